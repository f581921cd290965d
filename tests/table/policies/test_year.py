"""A simulated year of training on ids that drift: the table keeps its size, and every row is accounted for.

Each day the window of popular ids moves on, and ids that occur only once arrive. An oracle knows the last day
of every id, so the expected number of rows is exact. `make soak` runs the year, `make test` a few weeks of a
smaller table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import Tensor

from megalith import TTL, Adagrad, Capacity, MinCount, Table, TableConfig
from megalith.table.policies import Eviction

DAY = 86_400
TTL_DAYS = 10
STEPS = 4  # of a day
SCATTER = 0x9E3779B97F4A7C15 - (1 << 64)  # ids from all of the 64-bit range
GATHER = pow(SCATTER, -1, 1 << 64) - (1 << 64)  # the inverse of the multiplication


@dataclass(frozen=True)
class Drift:
    """The ids of each day: the window [day * new, day * new + window), and `once` ids that never return."""

    days: int
    window: int
    new: int
    once: int

    @property
    def max_pending(self) -> int:
        """Ids that are counted at most: those of two steps, and of some days if they occur once."""
        return self.window + 10 * self.once

    def popular(self, day: int) -> Tensor:
        return torch.arange(day * self.new, day * self.new + self.window)

    def rare(self, day: int) -> Tensor:
        return -1 - torch.arange(day * self.once, (day + 1) * self.once)


FEW_WEEKS = Drift(days=60, window=3_000, new=300, once=200)
YEAR = Drift(days=365, window=40_000, new=4_000, once=1_500)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def live_for(drift: Drift, policies: list[Eviction], limit: int | None) -> tuple[list[int], list[int]]:
    """Train for all days, check rows, counters and touched ids. Returns memory by day: table, process."""
    admission = MinCount(2, max_ids=drift.max_pending)
    config = TableConfig("t", dim=8, optimizer=Adagrad(0.1), admission=admission, eviction=policies)
    table = Table(config)
    table.track("publisher")
    served = torch.zeros(drift.days * drift.new + drift.window, dtype=torch.bool)
    last_day = torch.full(served.shape, -TTL_DAYS)
    generator = torch.Generator().manual_seed(0)
    evicted = removed = refused = 0
    used, resident = [], []
    for day in range(drift.days):
        now = (day + TTL_DAYS) * DAY
        table.evict(now)
        gone = drift.popular(day - 1)[:20] if day else torch.arange(0)
        removed += table.remove(gone * SCATTER)
        last_day[gone] = -TTL_DAYS
        popular, rare = drift.popular(day), drift.rare(day)
        parts = [popular[k::2] for k in (0, 1)] * 2
        assert len(parts) == STEPS
        for k, part in enumerate(parts):
            ids = torch.cat([part, rare[k::STEPS]])
            ids = ids[torch.randperm(ids.numel(), generator=generator)] * SCATTER
            grads = torch.full((ids.numel(), 8), 0.01)
            table.apply_gradients(ids, grads, step=day * STEPS + k, time=now)
            table.evict_part(now, rows=1000)
        last_day[popular] = day

        counters = table.stats().counters
        log, dropped = table.drain_evicted(), table.drain_refused()
        evicted += log.numel()
        refused += dropped.numel()
        expected = int((last_day > day - TTL_DAYS).sum())
        assert len(table) == (expected if limit is None else min(limit, expected))
        assert counters.created == len(table) + counters.evicted + counters.removed
        assert (counters.evicted, counters.removed, counters.refused) == (evicted, removed, refused)
        assert counters.pending <= drift.max_pending
        updated, deleted = table.drain_touched("publisher")
        served[deleted * GATHER] = False
        served[updated * GATHER] = True
        assert int(served.sum()) == len(table)
        used.append(table.memory().total)
        resident.append(resident_bytes())
    assert bool((table.find(torch.nonzero(served).flatten() * SCATTER) >= 0).all())
    if not any(isinstance(p, Capacity) and p.score == "lfu" for p in policies):  # lfu keeps old ids
        assert bool((table.find(drift.popular(drift.days - 1) * SCATTER) >= 0).all())
    return used, resident


def policies_of(name: str, drift: Drift) -> tuple[list[Eviction], int | None]:
    if name == "ttl":
        return [TTL(TTL_DAYS * DAY)], None
    limit = drift.window + 4 * drift.new
    return [TTL(TTL_DAYS * DAY), Capacity(limit, score=name)], limit


def assert_level(sizes: list[int], spare: int) -> None:
    """The last quarter needs no more memory than the second."""
    quarter = len(sizes) // 4
    assert max(sizes[-quarter:]) <= max(sizes[quarter : 2 * quarter]) + spare


@pytest.mark.parametrize("name", ["ttl", "lru"])
def test_a_few_weeks_keep_the_size_of_a_table(name: str) -> None:
    policies, limit = policies_of(name, FEW_WEEKS)

    used, _ = live_for(FEW_WEEKS, policies, limit)

    assert_level(used, spare=0)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["ttl", "lru", "lfu"])
def test_a_year_keeps_the_size_of_a_table_and_of_the_process(name: str) -> None:
    policies, limit = policies_of(name, YEAR)

    used, resident = live_for(YEAR, policies, limit)

    assert_level(used, spare=0)
    # Single days are up to 11 MiB above the others, early and late: what counts is the usual size.
    quarter = len(resident) // 4
    assert median(resident[-quarter:]) <= median(resident[quarter : 2 * quarter]) + (4 << 20)
