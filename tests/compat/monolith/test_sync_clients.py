"""Parameter sync by Monolith's names, with real servers that record what they get."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from megalith import SGD, LocalShards, Table, TableConfig, Zeros
from megalith.compat.monolith import sync_clients
from megalith.compat.monolith.dummy_server import DummySyncServer
from megalith.compat.monolith.sync_clients import (
    ParameterSyncClient,
    SyncHandle,
    create_dummy_sync_client,
    create_parameter_sync_clients,
    parameter_sync_client_from_config,
)
from megalith.compat.monolith.sync_config import SyncConfig, refresh_sync_config
from megalith.compat.monolith.tracked_changes import TrackedChanges
from megalith.errors import InputError, UnknownNameError, UsageError
from megalith.serving.client.credentials import Credentials
from megalith.serving.discovery import Replica, StaticDiscovery
from megalith.serving.export.exporter import export_model
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.security import Security
from megalith.serving.server.server_config import ServerConfig
from tests.serving.plain_server import plain_server
from tests.serving.sync_support import LIMIT, Trainer, assert_equal, export_version, make_model


@pytest.fixture
def servers() -> Iterator[list[DummySyncServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(DummySyncServer()) for _ in range(2)]


@pytest.fixture
def client() -> Iterator[ParameterSyncClient]:
    with parameter_sync_client_from_config() as client:
        yield client


def shards_of(**dims: int) -> LocalShards:
    return LocalShards(
        [TableConfig(name, dim=dim, optimizer=SGD(0.1), initializer=Zeros()) for name, dim in dims.items()]
    )


def config_for(servers: list[DummySyncServer], **options: Any) -> bytes:
    options = {
        "model_name": "movies:ps_0",
        "signature_name": "hashtable_assign",
        "timeout_ms": 3000,
        **options,
    }
    return SyncConfig(targets=tuple(server.address for server in servers), **options).to_bytes()


def responses(text: str) -> list[dict[str, Any]]:
    return json.loads(text).get("responses", [])  # type: ignore[no-any-return]


def test_a_trained_table_is_pushed_to_every_target(
    client: ParameterSyncClient, servers: list[DummySyncServer]
) -> None:
    shards = shards_of(table=3)
    client.attach(shards)
    lookup = shards.lookup({"table": torch.tensor([0, 0, 1])})
    shards.apply_gradients(lookup, {"table": -torch.ones(3, 3)}, step=0)  # the gradient of -emb
    rows = shards.lookup({"table": torch.tensor([0, 1])}).rows["table"]
    assert torch.equal(rows, torch.tensor([[0.2] * 3, [0.1] * 3]))

    text = client.create_sync_op(config_for(servers))

    assert responses(text) == [
        {"status_code": 0, "target": server.address, "update_num": 2} for server in servers
    ]
    assert "\n" in text  # pretty
    for server in servers:
        (request,) = server.requests
        ids, values = request.tables["table"]
        assert ids.tolist() == [0, 1]
        assert torch.equal(values, rows)


def test_nothing_touched_is_nothing_sent(client: ParameterSyncClient, servers: list[DummySyncServer]) -> None:
    shards = shards_of(table=3)
    shards.assign({"table": (torch.tensor([5]), torch.ones(1, 3))})
    client.attach(shards)

    assert [each["update_num"] for each in responses(client.create_sync_op(config_for(servers)))] == [0, 0]

    assert [server.requests for server in servers] == [[], []]


def test_a_failed_target_keeps_its_ids_for_the_next_call(
    client: ParameterSyncClient, servers: list[DummySyncServer]
) -> None:
    shards = shards_of(a=1, b=2)
    client.attach(shards)
    shards.assign({"a": (torch.tensor([1, 2]), torch.ones(2, 1)), "b": (torch.tensor([1]), torch.ones(1, 2))})
    servers[0].fail_next(1, "UNAVAILABLE")
    failed, fine = responses(client.create_sync_op(config_for(servers)))
    assert (failed["status_code"], failed["update_num"], fine["status_code"]) == (14, 0, 0)
    assert "UNAVAILABLE" in failed["error_message"]
    shards.assign({"a": (torch.tensor([2, 3]), torch.full((2, 1), 7.0))})

    first, second = responses(client.create_sync_op())

    assert (first["update_num"], second["update_num"]) == (4, 2)
    ids, values = servers[0].requests[0].tables["a"]
    assert dict(zip(ids.tolist(), values[:, 0].tolist(), strict=True)) == {1: 1.0, 2: 7.0, 3: 7.0}


def test_a_target_that_is_not_listed_for_a_while_keeps_its_ids(
    client: ParameterSyncClient, servers: list[DummySyncServer]
) -> None:
    shards = shards_of(table=1)
    client.attach(shards)
    servers[0].fail_next(1, "UNAVAILABLE")
    shards.assign({"table": (torch.tensor([1]), torch.ones(1, 1))})
    client.create_sync_op(config_for(servers))
    shards.assign({"table": (torch.tensor([2]), torch.ones(1, 1))})
    client.create_sync_op(config_for(servers[1:]))
    (waiting,) = responses(client.create_sync_op(config_for([])))
    assert (waiting["target"], waiting["status_code"]) == ("", 9)
    assert "'movies:ps_0', and changed ids wait: 2 of table 'table'." in waiting["error_message"]

    (response, _) = responses(client.create_sync_op(config_for(servers)))

    assert response["update_num"] == 2
    assert servers[0].requests[0].tables["table"][0].tolist() == [1, 2]


def test_the_ids_of_absent_targets_are_limited_and_logged(
    client: ParameterSyncClient,
    servers: list[DummySyncServer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sync_clients, "MAX_ABSENT_IDS", 2)
    shards = shards_of(table=1)
    client.attach(shards)
    client.create_sync_op(config_for(servers))
    for id in range(3):
        shards.assign({"table": (torch.tensor([id]), torch.ones(1, 1))})
        client.create_sync_op(config_for(servers[1:]))
    assert f"{servers[0].address} has been missing" in caplog.text
    assert "the 3 ids it was not sent are dropped" in caplog.text

    assert [each["update_num"] for each in responses(client.create_sync_op(config_for(servers)))] == [3, 0]


def test_ids_are_kept_after_any_error(
    client: ParameterSyncClient, servers: list[DummySyncServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = shards_of(table=1)
    client.attach(shards)
    shards.assign({"table": (torch.tensor([1]), torch.ones(1, 1))})

    def fail(*_: object) -> None:
        raise MemoryError("no memory for the rows")

    with monkeypatch.context() as broken:
        broken.setattr(sync_clients, "read_rows", fail)
        with pytest.raises(MemoryError):
            client.create_sync_op(config_for(servers))

    assert [each["update_num"] for each in responses(client.create_sync_op())] == [1, 1]


def test_clients_of_one_name_do_not_take_each_others_changes(servers: list[DummySyncServer]) -> None:
    shards = shards_of(table=1)
    with parameter_sync_client_from_config() as first, parameter_sync_client_from_config() as second:
        assert first.name == second.name
        for client in (first, second):
            client.attach(shards)
        shards.assign({"table": (torch.tensor([1]), torch.ones(1, 1))})

        found = [responses(client.create_sync_op(config_for(servers[:1]))) for client in (first, second)]

        assert [response["update_num"] for (response,) in found] == [1, 1]
        first.close()
        shards.assign({"table": (torch.tensor([2]), torch.ones(1, 1))})
        assert responses(second.create_sync_op())[0]["update_num"] == 1


def test_more_clients_than_a_table_has_consumers(servers: list[DummySyncServer]) -> None:
    shards = shards_of(table=1)
    clients = create_parameter_sync_clients(20)
    for client in clients:
        client.attach(shards)
    shards.assign({"table": (torch.tensor([1, 2]), torch.ones(2, 1))})
    shards.remove({"table": torch.tensor([2])})
    shards.assign({"table": (torch.tensor([2]), torch.ones(1, 1))})  # in both results of a drain

    found = [responses(client.create_sync_op(config_for(servers[:1])))[0] for client in clients]

    assert [response["update_num"] for response in found] == [2] * 20
    for client in clients:
        client.close()
    for consumer in range(8):
        shards.track(f"consumer {consumer}")  # all consumers are free again


def test_too_many_clients_are_referred_to_those_that_share_a_consumer() -> None:
    shards = shards_of(table=1)
    with ExitStack() as stack:
        clients = [parameter_sync_client_from_config(name_suffix=str(number)) for number in range(9)]
        for client in clients[:8]:
            stack.enter_context(client).attach(shards)

        with pytest.raises(UsageError, match=r"8 consumers: .* one call of create_parameter_sync_clients"):
            clients[8].attach(shards)


def test_clients_with_tables_of_their_own_may_use_one_table_name(servers: list[DummySyncServer]) -> None:
    clients, owners = create_parameter_sync_clients(2), [shards_of(table=1), shards_of(table=1)]
    for number, (client, shards) in enumerate(zip(clients, owners, strict=True)):
        client.attach(shards)
        shards.assign({"table": (torch.tensor([number]), torch.full((1, 1), number + 1.0))})

    for client, server in zip(clients, servers, strict=True):
        client.create_sync_op(config_for([server]))

    pushed = [server.requests[0].tables["table"] for server in servers]
    assert [(ids.tolist(), rows.tolist()) for ids, rows in pushed] == [([0], [[1.0]]), ([1], [[2.0]])]


@pytest.mark.parametrize("signature", ["hashtable_assign", "raw_assign"])
def test_monolith_servers_get_removed_ids_as_zeros(
    client: ParameterSyncClient, servers: list[DummySyncServer], signature: str
) -> None:
    shards = shards_of(table=2)
    client.attach(shards)
    shards.assign({"table": (torch.tensor([1, 2]), torch.ones(2, 2))})
    shards.remove({"table": torch.tensor([2, 3])})

    (response,) = responses(client.create_sync_op(config_for(servers[:1], signature_name=signature)))

    assert (response["status_code"], response["update_num"]) == (0, 2)
    inputs = {name: tensor.tolist() for name, tensor in servers[0].requests[0].inputs.items()}
    assert (
        inputs
        == {
            "hashtable_assign": {"table_id": [1, 2], "table_value": [[1.0, 1.0], [0.0, 0.0]]},
            "raw_assign": {"id": [1, 2], "id_split": [0, 2], "flat_value": [1.0, 1.0, 0.0, 0.0]},
        }[signature]
    )


@pytest.mark.parametrize(
    ("outputs", "status", "error", "pushed"),
    [
        ({}, 0, None, 1),  # Monolith's own dummy server answers every signature like this
        ({"layout": torch.ones(1)}, 13, "malformed answer to sync_position: 'sequence' must be one int64", 0),
    ],
)
def test_a_malformed_position_is_not_that_of_a_monolith_server(
    client: ParameterSyncClient, outputs: dict[str, Tensor], status: int, error: str | None, pushed: int
) -> None:
    shards = shards_of(table=1)
    client.attach(shards)
    shards.assign({"table": (torch.tensor([1]), torch.ones(1, 1))})
    shards.remove({"table": torch.tensor([1])})

    with plain_server(lambda _: outputs) as server:
        targets = SyncConfig(model_name="m", targets=(server.address,), timeout_ms=3000)
        (response,) = responses(client.create_sync_op(targets.to_bytes()))

    assert (response["status_code"], response["update_num"]) == (status, pushed)
    assert error is None or error in response["error_message"]
    assert len(server.seen) == 1 + pushed


def test_rows_that_are_not_finite_are_reported_by_table_and_id(
    client: ParameterSyncClient, servers: list[DummySyncServer], caplog: pytest.LogCaptureFixture
) -> None:
    shards = shards_of(table=1)
    client.attach(shards)
    largest = torch.full((2, 1), torch.finfo(torch.float32).max)
    shards.assign({"table": (torch.tensor([5, 6]), largest)})
    shards.assign_add({"table": (torch.tensor([5]), largest[:1])})

    (response,) = responses(client.create_sync_op(config_for(servers[:1])))

    assert (response["status_code"], response["update_num"]) == (9, 1)
    message = "rows with NaN or Inf are not pushed, servers keep their last value: 1 of table 'table' (ids 5)"
    assert response["error_message"] == message
    assert message in caplog.text
    shards.assign({"table": (torch.tensor([5]), torch.ones(1, 1))})
    assert responses(client.create_sync_op())[0] == {
        "status_code": 0,
        "target": servers[0].address,
        "update_num": 1,
    }


def test_without_targets_changes_wait(client: ParameterSyncClient, servers: list[DummySyncServer]) -> None:
    shards = shards_of(table=1)
    client.attach(shards)
    assert responses(client.create_sync_op()) == []
    shards.assign({"table": (torch.tensor([1]), torch.ones(1, 1))})

    for _ in range(2):
        (waiting,) = responses(client.create_sync_op())
        assert (waiting["target"], waiting["status_code"], waiting["update_num"]) == ("", 9, 0)
        assert "and changed ids wait: 1 of table 'table'" in waiting["error_message"]
    assert [each["update_num"] for each in responses(client.create_sync_op(config_for(servers)))] == [1, 1]


def test_raw_assign_sends_all_tables_in_one(
    client: ParameterSyncClient, servers: list[DummySyncServer]
) -> None:
    shards = shards_of(a=1, b=2)
    client.attach(shards)
    shards.assign({"b": (torch.tensor([1]), torch.ones(1, 2))})

    client.create_sync_op(config_for(servers, signature_name="multi/raw_assign"))

    (request,) = servers[0].requests
    assert {name: tensor.tolist() for name, tensor in request.inputs.items()} == {
        "id": [1],
        "id_split": [0, 0, 1],
        "flat_value": [1.0, 1.0],
    }


def test_a_big_push_goes_in_pieces(client: ParameterSyncClient, servers: list[DummySyncServer]) -> None:
    shards = shards_of(table=16)
    client.attach(shards)
    shards.assign({"table": (torch.arange(100_000), torch.rand(100_000, 16))})

    (response,) = responses(client.create_sync_op(config_for(servers[:1])))

    assert response["update_num"] == 100_000
    assert len(servers[0].requests) == 2


def test_a_single_table_may_be_attached_and_another_of_its_name_may_not(client: ParameterSyncClient) -> None:
    config = TableConfig("table", dim=1, optimizer=SGD(0.1))
    table = Table(config)
    client.attach(table)
    client.attach(table)

    with pytest.raises(InputError, match="another table named 'table'"):
        client.attach(Table(config))
    with pytest.raises(InputError, match="expected Shards or a Table"):
        client.attach("table")  # type: ignore[arg-type]


def test_a_closed_client_neither_reports_success_nor_tracks(servers: list[DummySyncServer]) -> None:
    shards = shards_of(table=1)
    client = parameter_sync_client_from_config(config_for(servers))
    client.attach(shards)
    shards.assign({"table": (torch.tensor([1]), torch.ones(1, 1))})
    client.close()
    client.close()

    with pytest.raises(UsageError, match="'MonolithSyncClient_' is closed: make a new one"):
        client.create_sync_op()
    with pytest.raises(UsageError, match="is closed"):
        client.attach(shards)


def test_clients_go_by_monoliths_names() -> None:
    assert [client.name for client in create_parameter_sync_clients(0)] == ["MonolithSyncClient_"]
    assert [client.name for client in create_parameter_sync_clients(2)] == [
        "MonolithSyncClient_0",
        "MonolithSyncClient_1",
    ]
    with pytest.raises(InputError):
        create_parameter_sync_clients(-1)


def test_a_client_of_a_client_has_the_same_tables_and_targets(servers: list[DummySyncServer]) -> None:
    client = parameter_sync_client_from_config(config_for(servers))
    shards = shards_of(table=1)
    client.attach(shards)
    with ParameterSyncClient(client=client) as second, ParameterSyncClient(client.handle) as third:
        assert (second.handle, second.name) == (client.handle, "MonolithSyncClient_")
        shards.assign({"table": (torch.tensor([1]), torch.ones(1, 1))})
        pushed = [responses(each.create_sync_op())[0]["update_num"] for each in (second, third, client)]
        assert pushed == [1, 0, 0]

    with pytest.raises(InputError, match="parameter_sync_client_from_config makes a client from a config"):
        ParameterSyncClient(config_for(servers))  # type: ignore[arg-type]


def test_targets_may_be_given_beforehand(servers: list[DummySyncServer]) -> None:
    with parameter_sync_client_from_config(config_for(servers), "7") as client:
        shards = shards_of(table=1)
        client.attach(shards)
        shards.assign({"table": (torch.tensor([1]), torch.ones(1, 1))})
        assert len(responses(client.create_sync_op(""))) == 2
        as_text = config_for(servers[:1]).decode("latin-1")
        assert len(responses(client.create_sync_op(as_text))) == 1


def test_the_dummy_client_succeeds_and_tracks_nothing(servers: list[DummySyncServer]) -> None:
    with create_dummy_sync_client() as client:
        shards = shards_of(table=1)
        client.attach(shards)
        shards.assign({"table": (torch.tensor([1]), torch.ones(1, 1))})

        text = client.create_sync_op(config_for(servers))

        assert client.name == "MonolithDummySyncClient"
        assert [each["status_code"] for each in responses(text)] == [0, 0]
        assert servers[0].requests == []
        with pytest.raises(UnknownNameError):
            shards.drain_touched(client.name)


@pytest.mark.parametrize("config", [b"\xff\xff", "\xff\xff"])
def test_what_is_no_config_is_refused(client: ParameterSyncClient, config: bytes | str) -> None:
    with pytest.raises(InputError):
        client.create_sync_op(config)


def test_another_signature_is_refused(client: ParameterSyncClient, servers: list[DummySyncServer]) -> None:
    with pytest.raises(InputError, match="hashtable_assign or raw_assign"):
        client.create_sync_op(config_for(servers, signature_name="serving_default"))


# ---- real servers of a model in two parts


class Parts:
    """A model in training, served in two parts; a part may be killed and started again at its address."""

    def __init__(self, root: Path, stack: ExitStack, routing: str) -> None:
        self.model = make_model(dist_type=routing)
        self.trainer = Trainer(self.model, num_ids=300)
        self.trainer.step(2)
        self._root, self._stack, self._version = root, stack, 0
        self.export()
        self.servers = [self._start(part, 0) for part in range(2)]
        self.backend = StaticDiscovery(
            {f"movies:ps_{part}": [server.address] for part, server in enumerate(self.servers)}
        )
        self.backend.subscribe_model("movies")
        self.clients = create_parameter_sync_clients(2)
        for client in self.clients:
            stack.callback(client.close)
            client.attach(self.model.embeddings.shards)

    def _start(self, part: int, port: int) -> ModelServer:
        config = ServerConfig(port=port, allow_writes=True, poll_seconds=60.0)
        return self._stack.enter_context(ModelServer(self._root / f"ps_{part}", config))

    def export(self) -> None:
        """Exports the model as it is now."""
        self._version += 1
        export_version(self.model, self._root, base="one", version=self._version, num_shards=2)

    def restart(self, part: int) -> None:
        """Ends a server, if it still runs, and starts one with the rows of the export; clients reconnect."""
        self.servers[part].stop()
        address = self.servers[part].address
        self.servers[part] = self._start(part, int(address.rpartition(":")[2]))
        connection = self.clients[part].handle._channels.get(address)
        grpc.channel_ready_future(connection.channel).result(LIMIT)

    def sync(self) -> list[dict[str, Any]]:
        """The response of each part's only target."""
        found = []
        for part, client in enumerate(self.clients):
            found += responses(client.create_sync_op(refresh_sync_config(self.backend, part)))
        return found

    def assert_equal(self) -> None:
        for server in self.servers:
            newest = server.models[0].newest
            assert newest is not None
            assert_equal(newest.servable, self.model, num_ids=300)


