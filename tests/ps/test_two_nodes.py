"""Servers on two Ray nodes with separate object stores, on loopback: arrays travel without shared memory.

Engines and policies on these servers.

Each node reports a GPU to Ray, where there is none: the cuda engine then runs in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import (
    SGD,
    TTL,
    Adagrad,
    Capacity,
    EmbeddingCollection,
    Feature,
    LocalShards,
    Mean,
    MinCount,
    Servers,
    ServerShards,
    Shards,
    TableConfig,
    checkpoint,
)
from megalith.ps.launch import loopback_ray, stop_ray
from megalith.shards import ShardsPart


def node_of(part: ShardsPart) -> str:
    found: str = loopback_ray().get_runtime_context().get_node_id()
    return found


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """A server with a GPU on each of two nodes."""
    loopback_ray()
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        with Servers(2, address=cluster.address, gpus=1, timeout=200.0) as started:
            yield started
    finally:
        stop_ray()
        cluster.shutdown()


def test_rows_and_gradients_travel_between_nodes(servers: Servers) -> None:
    config = TableConfig("t", dim=16, optimizer=Adagrad(0.1))
    nodes = loopback_ray().nodes()
    assert len({node["ObjectStoreSocketName"] for node in nodes}) == 2
    assert {node["NodeManagerAddress"] for node in nodes} == {"127.0.0.1"}
    shards, local = ServerShards([config], servers=servers, timeout=60.0), LocalShards([config])
    # One server is not on the node of this process, so its rows and gradients cross nodes.
    where = shards.each_part(node_of)
    assert set(where) == {node["NodeID"] for node in nodes}
    own = loopback_ray().get_runtime_context().get_node_id()
    shared = [link._channel is not None and link._channel.shared for link in shards.links]
    assert shared == [node == own for node in where]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 10**12, (20_000,), generator=generator)  # 1.3 MB of rows, by two servers
    grads = torch.randn(ids.numel(), 16, generator=generator)
    for step in range(2):
        for each in (shards, local):
            each.apply_gradients(each.lookup({"t": ids}), {"t": grads}, step=step, time=5.0)
    assert torch.equal(shards.lookup({"t": ids}).rows["t"], local.lookup({"t": ids}).rows["t"])
    shards.close()


TABLES = [
    TableConfig("a", dim=4, optimizer=Adagrad(0.1)),
    TableConfig("b", dim=3, optimizer=SGD(0.5), admission=MinCount(2)),
]


def trained(shards: Shards) -> EmbeddingCollection:
    """Two steps, then every other way to change rows."""
    collection = EmbeddingCollection(
        shards, [Feature("x", "a"), Feature("y", "a", Mean()), Feature("z", "b")]
    )
    shards.track("test")
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        x, y = torch.randint(0, 9, (2, 4, 2), generator=generator)
        out = collection({"x": x, "y": y, "z": x[:, 0]}, time=5.0)
        (out["x"].square().sum() + out["y"].sum() + (out["z"] * 2).sum()).backward()
    shards.assign({"a": (torch.tensor([1, 20]), torch.ones(2, 4))}, time=6.0)
    shards.assign_add({"b": (torch.tensor([1, 20]), torch.ones(2, 3))}, time=6.0)
    return collection


def assert_close(found: Shards, expected: Shards) -> None:
    """All rows with their state, to 1e-6."""
    for name in expected.configs:
        for each, other in zip(sorted_rows(found, name), sorted_rows(expected, name), strict=True):
            torch.testing.assert_close(each, other, rtol=1e-6, atol=1e-6)


def sorted_rows(shards: Shards, name: str) -> list[torch.Tensor]:
    chunks = list(shards.scan(name))
    ids, rows, time = (torch.cat([getattr(x, key) for x in chunks]) for key in ("ids", "rows", "time"))
    state = [torch.cat([x.state[key] for x in chunks]) for key in chunks[0].state]
    return [each[ids.argsort()] for each in (ids, rows, time, *state)]


def test_tables_on_the_gpus_of_servers(servers: Servers, tmp_path: Path) -> None:
    assert loopback_ray().available_resources().get("GPU", 0) == 0  # each server has one
    shards = ServerShards(TABLES, servers=servers, name="gpu", engine="cuda", timeout=60.0)
    local = LocalShards(TABLES, engine="reference")
    found, expected = trained(shards), trained(local)
    assert {stats.engine for stats in shards.stats().values()} == {"cuda"}
    assert_close(shards, local)
    for each, other in zip(
        shards.drain_touched("test").values(), local.drain_touched("test").values(), strict=True
    ):
        assert [sorted(x.tolist()) for x in each] == [sorted(x.tolist()) for x in other]
    checkpoint.save(found, tmp_path / "saved")
    ids = {"a": torch.tensor([1, 3, 50, 1])}
    assert shards.reinitialize(ids)["a"].tolist() == local.reinitialize(ids)["a"].tolist()
    assert shards.remove({"b": torch.tensor([1, 77])}) == local.remove({"b": torch.tensor([1, 77])})
    evicted, other = shards.evict(7.0), local.evict(7.0)
    assert {name: x.numel() for name, x in evicted.items()} == {name: x.numel() for name, x in other.items()}
    assert_close(shards, local)
    checkpoint.load(found, tmp_path / "saved")
    checkpoint.load(expected, tmp_path / "saved")
    assert_close(shards, local)
    half = ServerShards(TABLES, servers=servers, name="half", engine="cuda", wire="float16", timeout=60.0)
    half.assign({"a": (torch.tensor([90]), torch.full((1, 4), 0.5))})
    assert half.lookup({"a": torch.tensor([90])}).rows["a"].tolist() == [[0.5] * 4]
    shards.close()
    half.close()


POLICIES = [
    TableConfig("lru", dim=2, optimizer=SGD(0.5), eviction=Capacity(8)),
    TableConfig("lfu", dim=2, optimizer=Adagrad(0.5), eviction=Capacity(8, score="lfu")),
    TableConfig("counted", dim=2, optimizer=SGD(0.5), admission=MinCount(2), eviction=TTL(3)),
]


def update(shards: Shards, ids: torch.Tensor, step: int) -> None:
    grads = torch.stack([ids, ids + step], 1) / 8  # sums of eighths are exact in any order
    names = list(shards.configs)
    shards.apply_gradients(dict.fromkeys(names, ids), dict.fromkeys(names, grads), step=step, time=step)


def test_policies_with_two_synchronous_workers(servers: Servers) -> None:
    """Each server does what a table with its ids in one process does; occurrences of both workers count."""
    options: dict[str, Any] = {"name": "policies", "mode": "sync", "num_workers": 2, "timeout": 60.0}
    workers = [ServerShards(POLICIES, servers=servers, worker=worker, **options) for worker in (0, 1)]
    parts = [LocalShards(POLICIES, num_shards=2) for _ in range(2)]
    for step, ids in enumerate(torch.randint(0, 20, (8, 4), generator=torch.Generator().manual_seed(1))):
        for worker, own in zip(workers, ids.chunk(2), strict=True):
            update(worker, own, step)
        owners = workers[0].router("lru").owner(ids)
        for server, part in enumerate(parts):
            update(part, ids[owners == server], step)
    for worker in workers:
        worker.flush()
    for name in ("lru", "lfu", "counted"):
        expected = [sorted_rows(part, name) for part in parts]
        order = torch.cat([ids for ids, *_ in expected]).argsort()
        found = sorted_rows(workers[0], name)
        assert found[0].numel() > 0
        for i, values in enumerate(found):
            assert torch.equal(values, torch.cat([each[i] for each in expected])[order])
    evicted = [part.evict(9.0)["counted"].tolist() for part in parts]
    assert sorted(workers[0].evict(9.0)["counted"].tolist()) == sorted(evicted[0] + evicted[1]) != []
    stats = workers[0].stats()
    for name, counters in ((name, stats[name].counters) for name in stats):
        assert counters.evicted == sum(part.stats()[name].counters.evicted for part in parts)
    for worker in workers:
        worker.close()
