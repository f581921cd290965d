"""Monolith's buffer ops: every vector of its own tests, and what ours add."""

from __future__ import annotations

import pytest
import torch

from megalith import Ragged
from megalith.compat import monolith
from megalith.errors import InputError, UsageError
from tests.compat.monolith.test_distribution_ops import FLOATS, ints, rows

pytestmark = pytest.mark.usefixtures("implementation")

KEY = [[], [0, 1, 2, 1, 0], [0, 1, 0], []]
DIMS = [1, 2, 3, 4]
POS = Ragged.from_lists([[], [0, 1, 2], [3, 4], []])


def test_unique_key_with_value_and_offset() -> None:
    found = monolith.unique_key_with_value_and_offset(Ragged.from_lists(KEY), DIMS)
    assert found.unique_key.to_lists() == [[], [0, 1, 2], [0, 1], []]
    assert found.value_offset.to_lists() == [[], [[0, 8], [2, 6], [4]], [[10, 16], [13]], []]
    assert found.value_buffer is not None
    assert found.value_buffer.size == 19


def test_fill_with_offset_map_and_its_gradient() -> None:
    found = monolith.unique_key_with_value_and_offset(Ragged.from_lists(KEY), DIMS)
    assert found.value_buffer is not None
    value = torch.arange(12.0).requires_grad_()

    handle = monolith.fill_with_offset_map(POS, value, found.value_offset, found.value_buffer, DIMS)
    filled = monolith.finalize_shared_tensor([handle], torch.float32, [19])

    assert handle is found.value_buffer
    assert filled.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 0, 1, 6, 7, 8, 9, 10, 11, 6, 7, 8]
    expected = [8.0, 10.0, 8.0, 10.0, 4.0, 5.0, 26.0, 28.0, 30.0, 13.0, 14.0, 15.0]
    (grad,) = torch.autograd.grad(filled, value, torch.arange(19.0))
    assert grad.tolist() == expected
    by_hand = monolith.fill_with_offset_map_gradient(POS, torch.arange(19.0), found.value_offset, DIMS)
    assert by_hand.tolist() == expected


def test_several_fills_make_one_buffer() -> None:
    found = monolith.unique_key_with_value_and_offset(Ragged.from_lists(KEY), DIMS)
    buffer = found.value_buffer
    assert buffer is not None
    values = [torch.arange(4.0).requires_grad_(), torch.arange(4.0, 12.0).requires_grad_()]
    parts = [Ragged.from_lists([[], [0, 1], [], []]), Ragged.from_lists([[], [2], [3, 4], []])]

    handles = [
        monolith.fill_with_offset_map(p, v, found.value_offset, buffer, DIMS)
        for p, v in zip(parts, values, strict=True)
    ]
    filled = monolith.finalize_shared_tensor(handles)

    assert filled.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 0, 1, 6, 7, 8, 9, 10, 11, 6, 7, 8]
    grads = torch.autograd.grad(filled, values, torch.arange(19.0))
    assert [g.tolist() for g in grads] == [[8, 10, 8, 10], [4, 5, 26, 28, 30, 13, 14, 15]]


def test_a_value_too_short_is_refused() -> None:
    found = monolith.unique_key_with_value_and_offset(Ragged.from_lists(KEY), DIMS)
    assert found.value_buffer is not None
    with pytest.raises(InputError, match="value is too short"):
        monolith.fill_with_offset_map(POS, torch.arange(10.0), found.value_offset, found.value_buffer, DIMS)


def test_unique_keys_of_empty_rows() -> None:
    found = monolith.unique_key_with_value_and_offset(Ragged.from_lists([[], [], []]), [1, 2, 3])
    assert found.unique_key.to_lists() == [[], [], []]
    assert found.value_offset.to_lists() == [[], [], []]
    assert found.value_buffer is not None
    assert monolith.finalize_shared_tensor([found.value_buffer]).tolist() == []


def test_the_buffer_is_optional_and_finalized_once() -> None:
    key = Ragged.from_lists(KEY)
    assert monolith.unique_key_with_value_and_offset(key, DIMS, generate_buffer=False).value_buffer is None
    found = monolith.unique_key_with_value_and_offset(key, DIMS)
    buffer = found.value_buffer
    assert buffer is not None
    assert monolith.finalize_shared_tensor([buffer]).tolist() == [0.0] * 19
    with pytest.raises(UsageError, match="already finalized"):
        monolith.finalize_shared_tensor([buffer])
    with pytest.raises(UsageError, match="already finalized"):
        monolith.fill_with_offset_map(POS, torch.arange(12.0), found.value_offset, buffer, DIMS)


# ---- splits and flat buffers


@pytest.mark.parametrize(
    ("row_split", "sizes", "expected"),
    [
        ([0, 2, 5, 5, 9, 0, 0, 3, 4], [5, 4], [0, 2, 5, 5, 9, 9, 12, 13]),
        ([0, 2, 5], [3], [0, 2, 5]),
        ([0, 0, 0, 1], [1, 1, 2], [0, 1]),
        ([0], [1], [0]),
    ],
)
def test_normalize_merged_split(row_split: list[int], sizes: list[int], expected: list[int]) -> None:
    out = monolith.normalize_merged_split(ints(*row_split), ints(*sizes).int())
    assert out.tolist() == expected
    assert out.dtype == torch.int64


@pytest.mark.parametrize("dtype", FLOATS)
def test_aligned_concat_and_split_of_155_tensors(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = []
    for k in range(155):
        shape = torch.randint(0 if k % 20 == 0 else 1, 6, (k % 4 + 1,), generator=generator).tolist()
        tensors.append(torch.randn(shape, generator=generator).to(dtype))

    flat = monolith.aligned_flat_concat(tensors)
    parts = monolith.aligned_flat_split(tensors, flat)

    item = flat.element_size()
    for tensor, part in zip(tensors, parts, strict=True):
        assert torch.equal(tensor, part)
        assert part.storage_offset() * item % 64 == 0
        assert part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()  # a view


def test_aligned_concat_scales_pads_with_zeros_and_passes_gradients_on() -> None:
    inputs = [rows([1, 2]).requires_grad_(), torch.tensor(3.0, requires_grad=True)]
    flat = monolith.aligned_flat_concat(inputs, scale=0.5, alignment=16)
    assert flat.tolist() == [0.5, 1, 0, 0, 1.5, 0, 0, 0]
    first, second = torch.autograd.grad((flat * torch.arange(8)).sum(), inputs)
    assert first.tolist() == [[0, 0.5]]
    assert second.item() == 2
