"""Embedding tables over ranks: each row of a window is added once, by its owner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith import SGD, LocalShards, SyncShards, TableConfig
from megalith.errors import InputError
from megalith.gather import (
    ElasticRanks,
    GatherPlan,
    Label,
    OuterUpdate,
    PayloadSchema,
    PeerTables,
    UpdateConfig,
    compress,
    open_object_store,
    publish,
    run_window,
)
from tests.distributed.ranks import run_ranks

CONFIGS = [TableConfig("users", dim=2, optimizer=SGD(0.1))]
IDS = torch.arange(20, dtype=torch.int64) * 7 - 50
SCHEMA = PayloadSchema.of({"w": torch.zeros(4, 4)}, tables={"users": 2})


def plan(**more: Any) -> GatherPlan:
    update = UpdateConfig(clip="none")
    return GatherPlan(run="r", window=1, schema=SCHEMA.digest, primary=(1, 2), update=update, **more)


def rows(shards: Any) -> Tensor:
    return shards.lookup({"users": IDS}).rows["users"].clone()  # type: ignore[no-any-return]


def work(folder: str) -> dict[str, Any]:
    """How far each row moves with tables that are divided over ranks, and with a copy on each rank."""
    ranks, found = ElasticRanks.of_group(timeout=60.0), {}
    for name, shards in (("sync", SyncShards(CONFIGS, seed=1)), ("local", LocalShards(CONFIGS, seed=1))):
        before = rows(shards)
        stores = {"default": open_object_store(folder)}
        given = plan() if ranks.leads else None
        run_window(given, {"w": torch.zeros(4, 4)}, OuterUpdate(SCHEMA), stores, ranks=ranks, tables=shards)
        found[name] = (rows(shards) - before).tolist()
        found[f"{name} rows"] = len(shards.local["users"])
    if dist.get_world_size() == 2:
        with pytest.raises(InputError, match="divided over 2 ranks, but 1 ranks gather"):
            run_window(
                plan(),
                {"w": torch.zeros(4, 4)},
                OuterUpdate(SCHEMA),
                stores,
                tables=SyncShards(CONFIGS, seed=1),
            )
    return found


def test_each_row_is_added_once_by_its_owner(tmp_path: Any) -> None:
    store = open_object_store(tmp_path)
    for uid in (1, 2):
        change = {"users": (IDS, torch.ones(len(IDS), 2))}
        publish(store, compress({"w": torch.zeros(4, 4)}, SCHEMA, tables=change), Label("r", 1, uid))
    said = run_ranks(work, str(tmp_path), world_size=2)
    for each in said:
        for name in ("sync", "local"):
            torch.testing.assert_close(torch.tensor(each[name]), torch.full((len(IDS), 2), -1.0))
        assert each["local rows"] == len(IDS)
    assert sum(each["sync rows"] for each in said) == len(IDS)


def test_changes_are_those_of_the_touched_rows_since_the_last_window() -> None:
    local, shared = LocalShards(CONFIGS, seed=1), LocalShards(CONFIGS, seed=1)
    tables = PeerTables(local, shared)
    ids = torch.tensor([3, 5])
    local.apply_gradients({"users": ids}, {"users": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, step=0)
    found, change = tables.changes()["users"]
    order = found.argsort()
    assert found[order].tolist() == [3, 5]
    torch.testing.assert_close(change[order], 0.1 * torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    shared.assign_add({"users": (torch.tensor([5, 9]), torch.ones(2, 2))})  # what a window came to
    tables.adopt()
    for key in (3, 5, 9):
        wanted = shared.lookup({"users": torch.tensor([key])}).rows["users"]
        assert torch.equal(local.lookup({"users": torch.tensor([key])}).rows["users"], wanted)
    assert tables.changes()["users"][0].tolist() == []
    with pytest.raises(InputError, match="both must have the same"):
        PeerTables(local, LocalShards([TableConfig("other", dim=2, optimizer=SGD(0.1))]))


def test_rows_stay_changes_until_they_are_adopted() -> None:
    """Rows that are trained after `changes` are neither overwritten nor forgotten."""
    local, shared = LocalShards(CONFIGS, seed=1), LocalShards(CONFIGS, seed=1)
    tables = PeerTables(local, shared)

    def train(*ids: int) -> None:
        grads = torch.ones(len(ids), 2)
        local.apply_gradients({"users": torch.tensor(ids)}, {"users": grads}, step=0)

    train(3, 5)
    first = tables.changes()["users"]
    train(5, 7)
    found, change = tables.changes()["users"]
    assert (first[0].tolist(), found.tolist()) == ([3, 5], [3, 5, 7])
    torch.testing.assert_close(change, torch.tensor([[0.1], [0.2], [0.1]]).expand(3, 2))
    shared.assign_add({"users": (found, -change)})
    train(7, 9)
    tables.adopt()  # 7 was sent: its row becomes that of the window
    found, change = tables.changes()["users"]
    assert found.tolist() == [9]
    torch.testing.assert_close(change, torch.full((1, 2), 0.1))
    tables.adopt()
    assert tables.changes()["users"][0].tolist() == []


def test_tables_that_are_not_shards_are_refused() -> None:
    with pytest.raises(InputError, match="tables must have the method assign_add"):
        run_window(plan(), {"w": torch.zeros(4, 4)}, OuterUpdate(SCHEMA), {}, tables=object())  # type: ignore[arg-type]
