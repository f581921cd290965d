"""Parameter sync by Monolith's names, with real servers that record what they get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import SGD, Table, TableConfig
from megalith.compat.monolith import sync_clients
from megalith.compat.monolith.dummy_server import DummySyncServer
from megalith.compat.monolith.sync_clients import (
    ParameterSyncClient,
    create_dummy_sync_client,
    create_parameter_sync_clients,
    parameter_sync_client_from_config,
)
from megalith.compat.monolith.sync_config import SyncConfig
from megalith.errors import InputError, UnknownNameError, UsageError
from tests.compat.monolith.sync_client_support import responses, shards_of
from tests.serving.plain_server import plain_server


@pytest.fixture
def servers() -> Iterator[list[DummySyncServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(DummySyncServer()) for _ in range(2)]


@pytest.fixture
def client() -> Iterator[ParameterSyncClient]:
    with parameter_sync_client_from_config() as client:
        yield client


def config_for(servers: list[DummySyncServer], **options: Any) -> bytes:
    options = {
        "model_name": "movies:ps_0",
        "signature_name": "hashtable_assign",
        "timeout_ms": 3000,
        **options,
    }
    return SyncConfig(targets=tuple(server.address for server in servers), **options).to_bytes()


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