@pytest.fixture
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Parts]:
    with ExitStack() as stack:
        yield Parts(tmp_path, stack, getattr(request, "param", "roundrobin"))


@pytest.mark.parametrize("parts", ["roundrobin", "hash_roundrobin"], indirect=True)
def test_two_clients_deliver_rows_and_removals_to_two_parts(parts: Parts) -> None:
    for _ in range(3):
        parts.trainer.step(3)
        parts.model.embeddings.shards.remove({"item": torch.arange(20)})

        found = parts.sync()

        assert [(each["status_code"], each.get("error_message")) for each in found] == [(0, None)] * 2
        assert all(each["update_num"] > 0 for each in found)
        parts.assert_equal()
    assert [each["update_num"] for each in parts.sync()] == [0, 0]


def test_a_part_that_dies_and_comes_back_gets_everything(parts: Parts) -> None:
    parts.trainer.step(2)
    parts.sync()
    parts.servers[1].stop()
    parts.trainer.step(2)
    well, dead = parts.sync()
    assert (well["status_code"], dead["status_code"], dead["update_num"]) == (0, 14, 0)

    # Discovery does not list the dead server for a while; training continues.
    address = parts.servers[1].address
    parts.backend.unregister("movies:ps_1", address)
    parts.trainer.step(2)
    assert [each["target"] for each in parts.sync()] == [parts.servers[0].address, ""]
    parts.restart(1)
    parts.backend.register("movies:ps_1", Replica(address))

    found = parts.sync()

    assert (found[1]["status_code"], found[1]["update_num"] > 0) == (0, True)
    parts.assert_equal()


