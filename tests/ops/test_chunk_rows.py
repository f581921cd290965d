"""Rows of compressed updates: the native functions and those in plain torch give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith.library import native_module
from megalith.ops import matrix_chunks
from megalith.ops.matrix_chunks import (
    NOT_ASCENDING,
    SPARE_BITS,
    TOO_HIGH,
    add_chunk_rows,
    count_codes,
    divide_by_counts,
    index_problems,
    largest_of_rows,
    pack_codes,
    pack_indices,
)

T = TypeVar("T")


def both(work: Callable[[], T]) -> tuple[T, T]:
    """What a function returns with the native module and without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_chunks, "native_module", lambda: None)
        return work(), (patch.undo(), work())[1]


def sent(rows: int, keep: int, size: int, bits: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    indices = torch.rand(rows, size, generator=make).argsort(1)[:, :keep].sort(1).values
    codes = torch.randint(0, 1 << bits, (rows, keep), generator=make, dtype=torch.uint8)
    return indices, codes, torch.randn(1 << bits, generator=make), torch.randn(rows, size, generator=make)


sizes = st.tuples(st.integers(0, 5), st.integers(1, 40), st.sampled_from([2, 4, 8]), st.integers(0, 10**6))


@given(sizes, st.data(), st.sampled_from([None, torch.uint8, torch.int32]))
def test_sums_counts_and_means(
    given_: tuple[int, int, int, int], data: st.DataObject, kind: torch.dtype | None
) -> None:
    rows, size, bits, seed = given_
    keep = data.draw(st.integers(1, size))
    indices, codes, values, start = sent(rows, keep, size, bits, seed)
    packed = pack_indices(indices), pack_codes(codes, bits)

    def work() -> list[Any]:
        total = start.clone()
        count = None if kind is None else torch.ones(rows, size, dtype=kind)
        add_chunk_rows(total, count, *packed, values, keep, bits)
        mean = None if count is None else divide_by_counts(total.clone(), count).tolist()
        counted, spare = count_codes(packed[1], keep, bits)
        problems = index_problems(packed[0], keep, size)
        return [
            total.tolist(),
            None if count is None else count.tolist(),
            mean,
            counted.tolist(),
            spare,
            problems,
        ]

    plain, native = both(work)
    assert plain == native
    expected = start.clone().scatter_add_(1, indices, values[codes.long()])
    assert native[0] == expected.tolist()
    assert native[3] == torch.bincount(codes.flatten().long(), minlength=1 << bits).tolist()
    assert native[4:] == [False, 0]


@given(st.integers(0, 5), st.integers(1, 30), st.data())
def test_the_largest_and_of_equal_ones_the_first(rows: int, size: int, data: st.DataObject) -> None:
    keep = data.draw(st.integers(1, size))
    values = data.draw(st.lists(st.integers(-4, 4), min_size=rows * size, max_size=rows * size))
    given_ = torch.tensor(values, dtype=torch.float32).view(rows, size)
    plain, native = both(lambda: [each.tolist() for each in largest_of_rows(given_, keep)])
    assert plain == native
    for row, found in zip(given_.tolist(), native[0], strict=True):
        assert found == sorted(sorted(range(size), key=lambda i: (-abs(row[i]), i))[:keep])


@pytest.mark.parametrize(
    ("row", "size", "problem"),
    [([1, 5, 9], 9, TOO_HIGH), ([5, 1, 9], 10, NOT_ASCENDING), ([1, 1, 12], 10, NOT_ASCENDING + TOO_HIGH)],
)
def test_wrong_indices(row: list[int], size: int, problem: int) -> None:
    packed = pack_indices(torch.tensor([[0, 1, 2], row]))
    assert both(lambda: index_problems(packed, 3, size)) == (problem, problem)


def test_unused_bits() -> None:
    packed = pack_indices(torch.tensor([[1, 2, 3]]))
    packed[0, -1] |= 0x10
    assert both(lambda: index_problems(packed, 3, 10)) == (SPARE_BITS, SPARE_BITS)
    codes = pack_codes(torch.tensor([[1, 2, 3]], dtype=torch.uint8), 2)
    codes[0, -1] |= 0x40
    assert [spare for _, spare in both(lambda: count_codes(codes, 3, 2))] == [True, True]


def test_native_sums_refuse_what_was_not_checked() -> None:
    indices, codes, values, total = sent(2, 3, 8, 2, 0)
    packed = pack_indices(indices + 6), pack_codes(codes, 2)
    if native_module() is None:
        pytest.skip("the native module is not built")
    with pytest.raises(ValueError, match="out of range"):
        add_chunk_rows(total, None, *packed, values, 3, 2)
    with pytest.raises(ValueError, match="bad shape"):
        add_chunk_rows(total[:1], None, *packed, values, 3, 2)
