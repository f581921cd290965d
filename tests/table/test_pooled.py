"""Pooled reads and updates through a table: bags, weights, divisors, parts, and what they leave alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith import Adagrad, Normal, Segment, Table, TableConfig
from megalith.errors import InputError
from megalith.ops import Bags, OutputSlice, Pooling
from tests.fixed_examples import fixed_examples
from tests.table.support import (
    assert_close,
    dyadic,
    ints,
    sgd_table,
    unchanged,
    whole,
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

CONFIG = TableConfig(
    "t",
    segments=[Segment(3, optimizer=Adagrad(0.1)), Segment(8, optimizer=Adagrad(0.2), initializer=Normal())],
)


def features(batch: int, lengths: list[list[int]], periods: list[int]) -> tuple[Pooling, int]:
    """Every second feature shared; all added into output 0, and each alone into an output of its own."""
    bags, end = [], 0
    outputs = [(batch, 11)]
    for number, (own, period) in enumerate(zip(lengths, periods, strict=True)):
        shared = number % 2 == 0
        count = period if shared else batch
        cuts = [end]
        for bag in range(count):
            cuts.append(cuts[-1] + own[bag % len(own)])
        end = cuts[-1]
        parts = (OutputSlice(0, 0, 0, 11, accumulate=True), OutputSlice(len(outputs), 1, 2, 11))
        outputs.append((batch, 11))
        divisor = torch.full((count,), 2.0) if number % 3 == 0 else None
        bags.append(Bags(ints(*cuts), parts, divisor=divisor, shared=shared))
    return Pooling(tuple(outputs), {"t": tuple(bags)}), end


def train(engine: str, pooling: Pooling, ids: Tensor, seed: int) -> tuple[list[Tensor], Table]:
    table = Table(CONFIG, engine=engine, seed=1)
    outputs: list[Tensor] = []
    for step in range(3):
        outputs += table.read(table.find(ids), ids, pooling)
        grads = [dyadic(seed + step, *shape) for shape in pooling.outputs]
        table.update(table.find(ids), ids, grads, pooling, step=step, time=1.0)
    return outputs, table


@fixed_examples(12, 50)
@given(
    batch=st.sampled_from([2, 4, 8]),
    lengths=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_engines_agree(batch: int, lengths: list[list[int]], seed: int, data: st.DataObject) -> None:
    periods = [data.draw(st.sampled_from([1, 2, batch])) for _ in lengths]
    pooling, n = features(batch, lengths, periods)
    ids = torch.randint(-4, 5, (n,), generator=torch.Generator().manual_seed(seed))

    reference, expected = train("reference", pooling, ids, seed)
    outputs, table = train("cpu", pooling, ids, seed)

    for actual, wanted in zip(outputs, reference, strict=True):
        assert_close(actual, wanted, rtol=1e-5, atol=1e-6)
    assert whole(table).ids.tolist() == whole(expected).ids.tolist()
    assert_close(whole(table).rows, whole(expected).rows, rtol=1e-5, atol=1e-6)
