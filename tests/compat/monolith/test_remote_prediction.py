"""remote_predict: calls copied from Monolith's code, against our own servers of tables without a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import SGD, LocalShards, Ragged, TableConfig
from megalith.compat.monolith import DummySyncServer, remote_predict, set_default_discovery
from megalith.compat.monolith import distributed_serving_ops as module
from megalith.errors import InputError, RemoteError, UsageError
from megalith.serving import ClientCache, ModelServer, ServerConfig, export_model
from megalith.serving.discovery import StaticDiscovery
from tests.serving.plain_server import LIMIT, Refused, Seen, plain_server

MILLIS = 1000 * LIMIT
X = torch.tensor([1.0, 2.5])
CALL: dict[str, Any] = {"input_tensor_alias": ["x"], "input_tensors": [X], "output_tensor_alias": ["y"]}
CALL |= {"model_name": "movies", "task": 0, "max_rpc_deadline_millis": MILLIS}
SLOT: dict[str, Any] = {"input_tensor_alias": ["fc_slot_1"], "input_tensors": [torch.tensor([2])]}
SLOT |= {"output_tensor_alias": ["fc_slot_1"], "model_name": "m:ps_0", "signature_name": "lookup"}


def predict(**changed: Any) -> list[Tensor]:
    return remote_predict(**CALL | changed)


SLOT_DIMS = {"fc_slot_1": 1, "fc_slot_2": 3}
IDS = {"fc_slot_1": [1, 2, 5, 8], "fc_slot_2": [3, 4]}


def tables() -> LocalShards:
    """Two tables, whose rows hold the id in the first column and the column number in the others."""
    shards = LocalShards([TableConfig(name, dim=dim, optimizer=SGD(0.1)) for name, dim in SLOT_DIMS.items()])
    shards.assign({name: (torch.tensor(ids), rows(ids, SLOT_DIMS[name])) for name, ids in IDS.items()})
    return shards


def rows(ids: list[int], dim: int) -> Tensor:
    """The rows of ids; an id above 100 has none."""
    known = [[float(id), *range(1, dim)] if id <= 100 else [0.0] * dim for id in ids]
    return torch.tensor(known).reshape(-1, dim)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StaticDiscovery]:
    """A server of each of two parts."""
    out = export_model(tables(), tmp_path_factory.mktemp("tables"), name="m", num_shards=2)
    found = StaticDiscovery({})
    config = ServerConfig(allow_writes=True)
    with ExitStack() as stack:
        for number in range(2):
            stack.enter_context(ModelServer(out / f"ps_{number}", config, discovery=found))
        yield found


@pytest.fixture(autouse=True)
def _no_default() -> Iterator[None]:
    yield
    set_default_discovery(None)


# ---- calls of Monolith's DistributedMultiTypeHashTable


def test_an_entry_looks_up_slots_in_each_ps(servers: StaticDiscovery) -> None:
    set_default_discovery(servers)
    slot_names = sorted(SLOT_DIMS)
    per_ps = [{"fc_slot_1": [2, 8, 102], "fc_slot_2": [4]}, {"fc_slot_1": [5, 1], "fc_slot_2": []}]
    for i, ids in enumerate(per_ps):
        usual: dict[str, Any] = {"task": i, "old_model_name": f"ps_{i}", "model_name": f"m:ps_{i}"}
        usual |= {"model_version": -1, "max_rpc_deadline_millis": MILLIS}
        results = remote_predict(
            slot_names,
            [torch.tensor(ids[slot], dtype=torch.int64) for slot in slot_names],
            slot_names,
            output_types=[torch.float32] * len(slot_names),
            signature_name="lookup",
            **usual,
        )
        for slot, result in zip(slot_names, results, strict=True):
            assert torch.equal(result, rows(ids[slot], SLOT_DIMS[slot])), slot
        splitted_id = Ragged.from_lists([ids[slot] for slot in slot_names])
        (flat_emb,) = remote_predict(
            ["id", "id_split"],
            [splitted_id.values, splitted_id.row_splits],
            ["flat_emb"],
            output_types=[torch.float32],
            signature_name="raw_lookup",
            **usual,
        )
        expected = [rows(ids[slot], SLOT_DIMS[slot]).reshape(-1) for slot in slot_names]
        assert torch.equal(flat_emb, torch.cat(expected))


def test_rows_that_raw_assign_writes_are_looked_up(servers: StaticDiscovery) -> None:
    ids, splits = torch.tensor([42]), torch.tensor([0, 0, 1])
    (result,) = predict(
        input_tensor_alias=["id", "id_split", "flat_value"],
        input_tensors=[ids, splits, torch.tensor([1.0, 2.0, 3.0])],
        output_tensor_alias=["result"],
        signature_name="tables/raw_assign",
        model_name="m:ps_0",
        discovery=servers,
    )
    assert result.tolist() == [0]
    names = ["fc_slot_2"]
    looked_up = SLOT | {"input_tensor_alias": names, "input_tensors": [ids], "output_tensor_alias": names}
    (row,) = predict(**looked_up, discovery=servers)
    assert row.tolist() == [[1.0, 2.0, 3.0]]


MISSPELT: list[tuple[dict[str, Any], str]] = [
    ({"input_tensor_alias": ["fc_slot_3"]}, "'fc_slot_3' is unknown; lookup takes fc_slot_1, fc_sl"),
    ({"output_tensor_alias": ["fc_slot_3"]}, "output 'fc_slot_3' is unknown"),
    ({"signature_name": "lokup"}, "signature 'lokup' is unknown"),
    ({"input_tensors": [torch.tensor([2.0])]}, "input 'fc_slot_1' must be int64"),
    ({"input_tensors": [torch.tensor([3])]}, "id 3 belongs to another part than ps_0"),
]


@pytest.mark.parametrize(("changes", "message"), MISSPELT)
def test_a_wrong_request_always_raises(
    servers: StaticDiscovery, changes: dict[str, Any], message: str
) -> None:
    for fail in (True, False):
        call = SLOT | {"old_model_name": "ps_0", "fail_op_on_rpc_error": fail, "discovery": servers}
        assert predict(**call)[0].tolist() == [[2.0]]
        with pytest.raises(RemoteError, match=message) as raised:
            predict(**call | changes)
        assert raised.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("model_name", "old_model_name", "code", "reasons"),
    [
        ("m:ps_0", None, "NOT_FOUND", ["m:ps_0: .*'m:ps_0' has no version 77; it has 0"]),
        ("m:ps_0", "ps_0", "NOT_FOUND", ["'m:ps_0' has no version 77; it has 0", "'ps_0' is unknown"]),
        ("m:ps_0", "mm", "NOT_FOUND", ["has no version 77; it has 0", "mm:ps_0: discovery knows no server"]),
        ("mm:ps_0", "m", "NOT_FOUND", ["mm:ps_0: discovery knows no server", "m:ps_0: .*has no version 77"]),
        ("mm:ps_0", "ps_0", "UNAVAILABLE", ["^mm:ps_0: discovery knows no server of this service$"]),
    ],
)
def test_a_model_or_version_that_no_server_has_is_a_failure_with_every_reason(
    servers: StaticDiscovery, model_name: str, old_model_name: str | None, code: str, reasons: list[str]
) -> None:
    call = SLOT | {"model_name": model_name, "old_model_name": old_model_name, "discovery": servers}
    with pytest.raises(RemoteError, match=".*; .*".join(reasons)) as raised:
        predict(**call, model_version=77)
    assert raised.value.code == code
    assert predict(**call, model_version=77, fail_op_on_rpc_error=False)[0].shape == (0,)


def test_a_model_of_one_process_has_the_parts_names(tmp_path: Path) -> None:
    out = export_model(tables(), tmp_path, name="m", version=7)
    with ModelServer(out) as server:
        call = SLOT | {"input_tensors": [torch.tensor([5, 2])], "discovery": f"static:{server.address}"}
        for name, task in (("m:ps_0", 0), ("m", 0), ("m", "ps_0"), ("m:standalone", "standalone")):
            (found,) = predict(**call | {"model_name": name, "task": task}, model_version=7)
            assert found.tolist() == [[5.0], [2.0]]


# ---- arguments


def doubled(seen: Seen) -> dict[str, Tensor]:
    return {"y": 2 * seen.inputs["x"], "z": torch.zeros(1)}


def test_positional_arguments_and_names_on_the_wire() -> None:
    with plain_server(doubled) as server:
        set_default_discovery(StaticDiscovery([server.address]))
        z, y = remote_predict(["x"], [X], ["z", "y"], "movies", "entry", max_rpc_deadline_millis=MILLIS)
        assert (z.tolist(), y.tolist()) == ([0.0], [2.0, 5.0])
        remote_predict(["x"], [X], ["y"], "movies", 0, None, 3, True, MILLIS, [torch.float32], "op", "lookup")
        predict(model_name="movies:dense_0", old_model_name="dense_0")
        specs = [seen.message.model_spec for seen in server.seen]
        assert [spec.name for spec in specs] == ["movies:entry", "movies:ps_0", "movies:dense_0"]
        assert (specs[1].version.value, specs[1].signature_name) == (3, "lookup")


@pytest.mark.parametrize("old", ["ps_0", "films", "films:ps_0"])
def test_the_old_name_is_asked_for_if_no_server_knows_the_new_one(old: str) -> None:
    asked = "films:ps_0" if old == "films" else old

    def answer(seen: Seen) -> dict[str, Tensor]:
        if seen.message.model_spec.name != asked:
            raise Refused("NOT_FOUND")
        return doubled(seen)

    with plain_server(answer) as server:
        (y,) = predict(model_name="movies:ps_0", old_model_name=old, discovery=f"static:{server.address}")
        assert y.tolist() == [2.0, 5.0]
        assert [seen.message.model_spec.name for seen in server.seen] == ["movies:ps_0", asked]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model_name": None}, "model_name must name a model"),
    ({"model_name": ":ps_0"}, "model_name must name a model"),
    ({"model_name": "movies:ps_1"}, "'movies:ps_1' names another part than task 0"),
    ({"model_name": "movies:ps_0", "task": "entry"}, "another part than task 'entry'"),
    ({"old_model_name": "films:ps_1"}, "'films:ps_1' names another part than 'ps_0'"),
    ({"input_tensors": []}, "1 input aliases for 0 tensors"),
    ({"input_tensor_alias": ["x", "x"], "input_tensors": [X, X]}, "input_tensor_alias contains"),
    ({"output_tensor_alias": ["y", "y"]}, "output_tensor_alias contains a name twice"),
    ({"output_tensor_alias": []}, "output_tensor_alias must name an output"),
    ({"output_types": [torch.float32] * 2}, "output_types must be 1 torch dtypes"),
    ({"output_types": ["float32"]}, "output_types must be 1 torch dtypes"),
    ({"max_rpc_deadline_millis": 0}, "timeout must be"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_arguments_raise_even_where_failures_do_not(changes: dict[str, Any], message: str) -> None:
    given = {"fail_op_on_rpc_error": False, "discovery": "static:localhost:1", "name": "op_1"}
    with pytest.raises(InputError, match=message):
        predict(**given | changes)


def test_without_a_discovery_the_error_has_the_name_and_a_remedy() -> None:
    with pytest.raises(InputError, match="nope"):
        set_default_discovery("nope:localhost")
    with pytest.raises(UsageError, match="remote_predict 'op_1': no discovery: call set_default_discovery"):
        predict(name="op_1")


# ---- failures


def test_a_failure_raises_or_gives_empty_outputs_of_the_types() -> None:
    with DummySyncServer() as server:
        set_default_discovery(f"static:{server.address}")
        server.fail_next(3, "INTERNAL")
        with pytest.raises(RemoteError) as raised:
            predict(output_tensor_alias=["y", "z"])
        assert raised.value.code == "INTERNAL"
        outputs = predict(output_tensor_alias=["y", "z"], fail_op_on_rpc_error=False)
        outputs += predict(output_types=[torch.int64], fail_op_on_rpc_error=False)
        assert [tensor.dtype for tensor in outputs] == [torch.float32, torch.float32, torch.int64]
        assert [tensor.shape for tensor in outputs] == [(0,)] * 3
        assert len(server.failed) == 3


def test_a_malformed_response_is_a_failure_and_another_dtype_is_not() -> None:
    answers: list[Any] = [b"\xff\xff\xff", {"y": X}, {"z": X}]
    with plain_server(lambda seen: answers.pop(0)) as server:
        given = {"discovery": f"static:{server.address}", "fail_op_on_rpc_error": False}
        assert predict(**given)[0].shape == (0,)
        with pytest.raises(InputError, match=r"'y' is torch\.float32, but output_types has torch\.int64"):
            predict(**given, output_types=[torch.int64])
        with pytest.raises(RemoteError, match="output 'y' is missing from the response; found z"):
            predict(**given)


# ---- clients


def test_calls_use_given_clients_or_those_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(module.atexit, "register", at_exit.append)
    monkeypatch.setattr(module, "_process_clients", functools.cache(module._process_clients.__wrapped__))
    with plain_server(doubled) as server, ClientCache(StaticDiscovery([server.address])) as given:
        assert predict(clients=given)[0].tolist() == [2.0, 5.0]
        assert len(given) == 1
        set_default_discovery(f"static:{server.address}")
        for _ in range(2):
            predict()
        assert len(module._process_clients()) == len(at_exit) == 1
        at_exit[0]()
        assert len(module._process_clients()) == 0
