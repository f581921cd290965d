"""Monolith's buffer ops: one buffer for the rows of many slots, merged row splits, aligned concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.ops import checks
from megalith.ops.bucketing import dedup
from megalith.ops.move_runs import moved, take
from megalith.ragged import Ragged

# ---- one buffer for the rows of many slots


class OffsetMap(NamedTuple):
    """Where in a buffer the values of each distinct key go."""

    offsets: Ragged
    """A row per distinct key: the elements where the values of its occurrences begin, ascending."""
    row_splits: Tensor
    """int64 [rows + 1]: which distinct keys belong to each row of the input."""

    def to_lists(self) -> list[list[list[int]]]:
        """Returns the offsets as nested lists: row, distinct key, offset."""
        flat, splits = self.offsets.to_lists(), self.row_splits.tolist()
        return [flat[a:b] for a, b in pairwise(splits)]


class SharedBuffer:
    """A buffer for the values of many slots: filled by one call per shard, then finalized once.

    A fill is only recorded; the values are copied by `finalize_shared_tensor`, so that gradients reach all
    of them.

    Args:
        size: the number of elements.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fills: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # values, source, target, widths
        self.finalized = False


class UniqueKeys(NamedTuple):
    """Result of `unique_key_with_value_and_offset`."""

    unique_key: Ragged
    value_offset: OffsetMap
    value_buffer: SharedBuffer | None


def unique_key_with_value_and_offset(
    key: Ragged, dims: Sequence[int], generate_buffer: bool = True
) -> UniqueKeys:
    """Finds the distinct keys of each row, in order of first occurrence, and where their values go.

    Args:
        key: int keys.
        dims: the size of a value, for each row.
        generate_buffer: whether to create a buffer. It holds one value per key, duplicates included, row by
            row.
    """
    if not isinstance(key, Ragged):
        raise InputError(f"key must be a Ragged, got {checks.kind(key)}")
    sizes = _dims(dims, key, "key")
    keys = checks.int64(key.values, "key.values")
    # With one shard, distinct keys are ordered by row, then first occurrence.
    found = dedup(keys, key.row_splits)
    per_key = torch.repeat_interleave(sizes, key.lengths(), output_size=keys.shape[0])
    offset = torch.cumsum(per_key, 0) - per_key
    order = torch.argsort(found.inverse, stable=True)
    occurrences = torch.zeros_like(found.first).scatter_add_(0, found.inverse, torch.ones_like(found.inverse))
    unique = Ragged.from_lengths(key.values[found.first], found.counts[0])
    offsets = Ragged.from_lengths(offset[order], occurrences)
    buffer = (
        SharedBuffer(int((key.lengths() * sizes).sum()))
        if checks.flag(generate_buffer, "generate_buffer")
        else None
    )
    return UniqueKeys(unique, OffsetMap(offsets, unique.row_splits), buffer)


def fill_with_offset_map(
    pos: Ragged, value: Tensor, value_offset_map: OffsetMap, value_buffer: SharedBuffer, dims: Sequence[int]
) -> SharedBuffer:
    """Records values for a buffer, at the offsets of their keys. Differentiable in `value`.

    Args:
        pos: for each row, numbers of distinct keys, counted over all rows.
        value: float [size]: the values of these keys, concatenated.
        value_offset_map: where each distinct key's values go.
        value_buffer: the buffer to fill.
        dims: the size of a value, for each row.

    Returns:
        The same buffer.

    Raises:
        InputError: `value` is too short, or `pos` has an unknown number.
        UsageError: the buffer is already finalized.
    """
    if not isinstance(value_buffer, SharedBuffer):
        raise InputError(f"value_buffer must be a SharedBuffer, got {checks.kind(value_buffer)}")
    if value_buffer.finalized:
        raise UsageError("value_buffer is already finalized; fill it before finalize_shared_tensor")
    value = checks.floats(value, "value", (None,))
    source, target, widths = _runs(pos, value_offset_map, dims)
    checks.require(target + widths <= value_buffer.size, "value_offset_map exceeds value_buffer")
    needed = (pos.lengths() * _dims(dims, pos, "pos")).sum()
    checks.require(needed <= value.shape[0], "value is too short for pos and dims")
    value_buffer.fills.append((value, source, target, widths))
    return value_buffer


def fill_with_offset_map_gradient(
    pos: Ragged, grad: Tensor, value_offset_map: OffsetMap, dims: Sequence[int]
) -> Tensor:
    """Computes the gradient of a fill's `value`.

    Args:
        pos: as in `fill_with_offset_map`.
        grad: float [buffer size], the gradient of the buffer.
        value_offset_map: as in `fill_with_offset_map`.
        dims: as in `fill_with_offset_map`.

    Returns:
        For each value, the sum of `grad` over the offsets of its key, concatenated.
    """
    grad = checks.floats(grad, "grad", (None,))
    source, target, widths = _runs(pos, value_offset_map, dims)
    size = int((pos.lengths() * _dims(dims, pos, "pos")).sum())
    return moved(grad, target, source, widths, size, "value_offset_map")


