"""Capacity with a score function: how much of the table a write visits, and which rows go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalith import SGD, TTL, Capacity, Table, TableConfig, Zeros
from megalith.errors import InputError
from megalith.table import Chunk, Eviction
from megalith.table.engines import shard_capacity
from megalith.table.engines.shard_capacity import MIN_PART, PARTS, VISITED

NEW = 1 << 40
"""Ids from here on are new; the score functions below rank them highest."""


class Recorded:
    """A static score function that counts the rows it sees."""

    def __init__(self, rank: Tensor) -> None:
        self.rank = rank  # of the ids 0, 1, ...
        self.rows = 0

    def __call__(self, chunk: Chunk) -> Tensor:
        self.rows += chunk.ids.numel()
        known = chunk.ids.clamp(max=self.rank.numel() - 1)
        return torch.where(chunk.ids < NEW, self.rank[known], chunk.ids).double()


def shuffled(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(1))


def full_table(score: Recorded, *others: Eviction, engine: str = "cpu") -> Table:
    n = score.rank.numel()
    config = TableConfig(
        "t", dim=2, optimizer=SGD(1.0), initializer=Zeros(), eviction=[Capacity(n, score=score), *others]
    )
    table = Table(config, engine=engine)
    write(table, torch.arange(n))
    return table


def write(table: Table, ids: Tensor, time: float = 1) -> list[int]:
    """Train ids, and return the ids that made room for them."""
    table.apply_gradients(ids, torch.ones(ids.numel(), 2), step=0, time=time)
    assert len(table) <= (table.engine_impl.row_limit or 0)
    return table.drain_evicted().tolist()


def ranked(score: Recorded, table: Table) -> list[int]:
    """The ids in the order in which a sort of the whole table would remove them."""
    alive = torch.arange(score.rank.numel())
    alive = alive[table.find(alive) >= 0]
    return alive[torch.argsort(score.rank[alive])].tolist()


def test_no_write_visits_more_than_a_part_of_the_table() -> None:
    n = 180_000
    score = Recorded(shuffled(n))
    table = full_table(score)
    assert score.rows == 0
    visited = []
    for number in range(n // 400):  # more than one pass
        score.rows = 0
        write(table, torch.arange(64) + NEW + 64 * number)
        visited.append(score.rows)

    block = n // PARTS // 32
    assert sum(visited) > 1.2 * n
    assert max(visited) <= n // PARTS + block
    assert max(visited) <= 0.05 * n
    score.rows = 0
    write(table, torch.arange(2000) + 2 * NEW)  # a large call visits more, but only in proportion
    assert score.rows <= VISITED * 2000 + block


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_a_call_that_contains_the_rows_with_the_lowest_scores_removes_others(engine: str) -> None:
    score = Recorded(torch.arange(10))
    table = full_table(score, engine=engine)
    assert write(table, torch.tensor([0, 1, 2, 3, 4, NEW])) == [5]
    assert write(table, torch.tensor([0, 1, 2, 3, 4, 6, 7, NEW + 1, NEW + 2])) == [8, 9]
    assert sorted(write(table, torch.arange(8) + 2 * NEW)) == [0, 1, 2, 3, 4, 6, 7, NEW]


def test_parts_are_not_smaller_than_useful() -> None:
    score = Recorded(shuffled(20_000))
    table = full_table(score)

    write(table, torch.arange(1) + NEW)

    assert MIN_PART <= score.rows <= MIN_PART + MIN_PART // 32


def test_after_one_pass_the_lowest_rows_of_a_static_table_go() -> None:
    n, few = 20_000, 20_000 // (PARTS * VISITED)
    score = Recorded(shuffled(n))
    table, calls = full_table(score), 0
    while score.rows < n - 3 * few:  # rows that went are not visited
        write(table, torch.arange(few) + NEW + few * calls)
        calls += 1
    assert calls <= 6

    for _ in range(60):  # three passes
        order = ranked(score, table)
        gone = write(table, torch.arange(few) + NEW + few * calls)
        assert set(gone) == set(order[: len(gone)])
        assert len(gone) < 2 * few
        calls += 1


@pytest.mark.parametrize("first_is_lowest", [True, False])
def test_low_rows_are_found_wherever_they_are(first_is_lowest: bool) -> None:
    n = 20_000
    ascending = torch.arange(n)
    score = Recorded(ascending if first_is_lowest else ascending.flip(0))
    table = full_table(score)

    gone = write(table, ints_above(50))  # no pass is complete yet

    assert len(gone) >= 50
    assert int(score.rank[torch.tensor(gone)].max()) < n // 8


def ints_above(n: int) -> Tensor:
    return torch.arange(n) + NEW


def test_a_candidate_that_is_trained_again_stays(engine: str) -> None:
    score = Recorded(torch.arange(60))
    table = full_table(score, engine=engine)
    assert write(table, ints_above(1)) == [0]  # now 1 to 9 are candidates
    visited = score.rows

    write(table, torch.arange(1, 6))

    assert write(table, ints_above(2)) == [6]
    assert score.rows == visited


def test_engines_remove_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_capacity, "MIN_PART", 40)
    n, logs = 300, []
    for engine in ("reference", "cpu"):
        score = Recorded(shuffled(n) // 3)  # with ties
        table = full_table(score, TTL(50), engine=engine)
        log = []
        for number in range(30):
            log.append(write(table, torch.cat([torch.arange(3), torch.arange(4) + NEW + 4 * number])))
        write(table, torch.arange(100), time=90)
        log.append(table.evict(100).tolist())
        log.append(write(table, torch.arange(n - 40) + 2 * NEW, time=100))
        log.append(write(table, torch.arange(80) + 3 * NEW, time=100))
        logs.append(log)

    assert len(logs[0][0]) == 4
    assert len(logs[0][-1]) >= 40
    assert logs[1] == logs[0]


def test_a_wrong_score_raises_and_the_search_continues_afterwards(engine: str) -> None:
    result: list[object] = [torch.ones(3), torch.full((20,), float("nan")), "high"]

    def score(chunk: Chunk) -> Tensor:
        return result.pop() if result else chunk.ids.double()  # type: ignore[return-value]

    config = TableConfig("t", dim=2, optimizer=SGD(1.0), eviction=Capacity(20, score=score))
    table = Table(config, engine=engine)
    write(table, torch.arange(20))
    for message in (r"must return a tensor \[20\], got 'high'", "returned NaN", r"got torch.Size\(\[3\]\)"):
        with pytest.raises(InputError, match=message):
            write(table, ints_above(1))
        assert len(table) == 20

    assert write(table, ints_above(1)) == [0]


def test_candidates_count_as_memory() -> None:
    limit = 2_000_000
    config = TableConfig(
        "t",
        dim=2,
        optimizer=SGD(1.0),
        eviction=Capacity(max_bytes=limit, score=lambda chunk: chunk.time.double()),
    )
    table = Table(config)
    rows = table.engine_impl.row_limit
    assert rows is not None

    for step in range(20):
        write(table, torch.arange(4_000) + 2_000 * step, time=step)
        assert table.memory().total <= limit
    assert len(table) > 0.9 * rows
    assert table.engine_impl.score_search is not None
    assert table.memory().counters > table.engine_impl.score_search.bytes > rows
