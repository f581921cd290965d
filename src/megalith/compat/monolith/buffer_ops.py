"""Monolith's buffer ops: one buffer for the rows of many slots, merged row splits, aligned concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.library import define_op, new_size
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
        """Return the offsets as nested lists: row, distinct key, offset."""
        flat, splits = self.offsets.to_lists(), self.row_splits.tolist()
        return [flat[a:b] for a, b in pairwise(splits)]


class SharedBuffer:
    """A buffer for the values of many slots: filled by one call per shard, then finalized once.

    A fill is only recorded; the values are copied by `finalize_shared_tensor`, so that gradients reach all
    of them.

    Args:
        size: The number of elements.
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
    """Find the distinct keys of each row, in order of first occurrence, and where their values go.

    Args:
        key: Integer keys.
        dims: The size of a value, for each row.
        generate_buffer: Whether to create a buffer. It holds one value per key, duplicates included, row by
            row.

    Returns:
        The distinct keys, the offsets of their values, and the buffer (None without `generate_buffer`).
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
    """Record values for a buffer, at the offsets of their keys. Differentiable in `value`.

    If several values go to the same elements, the last one stays: values of one fill count in the order of
    `pos`, fills in the order of the calls. A value that is overwritten has no gradient.

    Args:
        pos: For each row, numbers of distinct keys, counted over all rows.
        value: float [size]: the values of these keys, concatenated.
        value_offset_map: Where each distinct key's values go.
        value_buffer: The buffer to fill.
        dims: The size of a value, for each row.

    Returns:
        The same buffer.

    Raises:
        InputError: `value` is too short, or `pos` has an unknown number; the buffer is unchanged.
        UsageError: The buffer is already finalized.
    """
    if not isinstance(value_buffer, SharedBuffer):
        raise InputError(f"value_buffer must be a SharedBuffer, got {checks.kind(value_buffer)}")
    if value_buffer.finalized:
        raise UsageError("value_buffer is already finalized; fill it before finalize_shared_tensor")
    value = checks.floats(value, "value", (None,))
    source, target, widths = _runs(pos, value_offset_map, dims)
    inside = (target >= 0) & (target + widths <= value_buffer.size)
    checks.require(inside, "value_offset_map exceeds value_buffer")
    needed = (pos.lengths() * _dims(dims, pos, "pos")).sum()
    checks.require(needed <= value.shape[0], "value is too short for pos and dims")
    value_buffer.fills.append((value, source, target, widths))
    return value_buffer


def fill_with_offset_map_gradient(
    pos: Ragged, grad: Tensor, value_offset_map: OffsetMap, dims: Sequence[int]
) -> Tensor:
    """Compute the gradient of a fill's `value` as Monolith defines it.

    A value that a later one overwrites counts as if it had been used; autograd gives it no gradient.

    Args:
        pos: As in `fill_with_offset_map`.
        grad: float [buffer size], the gradient of the buffer.
        value_offset_map: As in `fill_with_offset_map`.
        dims: As in `fill_with_offset_map`.

    Returns:
        For each value, the sum of `grad` over the offsets of its key, concatenated.
    """
    grad = checks.floats(grad, "grad", (None,))
    source, target, widths = _runs(pos, value_offset_map, dims)
    size = int((pos.lengths() * _dims(dims, pos, "pos")).sum())
    return moved(grad, target, source, widths, size, "value_offset_map")


def finalize_shared_tensor(
    shared_tensor_handles: Sequence[SharedBuffer],
    dtype: torch.dtype = torch.float32,
    shape: Sequence[int | None] | None = None,
) -> Tensor:
    """Return a filled buffer as a tensor, with zeros where nothing was filled in.

    Args:
        shared_tensor_handles: What the fills returned; all must be the same buffer.
        dtype: The float dtype of the result.
        shape: The shape of the result. One size may be None (or -1): it follows from the others. None
            means one dimension.

    Returns:
        The buffer, on the device of the values that were filled in. The buffer cannot be used again.

    Raises:
        InputError: The handles differ, or `dtype` or `shape` does not match; the buffer can still be used.
        UsageError: The buffer is already finalized.
    """
    handles = checks.as_list(shared_tensor_handles, "shared_tensor_handles")
    for number, handle in enumerate(handles):
        if not isinstance(handle, SharedBuffer) or handle is not handles[0]:
            raise InputError(f"shared_tensor_handles[{number}] is not the buffer of shared_tensor_handles[0]")
    if not handles:
        raise InputError(
            "shared_tensor_handles is empty; pass the buffers that fill_with_offset_map returned"
        )
    buffer = handles[0]
    if buffer.finalized:
        raise UsageError(
            "this buffer is already finalized; create another with unique_key_with_value_and_offset"
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(f"dtype must be a float dtype, got {dtype!r}")
    sizes = [None] if shape is None else checks.as_list(shape, "shape")
    dims = [-1 if dim is None else dim for dim in sizes]
    for dim in dims:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise InputError(f"shape must hold sizes and at most one None, got {shape!r}")
    filled = _filled(buffer, dtype)
    try:
        result = filled.view(dims)
    except RuntimeError:
        raise InputError(f"shape {shape!r} does not match the buffer's {buffer.size} elements") from None
    buffer.finalized = True
    return result


def _filled(buffer: SharedBuffer, dtype: torch.dtype) -> Tensor:
    """Copy the values of all fills, [size]."""
    if not buffer.fills:
        return torch.zeros(buffer.size, dtype=dtype, device="cpu")
    values, sources, targets, widths = (list(each) for each in zip(*buffer.fills, strict=True))
    starts = accumulate((value.shape[0] for value in values), initial=0)
    source = torch.cat([each + start for each, start in zip(sources, starts, strict=False)])
    at, to, width = _visible_runs(source, torch.cat(targets), torch.cat(widths))
    return moved(torch.cat([value.to(dtype) for value in values]), at, to, width, buffer.size, "value")


def _visible_runs_any(source: Tensor, target: Tensor, widths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Stable, so that the last of several equal targets is the last run.
    order = torch.argsort(target, stable=True)
    start, end = target[order], (target + widths)[order]
    if bool((end[:-1] <= start[1:]).all()):
        return source.clone(), target.clone(), widths.clone()
    last = torch.cat([start[1:] != start[:-1], start.new_ones(1, dtype=torch.bool)])
    if bool((last[:-1] | (end[:-1] == end[1:])).all()):  # runs of one target have one width
        start, end = start[last], end[last]
        if bool((end[:-1] <= start[1:]).all()):
            return source[order][last], start, end - start
    # Runs that overlap in part: one run per element, and of each element the last.
    total = int(widths.sum())
    run = torch.repeat_interleave(
        torch.arange(widths.shape[0], device=source.device), widths, output_size=total
    )
    within = torch.arange(total, device=source.device) - (torch.cumsum(widths, 0) - widths)[run]
    return _visible_runs_any(source[run] + within, target[run] + within, torch.ones_like(run))


def _visible_runs_fake(source: Tensor, target: Tensor, widths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count = new_size()
    return source.new_empty(count), target.new_empty(count), widths.new_empty(count)


_visible_runs = define_op(
    "visible_runs(Tensor source, Tensor target, Tensor widths) -> (Tensor, Tensor, Tensor)",
    native=_visible_runs_any,
    reference=_visible_runs_any,
    fake=_visible_runs_fake,
)
"""Return runs that do not overlap and copy the same as all given runs, one after the other."""


def _dims(dims: Sequence[int], column: Ragged, name: str) -> Tensor:
    """Check the size of a value for each row of the column; return int64 [rows]."""
    sizes = checks.sizes(dims, "dims")
    rows = column.row_splits.shape[0] - 1
    if len(sizes) != rows:
        raise InputError(f"dims has {len(sizes)} sizes for {rows} rows of {name}")
    return torch.tensor(sizes, dtype=torch.int64, device=column.values.device)


def _runs(pos: Ragged, where: OffsetMap, dims: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """List the copies of a fill: start in the values, start in the buffer, and size of each."""
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


def normalize_merged_split(row_split: Tensor, size: Tensor) -> Tensor:
    """Merge concatenated row splits, each of which begins at 0, into the row splits of all rows.

    Args:
        row_split: int [n], the concatenated row splits.
        size: int [k], the length of each.

    Returns:
        int64 [n + 1 - k].
    """
    splits = checks.int64(row_split, "row_split")
    sizes = checks.int64(size, "size")
    if sizes.shape[0] < 1:
        raise InputError("size is empty; pass the length of each row_split")
    total = splits.shape[0]
    checks.require((sizes >= 1).all() & (sizes.sum() == total), "size must add up to row_split's length")
    ends = torch.cumsum(sizes, 0)
    first = torch.zeros_like(splits, dtype=torch.bool).index_fill(0, ends - sizes, True)
    checks.require(torch.where(first, splits, 0) == 0, "row_split: each part must begin at 0")
    steps = torch.diff(splits, prepend=splits.new_zeros(1))
    checks.require((steps >= 0) | first, "row_split must not descend within a part")
    # Leading zeros are dropped; every other entry adds its step to the running total.
    kept = torch.argsort(first.to(torch.int8), stable=True)[: total - sizes.shape[0]]
    return torch.cat([splits.new_zeros(1), torch.cumsum(steps[kept], 0)])


def aligned_flat_concat(inputs: Sequence[Tensor], scale: float = 1.0, alignment: int = 64) -> Tensor:
    """Flatten and concatenate tensors, each padded with zeros to a multiple of `alignment` bytes.

    Args:
        inputs: Float tensors of one dtype.
        scale: A factor for the result.
        alignment: The alignment of each tensor in bytes, a multiple of the element size.

    Returns:
        A flat tensor of the dtype of the inputs.
    """
    tensors = checks.same_floats(inputs, "inputs")
    pieces = [
        torch.nn.functional.pad(t.reshape(-1), (0, _aligned(t, alignment) - t.numel())) for t in tensors
    ]
    flat = torch.cat(pieces)
    return flat if checks.number(scale, "scale") == 1 else flat * scale


def aligned_flat_split(inputs: Sequence[Tensor], flat: Tensor, alignment: int = 64) -> list[Tensor]:
    """Split the result of `aligned_flat_concat` into views with the shapes of the inputs.

    Args:
        inputs: Float tensors of one dtype, for their shapes.
        flat: What `aligned_flat_concat` returned.
        alignment: The alignment in bytes that `aligned_flat_concat` got.

    Returns:
        A view of `flat` for each input, in its shape.
    """
    tensors = checks.same_floats(inputs, "inputs")
    sizes = [_aligned(t, alignment) for t in tensors]
    flat = checks.floats(flat, "flat", (sum(sizes),))
    return [piece[: t.numel()].view(t.shape) for piece, t in zip(flat.split(sizes), tensors, strict=True)]


monolith_aligned_flat_concat = aligned_flat_concat
monolith_aligned_flat_split = aligned_flat_split


def _aligned(tensor: Tensor, alignment: int) -> int:
    """Return the number of elements, rounded up to a multiple of `alignment` bytes."""
    item = tensor.element_size()
    if checks.integer(alignment, "alignment") < item or alignment % item:
        raise InputError(f"alignment must be a multiple of {item} bytes, got {alignment}")
    return -(-tensor.numel() * item // alignment) * alignment // item
