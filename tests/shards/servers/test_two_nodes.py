"""Servers on two Ray nodes with separate object stores, on loopback: arrays travel without shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megalith import Adagrad, LocalShards, Servers, ServerShards, TableConfig
from megalith.shards import ShardsPart
from megalith.shards.servers.ray_servers import loopback_ray, stop_ray


def node_of(part: ShardsPart) -> str:
    found: str = loopback_ray().get_runtime_context().get_node_id()
    return found


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a cluster of two nodes."""
    loopback_ray()
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        yield cluster.address
    finally:
        stop_ray()
        cluster.shutdown()


def test_rows_and_gradients_travel_between_nodes(address: str) -> None:
    config = TableConfig("t", dim=16, optimizer=Adagrad(0.1))
    with Servers(2, address=address, timeout=200.0) as servers:
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
