"""Monolith's distribution ops: split ids by shard, gather the rows of ids, reduce the rows of a batch.

Thin adapters over `megalith.ops`. Arguments and results are Monolith's, with these decisions, which also hold
for `layout_ops`: an index out of range, an unknown id or a short buffer raises InputError; the mean of an
empty row is 0; `scale` works on every device; offsets are int64; every op is differentiable where a gradient
makes sense, on any device, in any float type. A length given as a tensor is read on the host; inside
torch.compile pass it as an int.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.library import define_op, new_size
from megalith.ops import checks
from megalith.ops.bucketing import _bucketize, dedup, match, split_rows
from megalith.ops.gather_rows import gather, gather_pieces, scatter_pieces, scatter_sum
from megalith.ops.move_runs import moved, take
from megalith.ops.pooling import Bags, OutputSlice, pool_rows
from megalith.ragged import Ragged
from megalith.routing import Router


def __getattr__(name: str) -> Any:
    if name not in ("fused_embedding_to_layout", "fused_embedding_to_layout_grad"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megalith.compat.monolith import layout_ops  # needs protobuf

    return getattr(layout_ops, name)


def given(value: Any) -> Any:
    """Return what TensorFlow would convert, a list or array of numbers, as a tensor; others unchanged."""
    if isinstance(value, list | tuple | np.ndarray) and not any(isinstance(x, Tensor) for x in value):
        try:
            return torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            return value
    return value


# ---- ids by shard


def split_by_indices(indices: Tensor, tensor: Tensor, num_splits: int) -> list[Tensor]:
    """Split a tensor by row: row i goes to output `indices[i]`, in input order.

    Args:
        indices: int [n], each in 0:num_splits.
        tensor: [n, ...] of any dtype.
        num_splits: The number of outputs.

    Returns:
        `num_splits` tensors [k, ...].
    """
    return split_rows(tensor, indices, num_splits)


def ragged_split_by_indices(
    indices: Tensor, num: Ragged, num_splits: int
) -> tuple[list[Ragged], list[Ragged]]:
    """Split a column by value: value i goes to output `indices[i]`. Every output has all rows.

    Args:
        indices: int [n], one per value, each in 0:num_splits.
        num: The column with n values.
        num_splits: The number of outputs.

    Returns:
        The parts, and columns of the same shape with the positions of their values in the input.
    """
    if not isinstance(num, Ragged):
        raise InputError(f"num must be a Ragged, got {checks.kind(num)}")
    num_splits = checks.integer(num_splits, "num_splits")
    owners = checks.int64(indices, "indices", (num.values.shape[0],)).to(torch.int32)
    checks.with_data(num.row_splits, "num")
    lengths, _ = _bucketize(None, num.row_splits, owners, [], num_splits, "indices")
    values = split_rows(num.values, indices, num_splits)
    positions = split_rows(torch.arange(owners.shape[0], device=owners.device), indices, num_splits)
    splits = [
        Ragged.from_lengths(v, part).row_splits
        for v, part in zip(values, lengths.chunk(num_splits), strict=True)
    ]
    return (
        [Ragged(v, s) for v, s in zip(values, splits, strict=True)],
        [Ragged(p, s) for p, s in zip(positions, splits, strict=True)],
    )


def reorder_by_indices(input: Tensor, shard_ids: Tensor, num_of_shards: int) -> tuple[Tensor, Tensor]:
    """Group distinct ids by shard. Within a shard, the id that first occurs last comes first.

    Args:
        input: int [n], or rows [n, d] whose first column is the id.
        shard_ids: int [n]; the first occurrence of an id decides its shard.
        num_of_shards: The number of shards.

    Returns:
        The distinct ids (or rows), and int32 [num_of_shards] with the number of ids of each shard.
    """
    checks.tensor(input, "input", None)
    if input.dim() not in (1, 2) or (input.dim() == 2 and input.shape[1] < 1) or input.is_complex():
        raise InputError(f"input must be numbers [n] or [n, d], got {input.dtype} {list(input.shape)}")
    column = input if input.dim() == 1 else input[:, 0]
    num_of_shards = checks.integer(num_of_shards, "num_of_shards")
    ids = dedup(_as_ids(column), owners=shard_ids, num_shards=num_of_shards, name="shard_ids")
    counts = ids.counts[:, 0]
    ends = torch.cumsum(counts, 0)
    # Position j of a shard that covers start:end moves to start + end - 1 - j.
    mirror = torch.repeat_interleave(2 * ends - counts - 1, counts, output_size=ids.first.shape[0])
    order = mirror - torch.arange(ids.first.shape[0], device=mirror.device)
    if input.dtype == torch.int64 and input.dim() == 1:
        return ids.ids.index_select(0, order), counts.to(torch.int32)
    return input.index_select(0, ids.first.index_select(0, order)), counts.to(torch.int32)


def _as_ids(column: Tensor) -> Tensor:
    """Map numbers to int64 so that two results are equal exactly if the numbers are."""
    if not column.is_floating_point():
        return column.to(torch.int64)
    return (column.to(torch.float64) + 0.0).view(torch.int64)  # -0 + 0 is 0


class FusedReorder(NamedTuple):
    """Result of `fused_reorder_by_indices`."""

    output: Tensor
    """int64 [u]: distinct ids, ordered by shard, then input, then first occurrence."""
    shard_sizes: Tensor
    """int32 [shards]: number of distinct ids of each shard."""
    sharded_slot_sizes: Tensor
    """int32 [shards * inputs]: number of distinct ids of each shard and input."""
    emb_offset_sz: Tensor
    """int32 [inputs]: number of ids of each input, duplicates included."""
    fused_emb_offset: Tensor
    """int64 [n]: where the row of each id begins in the concatenated rows of `output`."""


def fused_reorder_by_indices(
    inputs: Sequence[Tensor], num_of_shards: int | Router, dim_sizes: Sequence[int]
) -> FusedReorder:
    """Group the distinct ids of several inputs by the shard that owns them.

    Args:
        inputs: int [n] each; ids are compared within an input.
        num_of_shards: A Router, or the number of shards for roundrobin.
        dim_sizes: The row size of each input.

    Returns:
        The distinct ids by shard and input, their counts, and where the row of each id of the inputs begins.
    """
    inputs = checks.int64_vectors(inputs, "inputs")
    dims = checks.sizes(dim_sizes, "dim_sizes")
    checks.same_length(inputs=inputs, dim_sizes=dims)
    if not inputs:
        raise InputError("inputs is empty; pass at least one id tensor")
    router = num_of_shards
    if not isinstance(router, Router):
        router = Router("roundrobin", checks.integer(num_of_shards, "num_of_shards"))
    sizes = [ids.shape[0] for ids in inputs]
    ids = torch.cat(inputs)
    splits = torch.tensor([*accumulate(sizes, initial=0)], device=ids.device)
    found = dedup(ids, splits, router, widths=dims)
    assert found.offsets is not None
    return FusedReorder(
        found.ids,
        found.counts.sum(1).to(torch.int32),
        found.counts.flatten().to(torch.int32),
        torch.tensor(sizes, dtype=torch.int32, device=ids.device),
        found.offsets,
    )


# ---- rows of ids


def map_id_to_embedding(
    ids: Sequence[Tensor], embeddings: Sequence[Tensor], input: Tensor, use_multi_threads: bool = True
) -> Tensor:
    """Gather the row of each id of the input from several pieces of (ids, rows).

    Args:
        ids: int [k] each; an id in several pieces takes its row from the first one.
        embeddings: float [k, d] each.
        input: int [...].

    Returns:
        [..., d].

    Raises:
        InputError: An id of the input is in no piece.
    """
    pieces, rows = _pieces(ids), checks.as_list(embeddings, "embeddings")
    checks.same_length(ids=pieces, embeddings=rows)
    dim = checks.floats(rows[0], "embeddings[0]", (None, None)).shape[1]
    for i, (piece, block) in enumerate(zip(pieces, rows, strict=True)):
        checks.floats(block, f"embeddings[{i}]", (piece.shape[0], dim))
    return gather(torch.cat(rows), match(torch.cat(pieces), input, name="input"))


def map_id_to_embedding_gradient_back_prop(
    ids: Sequence[Tensor], input: Tensor, grads: Tensor
) -> list[Tensor]:
    """Sum gradient rows by piece and id: the gradient of `map_id_to_embedding`.

    Args:
        grads: float [..., d], for the ids of `input`.

    Returns:
        A [k, d] for each piece.
    """
    pieces = _pieces(ids)
    index = match(torch.cat(pieces), input, name="input").reshape(-1)
    rows = _matrix(grads, "grads", index.shape[0])
    sizes = [p.shape[0] for p in pieces]
    return list(scatter_sum(rows, index, sum(sizes), name="input").split(sizes))


def gather_embeddings_by_input(
    ids: Tensor, embeddings: Tensor, input: Tensor, use_multi_threads: bool = False
) -> tuple[Tensor, Tensor]:
    """Gather the row of each id of the input.

    Args:
        ids: int [k].
        embeddings: float [k, d].
        input: int [...].

    Returns:
        The rows [..., d], and the position of each id in `ids`, int64 [...].
    """
    ids = checks.int64(ids, "ids")
    embeddings = checks.floats(embeddings, "embeddings", (ids.shape[0], None))
    index = match(ids, input, name="input")
    return gather(embeddings, index), index


def gather_embeddings_by_ids_gradient_back_prop(ids: Tensor, grads: Tensor, index_mapping: Tensor) -> Tensor:
    """Sum gradient rows by position: the gradient of `gather_embeddings_by_input`.

    Args:
        ids: int [k].
        grads: float [..., d].
        index_mapping: int [...], the positions that the forward op returned.

    Returns:
        [k, d].
    """
    ids = checks.int64(ids, "ids")
    index = checks.int64(index_mapping, "index_mapping", None).reshape(-1)
    rows = _matrix(grads, "grads", index.shape[0])
    return scatter_sum(rows, index, ids.shape[0], name="index_mapping")


def fused_gather_embeddings_by_input(
    fused_embeddings: Tensor, fused_embedding_offsets: Sequence[Tensor], embedding_dims: Sequence[int]
) -> list[Tensor]:
    """Gather rows of several sizes from one flat buffer.

    Args:
        fused_embeddings: float [size].
        fused_embedding_offsets: int [n] each: the element where each row begins.
        embedding_dims: The row size of each output.

    Returns:
        A [n, dim] for each tensor of offsets.
    """
    fused = checks.floats(fused_embeddings, "fused_embeddings", (None,))
    offsets, dims = _offsets(fused_embedding_offsets, embedding_dims, "fused_embedding_offsets")
    return gather_pieces(fused, offsets, dims, name="fused_embedding_offsets")


def fused_gather_embeddings_by_input_gradient(
    fused_embeddings: int | Tensor,
    grads: Sequence[Tensor],
    embedding_offsets: Sequence[Tensor],
    embedding_dims: Sequence[int],
    scale: float | Tensor = 1.0,
) -> Tensor:
    """Sum gradient rows into a flat buffer: the gradient of `fused_gather_embeddings_by_input`.

    Args:
        fused_embeddings: The number of elements of the buffer, despite its name.
        grads: float [n, dim] each.
        scale: A factor for the result.

    Returns:
        [fused_embeddings].
    """
    size = checks.scalar(fused_embeddings, "fused_embeddings")
    offsets, dims = _offsets(embedding_offsets, embedding_dims, "embedding_offsets")
    checks.same_length(grads=checks.as_list(grads, "grads"), embedding_offsets=offsets)
    rows = [checks.floats(g, f"grads[{m}]", (offsets[m].shape[0], dims[m])) for m, g in enumerate(grads)]
    total = scatter_pieces(rows, offsets, size, name="embedding_offsets")
    return total if checks.number(scale, "scale") == 1 else total * scale


def _offsets(offsets: Sequence[Tensor], dims: Sequence[int], name: str) -> tuple[list[Tensor], list[int]]:
    checked = checks.int64_vectors(offsets, name)
    sizes = checks.sizes(dims, "embedding_dims")
    lists: dict[str, list[Any]] = {name: checked, "embedding_dims": sizes}
    checks.same_length(**lists)
    return checked, sizes


def _pieces(ids: Sequence[Tensor]) -> list[Tensor]:
    pieces = checks.int64_vectors(ids, "ids")
    if not pieces:
        raise InputError("ids is empty; pass at least one tensor")
    return pieces


def _matrix(grads: Tensor, name: str, rows: int) -> Tensor:
    checks.floats(grads, name, None)
    if grads.dim() < 1 or grads.shape[:-1].numel() != rows:
        raise InputError(f"{name} must have one row for each of the {rows} ids, got {list(grads.shape)}")
    return grads.reshape(rows, grads.shape[-1])


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
        grad: float [buffer size], the gradient of the buffer.

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
    dims = [-1 if dim is None else checks.integer(dim, "shape: a size", -1) for dim in sizes]
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
    # One run per element, and of each element the last.
    total = int(widths.sum())
    run = torch.repeat_interleave(
        torch.arange(widths.shape[0], device=source.device), widths, output_size=total
    )
    within = torch.arange(total, device=source.device) - (torch.cumsum(widths, 0) - widths)[run]
    source, target = source[run] + within, target[run] + within
    order = torch.argsort(target, stable=True)
    last = order[torch.cat([target[order].diff() != 0, order.new_ones(1, dtype=torch.bool)])]
    return source[last], target[last], torch.ones_like(last)


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


def normalize_merged_split(row_split: Tensor, row_split_size: Tensor) -> Tensor:
    """Merge concatenated row splits, each of which begins at 0, into the row splits of all rows.

    Args:
        row_split: int [n], the concatenated row splits.
        row_split_size: int [k], the length of each.

    Returns:
        int64 [n + 1 - k].
    """
    splits = checks.int64(given(row_split), "row_split")
    sizes = checks.int64(given(row_split_size), "row_split_size")
    if sizes.shape[0] < 1:
        raise InputError("row_split_size is empty; pass the length of each row_split")
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
    # In elements, rounded up to a multiple of `alignment` bytes.
    item = tensor.element_size()
    if checks.integer(alignment, "alignment") < item or alignment % item:
        raise InputError(f"alignment must be a multiple of {item} bytes, got {alignment}")
    return -(-tensor.numel() * item // alignment) * alignment // item


# ---- rows of a batch


def reduce_sum(
    id_indices: Tensor, id_values: Tensor, id_length: int | Tensor, name: str | None = None
) -> Tensor:
    """Sum the rows of each batch row.

    Args:
        id_indices: int [n, 1] or [n], the batch row of each value.
        id_values: float [n, d].
        id_length: The number of batch rows, an int or a tensor of one element.
    """
    index, values, size = _segments(id_indices, id_values, id_length)
    return scatter_sum(values, index, size, name="id_indices")


def reduce_mean(
    id_indices: Tensor, id_values: Tensor, id_length: int | Tensor, name: str | None = None
) -> Tensor:
    """Average the rows of each batch row; a batch row without values is 0. Arguments as of `reduce_sum`."""
    index, values, size = _segments(id_indices, id_values, id_length)
    total = scatter_sum(_wide(values), index, size, name="id_indices")
    counts = scatter_sum(torch.ones_like(index, dtype=total.dtype)[:, None], index, size, name="id_indices")
    return (total / counts.clamp(min=1)).to(values.dtype)


def reduce_sqrtn(
    id_indices: Tensor, id_values: Tensor, id_length: int | Tensor, name: str | None = None
) -> Tensor:
    """Compute the L2 norm of each column over the rows of a batch row; its gradient at 0 is 0.

    This is not the combiner `Sqrtn`, which is sum / sqrt(n); the name is Monolith's. Arguments as of
    `reduce_sum`.
    """
    index, values, size = _segments(id_indices, id_values, id_length)
    wide = _wide(values)
    squares = scatter_sum(wide * wide, index, size, name="id_indices")
    zero = squares == 0
    return torch.where(zero, 0, torch.where(zero, 1, squares).sqrt()).to(values.dtype)


def fused_sorted_segment_sum(
    indices: Sequence[Tensor], values: Sequence[Tensor], shapes: Sequence[Sequence[int] | Tensor]
) -> list[Tensor]:
    """Compute several segment sums.

    Args:
        indices: int [n] each, the segment of each value; they need not be sorted.
        values: float [n, d] each.
        shapes: (segments, d) of each, as sizes or as an int [2] tensor. Tensors are read on the host.

    Returns:
        A [segments, d] for each.
    """
    named = {"indices": indices, "values": values, "shapes": shapes}
    lists = [checks.as_list(items, name) for name, items in named.items()]
    checks.same_length(**named)
    results = []
    for i, (index, rows, shape) in enumerate(zip(*lists, strict=True)):
        rows = checks.floats(rows, f"values[{i}]", (None, None))
        segments = _num_segments(shape, f"shapes[{i}]", rows, f"values[{i}]")
        index, rows, size = _segments(index, rows, segments, names=(f"indices[{i}]", f"values[{i}]"))
        results.append(scatter_sum(rows, index, size, name=f"indices[{i}]"))
    return results


def _num_segments(shape: Sequence[int] | Tensor, name: str, rows: Tensor, rows_name: str) -> int:
    """Check (segments, columns), given as sizes or as a tensor; return the number of segments."""
    if isinstance(shape, Tensor):
        given = checks.with_data(checks.integers(shape, name, (2,)), name)
        if torch.compiler.is_compiling():  # the values are unknown: a check is a part of the graph
            checks.require(
                given[1] == rows.shape[1], f"{name} has another number of columns than {rows_name}"
            )
            return checks.scalar(given[0], name)
        shape = given.tolist()
    if not isinstance(shape, list | tuple) or len(shape) != 2:
        raise InputError(f"{name} must be (segments, columns), got {shape!r}")
    segments, columns = (checks.integer(size, name, least=0) for size in shape)
    checks.floats(rows, rows_name, (None, columns))
    return segments


def fused_reduce_sum_and_split(
    id_indices: Tensor,
    id_values: Tensor,
    id_length: int | Tensor,
    split_dims: Sequence[int],
    name: str | None = None,
) -> list[Tensor]:
    """Sum the rows of each batch row and split the sums by column. Arguments as of `reduce_sum`.

    Args:
        split_dims: Sizes that add up to d.

    Returns:
        A [id_length, dim] for each size.
    """
    index, values, size = _segments(id_indices, id_values, id_length)
    dims = checks.sizes(split_dims, "split_dims")
    if sum(dims) != values.shape[1]:
        raise InputError(f"split_dims add up to {sum(dims)}, id_values have {values.shape[1]} columns")
    return list(scatter_sum(values, index, size, name="id_indices").split(dims, dim=1))


def fused_reduce_and_split(
    splits: Sequence[Tensor],
    embeddings: Sequence[Tensor],
    slice_dims: Sequence[Sequence[int]],
    name: str | None = None,
) -> list[Tensor]:
    """Sum each row of several columns and split the sums.

    Args:
        splits: Row splits, int [batch + 1], of each column.
        embeddings: float [n, d] of each column.
        slice_dims: For each column, sizes that add up to d.

    Returns:
        A [batch, dim] for each size of each column, in order.
    """
    named = {"splits": splits, "embeddings": embeddings, "slice_dims": slice_dims}
    for name, items in named.items():
        checks.as_list(items, name)
    checks.same_length(**named)
    results: list[Tensor] = []
    for k, (cuts, rows, sizes) in enumerate(zip(splits, embeddings, slice_dims, strict=True)):
        dims = checks.sizes(sizes, f"slice_dims[{k}]")
        rows = checks.floats(rows, f"embeddings[{k}]", (None, sum(dims)))
        offsets = checks.splits(cuts, f"splits[{k}]", rows.shape[0])
        columns = pairwise(accumulate(dims, initial=0))
        parts = tuple(OutputSlice(i, 0, start, end) for i, (start, end) in enumerate(columns))
        shapes = [(offsets.shape[0] - 1, dim) for dim in dims]
        results += pool_rows(rows, None, [Bags(offsets, parts)], shapes, name=f"embeddings[{k}]")
    return results


fused_reduce_and_split_gpu = fused_reduce_and_split


def _wide(values: Tensor) -> Tensor:
    """Convert 16-bit floats to float32, because sums of counts and squares would overflow."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _segments(
    index: Tensor, values: Tensor, size: int | Tensor, names: tuple[str, str] = ("id_indices", "id_values")
) -> tuple[Tensor, Tensor, int]:
    index, values, size = given(index), given(values), given(size)
    values = checks.floats(values, names[1], (None, None))
    if isinstance(index, Tensor) and index.dim() == 2:
        index = checks.int64(index, names[0], (values.shape[0], 1))[:, 0]
    return checks.int64(index, names[0], (values.shape[0],)), values, checks.scalar(size, "id_length")
