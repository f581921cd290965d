"""Parameter sync by Monolith's names, with real servers that record what they get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import SGD, LocalShards, Table, TableConfig
from megalith.compat.monolith import sync_clients
from megalith.compat.monolith.distributed_serving_ops import (
    DummySyncServer,
    ParameterSyncClient,
    create_dummy_sync_client,
    create_parameter_sync_clients,
    parameter_sync_client_from_config,
)
from megalith.errors import InputError, UnknownNameError, UsageError
from megalith.serving.proto.message_types import ClientConfig
from tests.compat.monolith.sync_client_support import responses, shards_of
from tests.serving.plain_server import plain_server

Servers = list[DummySyncServer]


@pytest.fixture
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield [stack.enter_context(DummySyncServer()) for _ in range(2)]


@pytest.fixture
def client() -> Iterator[ParameterSyncClient]:
    with parameter_sync_client_from_config() as client:
        yield client


@pytest.fixture
def shards(client: ParameterSyncClient) -> LocalShards:
    """A table of dim 1, attached to the client."""
    made = shards_of(table=1)
    client.attach(made)
    return made


def put(shards: LocalShards, *ids: int, value: float = 1.0, table: str = "table") -> None:
    rows = torch.full((len(ids), shards.configs[table].dim), value)
    shards.assign({table: (torch.tensor(ids), rows)})


def config_for(servers: Servers, **options: Any) -> bytes:
    usual = {"model_name": "movies:ps_0", "signature_name": "hashtable_assign", "timeout_in_ms": 3000}
    config = ClientConfig(targets=[server.address for server in servers], **(usual | options))
    data: bytes = config.SerializeToString()
    return data


def pushed(client: ParameterSyncClient, config: bytes | str | None = None) -> list[int]:
    """The number of ids that each target got."""
    return [each["update_num"] for each in responses(client.create_sync_op(config))]


def test_what_was_touched_before_attach_is_not_sent(client: ParameterSyncClient, servers: Servers) -> None:
    shards = shards_of(table=3)
    put(shards, 5)
    client.attach(shards)

    assert pushed(client, config_for(servers)) == [0, 0]
    assert [server.requests for server in servers] == [[], []]


def test_a_failed_target_keeps_its_ids_for_the_next_call(
    client: ParameterSyncClient, servers: Servers
) -> None:
    shards = shards_of(a=1, b=2)
    client.attach(shards)
    put(shards, 1, 2, table="a")
    put(shards, 1, table="b")
    servers[0].fail_next(1, "UNAVAILABLE")
    failed, fine = responses(client.create_sync_op(config_for(servers)))
    assert (failed["status_code"], failed["update_num"], fine["status_code"]) == (14, 0, 0)
    assert "UNAVAILABLE" in failed["error_message"]
    put(shards, 2, 3, value=7.0, table="a")

    assert pushed(client) == [4, 2]

    ids, values = servers[0].requests[0].tables["a"]
    assert dict(zip(ids.tolist(), values[:, 0].tolist(), strict=True)) == {1: 1.0, 2: 7.0, 3: 7.0}


def test_a_target_that_is_not_listed_for_a_while_keeps_its_ids(
    client: ParameterSyncClient, shards: LocalShards, servers: Servers
) -> None:
    servers[0].fail_next(1, "UNAVAILABLE")
    put(shards, 1)
    client.create_sync_op(config_for(servers))
    put(shards, 2)
    client.create_sync_op(config_for(servers[1:]))
    (waiting,) = responses(client.create_sync_op(config_for([])))
    assert "'movies:ps_0', and changed ids wait: 2 of table 'table'." in waiting["error_message"]

    assert pushed(client, config_for(servers)) == [2, 0]
    assert servers[0].requests[0].tables["table"][0].tolist() == [1, 2]


def test_the_ids_of_absent_targets_are_limited_and_logged(
    client: ParameterSyncClient,
    shards: LocalShards,
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sync_clients, "MAX_ABSENT_IDS", 2)
    client.create_sync_op(config_for(servers))
    for id in range(3):
        put(shards, id)
        client.create_sync_op(config_for(servers[1:]))
    assert f"{servers[0].address} has been missing" in caplog.text
    assert "the 3 ids it was not sent are dropped" in caplog.text

    assert pushed(client, config_for(servers)) == [3, 0]


def test_ids_are_kept_after_any_error(
    client: ParameterSyncClient, shards: LocalShards, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(shards, 1)

    def fail(*_: object) -> None:
        raise MemoryError("no memory for the rows")

    with monkeypatch.context() as broken:
        broken.setattr(sync_clients, "read_rows", fail)
        with pytest.raises(MemoryError):
            client.create_sync_op(config_for(servers))

    assert pushed(client) == [1, 1]


def test_clients_of_one_name_do_not_take_each_others_changes(
    client: ParameterSyncClient, shards: LocalShards, servers: Servers
) -> None:
    with parameter_sync_client_from_config() as other:
        assert client.name == other.name
        other.attach(shards)
        put(shards, 1)

        assert [pushed(each, config_for(servers[:1])) for each in (client, other)] == [[1], [1]]
        client.close()
        put(shards, 2)
        assert pushed(other) == [1]


def test_more_clients_than_a_table_has_consumers(servers: Servers) -> None:
    shards = shards_of(table=1)
    clients = create_parameter_sync_clients(20)
    for client in clients:
        client.attach(shards)
    put(shards, 1, 2)
    shards.remove({"table": torch.tensor([2])})
    put(shards, 2)  # in both results of a drain

    assert [pushed(client, config_for(servers[:1])) for client in clients] == [[2]] * 20
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


def test_clients_with_tables_of_their_own_may_use_one_table_name(servers: Servers) -> None:
    clients, owners = create_parameter_sync_clients(2), [shards_of(table=1), shards_of(table=1)]
    for number, (client, shards) in enumerate(zip(clients, owners, strict=True)):
        client.attach(shards)
        put(shards, number, value=number + 1.0)

    for client, server in zip(clients, servers, strict=True):
        client.create_sync_op(config_for([server]))

    received = [server.requests[0].tables["table"] for server in servers]
    assert [(ids.tolist(), rows.tolist()) for ids, rows in received] == [([0], [[1.0]]), ([1], [[2.0]])]


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("hashtable_assign", {"b_id": [1, 2], "b_value": [[1.0, 1.0], [0.0, 0.0]]}),
        ("raw_assign", {"id": [1, 2], "id_split": [0, 0, 2], "flat_value": [1.0, 1.0, 0.0, 0.0]}),
        ("multi/raw_assign", {"id": [1, 2], "id_split": [0, 0, 2], "flat_value": [1.0, 1.0, 0.0, 0.0]}),
    ],
)
def test_monolith_servers_get_all_tables_and_removed_ids_as_zeros(
    client: ParameterSyncClient, servers: Servers, signature: str, expected: dict[str, Any]
) -> None:
    shards = shards_of(a=1, b=2)
    client.attach(shards)
    put(shards, 1, 2, table="b")
    shards.remove({"b": torch.tensor([2, 3])})

    (response,) = responses(client.create_sync_op(config_for(servers[:1], signature_name=signature)))

    assert (response["status_code"], response["update_num"]) == (0, 2)
    (request,) = servers[0].requests
    assert {name: tensor.tolist() for name, tensor in request.inputs.items()} == expected


@pytest.mark.parametrize(
    ("outputs", "status", "error", "pushed"),
    [
        ({}, 0, None, 1),  # Monolith's own dummy server answers every signature like this
        ({"layout": torch.ones(1)}, 13, "malformed answer to sync_position: 'sequence' must be one int64", 0),
    ],
)
def test_a_malformed_position_is_not_that_of_a_monolith_server(
    client: ParameterSyncClient,
    shards: LocalShards,
    outputs: dict[str, Tensor],
    status: int,
    error: str | None,
    pushed: int,
) -> None:
    put(shards, 1)
    shards.remove({"table": torch.tensor([1])})

    with plain_server(lambda _: outputs) as server:
        targets = ClientConfig(model_name="m", targets=(server.address,), timeout_in_ms=3000)
        (response,) = responses(client.create_sync_op(targets.SerializeToString()))

    assert (response["status_code"], response["update_num"]) == (status, pushed)
    assert error is None or error in response["error_message"]
    assert len(server.seen) == 1 + pushed


def test_rows_that_are_not_finite_are_reported_by_table_and_id(
    client: ParameterSyncClient, shards: LocalShards, servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    largest = torch.finfo(torch.float32).max
    put(shards, 5, 6, value=largest)
    shards.assign_add({"table": (torch.tensor([5]), torch.tensor([[largest]]))})

    (response,) = responses(client.create_sync_op(config_for(servers[:1])))

    assert (response["status_code"], response["update_num"]) == (9, 1)
    message = "rows with NaN or Inf are not pushed, servers keep their last value: 1 of table 'table' (ids 5)"
    assert response["error_message"] == message
    assert message in caplog.text
    put(shards, 5)
    assert pushed(client) == [1]


def test_without_targets_changes_wait(
    client: ParameterSyncClient, shards: LocalShards, servers: Servers
) -> None:
    assert responses(client.create_sync_op()) == []
    put(shards, 1)

    for _ in range(2):
        (waiting,) = responses(client.create_sync_op())
        assert (waiting["target"], waiting["status_code"], waiting["update_num"]) == ("", 9, 0)
        assert "and changed ids wait: 1 of table 'table'" in waiting["error_message"]
    assert pushed(client, config_for(servers)) == [1, 1]


def test_a_big_push_goes_in_pieces(client: ParameterSyncClient, servers: Servers) -> None:
    shards = shards_of(table=16)
    client.attach(shards)
    put(shards, *range(100_000))

    assert pushed(client, config_for(servers[:1])) == [100_000]
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


def test_a_closed_client_neither_reports_success_nor_tracks(
    client: ParameterSyncClient, shards: LocalShards, servers: Servers
) -> None:
    put(shards, 1)
    client.close()
    client.close()

    with pytest.raises(UsageError, match="'MonolithSyncClient_' is closed: make a new one"):
        client.create_sync_op(config_for(servers))
    with pytest.raises(UsageError, match="is closed"):
        client.attach(shards)


def test_clients_go_by_monoliths_names() -> None:
    assert [client.name for client in create_parameter_sync_clients(0)] == ["MonolithSyncClient_"]
    clients = create_parameter_sync_clients(2)
    assert [client.name for client in clients] == ["MonolithSyncClient_0", "MonolithSyncClient_1"]
    with pytest.raises(InputError):
        create_parameter_sync_clients(-1)


def test_a_client_of_a_client_has_the_same_tables_and_targets(servers: Servers) -> None:
    client = parameter_sync_client_from_config(config_for(servers))
    shards = shards_of(table=1)
    client.attach(shards)
    with ParameterSyncClient(client=client) as second, ParameterSyncClient(client.handle) as third:
        assert (second.handle, second.name) == (client.handle, "MonolithSyncClient_")
        put(shards, 1)
        assert [pushed(each)[0] for each in (second, third, client)] == [1, 0, 0]

    with pytest.raises(InputError, match="parameter_sync_client_from_config makes a client from a config"):
        ParameterSyncClient(config_for(servers))  # type: ignore[arg-type]


def test_targets_may_be_given_beforehand(servers: Servers) -> None:
    with parameter_sync_client_from_config(config_for(servers), "7") as client:
        shards = shards_of(table=1)
        client.attach(shards)
        put(shards, 1)
        assert pushed(client, "") == [1, 1]
        assert pushed(client, config_for(servers[:1]).decode("latin-1")) == [0]


def test_the_dummy_client_succeeds_and_tracks_nothing(servers: Servers) -> None:
    with create_dummy_sync_client() as client:
        shards = shards_of(table=1)
        client.attach(shards)
        put(shards, 1)

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
    with pytest.raises(InputError, match="hashtable_assign or raw_assign"):
        client.create_sync_op(config_for([], signature_name="serving_default"))
