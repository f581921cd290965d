"""Tables with serving precisions over ranks: lookups and stored rows have the bits of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith import (
    SGD,
    Adagrad,
    EmbeddingCollection,
    Feature,
    FixedPoint,
    LocalShards,
    Normal,
    OneBit,
    Pipeline,
    Ragged,
    Segment,
    SyncShards,
    TableConfig,
)
from megalith.nn import MicroBatches
from megalith.shards import Shards
from tests.distributed.ranks import run_ranks

IDS = torch.randint(0, 40, (4, 12), generator=torch.Generator().manual_seed(3))
EVERY = torch.arange(-5, 45)


def configs() -> list[TableConfig]:
    return [
        TableConfig(
            "mixed",
            segments=[
                Segment(3, optimizer=SGD(0.5), initializer=Normal(0.0, 1.0), serving=FixedPoint(2.0)),
                Segment(
                    9, optimizer=Adagrad(0.5), initializer=Normal(0.0, 1.0), serving=OneBit(0.5, step_size=1)
                ),
            ],
        ),
        TableConfig("bits", dim=5, optimizer=SGD(0.5), serving=OneBit(0.5, step_size=1), missing="zeros"),
    ]


def train(shards: Shards, ahead: bool = False) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Train with 4 micro-batches a step; return the stored rows, the losses, and what is served."""
    features = [Feature("a", "mixed"), Feature("b", "bits")]
    model = EmbeddingCollection(shards, features, update="step")
    micro = MicroBatches(model, 4)
    losses = []
    steps = range(3)
    batches = [{f: Ragged.from_lists(row.view(3, 4).tolist()) for f in "ab"} for row in IDS[micro.mine]]
    source = [batch for _ in steps for batch in batches]
    loader = iter(Pipeline(model, source, depth=2) if ahead else source)
    for _ in steps:

        def loss() -> Tensor:
            out = model(next(loader))
            return out["a"].square().sum() + out["b"].sum()

        micro.step([loss] * len(batches))
        losses.append(micro.loss)
    served = shards.lookup(dict.fromkeys(shards.configs, EVERY))
    found = {name: served.rows[name].clone() for name in shards.configs}
    rows = {}
    for name, table in shards.local.items():
        for chunk in table.scan():
            rows |= {f"{name} {id}": row for id, row in zip(chunk.ids.tolist(), chunk.rows, strict=True)}
    return rows, losses, found


def train_rank(ahead: bool) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    assert dist.is_initialized()
    return train(SyncShards(configs()), ahead)


@pytest.mark.parametrize(("size", "ahead"), [(2, False), (4, False), (2, True)])
def test_ranks_see_and_store_the_rows_of_one_process(size: int, ahead: bool) -> None:
    rows, losses, served = train(LocalShards(configs()))

    parts = run_ranks(train_rank, ahead, world_size=size)

    together = {key: row for part in parts for key, row in part[0].items()}
    assert together.keys() == rows.keys()
    assert all(torch.equal(together[key], row) for key, row in rows.items())
    for _, other_losses, other_served in parts:
        assert other_losses == losses
        assert all(torch.equal(other_served[name], found) for name, found in served.items())
