"""Monolith's vectors for tables over shards, under Megalith's decisions, on 1, 2 and 4 real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith import SGD, Adagrad, Adam, LocalShards, SyncShards
from tests.distributed.ranks import PATIENT, run_ranks
from tests.shards.vectors import GROWING, VECTORS, Data, float16_on_the_wire, table
from tests.table.support import ints


def on_a_rank(transport: str) -> None:
    """Only rank 0 brings data; all ranks read."""

    def create(*tables: Any, **options: Any) -> SyncShards:
        return SyncShards(tables, transport=transport, timeout=PATIENT, **options)

    for vector in (*VECTORS, float16_on_the_wire):
        vector(create, dist.get_rank() == 0)
    same_gradients(create)


def same_gradients(create: Any) -> None:
    """Reference 1.6: every rank pushes the same gradients; ranks that push one id make a step of the sum."""
    rank, size = dist.get_rank(), dist.get_world_size()
    data = Data(create(table("1"), table("2", 2, GROWING)), True)
    assert (data.read("1", 1, 1), data.read("2", 2)) == ([[0], [0]], [[0, 0]])
    data.push({"1": [1, 1], "2": [2]}, {"1": [[0.5], [0.5]], "2": [[0.5, 1.0]]})
    assert (data.read("1", 1, 1), data.read("2", 2)) == ([[-size]] * 2, [[-0.5 * size, -size]])
    for optimizer in (Adagrad(0.1), Adam(0.1), SGD(0.1)):
        config = table(dim=2, optimizer=optimizer)
        data, alone, grads = Data(create(config), True), LocalShards([config]), torch.tensor([[0.5, -0.25]])
        for step in range(3):
            data.push({"t": [7]}, {"t": grads.tolist()}, step)
            alone.apply_gradients({"t": ints(7)}, {"t": size * grads}, step=step)
        expected = alone.lookup({"t": ints(7)}).rows["t"]
        torch.testing.assert_close(torch.tensor(data.read("t", 7)), expected, rtol=1e-6, atol=0)
    data = Data(create(table()), True)
    own = [[1.0], [2.0]] if size == 1 else {0: [[1.0]], 1: [[2.0]]}.get(rank, [])
    grads = torch.tensor(own).view(-1, 1)
    data.shards.apply_gradients({"t": ints(*[1] * len(own))}, {"t": grads}, step=0)
    assert data.read("t", 1) == [[-3]]


@pytest.mark.parametrize(("size", "transport"), [(1, "gloo"), (2, "gloo"), (4, "auto")])
def test_vectors(size: int, transport: str) -> None:
    run_ranks(on_a_rank, transport, world_size=size)
