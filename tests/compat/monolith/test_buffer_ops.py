"""Monolith's buffer ops: every vector of its own tests, and what ours add."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalith import Ragged
from megalith.compat import monolith
from megalith.errors import InputError, UsageError
from tests.compat.monolith.test_distribution_ops import FLOATS, ints, rows

pytestmark = pytest.mark.usefixtures("implementation")

KEY = [[], [0, 1, 2, 1, 0], [0, 1, 0], []]
DIMS = [1, 2, 3, 4]


POS = [[], [0, 1, 2], [3, 4], []]


def keys(key: list[list[int]] = KEY, dims: list[int] = DIMS) -> tuple[Any, Any, monolith.SharedBuffer]:
    """The distinct keys, their offsets and the buffer."""
    found = monolith.unique_key_with_value_and_offset(Ragged.from_lists(key), dims)
    assert found.value_buffer is not None
    return found.unique_key, found.value_offset, found.value_buffer


@pytest.mark.parametrize(
    ("key", "dims", "distinct", "offsets", "size"),
    [
        (KEY, DIMS, [[], [0, 1, 2], [0, 1], []], [[], [[0, 8], [2, 6], [4]], [[10, 16], [13]], []], 19),
        ([[], [], []], [1, 2, 3], [[], [], []], [[], [], []], 0),
    ],
)
def test_unique_key_with_value_and_offset(
    key: Any, dims: Any, distinct: Any, offsets: Any, size: int
) -> None:
    unique, where, buffer = keys(key, dims)
    assert unique.to_lists() == distinct
    assert where.to_lists() == offsets
    assert monolith.finalize_shared_tensor([buffer]).tolist() == [0.0] * size
    given = Ragged.from_lists(key)
    assert monolith.unique_key_with_value_and_offset(given, dims, generate_buffer=False).value_buffer is None


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([POS], [[8, 10, 8, 10, 4, 5, 26, 28, 30, 13, 14, 15]]),
        (
            [[[], [0, 1], [], []], [[], [2], [3, 4], []]],
            [[8, 10, 8, 10], [4, 5, 26, 28, 30, 13, 14, 15]],
        ),
    ],
    ids=["one fill", "two fills"],
)
def test_fill_with_offset_map_and_its_gradient(parts: Any, expected: list[list[float]]) -> None:
    _, where, buffer = keys()
    sizes = [len(grad) for grad in expected]
    values = [x.clone().requires_grad_() for x in torch.arange(12.0).split(sizes)]
    positions = [Ragged.from_lists(part) for part in parts]

    handles = [
        monolith.fill_with_offset_map(each, value, where, buffer, DIMS)
        for each, value in zip(positions, values, strict=True)
    ]
    filled = monolith.finalize_shared_tensor(handles, torch.float32, [19])

    assert all(handle is buffer for handle in handles)
    assert filled.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 0, 1, 6, 7, 8, 9, 10, 11, 6, 7, 8]
    upstream = torch.arange(19.0)
    assert [g.tolist() for g in torch.autograd.grad(filled, values, upstream)] == expected
    by_hand = [monolith.fill_with_offset_map_gradient(each, upstream, where, DIMS) for each in positions]
    assert [g.tolist() for g in by_hand] == expected


def test_where_positions_overlap_the_last_value_is_copied() -> None:
    _, where, buffer = keys([[9]], [2])
    value = torch.tensor([5.0, 6.0, 7.0, 8.0], requires_grad=True)
    twice = Ragged.from_lists([[0, 0]])

    handle = monolith.fill_with_offset_map(twice, value, where, buffer, [2])
    filled = monolith.finalize_shared_tensor([handle], torch.float32, [None])

    assert filled.tolist() == [7, 8]
    (grad,) = torch.autograd.grad(filled, value, torch.tensor([1.0, 10.0]))
    assert grad.tolist() == [0, 0, 1, 10]  # what was overwritten has no part in the result
    by_hand = monolith.fill_with_offset_map_gradient(twice, torch.tensor([1.0, 10.0]), where, [2])
    assert by_hand.tolist() == [1, 10, 1, 10]  # Monolith's op counts it


def test_chunks_that_overlap_in_part_are_copied_one_after_the_other() -> None:
    offsets = Ragged.from_lists([[0, 3], [2], [1]])  # of 3 elements each, in a buffer of 7
    where = monolith.OffsetMap(offsets, ints(0, 3))
    value = torch.arange(1.0, 10.0, dtype=torch.float64).requires_grad_()

    def fill(value: torch.Tensor) -> torch.Tensor:
        """The first chunk in a fill of its own: a later fill overwrites it."""
        buffer = monolith.SharedBuffer(7)
        for pos, own in (([[0]], value[:3]), ([[1, 2]], value[3:])):
            monolith.fill_with_offset_map(Ragged.from_lists(pos), own, where, buffer, [3])
        return monolith.finalize_shared_tensor([buffer], torch.float64, [1, None])[0]

    plain = [0.0] * 7
    for chunk, starts in ((value[:3], [0, 3]), (value[3:6], [2]), (value[6:], [1])):
        for start in starts:
            plain[start : start + 3] = chunk.tolist()
    assert fill(value).tolist() == plain == [1, 7, 8, 9, 6, 3, 0]
    assert torch.autograd.gradcheck(fill, value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": [3]}, "does not match the buffer's 2 elements"),
        ({"shape": [None, None]}, "does not match"),
        ({"shape": ["2"]}, "a size must be an integer"),
        ({"dtype": torch.int64}, "dtype must be a float dtype"),
    ],
)
def test_a_buffer_is_finalized_once_and_not_by_an_error(arguments: dict[str, Any], message: str) -> None:
    _, where, buffer = keys([[9]], [2])
    pos = Ragged.from_lists([[0]])
    with pytest.raises(InputError, match="value is too short"):
        monolith.fill_with_offset_map(pos, torch.ones(1), where, buffer, [2])
    monolith.fill_with_offset_map(pos, torch.ones(2), where, buffer, [2])
    with pytest.raises(InputError, match=message):
        monolith.finalize_shared_tensor([buffer], **arguments)
    assert monolith.finalize_shared_tensor([buffer], torch.float32, [None]).tolist() == [1, 1]
    with pytest.raises(UsageError, match="already finalized"):
        monolith.finalize_shared_tensor([buffer])
    with pytest.raises(UsageError, match="already finalized"):
        monolith.fill_with_offset_map(pos, torch.ones(2), where, buffer, [2])


def test_a_value_too_short_is_refused() -> None:
    _, where, buffer = keys()
    with pytest.raises(InputError, match="value is too short"):
        monolith.fill_with_offset_map(Ragged.from_lists(POS), torch.arange(10.0), where, buffer, DIMS)


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
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
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
