"""Touched rows: each consumer receives each change exactly once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megalith import Normal, Table
from megalith.ops import Pooling
from tests.table.support import EXTREME_IDS, HIGHEST, LOWEST, as_sets, ints, sgd_table, whole

Ids = set[int]


def tracked(engine: str, *consumers: str) -> Table:
    """A table that holds ids 1, 2 and 3, none of them touched."""
    table = sgd_table(engine, 1, initializer=Normal())
    table.assign(ints(1, 2, 3), torch.ones(3, 1))
    for consumer in consumers:
        table.track(consumer)
    return table


def drained(table: Table, consumer: str = "a") -> tuple[Ids, Ids]:
    return as_sets(table.drain_touched(consumer))


WRITES: dict[str, Callable[[Table, torch.Tensor], object]] = {
    "update": lambda t, ids: t.update(t.find(ids), ids, torch.ones(ids.numel(), 1), step=0, epoch=t.epoch),
    "pooled update": lambda t, ids: t.update(
        None, ids, [torch.ones(1, 1)], Pooling.sum("t", ints(0, ids.numel()), 1), step=0
    ),
    "apply_gradients": lambda t, ids: t.apply_gradients(ids, torch.ones(ids.numel(), 1), step=0),
    "zero gradients": lambda t, ids: t.apply_gradients(ids, torch.zeros(ids.numel(), 1), step=0),
    "assign": lambda t, ids: t.assign(ids, torch.ones(ids.numel(), 1)),
    "assign_add": lambda t, ids: t.assign_add(ids, torch.ones(ids.numel(), 1)),
    "reinitialize": lambda t, ids: t.reinitialize(ids),
    "restore": lambda t, ids: t.restore(whole(holding(t.engine, ids))),
}


def holding(engine: str, ids: torch.Tensor) -> Table:
    table = sgd_table(engine, 1)
    table.assign(ids, torch.ones(ids.numel(), 1))
    return table


@pytest.mark.parametrize("write", WRITES)
def test_every_write_marks_old_and_new_rows(engine: str, write: str) -> None:
    table = tracked(engine, "a")

    WRITES[write](table, ints(2, LOWEST, 2, HIGHEST))

    assert drained(table) == ({2, LOWEST, HIGHEST}, set())
    assert drained(table) == (set(), set())


def test_reading_marks_nothing(engine: str) -> None:
    table = tracked(engine, "a")
    ids = ints(1, 2, 77)

    table.lookup(ids)
    table.read(table.find(ids), ids, Pooling.sum("t", ints(0, 3), 1))
    list(table.scan())
    table.reserve(1000)

    assert drained(table) == (set(), set())


def test_changes_before_tracking_are_not_reported_and_tracking_again_keeps_what_is_waiting(
    engine: str,
) -> None:
    table = tracked(engine)
    table.remove(ints(3))

    table.track("a")

    assert drained(table) == (set(), set())

    table = tracked(engine, "a")
    table.assign(ints(1), torch.ones(1, 1))

    table.track("a")

    assert table.stats().consumers == ("a",)
    assert drained(table) == ({1}, set())


def test_consumers_are_independent(engine: str) -> None:
    table = tracked(engine, "a")
    table.assign(ints(1), torch.ones(1, 1))
    table.track("b")
    table.assign(ints(2), torch.ones(1, 1))

    assert drained(table, "a") == ({1, 2}, set())
    table.assign(ints(3), torch.ones(1, 1))
    table.remove(ints(2))

    assert drained(table, "b") == ({3}, {2})
    assert drained(table, "a") == ({3}, {2})
    assert drained(table, "b") == (set(), set())


def test_untracking_forgets_and_a_successor_starts_clean(engine: str) -> None:
    table = tracked(engine, "a", "b")
    table.assign(ints(1), torch.ones(1, 1))
    table.remove(ints(2))

    table.untrack("a")
    table.track("c")  # may take the place of "a"

    assert set(table.stats().consumers) == {"b", "c"}
    assert drained(table, "c") == (set(), set())
    assert drained(table, "b") == ({1}, {2})


def test_an_id_that_comes_and_goes_is_reported_once(engine: str) -> None:
    table = tracked(engine, "a")
    table.assign(ints(1, 2, 50), torch.ones(3, 1))

    table.remove(ints(1, 1, 77, 50))

    assert drained(table) == ({2}, {1, 50})

    table = tracked(engine, "a", "b")

    table.remove(ints(1))
    assert drained(table, "b") == (set(), {1})
    table.assign(ints(1), torch.ones(1, 1))

    assert drained(table, "a") == ({1}, set())
    assert drained(table, "b") == ({1}, set())

    table = tracked(engine, "a")
    table.assign(ints(1), torch.ones(1, 1))
    table.remove(ints(1))
    drained(table)

    table.assign(ints(60), torch.ones(1, 1))  # takes the row that 1 let go

    assert drained(table) == ({60}, set())


def test_clear_reports_every_row_as_removed_and_tracking_continues(engine: str) -> None:
    table = tracked(engine, "a", "b")
    table.assign(ints(*EXTREME_IDS), torch.ones(len(EXTREME_IDS), 1))
    drained(table, "b")

    table.clear()

    everything = {1, 2, 3, *EXTREME_IDS}
    assert drained(table, "b") == (set(), everything)
    table.assign(ints(1, 8), torch.ones(2, 1))
    assert drained(table, "a") == ({1, 8}, everything - {1})


def test_every_row_of_many_is_reported(engine: str) -> None:
    table = sgd_table(engine)
    table.track("slow")
    ids = torch.arange(100)
    for _ in range(60):  # 6000 removed ids, of which 100 differ
        table.assign(ids, torch.zeros(100, 2))
        table.remove(ids)
    assert table.memory().side < 20000
    assert drained(table, "slow") == (set(), set(ids.tolist()))


# ---- giving back


def test_a_failed_send_is_given_back_and_follows_later_changes(engine: str) -> None:
    table = tracked(engine, "a", "b")
    table.assign(ints(1, 2), torch.ones(2, 1))
    table.remove(ints(3))
    updated, removed = table.drain_touched("a")

    table.mark_touched("a", updated)
    table.mark_touched("a", removed)
    table.assign(ints(9), torch.ones(1, 1))

    assert drained(table, "a") == ({1, 2, 9}, {3})
    assert drained(table, "b") == ({1, 2, 9}, {3})
    table.mark_touched("b", ints(1))
    assert drained(table, "a") == (set(), set())

    table = tracked(engine, "a")
    table.assign(ints(1), torch.ones(1, 1))
    table.remove(ints(2))
    drained(table)

    table.mark_touched("a", ints(1, 2, 1))
    table.remove(ints(1))
    table.assign(ints(2), torch.ones(1, 1))

    assert drained(table) == ({2}, {1})


# ---- what it costs


def test_a_consumer_takes_a_bit_per_row() -> None:
    rows = 4096
    plain, watched = (sgd_table("cpu", 1) for _ in range(2))
    watched.track("a")
    for table in (plain, watched):
        table.assign(torch.arange(rows), torch.ones(rows, 1))

    assert watched.memory().side - plain.memory().side == (rows + rows // 64) // 8
    plain.track("late")
    assert plain.memory().side == watched.memory().side
