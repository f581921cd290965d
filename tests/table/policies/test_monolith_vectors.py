"""Monolith's vectors of feature admission and expiry, with the derivation where our rules differ.

Admission. Monolith credits its filter one occurrence at a time and admits an occurrence if the count before
it is at least the threshold t: the occurrences from number t + 1 on are applied. `MinCount(n)` adds the
occurrences of a call first, and applies all of them once the total reaches n. With n = t + 1 both create
the row in the same call; only in that call the applied gradient can differ, if the id occurs more than once
in it.

Expiry. The rule is the same: now - last update >= age. Monolith's `now` is the latest time of the table
when it saves; ours is the argument of `evict`. An age of 0 days, which removes every row in Monolith, is
refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalith import (
    SGD,
    TTL,
    EmbeddingCollection,
    Feature,
    MinCount,
    Probability,
    Table,
    TableConfig,
    Zeros,
    checkpoint,
    fid,
)
from megalith.errors import InputError
from megalith.table import Admission, Eviction
from tests.table.support import ints

DAY = 86_400
LATEST = 10_000_000


def table_with(engine: str, admission: Admission | None = None, eviction: tuple[Eviction, ...] = ()) -> Table:
    config = TableConfig(
        "t",
        dim=1,
        optimizer=SGD(1.0),
        initializer=Zeros(),
        missing="zeros",
        admission=admission,
        eviction=eviction,
    )
    return Table(config, engine=engine)


def applied(table: Table, ids: list[int], steps: int) -> list[dict[int, float]]:
    """Train with gradient 1 for each occurrence; return how many were applied to each id in each step."""
    seen, before = [], dict.fromkeys(ids, 0.0)
    for step in range(steps):
        table.apply_gradients(torch.tensor(ids), torch.ones(len(ids), 1), step=step, time=step)
        after = {id: -table.lookup(ints(id)).item() for id in ids}
        seen.append({id: after[id] - before[id] for id in after})
        before = after
    return seen


# ---- 3.7 admission


def test_gradients_of_three_occurrences_at_threshold_3(engine: str) -> None:
    # Monolith, ids 1, 3 << 17, 1: occurrences applied per step 000, 001, 101, 111. Id 1 occurs twice per
    # step, so its totals are 2, 4, 6, 8. In step 2 Monolith applies only occurrence 4, we apply both: 000,
    # 101, 101, 111.
    a, b = 1, 3 << 17

    seen = applied(table_with(engine, MinCount(4)), [a, b, a], 4)

    assert [step[a] for step in seen] == [0, 2, 2, 2]
    assert [step[b] for step in seen] == [0, 0, 0, 1]


def test_the_same_occurrences_one_call_each_are_monolith_s(engine: str) -> None:
    # With one occurrence per call there is nothing to sum: exactly 000, 001, 101, 111.
    a, b = 1, 3 << 17
    table = table_with(engine, MinCount(4))

    steps = []
    for _ in range(4):
        flags = ""
        for id in (a, b, a):
            weight = table.lookup(ints(id)).item()
            table.apply_gradients(ints(id), torch.ones(1, 1), step=0)
            flags += "1" if table.lookup(ints(id)).item() < weight else "0"
        steps.append(flags)

    assert steps == ["000", "001", "101", "111"]


def test_embeddings_at_threshold_3_one_call_per_occurrence(engine: str) -> None:
    # Monolith, lr 0.1, ids 0, 0, 1, gradient -1: (0, 0) (0.1, 0) (0.3, 0) (0.5, 0.1).
    table = table_with(engine, MinCount(4))

    seen = []
    for _ in range(4):
        for id in (0, 0, 1):
            table.apply_gradients(ints(id), torch.tensor([[-0.1]]), step=0)
        seen.append(table.lookup(ints(0, 1)).flatten().tolist())

    assert seen == [pytest.approx(x) for x in ((0, 0), (0.1, 0), (0.3, 0), (0.5, 0.1))]


def test_a_filter_of_many_splits_at_threshold_2(engine: str) -> None:
    # Monolith, 100 splits, ids 1, 1 << 17, 2 << 17, 1: step 1 none, step 2 the first and the last, then
    # all. The same here: totals of id 1 are 2, 4 and of the others 1, 2, 3; n = 3. The sizes of its splits
    # have no counterpart; we count the ids that have no row, two after two steps.
    a, b, c = 1, 1 << 17, 2 << 17
    table = table_with(engine, MinCount(3))

    seen = applied(table, [a, b, c, a], 2)
    assert [x.tolist() for x in table.pending()] == [[b, c], [2, 2]]
    seen += applied(table, [a, b, c, a], 1)

    assert [[step[id] > 0 for id in (a, b, c)] for step in seen] == [
        [False, False, False],
        [True, False, False],
        [True, True, True],
    ]


def test_thresholds_above_15_admit(engine: str) -> None:
    # Monolith's counter has 4 bits, so thresholds above 15 never admit an id.
    table = table_with(engine, MinCount(21))

    seen = applied(table, [5], 22)

    assert [step[5] for step in seen] == [0] * 20 + [1, 1]


def test_threshold_0_is_no_policy(engine: str) -> None:
    table = table_with(engine, MinCount(1))

    assert applied(table, [5, 6, 5], 1) == [{5: 2.0, 6: 1.0}]
    assert table.stats().counters.pending == 0


def test_ids_with_equal_signatures_are_counted_apart(engine: str) -> None:
    # Monolith's filter compares 12 bits, (id >> 17 | id << 15) & 0xFFF, which are equal for these ids.
    a, b = 1 << 40, 2 << 40
    assert (a >> 17 | a << 15) & 0xFFF == (b >> 17 | b << 15) & 0xFFF
    table = table_with(engine, MinCount(2))

    table.apply_gradients(ints(a, b), torch.ones(2, 1), step=0)

    assert len(table) == 0


def test_the_equal_form_of_the_probabilistic_filter(engine: str) -> None:
    # Monolith: 1 - (1 - p)^count with p = 1 - 0.05^(1 / t), so that t occurrences admit an id with 95 %.
    # The draws are ours: the numbers are those of seed 0, within four standard deviations of the rule (n =
    # 2000).
    threshold, n = 10, 2000
    policy = Probability(1 - 0.05 ** (1 / threshold))

    for occurrences in (1, threshold):
        table = table_with(engine, policy)
        ids = torch.arange(n).repeat(occurrences)
        table.apply_gradients(ids, torch.ones(ids.numel(), 1), step=0)

        rate = 1 - 0.05 ** (occurrences / threshold)
        assert abs(len(table) / n - rate) < 4 * (rate * (1 - rate) / n) ** 0.5


# ---- 3.8 expiry


@pytest.mark.parametrize("by_gradients", [False, True])
def test_rows_of_a_day_are_skipped_on_save(engine: str, by_gradients: bool, tmp_path: Path) -> None:
    # Monolith, expire 1 day, latest time 10,000,000: updated at latest - 86401 dropped, latest - 86399
    # kept, so the lookups after a restore are 0, 2, 3, or 0, -2, -3 with gradients.
    config = TableConfig(
        "t", dim=1, optimizer=SGD(1.0), initializer=Zeros(), missing="zeros", eviction=TTL(DAY)
    )
    model, loaded = (EmbeddingCollection([config], [Feature("t", "t")], engine=engine) for _ in range(2))
    for id, time in ((1, LATEST - DAY - 1), (2, LATEST - DAY + 1), (3, LATEST)):
        value = torch.full((1, 1), float(id))
        if by_gradients:
            model.tables["t"].apply_gradients(ints(id), value, step=0, time=time)
        else:
            model.tables["t"].assign(ints(id), value, time=time)

    model.shards.evict(LATEST)
    checkpoint.save(model, tmp_path)
    checkpoint.load(loaded, tmp_path)

    found = loaded.tables["t"].lookup(ints(1, 2, 3)).flatten().tolist()
    assert found == ([0, -2, -3] if by_gradients else [0, 2, 3])


def test_an_age_of_0_is_refused_and_the_smallest_age_keeps_the_current_second(engine: str) -> None:
    # Monolith: expire 0 removes every row; slot 1 expire 0 and slot 2 expire 1 day give lookups 0, 2. Here
    # the ages of rows are whole seconds, so any age up to one second removes all rows but those of the
    # current second.
    for wrong in (lambda: TTL(0), lambda: TTL(DAY, per_slot={1: 0})):
        with pytest.raises(InputError, match="must be a number above 0"):
            wrong()
    table = table_with(engine, eviction=(TTL(DAY, per_slot={1: 1}),))
    first, second = fid(1, 7), fid(2, 7)
    table.assign(ints(first, second), torch.tensor([[1.0], [2.0]]), time=LATEST - 1)
    table.assign(ints(fid(1, 8)), torch.tensor([[3.0]]), time=LATEST)

    assert table.evict(LATEST).tolist() == [first]
    assert table.lookup(ints(first, second, fid(1, 8))).flatten().tolist() == [0.0, 2.0, 3.0]


def test_without_times_nothing_expires(engine: str) -> None:
    # Monolith: req_time 0 everywhere. The latest time of the table is then 0 too; the clock is not used.
    table = table_with(engine, eviction=(TTL(1),))
    table.assign(ints(1, 2), torch.ones(2, 1), time=0)

    assert table.evict(0).numel() == 0
    assert len(table) == 2
