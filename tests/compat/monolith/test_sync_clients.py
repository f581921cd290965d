"""Parameter sync by Monolith's names, with real servers that record what they get."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from megalith import SGD, LocalShards, Table, TableConfig, Zeros
from megalith.compat.monolith.dummy_server import DummySyncServer
from megalith.compat.monolith.sync_clients import (
    ParameterSyncClient,
    create_dummy_sync_client,
    create_parameter_sync_clients,
    parameter_sync_client_from_config,
)
from megalith.compat.monolith.sync_config import SyncConfig
from megalith.errors import InputError, UnknownNameError


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


def test_without_targets_changes_wait(client: ParameterSyncClient, servers: list[DummySyncServer]) -> None:
    shards = shards_of(table=1)
    client.attach(shards)
    shards.assign({"table": (torch.tensor([1]), torch.ones(1, 1))})

    assert responses(client.create_sync_op()) == []

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


def test_clients_go_by_monoliths_names() -> None:
    assert [client.name for client in create_parameter_sync_clients(0)] == ["MonolithSyncClient_"]
    assert [client.name for client in create_parameter_sync_clients(2)] == [
        "MonolithSyncClient_0",
        "MonolithSyncClient_1",
    ]
    with pytest.raises(InputError):
        create_parameter_sync_clients(-1)


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