def test_a_part_that_restarts_unnoticed_is_sent_the_pushed_rows_again(parts: Parts) -> None:
    parts.trainer.step(3)
    parts.sync()
    parts.restart(0)

    found = parts.sync()

    assert found[0]["update_num"] > 0  # although nothing was trained since
    assert found[1]["update_num"] == 0
    parts.assert_equal()


@pytest.mark.parametrize("moves", [True, False], ids=["at a new address", "as a second replica"])
def test_a_server_that_appears_is_sent_the_pushed_rows(parts: Parts, moves: bool) -> None:
    parts.trainer.step(3)
    parts.sync()
    if moves:
        parts.servers[0].stop()
        parts.backend.unregister("movies:ps_0", parts.servers[0].address)
    parts.servers.append(parts._start(0, 0))
    address = parts.servers[-1].address
    parts.backend.register("movies:ps_0", Replica(address))

    found = {each["target"]: each for each in parts.sync()}  # although nothing was trained since

    assert (found[address]["status_code"], found[address]["update_num"] > 0) == (0, True)
    assert sum(each["update_num"] > 0 for each in found.values()) == 1
    del parts.servers[: int(moves)]
    parts.assert_equal()


@pytest.mark.parametrize(("max_ids", "status", "row"), [(100, 0, 0.0), (3, 0, 0.0), (1, 9, 1.0)])
def test_a_restarted_part_removes_rows_although_too_many_ids_have_changed(
    parts: Parts, max_ids: int, status: int, row: float
) -> None:
    shards = parts.model.embeddings.shards
    shards.assign({"user": (torch.arange(1000, 1010), torch.ones(10, 5))})
    parts.export()
    parts.restart(0)
    changes = TrackedChanges(max_ids)
    handle = SyncHandle("0", changes=changes)
    with (
        ParameterSyncClient(handle) as client,
        ParameterSyncClient(SyncHandle("1", changes=changes)) as other,
    ):
        client.attach(shards)
        other.attach(shards)
        shards.assign({"user": (torch.arange(1000, 1010, 2), torch.full((5, 5), 9.0))})
        shards.remove({"user": torch.tensor([1004, 1006])})
        client.create_sync_op(refresh_sync_config(parts.backend, 0))
        parts.restart(0)
        connection = handle._channels.get(parts.servers[0].address)
        grpc.channel_ready_future(connection.channel).result(LIMIT)

        (response,) = responses(client.create_sync_op())

    newest = parts.servers[0].models[0].newest
    assert newest is not None
    rows = newest.servable.lookup("user", torch.tensor([1002, 1004, 1006]))
    assert rows[:, 0].tolist() == [9.0, row, row]
    assert response["status_code"] == status
    assert ("rows were removed since attach to remember" in response.get("error_message", "")) == (
        status == 9
    )


