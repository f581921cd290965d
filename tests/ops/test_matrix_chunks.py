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
    StepRule,
    add_chunk_rows,
    count_codes,
    divide_by_counts,
    from_chunks,
    index_problems,
    largest_of_rows,
    pack_codes,
    pack_indices,
    step_chunks,
    to_chunks,
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


# ---- the step of a matrix by chunks: native code and plain torch, against the step of the whole matrix


def expected_step(
    weights: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, rule: StepRule
) -> tuple[torch.Tensor, torch.Tensor]:
    if rule == "sign":
        return weights - gradient.sign() * 0.3, momentum
    if rule == "sgd":
        return weights - gradient * 0.3, momentum
    later = momentum * 0.9 + gradient
    return weights - (later * 0.9 + gradient) * 0.3, later


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from(["sgd", "nesterov", "sign"]),
    st.data(),
)
def test_a_step_covers_the_matrix(
    lines: int, columns: int, chunk: tuple[int, int], rule: StepRule, data: st.DataObject
) -> None:
    """A part of a matrix, stepped by all chunks of the whole, in pieces."""
    top = data.draw(st.integers(0, lines - 1))
    bottom = data.draw(st.integers(top + 1, lines))
    left = data.draw(st.integers(0, columns - 1))
    gradient, across = torch.randn(lines, columns), -(-columns // chunk[1])
    tiles = to_chunks(gradient, chunk)
    assert torch.equal(from_chunks(tiles, (lines, columns), chunk), gradient)
    start, momentum = torch.randn(bottom - top, columns - left), torch.randn(bottom - top, columns - left)
    expected = expected_step(start, momentum, gradient[top:bottom, left:], rule)
    cut = data.draw(st.integers(0, len(tiles)))
    for native in (True, False):
        weights, own = start.clone(), momentum.clone()
        with pytest.MonkeyPatch.context() as patch:
            if not native:
                patch.setattr(matrix_chunks, "native_module", lambda: None)
                patch.setattr(matrix_chunks, "_STEP_POSITIONS", 3 * chunk[0] * chunk[1])
            for first, piece in ((0, tiles[:cut]), (cut, tiles[cut:])):
                step_chunks(
                    piece,
                    weights,
                    own,
                    first=first,
                    across=across,
                    chunk=chunk,
                    corner=(top, left),
                    rule=rule,
                    lr=0.3,
                    beta=0.9,
                )
        assert torch.equal(weights, expected[0])
        assert torch.equal(own, expected[1])


def test_a_step_of_another_type_rounds_once() -> None:
    weights = torch.ones(2, 2, dtype=torch.bfloat16)
    gradient = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    step_chunks(gradient, weights, None, first=0, across=1, chunk=(2, 2), corner=(0, 0), rule="sgd", lr=0.5)
    assert torch.equal(weights, (1 - gradient.view(2, 2) * 0.5).to(torch.bfloat16))
