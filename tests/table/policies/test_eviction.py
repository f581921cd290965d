"""TTL, MinNorm and Capacity: which rows go, and that none goes unnoticed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalith import SGD, TTL, Capacity, MinCount, MinNorm, Table, TableConfig, Zeros, fid
from megalith.errors import InputError, TableFullError
from megalith.table import Chunk, Eviction
from tests.table.support import ints

DAY = 86_400


def table_with(engine: str, *eviction: Eviction, small_chunks: bool = False, **options: int) -> Table:
    """A table; with small chunks, the cuda engine allocates less than 16 MiB at a time."""
    budget = 8192 if small_chunks and engine == "cuda" else None
    config = TableConfig(
        "t", dim=2, optimizer=SGD(1.0), initializer=Zeros(), eviction=eviction, device_bytes=budget
    )
    return Table(config, engine=engine, **options)


def train(table: Table, ids: Tensor, *, step: int = 0, time: float = 0) -> None:
    table.apply_gradients(ids, torch.full((ids.numel(), 2), -1.0), step=step, time=time)


def test_ttl_removes_rows_by_age(engine: str) -> None:
    # Monolith: expire 1 day, latest time 10,000,000: an age of 86,401 s is dropped, 86,399 s is kept.
    table, now = table_with(engine, TTL(DAY)), 10_000_000
    train(table, ints(1), time=now - 86_401)
    train(table, ints(2), time=now - 86_399)
    train(table, ints(3), time=now - 86_400)

    assert sorted(table.evict(now).tolist()) == [1, 3]
    assert 2 in table
    assert len(table) == 1
    assert table.evict(now).numel() == 0


def test_ttl_by_slot(engine: str) -> None:
    # Monolith: slots 1: 5 days, 2: 6 days, default 14 days; after 5 days and 60 seconds only slot 1 is gone.
    table = table_with(engine, TTL(14 * DAY, per_slot={1: 5 * DAY, 2: 6 * DAY}))
    ids = torch.tensor([fid(slot, 7) for slot in (1, 2, 3)])
    train(table, ids, time=1000)

    assert table.evict(1000 + 5 * DAY + 60).tolist() == [fid(1, 7)]
    assert sorted(table.evict(1000 + 14 * DAY).tolist()) == sorted([fid(2, 7), fid(3, 7)])


def test_min_norm_removes_small_rows_and_policies_combine(engine: str) -> None:
    table = table_with(engine, MinNorm(0.5), TTL(100))
    table.assign(ints(1, 2, 3), torch.tensor([[0.3, 0.3], [0.4, 0.4], [3.0, 4.0]]), time=50)
    table.assign(ints(4), torch.tensor([[9.0, 9.0]]), time=1)

    assert sorted(table.evict(120).tolist()) == [1, 4]


def test_evicted_ids_are_counted_logged_and_marked_removed(engine: str) -> None:
    table = table_with(engine, TTL(10))
    table.track("sync")
    train(table, ints(1, 2, 3), time=5)
    train(table, ints(3), time=20)

    evicted = table.evict(20)

    assert sorted(evicted.tolist()) == [1, 2]
    assert sorted(table.drain_evicted().tolist()) == [1, 2]
    updated, removed = table.drain_touched("sync")
    assert (updated.tolist(), sorted(removed.tolist())) == ([3], [1, 2])
    counters = table.stats().counters
    assert (counters.created, counters.evicted, counters.removed) == (3, 2, 0)


@pytest.mark.parametrize(("score", "stays"), [("lru", [1, 4, 5]), ("lfu", [2, 4, 5]), ("step", [1, 4, 5])])
def test_capacity_removes_the_lowest_score_and_keeps_the_call(
    engine: str, score: str, stays: list[int]
) -> None:
    table = table_with(engine, Capacity(3, score=score))
    train(table, ints(2), step=0, time=1)
    train(table, ints(2, 3), step=1, time=2)
    train(table, ints(1), step=2, time=3)

    train(table, ints(4, 5), step=3, time=4)

    assert [i for i in range(9) if i in table] == stays
    assert len(table) == 3
    assert sorted(table.drain_evicted().tolist()) == sorted({1, 2, 3} - set(stays))


def test_a_score_function_decides(engine: str) -> None:
    def even_first(chunk: Chunk) -> Tensor:
        assert chunk.count is not None
        return (chunk.ids % 2).double() * 100 + chunk.count

    table = table_with(engine, Capacity(4, score=even_first))
    train(table, ints(1, 2, 3, 4))
    train(table, ints(2))

    train(table, ints(7))

    assert [i for i in range(9) if i in table] == [1, 2, 3, 7]


def test_refused_ids_need_no_room(engine: str) -> None:
    def by_id(chunk: Chunk) -> Tensor:
        return chunk.ids.double()

    config = TableConfig(
        "t", dim=2, optimizer=SGD(1.0), admission=MinCount(2), eviction=Capacity(10, score=by_id)
    )
    table = Table(config, engine=engine)
    train(table, torch.arange(10).repeat(2))

    train(table, torch.cat([ints(50), torch.arange(50, 90)]))  # only 50 gets a row; the call has 40 ids

    assert table.drain_evicted().tolist() == [0]
    assert 50 in table
    with pytest.raises(TableFullError, match="needs 11 "):
        train(table, torch.arange(200, 211).repeat(2))


@pytest.mark.parametrize("score", ["lfu", "step"])
def test_an_assigned_row_counts_as_written_once_and_now(engine: str, score: str) -> None:
    table = table_with(engine, Capacity(3, score=score))
    train(table, ints(1), step=4, time=1)
    train(table, ints(2), step=5, time=2)
    table.assign(ints(3), torch.zeros(1, 2), time=3)
    table.reinitialize(ints(3), time=3)
    (chunk,) = table.scan()
    assert chunk.count is not None
    assert chunk.step is not None
    assert (chunk.count.tolist(), chunk.step.tolist()) == ([1, 1, 1], [4, 5, 5])

    train(table, ints(4), step=6, time=4)

    assert table.drain_evicted().tolist() == [1]  # not the row that was just assigned


def test_rows_restored_without_counts_count_as_written_once(engine: str) -> None:
    (chunk,) = _filled(engine, 2).scan()
    table = table_with(engine, Capacity(9, score="lfu"))

    table.restore(chunk)

    (restored,) = table.scan()
    assert restored.count is not None
    assert restored.step is not None
    assert (restored.count.tolist(), restored.step.tolist()) == ([1, 1], [0, 0])


def test_without_a_score_or_room_for_the_call_a_full_table_raises_before_it_writes(engine: str) -> None:
    table, scored = table_with(engine, Capacity(2, score=None)), table_with(engine, Capacity(2))
    for each in (table, scored):
        train(each, ints(1, 2))

    with pytest.raises(TableFullError, match=r"table 't' .*Capacity is 2 rows"):
        train(table, ints(2, 3), time=9)
    with pytest.raises(TableFullError):
        train(scored, ints(3, 4, 5), time=9)

    for each in (table, scored):
        (chunk,) = each.scan()
        assert sorted(chunk.ids.tolist()) == [1, 2]
        assert chunk.time.tolist() == [0, 0]


def _filled(engine: str, n: int) -> Table:
    table = table_with(engine)
    train(table, torch.arange(n), time=5)
    return table


def test_shards_divide_the_capacity(engine: str) -> None:
    assert table_with(engine, Capacity(7), num_shards=4).engine_impl.row_limit == 2


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("admission", [None, MinCount(2), MinCount(2, max_ids=1)], ids=str)
def test_max_bytes_without_room_for_a_row_are_refused(
    engine: str, shards: int, admission: MinCount | None
) -> None:
    def make(max_bytes: int) -> Table:
        capacity = Capacity(max_bytes=max_bytes)
        config = TableConfig("t", dim=2, optimizer=SGD(1.0), admission=admission, eviction=capacity)
        return Table(config, engine=engine, num_shards=shards)

    with pytest.raises(InputError, match=r"has no room for a row.*; [0-9]+ are enough$") as caught:
        make(8000)

    assert make(int(str(caught.value).split()[-3])).engine_impl.row_limit is not None


@pytest.mark.parametrize("admission", [None, MinCount(2), MinCount(2, max_ids=100)])
def test_max_bytes_bounds_all_memory(admission: MinCount | None) -> None:
    limit = 400_000
    config = TableConfig(
        "t", dim=2, optimizer=SGD(1.0), admission=admission, eviction=Capacity(max_bytes=limit, score="lfu")
    )
    table = Table(config, engine="cpu")
    table.track("consumer")

    for step in range(60):
        train(table, (torch.arange(400) + 150 * step).repeat(2), step=step, time=step)
        train(table, torch.arange(1000) + 100_000 + 1000 * step, step=step, time=step)  # most are refused
        table.drain_touched("consumer")
        assert table.memory().total <= limit
    assert len(table) == table.engine_impl.row_limit
    assert table.memory().total > 0.55 * limit
    assert table.drain_evicted().numel() == limit // 1024
    assert Table(config, num_shards=3).engine_impl.limits.log_ids == limit // 3 // 1024


def test_memory_is_returned_after_an_eviction(engine: str) -> None:
    table = table_with(engine, TTL(10), small_chunks=True)
    n = 12_000 if engine == "cpu" else 5_000
    train(table, torch.arange(n), time=0)
    train(table, torch.arange(n - 100, n), time=50)
    before = table.memory()

    table.evict(55)

    after = table.memory()
    assert len(table) == 100
    assert after.slack + after.rows < before.rows / 4
    assert torch.equal(table.lookup(torch.arange(n - 100, n)), torch.full((100, 2), 2.0))


def test_rows_removed_during_a_compaction_do_not_hide_new_rows(engine: str) -> None:
    table = table_with(engine)
    table.assign(torch.arange(10_000), torch.zeros(10_000, 2), time=0)
    table.remove(torch.cat([torch.arange(100), torch.arange(4000, 9000), torch.arange(9500, 9990)]))
    table.engine_impl.compact(5)  # moves the last 5 rows to the front
    table.remove(torch.arange(9990, 9995))
    table.engine_impl.compact(300)  # drops the places of the rows that were removed

    table.assign(ints(-1, -2, -3, -4, -5), torch.ones(5, 2), time=0)

    assert sum(chunk.ids.numel() for chunk in table.scan()) == len(table) == 4410
    table.evict(0)
    assert table.lookup(ints(-1, -5)).tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_places_are_reused_after_new_rows_end_a_compaction(engine: str) -> None:
    table = table_with(engine, small_chunks=True)
    table.assign(torch.arange(10_000), torch.zeros(10_000, 2), time=0)
    table.remove(torch.cat([torch.arange(0, 10_000, 2), torch.arange(1, 400, 2)]))
    table.engine_impl.compact(5)
    table.assign(torch.arange(10_000, 13_000), torch.zeros(3_000, 2), time=0)
    table.evict(0)
    rows, slack = len(table), table.memory().slack

    table.assign(torch.arange(20_000, 22_000), torch.zeros(2_000, 2), time=0)

    assert (rows, len(table)) == (7_800, 9_800)
    # The cuda engine moves all rows in one call; it keeps 4 bytes for each place.
    assert table.memory().slack <= (5 * len(table) if engine == "cuda" else slack // 4)


def test_a_mass_expiry_does_not_stop_later_passes(engine: str) -> None:
    # Few rows are left in many places: parts of a pass must not be counted by rows alone.
    table = table_with(engine, TTL(10))
    n = 60_000 if engine == "cpu" else 5_000
    train(table, torch.arange(n), time=0)
    table.evict_part(0, rows=n // 25)
    train(table, torch.arange(50), time=100)
    for _ in range(90):  # the end of this pass, moving rows, another pass
        table.evict_part(100, rows=max(1, len(table) // 25))
    assert len(table) == 50

    for _ in range(90):
        table.evict_part(200, rows=max(1, len(table) // 25))
    assert len(table) == 0


def test_a_scan_sees_every_row_while_rows_are_evicted(engine: str) -> None:
    table = table_with(engine, TTL(10), small_chunks=True)
    n = 12_000 if engine == "cpu" else 5_000
    train(table, torch.arange(n), time=0)
    train(table, torch.arange(n - n // 4, n), time=50)
    scan = table.scan(chunk_size=n // 10)
    seen = next(scan).ids.tolist()

    table.evict(55)  # would move rows into free places
    seen += [i for chunk in scan for i in chunk.ids.tolist()]

    assert set(range(n - n // 4, n)) <= set(seen)
    before = table.memory().slack
    table.evict(55)
    assert table.memory().slack < before / 2


def test_a_policy_must_return_one_flag_per_row(engine: str) -> None:
    class Wrong(Eviction):
        name = "wrong"

        def expired(self, chunk: Chunk, now: int) -> Tensor:
            return torch.tensor([True])

    table = table_with(engine, Wrong())
    train(table, ints(1, 2))

    with pytest.raises(InputError, match=r"'wrong' must return bool \[2\]"):
        table.evict(5)
    assert len(table) == 2


@pytest.mark.parametrize("score", ["lru", None])
def test_restoring_more_rows_than_the_capacity(engine: str, score: str | None) -> None:
    (chunk,) = _filled(engine, 20).scan()
    table = table_with(engine, Capacity(8, score=score))

    if score is None:
        with pytest.raises(TableFullError):
            table.check_fits(20)
        with pytest.raises(TableFullError):
            table.restore(chunk)
        assert len(table) == 0
    else:
        table.restore(chunk)
        assert len(table) == 8
