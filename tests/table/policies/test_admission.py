"""MinCount and Probability: which ids get a row, and what happens to the others."""

from __future__ import annotations

import pytest
import torch

from megalith import SGD, MinCount, Probability, Segment, Table, TableConfig
from megalith.errors import InputError
from megalith.table import Admission
from tests.table.support import ints


def table_with(engine: str, admission: Admission, lr: float = 0.1) -> Table:
    config = TableConfig("t", segments=[Segment(1, optimizer=SGD(lr))], admission=admission, missing="zeros")
    return Table(config, engine=engine)


def test_counts_are_reported_until_the_id_has_a_row(engine: str) -> None:
    table = table_with(engine, MinCount(3))
    table.track("c")

    table.apply_gradients(ints(5, 7, 5), torch.ones(3, 1), step=0)
    assert [x.tolist() for x in table.pending()] == [[5, 7], [2, 1]]
    assert table.drain_refused().tolist() == [5, 7]
    assert [x.numel() for x in table.drain_touched("c")] == [0, 0]
    assert table.lookup(ints(5, 7)).tolist() == [[0.0], [0.0]]

    table.apply_gradients(ints(7, 5), torch.ones(2, 1), step=1)
    assert [x.tolist() for x in table.pending()] == [[7], [2]]
    assert ints(5).item() in table
    counters = table.stats().counters
    assert (counters.created, counters.refused, counters.pending) == (1, 3, 1)
    (chunk,) = table.scan()
    assert chunk.count is not None
    assert chunk.step is not None
    assert (chunk.count.tolist(), chunk.step.tolist()) == ([1], [1])


def test_a_limited_number_of_ids_is_counted(engine: str) -> None:
    table = table_with(engine, MinCount(2, max_ids=2))

    table.apply_gradients(ints(1, 2, 3), torch.ones(3, 1), step=0)

    assert table.pending()[0].tolist() == [2, 3]
    assert table.stats().counters.pending_dropped == 1
    table.apply_gradients(ints(1), torch.ones(1, 1), step=1)
    assert len(table) == 0

    table = table_with(engine, MinCount(2, max_ids=2))
    table.apply_gradients(ints(1, 2), torch.ones(2, 1), step=0)

    table.apply_gradients(ints(3, 2), torch.ones(2, 1), step=1)  # 2 is no longer counted, so 1 and 3 fit

    assert table.pending()[0].tolist() == [1, 3]
    assert table.stats().counters.pending_dropped == 0


def test_counts_end_with_an_assigned_row_and_move_to_another_table(engine: str) -> None:
    table = table_with(engine, MinCount(9))
    table.apply_gradients(ints(4), torch.ones(1, 1), step=0)

    table.assign(ints(4), torch.ones(1, 1))

    assert len(table) == 1
    assert table.pending()[0].numel() == 0

    table, other = table_with(engine, MinCount(3)), table_with(engine, MinCount(3))
    table.apply_gradients(ints(1, 1, 2), torch.ones(3, 1), step=0)

    other.restore_pending(*table.pending())
    other.apply_gradients(ints(1, 2), torch.ones(2, 1), step=1)

    assert 1 in other
    assert 2 not in other


def test_draws_depend_on_id_and_step_only(engine: str) -> None:
    ids = torch.arange(2000)
    admitted = []
    for order in (ids, ids.flip(0)):
        table = table_with(engine, Probability(0.25))
        for part in order.split(500):
            table.apply_gradients(part, torch.ones(500, 1), step=3)
        admitted.append(sorted(i for i in ids.tolist() if i in table))

    assert admitted[0] == admitted[1]
    assert 430 < len(admitted[0]) < 570
    assert table.stats().counters.refused == 2000 - len(table)


def test_many_occurrences_of_an_id_draw_alike_on_both_engines() -> None:
    ids, occurrences = torch.arange(40), torch.arange(40) * 5000 + 1
    tables = [table_with(engine, Probability(1e-5)) for engine in ("reference", "cpu")]
    for table in tables:
        numbers = table.checks.step(0, 0, 1.0, None)
        table.engine_impl.update(ids, None, [torch.ones(40, 1)], None, numbers, occurrences)

    admitted = [[i for i in range(40) if i in table] for table in tables]
    assert admitted[0] == admitted[1]
    assert 8 < len(admitted[0]) < 35


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: MinCount(0),
        lambda: MinCount(1.5),  # type: ignore[arg-type]
        lambda: MinCount(2, max_ids=0),
        lambda: Probability(0),
        lambda: Probability(1.5),
        lambda: Probability(float("nan")),
        lambda: TableConfig("t", dim=1, optimizer=SGD(), admission="often"),  # type: ignore[arg-type]
    ],
)
def test_wrong_settings_raise(wrong: object) -> None:
    with pytest.raises(InputError):
        wrong()  # type: ignore[operator]