def finalize_shared_tensor(
    handles: Sequence[SharedBuffer], dtype: torch.dtype = torch.float32, shape: Sequence[int] = (-1,)
) -> Tensor:
    """Returns a filled buffer as a tensor, with zeros where nothing was filled in.

    Args:
        handles: what the fills returned; all must be the same buffer.
        dtype: of the result.
        shape: of the result.

    Raises:
        UsageError: the buffer is already finalized.
    """
    handles = checks.as_list(handles, "handles")
    for number, handle in enumerate(handles):
        if not isinstance(handle, SharedBuffer) or handle is not handles[0]:
            raise InputError(f"handles[{number}] is not the buffer of handles[0]")
    if not handles:
        raise InputError("handles is empty; pass the buffers that fill_with_offset_map returned")
    buffer = handles[0]
    if buffer.finalized:
        raise UsageError(
            "this buffer is already finalized; create another with unique_key_with_value_and_offset"
        )
    buffer.finalized = True
    out = torch.zeros(buffer.size, dtype=dtype)
    for value, source, target, widths in buffer.fills:
        filled = moved(value, source, target, widths, buffer.size, "value")
        out = out.to(value.device) + filled.to(dtype)
    try:
        return out.view(*shape)
    except RuntimeError:
        raise InputError(f"shape {tuple(shape)} does not match the buffer's {buffer.size} elements") from None


def _dims(dims: Sequence[int], column: Ragged, name: str) -> Tensor:
    """Checks the size of a value for each row of the column; returns int64 [rows]."""
    sizes = checks.sizes(dims, "dims")
    rows = column.row_splits.shape[0] - 1
    if len(sizes) != rows:
        raise InputError(f"dims has {len(sizes)} sizes for {rows} rows of {name}")
    return torch.tensor(sizes, dtype=torch.int64, device=column.values.device)


def _runs(pos: Ragged, where: OffsetMap, dims: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Lists the copies of a fill: start in the values, start in the buffer, and size of each."""
    if not isinstance(pos, Ragged) or not isinstance(where, OffsetMap):
        raise InputError("pos must be a Ragged and value_offset_map an OffsetMap")
    chosen = checks.int64(pos.values, "pos.values")
    checks.require(
        (chosen >= 0) & (chosen < where.offsets.row_splits.shape[0] - 1),
        "pos holds a number that value_offset_map does not have",
    )
    sizes = torch.repeat_interleave(_dims(dims, pos, "pos"), pos.lengths(), output_size=chosen.shape[0])
    begin = torch.cumsum(sizes, 0) - sizes
    places = take(where.offsets, chosen)
    counts, total = places.lengths(), places.values.shape[0]
    source, widths = (torch.repeat_interleave(x, counts, output_size=total) for x in (begin, sizes))
    return source, places.values, widths


# ---- splits and flat buffers


def normalize_merged_split(row_split: Tensor, row_split_size: Tensor) -> Tensor:
    """Merges concatenated row splits, each of which begins at 0, into the row splits of all rows.

    Args:
        row_split: int [n], the concatenated row splits.
        row_split_size: int [k], the length of each.

    Returns:
        int64 [n + 1 - k].
    """
    splits = checks.int64(row_split, "row_split")
    sizes = checks.int64(row_split_size, "row_split_size")
    if sizes.shape[0] < 1:
        raise InputError("row_split_size is empty; pass the length of each row_splits")
    total = splits.shape[0]
    checks.require(
        (sizes >= 1).all() & (sizes.sum() == total), "row_split_size must add up to row_split's length"
    )
    ends = torch.cumsum(sizes, 0)
    first = torch.zeros_like(splits, dtype=torch.bool).index_fill(0, ends - sizes, True)
    checks.require(torch.where(first, splits, 0) == 0, "row_split: each part must begin at 0")
    steps = torch.diff(splits, prepend=splits.new_zeros(1))
    checks.require((steps >= 0) | first, "row_split must not descend within a part")
    # Leading zeros are dropped; every other entry adds its step to the running total.
    kept = torch.argsort(first.to(torch.int8), stable=True)[: total - sizes.shape[0]]
    return torch.cat([splits.new_zeros(1), torch.cumsum(steps[kept], 0)])


def aligned_flat_concat(inputs: Sequence[Tensor], scale: float = 1.0, alignment: int = 64) -> Tensor:
    """Flattens and concatenates tensors, each padded with zeros to a multiple of `alignment` bytes.

    Args:
        inputs: float tensors of one dtype.
        scale: a factor for the result.
        alignment: in bytes.
    """
    tensors = checks.same_floats(inputs, "inputs")
    pieces = [
        torch.nn.functional.pad(t.reshape(-1), (0, _aligned(t, alignment) - t.numel())) for t in tensors
    ]
    flat = torch.cat(pieces)
    return flat if checks.number(scale, "scale") == 1 else flat * scale


def aligned_flat_split(inputs: Sequence[Tensor], flat: Tensor, alignment: int = 64) -> list[Tensor]:
    """Splits the result of `aligned_flat_concat` into views with the shapes of the inputs.

    Args:
        inputs: float tensors of one dtype, for their shapes.
        flat: what `aligned_flat_concat` returned.
        alignment: in bytes.
    """
    tensors = checks.same_floats(inputs, "inputs")
    sizes = [_aligned(t, alignment) for t in tensors]
    flat = checks.floats(flat, "flat", (sum(sizes),))
    return [piece[: t.numel()].view(t.shape) for piece, t in zip(flat.split(sizes), tensors, strict=True)]


def _aligned(tensor: Tensor, alignment: int) -> int:
    """Returns the number of elements, rounded up to a multiple of `alignment` bytes."""
    item = tensor.element_size()
    if checks.integer(alignment, "alignment") < item or alignment % item:
        raise InputError(f"alignment must be a multiple of {item} bytes, got {alignment}")
    return -(-tensor.numel() * item // alignment) * alignment // item
