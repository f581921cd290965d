"""Servers on two Ray nodes with separate object stores, on loopback: arrays travel without shared memory.

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
    Adagrad,
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
from megalith.shards import ShardsPart
from megalith.shards.servers.ray_servers import loopback_ray, stop_ray


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
