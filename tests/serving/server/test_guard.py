"""The guard of gRPC calls: calls that never send their message take nothing from others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from megalith.errors import InputError, RemoteError
from megalith.serving.proto.message_types import GetModelStatusRequest
from megalith.serving.server import grpc_calls
from megalith.serving.server.grpc_calls import MAX_CONTROLS, MAX_REFLECTIONS, REQUESTS
from megalith.serving.server.model_server import SPARE_REQUESTS, ModelServer
from megalith.serving.server.server_config import ServerConfig
from tests.serving.exports import ServerClient, export_version, request_of, rows
from tests.serving.server.test_security import silent

FEATURES, DENSE = rows(2)
INPUTS = {**FEATURES, "dense": DENSE}
STATUS = "/tensorflow.serving.ModelService/GetModelStatus"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MAX_CONCURRENT = 4
LIMIT = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    out = tmp_path_factory.mktemp("exports")
    export_version(out)
    with ModelServer(out, ServerConfig(max_concurrent=MAX_CONCURRENT)) as started:
        yield started


@pytest.fixture
def short_reads(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without a message end soon; only here, because other calls may be slow on a busy machine."""
    assert server._guard is not None
    monkeypatch.setattr(server._guard._deadlines, "_seconds", 0.3)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_healthy(server: ModelServer) -> bool:
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def has_status(server: ModelServer) -> bool:
    request = GetModelStatusRequest()
    request.model_spec.name = "movies"
    with ServerClient(server.address) as ask:
        return bool(ask.connection.get_model_status(request, timeout=20).model_version_status)


@pytest.mark.usefixtures("short_reads")
@pytest.mark.parametrize("method", REQUESTS)
def test_half_open_requests_leave_health_alone_and_end(server: ModelServer, method: str) -> None:
    places = MAX_CONCURRENT + SPARE_REQUESTS
    with silent(server, method, places + 156) as calls:
        assert is_healthy(server)
        assert has_status(server)
        codes = [call.code() for call in calls]
        assert set(codes) <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}
        assert codes.count(grpc.StatusCode.CANCELLED) >= places
    with ServerClient(server.address) as ask:
        assert ask(INPUTS)["logits"].shape == (2,)


@pytest.mark.usefixtures("short_reads")
@pytest.mark.parametrize("method", [STATUS, REFLECTION])
def test_half_open_calls_of_other_methods_leave_requests_alone(server: ModelServer, method: str) -> None:
    with silent(server, method, 40) as calls, ServerClient(server.address) as ask:
        assert ask(INPUTS)["logits"].shape == (2,)
        assert is_healthy(server)
        codes = [call.code() for call in calls]
        assert set(codes) <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}
        assert codes.count(grpc.StatusCode.CANCELLED) >= MAX_REFLECTIONS


@pytest.mark.parametrize("method", [REQUESTS[0], STATUS, "/grpc.health.v1.Health/Check"])
def test_half_open_calls_give_way_to_others(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Otherwise a few of them, begun again and again, would keep everyone out."""
    guard = server._guard
    assert guard is not None
    monkeypatch.setattr(guard._deadlines, "_seconds", 3600.0)
    monkeypatch.setattr(grpc_calls, "PATIENCE_SECONDS", 0.0)
    groups = {REQUESTS[0]: guard._requests, STATUS: guard._control}
    places = groups.get(method, guard._checks).places
    every = MAX_CONCURRENT + SPARE_REQUESTS if method == REQUESTS[0] else MAX_CONTROLS
    wait_until(lambda: places._value == every)
    with silent(server, method, every) as calls:
        wait_until(lambda: places._value == 0)
        with ServerClient(server.address) as ask:
            for _ in range(3):
                assert ask(INPUTS)["logits"].shape == (2,)
                assert is_healthy(server)
                assert has_status(server)
        wait_until(lambda: any(call.done() for call in calls))
        ended = [call for call in calls if call.done()]
        assert 1 <= len(ended) < every  # a place that is free again takes nobody else's
        assert {call.code() for call in ended} == {grpc.StatusCode.CANCELLED}
    wait_until(lambda: places._value == every)


def test_a_call_without_a_message_is_refused(server: ModelServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        for method in (*REQUESTS, STATUS):
            with pytest.raises(grpc.RpcError) as raised:
                channel.stream_unary(method)(iter(()), timeout=20)
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_places_come_back(server: ModelServer) -> None:
    """More requests than places, several at a time: each is answered, or refused because of the others."""
    with ServerClient(server.address) as ask, ThreadPoolExecutor(2) as pool:

        def score() -> str:
            try:
                return str(ask(INPUTS)["logits"].shape[0])
            except RemoteError as error:
                return str(error.code)

        assert {future.result() for future in [pool.submit(score) for _ in range(60)]} == {"2"}


def test_a_cancelled_call_has_its_place_until_its_thread_is_free(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise calls would be accepted that wait for a thread, with no deadline."""
    started, go = threading.Semaphore(0), threading.Event()
    (model,) = server.models

    def holds(*_: object, **__: object) -> object:
        started.release()
        go.wait(LIMIT)
        raise InputError("held")

    assert model.newest is not None
    monkeypatch.setattr(model.newest, "predict", holds)
    places = server._guard._requests.places  # type: ignore[union-attr]
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(REQUESTS[0])
        before = MAX_CONCURRENT + SPARE_REQUESTS
        wait_until(lambda: places._value == before)  # threads of the tests above may still end
        held = call.future(request_of(INPUTS).SerializeToString(), timeout=LIMIT)
        assert started.acquire(timeout=LIMIT)
        ended = threading.Event()
        held.add_done_callback(lambda _: ended.set())
        held.cancel()
        assert ended.wait(LIMIT)
        assert is_healthy(server)  # the server has read what came before it, the cancellation
        assert places._value == before - 1
        go.set()
        wait_until(lambda: places._value == before)
