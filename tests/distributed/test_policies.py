"""Policies and rows of 16 bits over ranks: counts are summed, owners round like one process, shards divide a
capacity, and all ranks use one time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith import (
    SGD,
    TTL,
    Capacity,
    EmbeddingCollection,
    Feature,
    LocalShards,
    MinCount,
    Probability,
    Ragged,
    Segment,
    SyncShards,
    TableConfig,
)
from megalith.shards import Shards
from megalith.table import Optimizer
from tests.distributed.ranks import run_ranks
from tests.table.support import ints

IDS = torch.tensor([[1, 2, 2, 3], [2, 4, 1, 1], [5, 5, 5, 6], [7, 3, 3, 8]])


class ScaledSGD(Optimizer):
    """An optimizer written in torch."""

    name = "scaled_sgd"

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        rows -= lr * grads


def configs() -> list[TableConfig]:
    rate, narrow = {"optimizer": SGD(0.5)}, {"precision": "bfloat16", "rounding": "stochastic"}
    counted: dict[str, Any] = {"admission": MinCount(3), "eviction": TTL(5), **narrow}
    return [
        TableConfig("counted", dim=2, admission=MinCount(3), **rate),
        TableConfig("drawn", dim=3, admission=Probability(0.4), **rate),
        TableConfig("plain", dim=1, **rate),
        TableConfig("mixed", segments=[Segment(3, precision="float16", **rate), Segment(2, **rate)]),
        TableConfig("narrow", dim=3, **rate, **counted),
        TableConfig("in_torch", dim=3, optimizer=ScaledSGD(0.5), **counted),
    ]


def train_twice(shards: Shards, ids: Tensor) -> None:
    """Update all tables, then even ids of the narrow ones only, and remove the rows of the others there."""
    for step in range(2):
        batch = dict.fromkeys(shards.configs, ids)
        grads = {name: torch.full((ids.numel(), c.dim), 0.25 + 2.0**-9) for name, c in shards.configs.items()}
        lookup = shards.lookup(batch)
        lookup.wait()
        shards.apply_gradients(lookup, grads, step=step, time=step)
    even = ids[ids % 2 == 0]
    late = dict.fromkeys(("narrow", "in_torch"), even)
    shards.apply_gradients(late, {name: torch.ones(even.numel(), 3) for name in late}, step=2, time=9)
    shards.evict(9)


def contents(shards: Shards) -> dict[str, dict[int, list[float]]]:
    return {
        name: {i: row.tolist() for c in table.scan() for i, row in zip(c.ids.tolist(), c.rows, strict=True)}
        for name, table in shards.local.items()
    }


def pending(shards: Shards) -> dict[int, int]:
    ids, counts = shards.local["counted"].pending()
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def admitted(size: int) -> tuple[dict[str, dict[int, list[float]]], dict[int, int]]:
    shards = SyncShards(configs())
    train_twice(shards, IDS.chunk(size)[dist.get_rank()].flatten())
    return contents(shards), pending(shards)


def merged(parts: list[Any]) -> Any:
    rows = {name: {} for name in parts[0][0]}
    counts: dict[int, int] = {}
    for tables, own in parts:
        for name, content in tables.items():
            rows[name] |= content
        counts |= own
    return rows, counts


@pytest.mark.parametrize("size", [1, 2, 4])
def test_occurrences_of_all_ranks_are_counted(size: int) -> None:
    shards = LocalShards(configs())
    train_twice(shards, IDS.flatten())
    assert set(contents(shards)["narrow"]) == set(contents(shards)["in_torch"]) == {2, 4, 6, 8}

    assert merged(run_ranks(admitted, size, world_size=size)) == (contents(shards), pending(shards))


def trained(update: str, size: int) -> tuple[dict[str, dict[int, list[float]]], dict[int, int]]:
    torch.manual_seed(0)
    config = TableConfig("counted", dim=2, optimizer=SGD(0.5), admission=MinCount(3))
    tables: Any = [config] if size > 1 else LocalShards([config])
    model = EmbeddingCollection(tables, [Feature("f", "counted")], update=update, reduction="sum")
    batches = IDS.chunk(size)[dist.get_rank() if size > 1 else 0]
    for _ in range(2):
        if update == "step":
            for row in batches:
                model({"f": Ragged.from_lists([row.tolist()])}, time=5)["f"].sum().backward()
            model.step()
        else:
            model({"f": Ragged.from_lists(batches.tolist())}, time=5)["f"].sum().backward()
    return contents(model.shards), pending(model.shards)


@pytest.mark.parametrize("size", [2, 4])
def test_micro_batches_and_ranks_count_like_one_batch(size: int) -> None:
    expected = trained("backward", 1)

    assert trained("step", 1) == expected
    assert merged(run_ranks(trained, "backward", size, world_size=size)) == expected
    assert merged(run_ranks(trained, "step", size, world_size=size)) == expected


def bounded() -> tuple[int, int, list[int]]:
    shards = SyncShards([TableConfig("t", dim=1, optimizer=SGD(1.0), eviction=(Capacity(11), TTL(50)))])
    for step in range(5):
        ids = torch.arange(8 * step, 8 * step + 8)
        shards.apply_gradients({"t": ids}, {"t": torch.ones(8, 1)}, step=step, time=step)
    most = len(shards.local["t"])
    # Rank 0 has the later clock: it counts on every rank.
    evicted = shards.evict(54 if dist.get_rank() == 0 else 1)["t"]
    return most, len(shards.local["t"]), sorted(evicted.tolist())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_divide_the_capacity_and_agree_on_the_time(size: int) -> None:
    results = run_ranks(bounded, world_size=size)

    share = -(-11 // size)
    assert [most for most, _, _ in results] == [share] * size
    assert [rows for _, rows, _ in results] == [0] * size
    evicted = sorted(i for _, _, ids in results for i in ids)
    assert len(evicted) == share * size
    assert evicted[0] >= 24  # of the last step but one
    assert evicted[-8:] == list(range(32, 40))


def evicting(every: int) -> tuple[list[int], int]:
    config = TableConfig("t", dim=1, optimizer=SGD(1.0), eviction=TTL(30))
    model = EmbeddingCollection([config], [Feature("f", "t")], evict_every=every)
    for step in range(120):
        model({"f": ints(step, step + 1)}, time=step)["f"].sum().backward()
    counters = model.tables["t"].stats().counters
    assert counters.created - counters.evicted == len(model.tables["t"])
    return sorted(i for chunk in model.tables["t"].scan() for i in chunk.ids.tolist()), counters.evicted


def test_training_evicts_as_it_goes() -> None:
    parts = run_ranks(evicting, 10, world_size=2)

    alive = sorted(i for ids, _ in parts for i in ids)
    assert alive[-1] == 120
    # Every pass of 40 steps removes what is older than 30 s when it begins.
    assert alive[0] >= 120 - 30 - 2 * 40 - 1
    assert sum(evicted for _, evicted in parts) == 121 - len(alive)
