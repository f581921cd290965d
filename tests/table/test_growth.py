"""The cpu engine's index at size: growth, removal and reuse, checked against a plain dict."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from megalith import Normal, Table
from tests.table.support import EXTREME_IDS, assert_same_bits, sgd_table, whole


def bit_reversed(n: int) -> list[int]:
    """0, 1, 2, ... with their 64 bits read backwards, as signed numbers."""
    unsigned = (int(f"{k:064b}"[::-1], 2) for k in range(n))
    return [u - 2**64 if u >= 2**63 else u for u in unsigned]


def strided(n: int) -> list[int]:
    """Multiples of 2^32: equal low halves, on both sides of zero."""
    return [(k - n // 2) << 32 for k in range(n)]


def scattered(n: int) -> list[int]:
    generator = random.Random(5)
    return [generator.getrandbits(64) - 2**63 for _ in range(n)]


FAMILIES = {
    "sequential": lambda n: list(range(n)),
    "strided": strided,
    "bit-reversed": bit_reversed,
    "scattered": scattered,
}


class Checked:
    """A table of one weight per row, and the dict that it must equal."""

    def __init__(self) -> None:
        self.table: Table = sgd_table("cpu", 1, missing="zeros")
        self.expected: dict[int, float] = {}
        self.clock = 0

    def assign(self, ids: list[int]) -> None:
        self.clock += 1
        values = torch.arange(len(ids), dtype=torch.float32) % 1000 + 1000 * self.clock
        self.table.assign(torch.tensor(ids), values[:, None])
        self.expected.update(zip(ids, values.tolist(), strict=True))

    def subtract(self, ids: list[int]) -> None:
        """An SGD step of 1: missing ids are created at zero."""
        self.table.apply_gradients(torch.tensor(ids), torch.ones(len(ids), 1), step=0)
        for id in ids:
            self.expected[id] = self.expected.get(id, 0.0) - 1.0

    def remove(self, ids: list[int]) -> None:
        there = [id for id in dict.fromkeys(ids) if id in self.expected]
        assert self.table.remove(torch.tensor(ids)) == len(there)
        for id in there:
            del self.expected[id]

    def check(self, others: list[int]) -> None:
        """Present ids have their values; `others` are present only if expected."""
        assert len(self.table) == len(self.expected)
        ids = [*self.expected, *others]
        found = self.table.find(torch.tensor(ids, dtype=torch.int64))
        present = [id in self.expected for id in ids]
        assert (found >= 0).tolist() == present
        values = [self.expected.get(id, 0.0) for id in ids]
        assert self.table.lookup(torch.tensor(ids, dtype=torch.int64))[:, 0].tolist() == values
        rows = found[: len(self.expected)]
        assert torch.unique(rows).numel() == rows.numel(), "a row of its own for every id"


def test_a_long_life_of_growth_removal_and_reuse() -> None:
    choice = random.Random(17)
    checked = Checked()
    pools = [family(80_000) for family in FAMILIES.values()]
    never_seen = [id + (1 << 62) for id in range(1000)]
    capacities, growing_calls, reads_while_growing = set(), 0, 0
    position = 0

    for round in range(50):
        for pool in pools:  # new ids of every kind, 6,400 a round
            checked.assign(pool[position : position + 1600])
        position += 1600
        stats = checked.table.stats()
        capacities.add(stats.capacity)
        growing_calls += stats.growing
        pool = choice.choice(pools)
        some = choice.sample(pool[:position], 400)
        checked.remove(some)
        checked.subtract(choice.sample(some, 200) + choice.sample(pool[:position], 200))
        checked.remove(choice.sample(pools[round % 4][:position], 400))
        reads_while_growing += checked.table.stats().growing
        if round % 12 == 0:
            checked.check([*never_seen, *some, *EXTREME_IDS])

    removed = [id for pool in pools for id in pool if id not in checked.expected]
    checked.check([*never_seen, *removed])
    assert len(checked.expected) > 250_000
    assert len(removed) > 10_000
    assert len(capacities) > 8
    assert growing_calls > 10
    assert reads_while_growing > 10

    chunk = whole(checked.table)
    assert dict(zip(chunk.ids.tolist(), chunk.rows[:, 0].tolist(), strict=True)) == checked.expected
    checked.remove(list(checked.expected))
    assert len(checked.table) == 0
    checked.assign(pools[1])
    checked.check(pools[0][1:1000])


def grown(rows: int = 120_000) -> tuple[Table, Tensor]:
    """A table caught in the middle of growing."""
    table = sgd_table("cpu", 1, initializer=Normal())
    ids = torch.arange(rows) * 0x9E3779B97F4A7C15
    at = 0
    while not (table.stats().growing and at > rows // 2):
        table.assign(ids[at : at + 500], ids[at : at + 500, None].float())
        at += 500
        assert at < rows, "never seen growing"
    return table, ids[:at]


@pytest.mark.parametrize("act", ["reserve", "clear", "remove all", "scan", "many at once"])
def test_anything_may_happen_in_the_middle_of_growth(act: str) -> None:
    table, ids = grown()
    values = ids[:, None].float()
    new = -1 - torch.arange(100_000)

    if act == "reserve":
        table.reserve(4 * ids.numel())
        assert not table.stats().growing
    elif act == "clear":
        table.clear()
        assert table.find(ids).max().item() == -1
        assert not table.stats().growing
        table.assign(ids, values)
    elif act == "remove all":
        assert table.remove(ids) == ids.numel()
        assert len(table) == 0
        assert table.find(ids).max().item() == -1
        table.assign(ids, values)
    elif act == "scan":
        assert set(whole(table).ids.tolist()) == set(ids.tolist())
    else:
        table.assign(new, torch.zeros(new.numel(), 1))
        assert table.remove(new) == new.numel()

    assert len(table) == ids.numel()
    assert_same_bits(table.lookup(ids), values)
    assert table.find(new).max().item() == -1


def test_capacity_is_never_below_the_number_of_rows_and_stays_if_it_was_reserved() -> None:
    plain, reserved = sgd_table("cpu", 1), sgd_table("cpu", 1)
    reserved.reserve(20_000)
    capacity, growing = reserved.stats().capacity, 0

    for start in range(0, 20_000, 200):
        for table in (plain, reserved):
            table.assign(torch.arange(start, start + 200), torch.zeros(200, 1))
        stats = plain.stats()
        assert stats.capacity >= stats.rows == start + 200
        assert reserved.stats().capacity == capacity
        assert not reserved.stats().growing
        growing += stats.growing

    assert growing


def test_memory_stays_close_to_what_rows_need() -> None:
    table = sgd_table("cpu", 16)
    table.assign(torch.arange(100_000), torch.zeros(100_000, 16))
    memory = table.memory()

    assert memory.rows == 100_000 * 64
    assert memory.side <= 100_000 * 13
    # 0.66 full at most, and 1.4 times larger after growth, of 64-byte buckets for five ids
    assert 100_000 * 64 / 5 <= memory.index <= 100_000 * 64 / 5 / 0.66 * 1.5 + 8192
