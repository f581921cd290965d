"""Rows of 16 bits over ranks: owners round like one process, also stochastically."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megalith import SGD, LocalShards, Segment, SyncShards, TableConfig
from megalith.shards import Shards
from tests.distributed.ranks import run_ranks
from tests.table.support import dyadic

IDS = torch.randint(0, 40, (4, 60), generator=torch.Generator().manual_seed(3))


def configs() -> list[TableConfig]:
    return [
        TableConfig("drawn", dim=5, optimizer=SGD(0.5), precision="bfloat16", rounding="stochastic"),
        TableConfig(
            "mixed",
            segments=[Segment(3, optimizer=SGD(0.5), precision="float16"), Segment(2, optimizer=SGD(0.5))],
        ),
    ]


def train(shards: Shards, part: slice) -> dict[str, dict[int, list[float]]]:
    """Train on some rows of IDS; return the rows of this shard."""
    ids = dict.fromkeys(shards.configs, IDS[part].flatten())
    for step in range(3):
        grads = {name: dyadic(step, *IDS.shape, 5)[part].flatten(0, 1) * 2.0**-9 for name in ids}
        lookup = shards.lookup(ids)
        lookup.wait()
        shards.apply_gradients(lookup, grads, step=step, time=step)
    found = {}
    for name, table in shards.local.items():
        found[name] = {
            id: row.tolist()
            for chunk in table.scan()
            for id, row in zip(chunk.ids.tolist(), chunk.rows, strict=True)
        }
    return found


def train_rank(size: int) -> dict[str, dict[int, list[float]]]:
    each = 4 // size
    return train(SyncShards(configs()), slice(each * dist.get_rank(), each * (dist.get_rank() + 1)))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_store_the_rows_of_one_process(size: int) -> None:
    expected = train(LocalShards(configs()), slice(0, 4))

    parts = run_ranks(train_rank, size, world_size=size)

    for name, rows in expected.items():
        assert {id: row for part in parts for id, row in part[name].items()} == rows
