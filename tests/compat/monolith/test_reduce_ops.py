"""Monolith's reduce ops: every vector of its own tests, and what ours add."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.compat import monolith
from tests.compat.monolith.test_distribution_ops import FLOATS, gradients, ints, rows

pytestmark = pytest.mark.usefixtures("implementation")


def column(*values: int) -> Tensor:
    return ints(*values).view(-1, 1)


MINUS_ONES, ZEROS = [[-1, -1], [-1, -1]], [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("reduce", "values", "expected"),
    [
        (monolith.reduce_sum, [[1, 1], [2, 2], [4, 4]], [[3, 3], [4, 4]]),
        (monolith.reduce_mean, [[4, 4], [2, 2], [1, 1]], [[3, 3], [1, 1]]),
        (monolith.reduce_sqrtn, [[3, 3], [4, 4], [4, 4]], [[5, 5], [4, 4]]),  # the norm of each column
    ],
)
def test_reductions(reduce: Any, values: Any, expected: Any) -> None:
    assert reduce(column(0, 0, 1), rows(*values), ints(2)).tolist() == expected


@pytest.mark.parametrize(
    ("reduce", "values", "factor", "expected"),
    [
        (monolith.reduce_sum, ZEROS, 1, MINUS_ONES),
        (monolith.reduce_mean, ZEROS, 2, MINUS_ONES),
        (monolith.reduce_sqrtn, [[3, 4], [4, 3]], 1, [[-0.6, -0.8], [-0.8, -0.6]]),
        (monolith.reduce_sqrtn, ZEROS, 1, ZEROS),
    ],
)
def test_gradients_of_reductions(reduce: Any, values: Any, factor: int, expected: Any) -> None:
    leaf = rows(*values).requires_grad_()
    loss = (1 - factor * reduce(column(0, 0), leaf, ints(1))).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], rows(*expected))


def test_the_mean_of_an_empty_row_is_0_and_more_rows_than_columns_are_fine() -> None:
    values = rows([4], [2]).requires_grad_()
    out = monolith.reduce_mean(column(1, 4), values, 6)
    assert out.tolist() == [[0], [4], [0], [0], [2], [0]]
    assert gradients(out.sum(), values) == [[[1], [1]]]


@pytest.mark.parametrize("reduce", [monolith.reduce_sum, monolith.reduce_mean, monolith.reduce_sqrtn])
@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions_keep_type_and_nan_and_take_strided_or_empty_values(
    reduce: Any, dtype: torch.dtype
) -> None:
    values = torch.arange(12.0).view(3, 4).to(dtype)
    strided = reduce(ints(0, 0, 2), values[:, ::2], 3)
    assert strided.dtype == dtype
    assert torch.equal(strided, reduce(ints(0, 0, 2), values[:, ::2].contiguous(), 3))
    assert reduce(ints(), values[:0], 2).tolist() == [[0] * 4] * 2
    assert reduce(ints(), values[:0], 0).shape == (0, 4)
    assert reduce(ints(0, 0, 2), values[:, :0], 3).shape == (3, 0)
    assert reduce(ints(0, 0), rows([float("nan")], [1]).to(dtype), 1).isnan().all()


def test_small_types_count_and_square_without_rounding_away() -> None:
    many = torch.ones(3000, 1, dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16
    assert monolith.reduce_mean(torch.zeros(3000, dtype=torch.int64), many, 1).item() == 1
    big = torch.full((2, 1), 3e4, dtype=torch.float16)  # the sum and the square are beyond float16
    assert monolith.reduce_mean(ints(0, 0), big, 1).item() == 3e4
    assert monolith.reduce_sqrtn(ints(0), big[:1], 1).item() == 3e4


def test_fused_reduce_sum_and_split() -> None:
    values = rows([1, 1, 1], [2, 2, 1], [4, 4, 2]).requires_grad_()

    first = monolith.fused_reduce_sum_and_split(ints(0, 0, 1), values, ints(2)[0], [2, 1])
    second = monolith.fused_reduce_sum_and_split(ints(0, 0, 1), values, 2, [1, 2])
    third = monolith.fused_reduce_sum_and_split(ints(0, 0, 2), values, 4, [1, 2])

    assert [t.tolist() for t in first] == [[[3, 3], [4, 4]], [[2], [2]]]
    assert [t.tolist() for t in second] == [[[3], [4]], [[3, 2], [4, 2]]]
    assert [t.tolist() for t in third] == [[[3], [0], [4], [0]], [[3, 2], [0, 0], [4, 2], [0, 0]]]
    assert gradients(third[0].sum() + third[1].sum(), values) == [[[1, 1, 1]] * 3]


def test_fused_sorted_segment_sum() -> None:
    values = rows([1, 1, 1], [2, 2, 1], [4, 4, 2])
    wide = rows([1, 1, 1, 1, 1], [2, 2, 1, 1, 1], [4, 4, 2, 2, 2], [4, 4, 2, 2, 2])
    leaves = [t.requires_grad_() for t in (values, values.detach().clone(), torch.empty(0, 3), wide)]

    outs = monolith.fused_sorted_segment_sum(
        [ints(0, 0, 1).int(), ints(0, 0, 1), ints(), ints(0, 0, 2, 2)],
        leaves,
        [torch.tensor([2, 3], dtype=torch.int32), (4, 3), (2, 3), ints(4, 5)],
    )

    assert [o.tolist() for o in outs] == [
        [[3, 3, 2], [4, 4, 2]],
        [[3, 3, 2], [4, 4, 2], [0, 0, 0], [0, 0, 0]],
        [[0, 0, 0], [0, 0, 0]],
        [[3, 3, 2, 2, 2], [0] * 5, [8, 8, 4, 4, 4], [0] * 5],
    ]
    grads = [torch.randn_like(o) for o in outs]
    actual = torch.autograd.grad(outs, leaves, grads)
    indices = ([0, 0, 1], [0, 0, 1], [], [0, 0, 2, 2])
    for grad, upstream, index in zip(actual, grads, indices, strict=True):
        assert torch.equal(grad, upstream[ints(*index)])


def test_fused_reduce_and_split_of_102_columns() -> None:
    batch, generator = 256, torch.Generator(torch.get_default_device()).manual_seed(0)
    splits, embeddings, slice_dims = [], [], []
    for width in range(1, 205, 2):
        lengths = torch.randperm(batch, generator=generator) % 8
        cuts = torch.cat([ints(0), lengths.cumsum(0)])
        quarter = width // 4
        dims = [quarter] * 3 + [width - 3 * quarter] if quarter else [1] * width
        splits.append(cuts)
        slice_dims.append(dims)
        embeddings.append(torch.randn(int(cuts[-1]), width, generator=generator, requires_grad=True))
    assert len(embeddings) == 102
    assert monolith.fused_reduce_and_split_gpu is monolith.fused_reduce_and_split

    actual = monolith.fused_reduce_and_split(splits, embeddings, slice_dims)

    expected: list[Tensor] = []
    for cuts, values, dims in zip(splits, embeddings, slice_dims, strict=True):
        index = torch.repeat_interleave(torch.arange(batch), torch.diff(cuts))
        total = torch.zeros(batch, values.shape[1]).index_add(0, index, values)
        expected += total.split(dims, 1)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    upstream = [torch.randn(e.shape, generator=generator) for e in expected]
    torch.testing.assert_close(
        torch.autograd.grad(actual, embeddings, upstream),
        torch.autograd.grad(expected, embeddings, upstream),
    )
