"""DummySyncServer: records everything, fails on request, and survives any request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalith.compat.monolith.distributed_serving_ops import DummySyncServer
from megalith.errors import InputError, RemoteError, UsageError
from megalith.serving.client.channels import Connection
from megalith.serving.proto.message_types import Message, PredictRequest
from megalith.serving.proto.tf_tensors import from_tensor_protos, strings_to_tensor_proto, to_tensor_proto

LIMIT = 30.0
Served = tuple[DummySyncServer, Connection]


def request(**inputs: Tensor) -> Message:
    protos = {name: to_tensor_proto(value) for name, value in inputs.items()}
    made = PredictRequest(inputs=protos)
    made.model_spec.name, made.model_spec.signature_name = "movies:ps_0", "hashtable_assign"
    return made


def push(connection: Connection, sent: Message | bytes, **metadata: str) -> dict[str, Any]:
    pairs = [(name.replace("_", "-"), value) for name, value in metadata.items()]
    response = connection.predict(sent, timeout=LIMIT, metadata=pairs)
    return {name: value.tolist() for name, value in from_tensor_protos(response.outputs).items()}


IDS, ROWS = torch.tensor([3, -1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])


@pytest.fixture
def served() -> Iterator[tuple[DummySyncServer, Connection]]:
    with DummySyncServer() as server, Connection(server.address) as connection:
        yield server, connection


def test_a_push_is_recorded_and_answered(served: Served) -> None:
    server, connection = served
    sent = request(user_id=IDS, user_value=ROWS)
    sent.model_spec.version.value = 4
    assert push(connection, sent, megalith_sequence="1") == {"user_result": [2]}
    assert connection.predict(request(), timeout=LIMIT).model_spec == request().model_spec
    recorded, plain = server.wait(2, timeout=LIMIT)
    assert (recorded.model, recorded.signature, recorded.version) == ("movies:ps_0", "hashtable_assign", 4)
    assert torch.equal(recorded.tables["user"][0], IDS)
    assert torch.equal(recorded.tables["user"][1], ROWS)
    assert recorded.metadata["megalith-sequence"] == "1"
    assert plain.version is None


def test_raw_pushes_and_names_of_any_kind_are_recorded(served: Served) -> None:
    server, connection = served
    raw = request(id=IDS, id_split=torch.tensor([0, 2]), flat_value=ROWS.reshape(-1))
    assert push(connection, raw) == {"result": [0]}
    odd = request(**{"_id": IDS, "user:removed": IDS, "": IDS, "x_value": ROWS, "y_id": ROWS})
    odd.inputs["words_id"].CopyFrom(strings_to_tensor_proto([b"a"]))
    assert push(connection, odd) == {"_result": [2], "y_result": [4]}
    assert sorted(server.requests[1].inputs) == ["", "_id", "user:removed", "words_id", "x_value", "y_id"]
    assert server.requests[1].tables == {}


def test_what_cannot_be_decoded_is_refused_and_counted(served: Served) -> None:
    server, connection = served
    huge = request(user_id=IDS)
    huge.inputs["user_id"].tensor_shape.dim[0].size = 2**60
    for bad in (b"\xff\xff", huge):
        with pytest.raises(RemoteError) as raised:
            push(connection, bad)
        assert raised.value.code == "INVALID_ARGUMENT"
    assert (server.refused, server.requests) == (2, [])
    assert push(connection, request(user_id=IDS)) == {"user_result": [2]}


def test_damaged_requests_never_end_it() -> None:
    good = request(user_id=IDS, user_value=ROWS).SerializeToString()
    with DummySyncServer() as server, Connection(server.address) as connection:

        @settings(max_examples=100)
        @given(
            st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), max_size=6), st.binary()
        )
        def check(flips: list[tuple[int, int]], more: bytes) -> None:
            damaged = bytearray(good)
            for at, value in flips:
                damaged[at] = value
            before = server.refused + len(server.requests)
            try:
                push(connection, bytes(damaged) + more)
                code = "OK"
            except RemoteError as error:
                code = error.code
            assert code in ("OK", "INVALID_ARGUMENT")
            assert server.refused + len(server.requests) == before + 1

        check()
        assert push(connection, request(user_id=IDS)) == {"user_result": [2]}


def test_failures_on_request(served: Served) -> None:
    server, connection = served
    server.fail_next(2, "RESOURCE_EXHAUSTED")
    server.fail_next()
    codes = []
    for _ in range(3):
        with pytest.raises(RemoteError) as raised:
            push(connection, request(user_id=IDS))
        codes.append(raised.value.code)
    assert codes == ["RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"]
    assert push(connection, request(user_id=IDS)) == {"user_result": [2]}
    assert (len(server.failed), len(server.requests)) == (3, 1)
    for code in ("OK", "NOTHING"):
        with pytest.raises(InputError, match="not the status of a failure"):
            server.fail_next(1, code)
    with pytest.raises(RemoteError, match="1 of 2 requests after 0 seconds"):
        server.wait(2, timeout=0)


def test_a_late_answer_is_recorded_in_time(served: Served) -> None:
    server, connection = served
    server.delay(LIMIT)
    late = [connection.start_predict(request(user_id=IDS), timeout=LIMIT) for _ in range(20)]
    server.wait(8, timeout=LIMIT)
    for call in late:
        call.cancel()
    server.delay(0)
    assert push(connection, request(user_id=IDS)) == {"user_result": [2]}


def test_shutdown_ends_late_answers() -> None:
    server = DummySyncServer()
    with Connection(server.address) as connection:
        server.delay(1000 * LIMIT)
        late = connection.start_predict(request(), timeout=LIMIT)
        server.wait(1, timeout=LIMIT)
        server.shutdown()
        server.shutdown()
        with pytest.raises(RemoteError) as raised:
            late.result()
        assert raised.value.code in ("UNAVAILABLE", "CANCELLED")
    assert not [thread for thread in threading.enumerate() if "dummy-sync-server" in thread.name]


def test_ports() -> None:
    with DummySyncServer("localhost:0") as server:
        assert server.address == f"localhost:{server.get_port()}"
        with pytest.raises(UsageError, match="use port 0"):
            DummySyncServer(server.address)
    with DummySyncServer(f"127.0.0.1:{server.get_port()}") as again:
        assert again.get_port() == server.get_port()


@pytest.mark.parametrize(
    "address", ["0.0.0.0:0", "[::]:0", "::1:0", "10.0.0.1:0", "localhost", "localhost:70000"]
)
def test_only_loopback(address: str) -> None:
    with pytest.raises(InputError, match="is not on loopback"):
        DummySyncServer(address)
