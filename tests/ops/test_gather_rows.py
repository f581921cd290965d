"""Gather and scatter: each is the gradient of the other, for any type and any threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from megalith.ops import gather, gather_pieces, scatter_pieces, scatter_sum
from megalith.ops.gather_rows import _gather_reference, _scatter_reference
from tests.ops.support import FLOATS, INTEGERS, assert_same, assert_threads_do_not_show, ints, randn, strided

ROWS = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])


# ---- by hand


def test_scatter_sum_adds_rows_of_an_index() -> None:
    assert scatter_sum(ROWS, ints(3, 0, 3), 4).tolist() == [[2, 20], [0, 0], [0, 0], [4, 40]]


def test_pieces_begin_anywhere_in_a_buffer() -> None:
    buffer = torch.arange(6.0)
    first, second = gather_pieces(buffer, [ints(3, 0), ints(1)], [3, 2], strides=[1, 2])
    assert first.tolist() == [[3, 4, 5], [0, 1, 2]]
    assert second.tolist() == [[2, 3]]
    back = scatter_pieces([first, second], [ints(3, 0), ints(1)], 6, strides=[1, 2])
    assert back.tolist() == [0, 1, 4, 6, 4, 5]
    assert scatter_pieces([], [], 3).tolist() == [0, 0, 0]


def test_sums_run_in_the_order_of_the_index_even_between_pieces() -> None:
    pieces = [torch.tensor([[1e8], [1.0]]), torch.tensor([[-1e8], [1.0]])]
    assert scatter_pieces(pieces, [ints(0, 0), ints(0, 0)], 1).tolist() == [1.0]
    assert scatter_pieces([pieces[0][:1], pieces[1]], [ints(0), ints(0, 0)], 1).tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    ones = torch.ones(4096, 1, dtype=dtype)  # 2048 + 1 is 2048 in float16
    assert scatter_sum(ones, torch.zeros(4096, dtype=torch.int64), 1).item() == 4096


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_gather_or_scatter(shape: tuple[int, int]) -> None:
    rows = torch.zeros(shape, requires_grad=True)
    index = torch.zeros(0, dtype=torch.int64)
    assert gather(rows, index).shape == (0, shape[1])
    assert gather(rows, index.view(2, 0)).shape == (2, 0, shape[1])
    out = scatter_sum(rows, torch.zeros(shape[0], dtype=torch.int64), 4)
    assert torch.equal(out, torch.zeros(4, shape[1]))
    out.sum().backward()
    assert rows.grad is not None
    assert rows.grad.shape == shape


# ---- against the references


@given(data=st.data(), seed=st.integers(0, 2**16))
def test_gather_is_its_reference(data: st.DataObject, seed: int) -> None:
    m, dim = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 2, 3, 4, 8, 13, 16, 32, 64]))
    index = torch.tensor(
        data.draw(st.lists(st.integers(0, m - 1), max_size=50)), dtype=data.draw(st.sampled_from(INTEGERS))
    )
    rows = randn(seed, m, dim, dtype=data.draw(st.sampled_from(FLOATS)))
    expected = _gather_reference(rows.reshape(-1), [index.long()], [dim], [dim], "index")[0]

    assert_same(gather(rows, index), expected)
    assert_same(gather(strided(rows), strided(index)), expected)
    assert_same(gather(rows.t().contiguous().t(), index), expected)
    assert_same(expected, rows[index.long()])


@given(data=st.data(), seed=st.integers(0, 2**16))
def test_scatter_is_its_reference(data: st.DataObject, seed: int) -> None:
    m, dim = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 20))
    index = torch.tensor(data.draw(st.lists(st.integers(0, m - 1), max_size=50)), dtype=torch.int64)
    rows = randn(seed, index.numel(), dim, dtype=data.draw(st.sampled_from(FLOATS)))
    expected = _scatter_reference([rows], [index], [dim], m * dim, "index").view(m, dim)

    assert_same(scatter_sum(rows, index, m), expected)
    assert_same(scatter_sum(strided(rows), strided(index).int(), m), expected)


@given(data=st.data(), seed=st.integers(0, 2**16))
def test_pieces_are_their_references(data: st.DataObject, seed: int) -> None:
    size = data.draw(st.integers(0, 60))
    widths = data.draw(st.lists(st.integers(0, min(size, 18)), max_size=4))
    strides = [data.draw(st.integers(0, 5)) for _ in widths]
    indices = []
    for width, stride in zip(widths, strides, strict=True):
        last = (size - width) // stride if stride else 3
        indices.append(
            torch.tensor(data.draw(st.lists(st.integers(0, last), max_size=20)), dtype=torch.int64)
        )
    dtype = data.draw(st.sampled_from(FLOATS))
    source = randn(seed, size, dtype=dtype)

    pieces = gather_pieces(source, indices, widths, strides=strides)

    assert_same(pieces, _gather_reference(source, indices, strides, widths, "index"))
    if pieces:
        expected = _scatter_reference(pieces, indices, strides, size, "index")
        assert_same(scatter_pieces(pieces, indices, size, strides=strides), expected)
        apart = [strided(p) for p in pieces], [strided(i) for i in indices]
        assert_same(scatter_pieces(*apart, size, strides=strides), expected)


# ---- gradients


@pytest.mark.parametrize("dim", [1, 5, 8])
def test_gradcheck_of_gather_and_scatter_twice(dim: int) -> None:
    rows = randn(0, 4, dim, dtype=torch.float64).requires_grad_()
    index = ints(3, 0, 3, 3, 1)
    assert gradcheck(lambda r: gather(r, index), rows)
    assert gradgradcheck(lambda r: gather(r, index) ** 2, rows)
    many = randn(1, 5, dim, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda r: scatter_sum(r, index, 6), many)
    assert gradgradcheck(lambda r: scatter_sum(r, index, 6) ** 2, many)


def test_gradcheck_of_pieces() -> None:
    source = randn(0, 12, dtype=torch.float64).requires_grad_()
    indices = [ints(0, 9, 4, 9), ints(2, 2), ints()]
    assert gradcheck(lambda s: gather_pieces(s, indices, [3, 2, 4], strides=[1, 5, 1]), source)
    pieces = [
        randn(k, n, w, dtype=torch.float64).requires_grad_() for k, (n, w) in enumerate([(4, 3), (2, 2)])
    ]
    assert gradcheck(lambda *p: scatter_pieces(p, indices[:2], 12, strides=[1, 5]), pieces)


def test_only_what_needs_a_gradient_gets_one() -> None:
    pieces = [torch.ones(1, 2, requires_grad=True), torch.ones(1, 2)]
    scatter_pieces(pieces, [ints(0), ints(1)], 4).sum().backward()
    assert pieces[0].grad is not None
    assert pieces[1].grad is None
    assert not gather(ROWS, ints(0)).requires_grad
    with torch.no_grad():
        assert not gather(ROWS.clone().requires_grad_(), ints(0)).requires_grad


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_have_the_type_of_the_rows(dtype: torch.dtype) -> None:
    rows = ROWS.clone().to(dtype).requires_grad_()
    gather(rows, ints(2, 2, 0)).sum().backward()
    assert rows.grad is not None
    assert rows.grad.dtype == dtype
    assert rows.grad.tolist() == [[1, 1], [0, 0], [2, 2]]


# ---- threads


@pytest.mark.parametrize("dim", [1, 16, 33])
def test_threads_do_not_show(dim: int, restore_threads: None) -> None:
    n, m = 50_000, 301  # several tasks of 4096 rows to gather, two shares of the sums
    index = (torch.rand(n, generator=torch.Generator().manual_seed(5)) ** 3 * m).long()
    rows, many = randn(1, m, dim), randn(2, n, dim)
    assert_threads_do_not_show(lambda: [gather(rows, index), scatter_sum(many, index, m)])
    torch.set_num_threads(2)
    assert_same(
        scatter_sum(many, index, m), _scatter_reference([many], [index], [dim], m * dim, "index").view(m, dim)
    )
