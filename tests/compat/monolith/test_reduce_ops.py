"""Monolith's reduce ops: every vector of its own tests, and what ours add."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalith.compat import monolith
from tests.compat.monolith.test_distribution_ops import FLOATS, gradients, ints, rows

pytestmark = pytest.mark.usefixtures("implementation")


def column(*values: int) -> Tensor:
    return ints(*values).view(-1, 1)


def test_reduce_mean() -> None:
    out = monolith.reduce_mean(column(0, 0, 1), rows([4, 4], [2, 2], [1, 1]), ints(2))
    assert out.tolist() == [[3, 3], [1, 1]]


def test_reduce_mean_gradient() -> None:
    values = torch.zeros(2, 2, requires_grad=True)
    out = monolith.reduce_mean(column(0, 0), values, ints(1))
    assert gradients((torch.ones(1, 2) - 2 * out).sum(), values) == [[[-1, -1], [-1, -1]]]


def test_the_mean_of_an_empty_row_is_0_and_more_rows_than_columns_are_fine() -> None:
    values = rows([4], [2]).requires_grad_()
    out = monolith.reduce_mean(column(1, 4), values, 6)
    assert out.tolist() == [[0], [4], [0], [0], [2], [0]]
    assert gradients(out.sum(), values) == [[[1], [1]]]


def test_reduce_sum() -> None:
    out = monolith.reduce_sum(column(0, 0, 1), rows([1, 1], [2, 2], [4, 4]), ints(2))
    assert out.tolist() == [[3, 3], [4, 4]]


def test_reduce_sum_gradient() -> None:
    values = torch.zeros(2, 2, requires_grad=True)
    out = monolith.reduce_sum(column(0, 0), values, ints(1))
    assert gradients((torch.ones(1, 2) - out).sum(), values) == [[[-1, -1], [-1, -1]]]


def test_reduce_sqrtn_is_the_norm_of_each_column() -> None:
    out = monolith.reduce_sqrtn(column(0, 0, 1), rows([3, 3], [4, 4], [4, 4]), ints(2))
    assert out.tolist() == [[5, 5], [4, 4]]


def test_reduce_sqrtn_gradient() -> None:
    values = rows([3, 4], [4, 3]).requires_grad_()
    out = monolith.reduce_sqrtn(column(0, 0), values, ints(1))
    (grad,) = torch.autograd.grad((torch.ones(1, 2) - out).sum(), values)
    torch.testing.assert_close(grad, rows([-0.6, -0.8], [-0.8, -0.6]))

    zeros = torch.zeros(2, 2, requires_grad=True)
    out = monolith.reduce_sqrtn(column(0, 0), zeros, ints(1))
    assert gradients(out.sum(), zeros) == [[[0, 0], [0, 0]]]


def test_nan_does_not_vanish() -> None:
    values = rows([float("nan")], [1])
    for reduce in (monolith.reduce_sum, monolith.reduce_mean, monolith.reduce_sqrtn):
        assert reduce(ints(0, 0), values, 1).isnan().all()


@pytest.mark.parametrize("reduce", [monolith.reduce_sum, monolith.reduce_mean, monolith.reduce_sqrtn])
@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions_keep_the_type_and_take_strided_or_empty_values(reduce, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    values = torch.arange(12.0).view(3, 4).to(dtype)
    strided = reduce(ints(0, 0, 2), values[:, ::2], 3)
    assert strided.dtype == dtype
    assert torch.equal(strided, reduce(ints(0, 0, 2), values[:, ::2].contiguous(), 3))
    assert reduce(ints(), values[:0], 2).tolist() == [[0] * 4] * 2
    assert reduce(ints(), values[:0], 0).shape == (0, 4)
    assert reduce(ints(0, 0, 2), values[:, :0], 3).shape == (3, 0)


def test_small_types_count_and_square_without_rounding_away() -> None:
    many = torch.ones(3000, 1, dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16
    assert monolith.reduce_mean(torch.zeros(3000, dtype=torch.int64), many, 1).item() == 1
    big = torch.full((2, 1), 3e4, dtype=torch.float16)  # the sum and the square are beyond float16
    assert monolith.reduce_mean(ints(0, 0), big, 1).item() == 3e4
    assert monolith.reduce_sqrtn(ints(0), big[:1], 1).item() == 3e4


def test_fused_reduce_sum_and_split() -> None:
    values = rows([1, 1, 1], [2, 2, 1], [4, 4, 2]).requires_grad_()

    first = monolith.fused_reduce_sum_and_split(ints(0, 0, 1), values, 2, [2, 1])
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
        [(2, 3), (4, 3), (2, 3), (4, 5)],
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


def test_the_gpu_name_is_the_same_op() -> None:
    assert monolith.fused_reduce_and_split_gpu is monolith.fused_reduce_and_split
