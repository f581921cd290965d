"""Pooled reads and updates through a table: bags, weights, divisors, parts, and what they leave alone."""

from __future__ import annotations

import pytest
import torch

from megalith import Table
from megalith.errors import InputError
from megalith.ops import Bags, OutputSlice, Pooling
from tests.table.support import (
    ints,
    sgd_table,
    unchanged,
)


def test_outputs_keep_what_no_part_writes(engine: str) -> None:
    table = sgd_table(engine, 1)
    table.assign(ints(1), torch.tensor([[2.0]]))
    pooling = Pooling(((1, 3),), {"t": (Bags(ints(0, 1), (OutputSlice(0, 1, 0, 1),)),)})
    out = torch.full((1, 3), 7.0)

    result = table.read(table.find(ints(1)), ints(1), pooling, out=[out])

    assert result[0] is out
    assert out.tolist() == [[7.0, 2.0, 7.0]]


def test_occurrences_in_no_bag_and_tables_without_bags_are_not_touched(engine: str) -> None:
    table = sgd_table(engine, 1)
    ids = ints(1, 2, 3, 4)

    table.update(table.find(ids), ids, [torch.ones(1, 1)], Pooling.sum("t", ints(1, 3), 1), step=0)

    assert [id in table for id in (1, 2, 3, 4)] == [False, True, True, False]

    table = sgd_table(engine, 1)
    pooling = Pooling.sum("other", ints(0, 1), 1)

    with unchanged(table):
        table.update(table.find(ints(1)), ints(1), [torch.ones(1, 1)], pooling, step=0)
    (out,) = table.read(table.find(ints(1)), ints(1), pooling)
    assert out.tolist() == [[0.0]]


def test_the_parts_of_an_occurrence_are_summed_before_they_are_added(engine: str) -> None:
    # The order of each gradient sum is fixed: occurrences in input order. Id 1 has gradient 1
    # from its first occurrence and 1e8 - 1e8 = 0 from its second.
    table = sgd_table(engine, 1)
    bags = Bags(ints(0, 1, 2), (OutputSlice(0, 0, 0, 1), OutputSlice(1, 0, 0, 1)))
    pooling = Pooling(((2, 1), (2, 1)), {"t": (bags,)})
    grads = [torch.tensor([[1.0], [1e8]]), torch.tensor([[0.0], [-1e8]])]

    table.update(None, ints(1, 1), grads, pooling, step=0)

    assert table.lookup(ints(1)).item() == -1.0


# ---- shared features: one row of ids for the whole batch, repeated in every output row


ROWS = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])


def filled(engine: str) -> Table:
    table = sgd_table(engine, 2)
    table.assign(ints(1, 2, 3), ROWS)
    return table


@pytest.mark.parametrize(("bags", "rows"), [(2, 3), (3, 2), (0, 2)])
def test_shared_rows_that_do_not_divide_the_batch_raise(engine: str, bags: int, rows: int) -> None:
    table, ids = filled(engine), ints(1, 2, 3)
    shared = Bags(torch.arange(bags + 1), (OutputSlice(0, 0, 0, 2),), shared=True)
    pooling = Pooling(((rows, 2),), {"t": (shared,)})
    with unchanged(table):
        with pytest.raises(InputError, match="table 't'"):
            table.read(table.find(ids), ids, pooling)
        with pytest.raises(InputError, match="table 't'"):
            table.update(table.find(ids), ids, [torch.zeros(rows, 2)], pooling, step=0)


# ---- engines agree