def test_what_no_target_gets_is_reported(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    (alone,) = create_parameter_sync_clients(1)
    with alone:
        alone.attach(parts.model.embeddings.shards)
        other = shards_of(other=1)
        alone.attach(other)
        other.assign({"other": (torch.tensor([1, 2]), torch.ones(2, 1))})
        parts.model.embeddings.shards.assign({"user": (torch.tensor([0, 1, 2]), torch.ones(3, 5))})

        (response,) = responses(alone.create_sync_op(refresh_sync_config(parts.backend, 0)))

    assert (response["status_code"], response["update_num"]) == (9, 2)
    assert response["error_message"].split("; ") == [
        "1 ids of table 'user' belong to parts that no client has pushed to (ps_1): attach it to one client "
        "for each part, which create_parameter_sync_clients(2) makes",
        "table 'other' is not served there: its 2 ids are not pushed",
    ]
    assert response["error_message"].split("; ")[1] in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        parameter_sync_client_from_config,
        lambda: ParameterSyncClient(client=create_parameter_sync_clients(0)[0]),
    ],
)
def test_one_client_per_rank_reports_the_parts_that_no_rank_pushes_to(
    make: Callable[[], ParameterSyncClient], tmp_path: Path
) -> None:
    # Two ranks push to ps_0 and ps_1 of a model with four parts. Rank 0 has the even ids, rank 1 the others.
    ranks = [shards_of(t=1), shards_of(t=1)]
    export_model(ranks[0], tmp_path, name="m", num_shards=4)
    with ExitStack() as stack:
        config = ServerConfig(allow_writes=True, poll_seconds=60.0)
        servers = [stack.enter_context(ModelServer(tmp_path / f"ps_{i}", config)) for i in range(4)]
        backend = StaticDiscovery({f"m:ps_{i}": [server.address] for i, server in enumerate(servers)})
        backend.subscribe_model("m")
        clients = [stack.enter_context(make()) for _ in ranks]
        for rank, client in enumerate(clients):
            client.attach(ranks[rank])
        for step in range(2):
            for rank, client in enumerate(clients):
                ids = torch.arange(rank, 8, 2)
                ranks[rank].assign({"t": (ids, torch.full((4, 1), step + 1.0))})

                (response,) = responses(client.create_sync_op(refresh_sync_config(backend, rank)))

                assert (response["status_code"], response["update_num"]) == (9, 2)
                message = f"2 ids of table 't' belong to parts that no client has pushed to (ps_{rank + 2})"
                assert message in response["error_message"]

        # With more ranks than parts, a rank has no target.
        with make() as extra:
            extra.attach(ranks[0])
            ranks[0].assign({"t": (torch.tensor([2, 4]), torch.ones(2, 1))})
            (response,) = responses(extra.create_sync_op(refresh_sync_config(backend, 4)))
            assert (response["target"], response["status_code"]) == ("", 9)
            assert (
                "no targets for 'm:ps_4', and changed ids wait: 2 of table 't'" in response["error_message"]
            )


