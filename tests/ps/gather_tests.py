"""Gather of tables on parameter servers: a peer sends the rows of all servers, and ranks share the window."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import SGD, FixedPoint, LocalShards, Segment, Shards, TableConfig
from megalith.gather import (
    ElasticRanks,
    GatherPlan,
    Label,
    ObjectStore,
    OuterUpdate,
    PayloadSchema,
    PeerTables,
    UpdateConfig,
    compress,
    open_object_store,
    publish,
    run_window,
    table_rows,
)
from tests.ps.support import Make

SEGMENT = Segment(2, optimizer=SGD(0.1), serving=FixedPoint(1.0))  # lookups read less than what is stored
CONFIGS = [TableConfig("users", segments=[SEGMENT]), TableConfig("items", dim=3, optimizer=SGD(0.1))]
IDS = torch.arange(20, dtype=torch.int64) * 7 - 50
WEIGHTS = {"w": torch.zeros(4, 4)}
SCHEMA = PayloadSchema.of(WEIGHTS, tables={"users": 2, "items": 3})


def plan(window: int) -> GatherPlan:
    update = UpdateConfig(clip="none")
    return GatherPlan(run="r", window=window, schema=SCHEMA.digest, primary=(1,), update=update)


def stored(shards: Shards) -> dict[str, list[Any]]:
    """All rows by table, in the order of ids."""
    found = {}
    for name in ("users", "items"):
        chunks = list(shards.scan(name))
        ids, rows = torch.cat([c.ids for c in chunks]), torch.cat([c.rows for c in chunks])
        order = ids.argsort()
        found[name] = [ids[order].tolist(), rows[order].tolist()]
    return found


def train(shards: Shards, scale: float) -> None:
    grads = torch.arange(20 * 5, dtype=torch.float32).view(20, 5) * scale
    given: dict[str, Tensor] = {"users": grads[:, :2], "items": grads[:, 2:]}
    ids = {"users": IDS, "items": IDS}
    shards.apply_gradients(ids, {name: each.contiguous() for name, each in given.items()}, step=0, wait=False)


def peer(local: Shards, shared: Shards, store: ObjectStore) -> list[Any]:
    """The payload of each of two windows, and the rows after each."""
    tables, update, found = PeerTables(local, shared), OuterUpdate(SCHEMA), []
    for window in (1, 2):
        train(local, 0.01 * window)
        made = compress(WEIGHTS, SCHEMA, tables=tables.changes())
        publish(store, made, Label("r", window, 1))
        run_window(plan(window), WEIGHTS, update, {"default": store}, tables=shared)
        trained = stored(local)
        tables.adopt()
        assert stored(local) == stored(shared)
        for name, (ids, rows) in stored(local).items():
            assert ids == trained[name][0]
            torch.testing.assert_close(torch.tensor(rows), torch.tensor(trained[name][1]))
        found.append((made.to_bytes(Label("r", window, 1)), stored(local)))
    return found


def test_a_peer_on_servers_sends_and_keeps_what_one_process_would(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_rows, "_BLOCK_BYTES", 60)  # several blocks per table
    one = peer(*(LocalShards(CONFIGS, seed=1) for _ in range(2)), open_object_store(tmp_path / "one"))
    servers = peer(*(make(*CONFIGS, seed=1) for _ in range(2)), open_object_store(tmp_path / "servers"))
    assert servers == one


def test_ranks_of_a_window_add_each_row_of_servers_once(make: Make, tmp_path: Path) -> None:
    store = open_object_store(tmp_path)
    change = {"users": (IDS, torch.ones(20, 2)), "items": (IDS[:5], torch.ones(5, 3))}
    publish(store, compress(WEIGHTS, SCHEMA, tables=change), Label("r", 1, 1))
    expected = LocalShards(CONFIGS, seed=1)
    run_window(plan(1), WEIGHTS, OuterUpdate(SCHEMA), {"default": store}, tables=expected)
    shared = [make(*CONFIGS, seed=1, name="gathered", worker=n, num_workers=2) for n in range(2)]
    meeting = torch.distributed.HashStore()

    def work(rank: int) -> dict[str, list[Any]]:
        ranks, weights = ElasticRanks(meeting, rank, 2, timeout=60.0), {"w": torch.zeros(4, 4)}
        stores: dict[str, ObjectStore] = {"default": open_object_store(tmp_path)}
        run_window(plan(1), weights, OuterUpdate(SCHEMA), stores, ranks=ranks, tables=shared[rank])
        return stored(shared[rank])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [stored(expected)] * 2
