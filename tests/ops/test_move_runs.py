"""Rows of a column, chunks of a buffer, packed offsets: moved as their references move them."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalith import Ragged
from megalith.errors import InputError
from megalith.ops import move_runs, pad_rows, take
from megalith.ops.move_runs import (
    _locate_reference,
    _move_reference,
    _pad_reference,
    _take_reference,
    _unpad_reference,
    locate,
)
from tests.ops.support import FLOATS, assert_same, id_tensors, ints, randn, splits, strided

# ---- take


def test_take_chooses_rows_with_their_weights() -> None:
    column = Ragged.from_lists([[1, 2], [], [3]], weights=[[0.5, 1.5], [], [2.5]])
    taken = take(column, ints(2, 0, 1, 0))
    assert taken.to_lists() == [[3], [1, 2], [], [1, 2]]
    assert taken.weights is not None
    assert taken.weights.tolist() == [2.5, 0.5, 1.5, 0.5, 1.5]
    assert take(column, ints()).to_lists() == []


@given(data=st.data(), values=id_tensors())
def test_take_is_its_reference(data: st.DataObject, values: Tensor) -> None:
    cuts = data.draw(splits(values.numel()))
    count = cuts.numel() - 1
    rows = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), max_size=9)), dtype=torch.int64)
    lists = [values.tolist()[a:b] for a, b in pairwise(cuts.tolist())]

    taken = take(Ragged(values, cuts), strided(rows).int())

    assert taken.to_lists() == [lists[r] for r in rows.tolist()]
    assert taken.values.dtype == values.dtype
    assert_same([taken.values, taken.row_splits], _take_reference(values, cuts, rows))


def test_a_few_rows_of_a_long_column_cost_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native implementation validates the whole column, and every tensor shows its size here."""
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = op(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
            return out

    column = Ragged.from_lengths(torch.arange(60_000), torch.tensor([2, 0, 4]).repeat(10_000))
    module = import_module("megalith.ops.move_runs")
    monkeypatch.setattr(module, "native_module", lambda: pytest.fail("the native implementation ran"))
    with Sizes():
        taken = take(column, ints(29_999, 1, 0, 29_999))
    assert taken.to_lists() == [
        [59_996, 59_997, 59_998, 59_999],
        [],
        [0, 1],
        [59_996, 59_997, 59_998, 59_999],
    ]
    assert 0 < max(sizes) <= 10


@pytest.mark.parametrize("count", [1, 40])
def test_a_row_outside_the_values_is_not_read(count: int) -> None:
    column = Ragged.trusted(torch.arange(4), torch.tensor([0, 2, 9, *[4] * 60]))
    with pytest.raises(InputError, match=r"row_splits:? must ascend"):
        take(column, torch.ones(count, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_values_of_any_rank_take_gradients(shape: tuple[int, ...]) -> None:
    values, cuts = randn(0, *shape, dtype=torch.float64).requires_grad_(), ints(0, 3, 3, 4)
    assert gradcheck(lambda v: take(Ragged(v, cuts), ints(2, 0, 2, 1)).values, values)


# ---- runs


def test_runs_are_added_where_they_go() -> None:
    out = move_runs(torch.arange(5.0), ints(1, 0, 4), ints(0, 1, 3), ints(3, 2, 1), 5)
    assert out.tolist() == [1, 2 + 0, 3 + 1, 4, 0]
    assert move_runs(torch.arange(5.0), ints(), ints(), ints(), 2).tolist() == [0, 0]
    assert move_runs(torch.arange(5.0), ints(5), ints(2), ints(0), 2).tolist() == [0, 0]


@given(data=st.data(), seed=st.integers(0, 2**16))
def test_runs_are_their_reference(data: st.DataObject, seed: int) -> None:
    m, size = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    dtype = data.draw(st.sampled_from(FLOATS))
    runs = []
    for _ in range(data.draw(st.integers(0, 12))):
        width = data.draw(st.integers(0, min(m, size)))
        runs.append((data.draw(st.integers(0, m - width)), data.draw(st.integers(0, size - width)), width))
    source, target, widths = (
        torch.tensor(x, dtype=torch.int64) for x in (zip(*runs, strict=True) if runs else ([], [], []))
    )
    values = randn(seed, m, dtype=dtype)

    out = move_runs(values, source, target, widths, size)

    assert_same(out, _move_reference(values, source, target, widths, size, "source"))
    apart = [strided(t) for t in (values, source.int(), target.int(), widths.int())]
    assert_same(move_runs(*apart, size), out)  # type: ignore[arg-type]


def test_gradcheck_of_runs() -> None:
    values = randn(0, 6, dtype=torch.float64).requires_grad_()
    runs = ints(0, 2, 2, 5), ints(1, 0, 3, 3), ints(3, 2, 2, 1)
    assert gradcheck(lambda v: move_runs(v, *runs, 5), values)
    assert gradgradcheck(lambda v: move_runs(v, *runs, 5) ** 2, values)


# ---- packed offsets


def packed(*pairs: tuple[int, int]) -> Tensor:
    return ints(*(number << 32 | element for number, element in pairs))


BASES = ints(0, 10, 10, 16)  # lists of 10, 0 and 6 elements
ENDS, WIDTHS = ints(2, 4), ints(4, 6)


@pytest.mark.parametrize("find", [locate, _locate_reference])
def test_packed_offsets_become_elements_of_all_lists(find) -> None:  # type: ignore[no-untyped-def]
    offsets = packed((0, 0), (2, 2), (0, 4), (2, 0))
    assert find(offsets, BASES, ENDS, WIDTHS, "fid_offset").tolist() == [0, 12, 4, 10]
    assert find(ints(), BASES, ints(0, 0), WIDTHS, "fid_offset").tolist() == []


@pytest.mark.parametrize("find", [locate, _locate_reference])
@pytest.mark.parametrize(
    ("pairs", "position"),
    [
        ([(0, 0), (3, 0), (0, 4), (2, 0)], 1),  # no list 3
        ([(0, 7), (2, 2), (0, 4), (2, 0)], 0),  # four elements from 7 end at 11
        ([(0, 0), (2, 2), (0, 4), (2, 1)], 3),  # six elements from 1 end at 7
        ([(0, 0), (1, 0), (0, 4), (2, 0)], 1),  # list 1 is empty
        ([(0, 0), (2, 2), (0, 2**32 - 1), (2, 0)], 2),
        ([(0, 0), (2, 2), (2**31 - 1, 0), (2, 0)], 2),
        ([(-1, 0), (2, 2), (0, 4), (2, 0)], 0),
    ],
)
def test_packed_offsets_outside_their_list(find, pairs, position: int) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=rf"^fid_offset\[{position}\] is outside the embeddings"):
        find(packed(*pairs), BASES, ENDS, WIDTHS, "fid_offset")


@pytest.mark.parametrize("find", [locate, _locate_reference])
@pytest.mark.parametrize("ends", [(2, 5), (3, 2), (-1, 4)])
def test_occurrences_beyond_the_offsets(find, ends: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match="feature_offset"):
        find(packed((0, 0), (2, 2), (0, 4), (2, 0)), BASES, ints(*ends), WIDTHS, "fid_offset")


# ---- pad


def test_pad_rows_keeps_the_first_and_fills_with_zeros() -> None:
    values = torch.arange(1.0, 6.0)[:, None].repeat(1, 2).requires_grad_()
    padded = pad_rows(values, ints(0, 3, 3, 5), 2)
    assert padded[..., 0].tolist() == [[1, 2], [0, 0], [4, 5]]
    padded.backward(torch.arange(12.0).view(3, 2, 2))
    assert values.grad is not None
    assert values.grad.tolist() == [[0, 1], [2, 3], [0, 0], [8, 9], [10, 11]]


@given(data=st.data(), length=st.integers(0, 5), dtype=st.sampled_from(FLOATS))
def test_pad_rows_is_its_reference(data: st.DataObject, length: int, dtype: torch.dtype) -> None:
    n = data.draw(st.integers(0, 12))
    cuts = data.draw(splits(n))
    width = data.draw(st.sampled_from([0, 1, 3]))
    values = torch.arange(float(n * width)).view(n, width).to(dtype)
    padded = pad_rows(values, cuts, length)
    assert_same([padded], [_pad_reference(values, cuts, length)])
    back = torch.ops.megalith.unpad(padded, cuts, n)
    assert_same([back], [_unpad_reference(padded, cuts, n)])


def test_pad_rows_passes_gradients_both_ways() -> None:
    values = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    cuts = ints(0, 3, 3, 5)
    assert gradcheck(lambda x: pad_rows(x, cuts, 2), values)
    assert gradgradcheck(lambda x: pad_rows(x, cuts, 2), values)
