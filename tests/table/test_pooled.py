"""Pooled reads and updates through a table: bags, weights, divisors, parts, and what they leave alone."""

from __future__ import annotations

import torch

from megalith.ops import Bags, OutputSlice, Pooling
from tests.table.support import ints, sgd_table, summed, unchanged


def test_a_pooled_read_sums_the_rows_of_each_bag(engine: str) -> None:
    table = sgd_table(engine, 2)
    table.assign(ints(1, 2, 3), torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]))
    ids = ints(1, 2, 3, 3)

    (out,) = table.read(table.find(ids), ids, Pooling.sum("t", ints(0, 2, 2, 4), 2))

    assert out.tolist() == [[3.0, 30.0], [0.0, 0.0], [6.0, 60.0]]


def test_weights_multiply_and_a_divisor_divides(engine: str) -> None:
    table = sgd_table(engine, 2)
    table.assign(ints(1, 2), torch.tensor([[1.0, 10.0], [2.0, 20.0]]))
    ids = ints(1, 2, 2)
    pooling = summed(
        "t",
        ints(0, 2, 3),
        2,
        weights=torch.tensor([3.0, 0.5, 4.0]),
        divisor=torch.tensor([4.0, 2.0]),
    )

    (out,) = table.read(table.find(ids), ids, pooling)
    table.update(table.find(ids), ids, [torch.tensor([[4.0, 8.0], [1.0, 1.0]])], pooling, step=0)

    assert out.tolist() == [[1.0, 10.0], [4.0, 40.0]]
    # id 1: [4, 8] / 4 * 3; id 2: [4, 8] / 4 * 0.5 + [1, 1] / 2 * 4
    assert table.lookup(ints(1, 2)).tolist() == [[1.0 - 3.0, 10.0 - 6.0], [2.0 - 2.5, 20.0 - 3.0]]


def test_parts_place_slices_side_by_side_and_on_top(engine: str) -> None:
    table = sgd_table(engine, 3)
    table.assign(ints(1, 2), torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]))
    ids = ints(1, 2, 2, 1)
    pooling = Pooling(
        outputs=((2, 4), (2, 2)),
        bags={
            "t": (
                Bags(
                    ints(0, 1, 2), (OutputSlice(0, 0, 0, 1), OutputSlice(0, 2, 1, 3), OutputSlice(1, 0, 1, 3))
                ),
                Bags(ints(2, 3, 4), (OutputSlice(1, 0, 0, 2, accumulate=True),)),
            )
        },
    )

    first, second = table.read(table.find(ids), ids, pooling)
    grads = [torch.tensor([[1.0, 9.0, 2.0, 3.0], [4.0, 9.0, 5.0, 6.0]]), torch.ones(2, 2)]
    table.update(table.find(ids), ids, grads, pooling, step=0)

    assert first.tolist() == [[1.0, 0.0, 2.0, 3.0], [10.0, 0.0, 20.0, 30.0]]
    assert second.tolist() == [[2.0 + 10.0, 3.0 + 20.0], [20.0 + 1.0, 30.0 + 2.0]]
    # id 1: [1, 2 + 1, 3 + 1] + [1, 1, 0]; id 2: [4, 5 + 1, 6 + 1] + [1, 1, 0]
    assert table.lookup(ints(1, 2)).tolist() == [[-1.0, -2.0, -1.0], [5.0, 13.0, 23.0]]


def test_inner_puts_the_first_rows_of_a_feature_side_by_side(engine: str) -> None:
    table = sgd_table(engine, 2)
    table.assign(ints(1, 2, 3), torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]))
    ids = ints(1, 2, 3)
    # two batch rows of two places each; the second row has only one id
    pooling = Pooling(((2, 4),), {"t": (Bags(ints(0, 1, 2, 3, 3), (OutputSlice(0, 0, 0, 2, inner=2),)),)})

    (out,) = table.read(table.find(ids), ids, pooling)
    grads = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    table.update(table.find(ids), ids, [grads], pooling, step=0)

    assert out.tolist() == [[1.0, 10.0, 2.0, 20.0], [3.0, 30.0, 0.0, 0.0]]
    assert table.lookup(ids).tolist() == [[0.0, 8.0], [-1.0, 16.0], [-2.0, 24.0]]


def test_a_pooled_read_fills_given_outputs(engine: str) -> None:
    table = sgd_table(engine, 1)
    table.assign(ints(1), torch.tensor([[2.0]]))
    pooling = Pooling(((1, 3),), {"t": (Bags(ints(0, 1), (OutputSlice(0, 1, 0, 1),)),)})
    out = torch.full((1, 3), 7.0)

    result = table.read(table.find(ints(1)), ints(1), pooling, out=[out])

    assert result[0] is out
    assert out.tolist() == [[7.0, 2.0, 7.0]]


def test_new_outputs_are_zero_before_anything_is_added(engine: str) -> None:
    table = sgd_table(engine, 2)
    table.assign(ints(1), torch.tensor([[1.0, 2.0]]))
    parts = (OutputSlice(0, 0, 0, 2, accumulate=True),)
    pooling = Pooling(((64, 2),), {"t": (Bags(torch.arange(65), parts),)})
    ids = torch.ones(64, dtype=torch.int64)
    torch.full((64, 2), 5.0)  # memory that a new output may be given again

    (out,) = table.read(table.find(ids), ids, pooling)

    assert out.tolist() == [[1.0, 2.0]] * 64


def test_occurrences_outside_every_bag_are_not_created(engine: str) -> None:
    table = sgd_table(engine, 1)
    ids = ints(1, 2, 3, 4)

    table.update(table.find(ids), ids, [torch.ones(1, 1)], Pooling.sum("t", ints(1, 3), 1), step=0)

    assert [id in table for id in (1, 2, 3, 4)] == [False, True, True, False]


def test_a_pooling_without_this_table_touches_nothing(engine: str) -> None:
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
