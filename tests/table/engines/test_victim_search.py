"""The kernels that make room in a full table remove the rows that the reference engine removes."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from megalith import SGD, Capacity, Table, TableConfig
from megalith.table.engines import reference_policies
from tests.table.engines.cuda_configs import ON_GPU

SCORES = ("lru", "lfu", "step")


def run(seed: int, score: str, calls: int) -> int:
    """Compare two tables after each of some writes; return the number of removed rows."""
    chance = random.Random(seed)
    limit = chance.choice([5, 40, 300])
    few = chance.choice([3, 50, 2**31])  # many equal times, or few
    config = TableConfig("t", dim=1, optimizer=SGD(1.0), eviction=Capacity(rows=limit, score=score))
    tables = [Table(config, engine=name) for name in ("cuda", "reference")]
    for table in tables:
        table.track("publisher")
    removed = 0
    for step in range(calls):
        n = min(limit, chance.choice([1, 5, 300]))
        ids = torch.tensor([chance.randrange(3 * limit) for _ in range(chance.randrange(1, n + 1))])
        time = chance.randrange(few)
        for table in tables:
            if step % 5 == 4:
                table.assign(ids, torch.ones(ids.numel(), 1), time=time)
            else:
                table.apply_gradients(ids, torch.ones(ids.numel(), 1), step=step % 9, time=time)
        gone, expected = (table.drain_evicted().tolist() for table in tables)
        assert gone == expected
        removed += len(gone)
        if step % 3 == 0:
            touched, wanted = ([sorted(x.tolist()) for x in t.drain_touched("publisher")] for t in tables)
            assert touched == wanted
    assert len(tables[0]) == len(tables[1]) <= limit
    assert tables[0].stats().counters == tables[1].stats().counters
    return removed


@pytest.mark.parametrize("score", SCORES if ON_GPU else SCORES[:2])
def test_the_rows_of_the_reference(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_policies, "SAMPLE", 64)
    assert sum(run(seed, score, 12 if ON_GPU else 6) for seed in range(20 if ON_GPU else 2)) > 5


@pytest.mark.parametrize("score", SCORES if ON_GPU else SCORES[:1])
def test_a_small_sample_often_ends_the_walk(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_policies, "SAMPLE", 4)
    monkeypatch.setattr(reference_policies, "WALK", 2)
    assert sum(run(seed, score, 12 if ON_GPU else 6) for seed in range(20 if ON_GPU else 2)) > 5