def test_one_client_may_push_to_the_parts_in_turn(parts: Parts) -> None:
    with parameter_sync_client_from_config() as client:
        client.attach(parts.model.embeddings.shards)
        statuses = []
        for _ in range(3):
            parts.trainer.step(2)
            for part in range(2):
                (response,) = responses(client.create_sync_op(refresh_sync_config(parts.backend, part)))
                statuses.append(response["status_code"])
            parts.assert_equal()
    # Only in the first call the other part is still unknown.
    assert statuses == [9, 0, 0, 0, 0, 0]


def test_credentials_are_presented(tmp_path: Path) -> None:
    shards = shards_of(t=1)
    export_model(shards, tmp_path, name="m", num_shards=1)
    security = Security(write_token="secret-token-1")
    config = ServerConfig(allow_writes=True, poll_seconds=60.0, security=security)
    credentials = Credentials(token="secret-token-1")
    with ExitStack() as stack:
        server = stack.enter_context(ModelServer(tmp_path / "ps_0", config))
        targets = SyncConfig(model_name="m:ps_0", targets=(server.address,), timeout_ms=3000).to_bytes()
        clients = [
            parameter_sync_client_from_config(targets),
            parameter_sync_client_from_config(targets, credentials=credentials),
            *create_parameter_sync_clients(0, credentials=credentials),
            *create_parameter_sync_clients(1, credentials=credentials),
        ]
        for client in clients:
            stack.callback(client.close)
            client.attach(shards)
        shards.assign({"t": (torch.tensor([1]), torch.ones(1, 1))})

        found = [responses(client.create_sync_op(targets))[0]["status_code"] for client in clients]

    assert found == [16, 0, 0, 0]
    with pytest.raises(InputError, match="credentials must be Credentials, got str"):
        create_parameter_sync_clients(1, credentials="secret-token-1")  # type: ignore[arg-type]


def test_an_entry_has_no_rows(tmp_path: Path) -> None:
    model = make_model()
    export_version(model, tmp_path, base="one", num_shards=1)
    options = ServerConfig(allow_writes=True, discovery=f"file:{tmp_path / 'servers.json'}")
    with (
        ModelServer(tmp_path, options) as server,
        parameter_sync_client_from_config() as client,
    ):
        client.attach(model.embeddings.shards)
        model.embeddings.shards.assign({"user": (torch.tensor([1]), torch.ones(1, 5))})
        config = SyncConfig(model_name="movies:entry", targets=(server.address,), timeout_ms=3000)

        (response,) = responses(client.create_sync_op(config.to_bytes()))

        assert (response["status_code"], response["update_num"]) == (9, 0)
        assert "is an entry, which has no rows: push to its parts" in response["error_message"]
