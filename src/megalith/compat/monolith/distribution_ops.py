"""The distribution ops under the names Monolith users know: thin adapters over the core ops.

Arguments and results are Monolith's, with these decisions: an index out of range, an unknown id or a
short buffer raises InputError; the mean of an empty row is 0; `scale` works everywhere; offsets are int64;
every op is differentiable where a gradient makes sense, on any device, in any float type. Lengths given
as tensors are read on the host; inside torch.compile give them as plain numbers.

The layout ops and their encoding live in layout.py, re-exported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.compat.monolith.layout_ops import (
    ShardedFids,
    fused_embedding_to_layout,
    fused_embedding_to_layout_grad,
    sharding_sparse_fids,
)
from megalith.errors import InputError, UsageError
from megalith.ops import checks
from megalith.ops.bucketing import _bucketize, dedup, match, split_rows
from megalith.ops.gather_rows import gather, gather_pieces, scatter_pieces, scatter_sum
from megalith.ops.move_runs import moved, take
from megalith.ops.pool_rows import pool_rows
from megalith.ops.pooling import Bags, OutputSlice
from megalith.ragged import Ragged
from megalith.routing import Router

__all__ = [
    "FusedReorder",
    "OffsetMap",
    "ShardedFids",
    "SharedBuffer",
    "UniqueKeys",
    "aligned_flat_concat",
    "aligned_flat_split",
    "fill_with_offset_map",
    "fill_with_offset_map_gradient",
    "finalize_shared_tensor",
    "fused_embedding_to_layout",
    "fused_embedding_to_layout_grad",
    "fused_gather_embeddings_by_input",
    "fused_gather_embeddings_by_input_gradient",
    "fused_reduce_and_split",
    "fused_reduce_and_split_gpu",
    "fused_reduce_sum_and_split",
    "fused_reorder_by_indices",
    "fused_sorted_segment_sum",
    "gather_embeddings_by_ids_gradient_back_prop",
    "gather_embeddings_by_input",
    "map_id_to_embedding",
    "map_id_to_embedding_gradient_back_prop",
    "normalize_merged_split",
    "ragged_split_by_indices",
    "reduce_mean",
    "reduce_sqrtn",
    "reduce_sum",
    "reorder_by_indices",
    "sharding_sparse_fids",
    "split_by_indices",
    "unique_key_with_value_and_offset",
]

# ---- parting ids by shard


def split_by_indices(indices: Tensor, tensor: Tensor, num_splits: int) -> list[Tensor]:
    """Row i of the tensor goes to output `indices[i]`, order kept: [n, ...] -> num_splits x [k, ...]."""
    return split_rows(tensor, indices, num_splits)


def ragged_split_by_indices(
    indices: Tensor, num: Ragged, num_splits: int
) -> tuple[list[Ragged], list[Ragged]]:
    """Parts a column by a number per value; every output keeps the number of rows.

    indices: int [n], one per value. Returns the parts, and the positions of their values in the input.
    """
    if not isinstance(num, Ragged):
        raise InputError(f"num must be a Ragged, got {checks.kind(num)}")
    num_splits = checks.positive(num_splits, "num_splits")
    owners = checks.whole(indices, "indices", (num.values.shape[0],)).to(torch.int32)
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
    """Distinct ids grouped by shard, within a shard the last one seen first.

    input: int [n], or float [n, d] whose first column is the id. shard_ids: int [n]; an id's first
    occurrence decides. Returns the distinct ids (rows) and int32 [num_of_shards] how many each shard has.
    """
    checks.tensor(input, "input", None)
    if input.dim() not in (1, 2) or (input.dim() == 2 and input.shape[1] < 1) or input.is_complex():
        raise InputError(f"input must be numbers [n] or [n, d], got {input.dtype} {list(input.shape)}")
    column = input if input.dim() == 1 else input[:, 0]
    num_of_shards = checks.positive(num_of_shards, "num_of_shards")
    ids = dedup(_as_ids(column), owners=shard_ids, num_shards=num_of_shards, name="shard_ids")
    counts = ids.counts[:, 0]
    ends = torch.cumsum(counts, 0)
    # Place j of a shard that covers start:end moves to start + end - 1 - j.
    mirror = torch.repeat_interleave(2 * ends - counts - 1, counts, output_size=ids.first.shape[0])
    order = mirror - torch.arange(ids.first.shape[0], device=mirror.device)
    if input.dtype == torch.int64 and input.dim() == 1:
        return ids.ids.index_select(0, order), counts.to(torch.int32)
    return input.index_select(0, ids.first.index_select(0, order)), counts.to(torch.int32)


def _as_ids(column: Tensor) -> Tensor:
    """Numbers as int64 such that equal ones stay equal and others differ."""
    if not column.is_floating_point():
        return column.to(torch.int64)
    return (column.to(torch.float64) + 0.0).view(torch.int64)  # -0 + 0 is 0


class FusedReorder(NamedTuple):
    """What `fused_reorder_by_indices` gives."""

    output: Tensor
    """int64 [u]: distinct ids by shard, then input, then first occurrence."""
    shard_sizes: Tensor
    """int32 [shards]: distinct ids of each shard."""
    sharded_slot_sizes: Tensor
    """int32 [shards * inputs]: the same by shard and input."""
    emb_offset_sz: Tensor
    """int32 [inputs]: ids of each input, repeats included."""
    fused_emb_offset: Tensor
    """int64 [n]: where each id's row begins when the rows of `output` lie end to end."""


def fused_reorder_by_indices(
    inputs: Sequence[Tensor], num_of_shards: int | Router, dim_sizes: Sequence[int]
) -> FusedReorder:
    """Distinct ids of several inputs, grouped by the shard that owns them.

    inputs: int [n] each; ids are compared within an input. num_of_shards: a Router, or a number for
    roundrobin. dim_sizes: the row size of each input.
    """
    inputs = [checks.whole(ids, f"inputs[{m}]") for m, ids in enumerate(checks.tensors(inputs, "inputs"))]
    dims = checks.sizes(dim_sizes, "dim_sizes")
    checks.same_length(inputs=inputs, dim_sizes=dims)
    if not inputs:
        raise InputError("inputs is empty; give at least one id tensor")
    router = num_of_shards
    if not isinstance(router, Router):
        router = Router("roundrobin", checks.positive(num_of_shards, "num_of_shards"))
    sizes = [ids.shape[0] for ids in inputs]
    ids = torch.cat(inputs)
    splits = torch.tensor(_running(sizes), device=ids.device)
    found = dedup(ids, splits, router, widths=dims)
    assert found.offsets is not None
    return FusedReorder(
        found.ids,
        found.counts.sum(1).to(torch.int32),
        found.counts.flatten().to(torch.int32),
        torch.tensor(sizes, dtype=torch.int32, device=ids.device),
        found.offsets,
    )


def _running(sizes: Sequence[int]) -> list[int]:
    """0 and the running sums."""
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    return sums


# ---- one buffer for the rows of many slots


class OffsetMap(NamedTuple):
    """Where in a buffer each distinct key's rows go."""

    offsets: Ragged
    """A row per distinct key: the elements at which its occurrences begin, ascending."""
    row_splits: Tensor
    """int64 [rows + 1]: the distinct keys of each row of the input."""

    def to_lists(self) -> list[list[list[int]]]:
        """Row -> distinct key -> offsets."""
        flat, splits = self.offsets.to_lists(), self.row_splits.tolist()
        return [flat[a:b] for a, b in pairwise(splits)]


class SharedBuffer:
    """The rows of many slots in one piece, filled by one call per shard, then finalized once.

    Nothing is written before it is finalized, so gradients reach every value that was filled in.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fills: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # values, source, target, widths
        self.finalized = False


class UniqueKeys(NamedTuple):
    """What `unique_key_with_value_and_offset` gives."""

    unique_key: Ragged
    value_offset: OffsetMap
    value_buffer: SharedBuffer | None


def unique_key_with_value_and_offset(
    key: Ragged, dims: Sequence[int], generate_buffer: bool = True
) -> UniqueKeys:
    """Distinct keys of each row in order of first occurrence, and where their values go.

    dims: the size of a value for each row. The buffer holds a value per key, repeats included, row after row.
    """
    if not isinstance(key, Ragged):
        raise InputError(f"key must be a Ragged, got {checks.kind(key)}")
    sizes = _dims(dims, key, "key")
    keys = checks.whole(key.values, "key.values")
    # One shard: distinct keys come by row, then first occurrence.
    found = dedup(keys, key.row_splits)
    per_key = torch.repeat_interleave(sizes, key.lengths(), output_size=keys.shape[0])
    offset = torch.cumsum(per_key, 0) - per_key
    order = torch.argsort(found.inverse, stable=True)
    occurrences = torch.zeros_like(found.first).scatter_add_(0, found.inverse, torch.ones_like(found.inverse))
    unique = Ragged.from_lengths(key.values[found.first], found.counts[0])
    offsets = Ragged.from_lengths(offset[order], occurrences)
    buffer = SharedBuffer(int((key.lengths() * sizes).sum())) if generate_buffer else None
    return UniqueKeys(unique, OffsetMap(offsets, unique.row_splits), buffer)


def fill_with_offset_map(
    pos: Ragged, value: Tensor, value_offset_map: OffsetMap, value_buffer: SharedBuffer, dims: Sequence[int]
) -> SharedBuffer:
    """Puts values where the map says; the buffer is the one given. Gradients go to `value`.

    pos: for each row, numbers of distinct keys (counted over all rows). value: float, flat: a chunk of the
    row's size for each of them, in order. Raises InputError if the value is too short or a number is unknown.
    """
    if not isinstance(value_buffer, SharedBuffer):
        raise InputError(f"value_buffer must be a SharedBuffer, got {checks.kind(value_buffer)}")
    if value_buffer.finalized:
        raise UsageError("this buffer was finalized before; fill it first")
    value = checks.floats(value, "value", (None,))
    source, target, widths = _runs(pos, value_offset_map, dims)
    checks.require(target + widths <= value_buffer.size, "value_offset_map leads out of value_buffer")
    needed = (pos.lengths() * _dims(dims, pos, "pos")).sum()
    checks.require(needed <= value.shape[0], "value is too short for pos and dims")
    value_buffer.fills.append((value, source, target, widths))
    return value_buffer


def fill_with_offset_map_gradient(
    pos: Ragged, grad: Tensor, value_offset_map: OffsetMap, dims: Sequence[int]
) -> Tensor:
    """The gradient of a fill's value: for each chunk the sum of the buffer's gradient over its places."""
    grad = checks.floats(grad, "grad", (None,))
    source, target, widths = _runs(pos, value_offset_map, dims)
    size = int((pos.lengths() * _dims(dims, pos, "pos")).sum())
    return moved(grad, target, source, widths, size, "value_offset_map")


def finalize_shared_tensor(
    handles: Sequence[SharedBuffer], dtype: torch.dtype = torch.float32, shape: Sequence[int] = (-1,)
) -> Tensor:
    """The buffer of the first handle as a tensor, zero where nobody filled it. A buffer is finalized once."""
    handles = checks.tensors(handles, "handles")
    for number, handle in enumerate(handles):
        if not isinstance(handle, SharedBuffer) or handle is not handles[0]:
            raise InputError(f"handles[{number}] is not the buffer of handles[0]")
    if not handles:
        raise InputError("handles is empty; give the buffers that fills returned")
    buffer = handles[0]
    if buffer.finalized:
        raise UsageError(
            "this buffer was finalized before; make another with unique_key_with_value_and_offset"
        )
    buffer.finalized = True
    out = torch.zeros(buffer.size, dtype=dtype)
    for value, source, target, widths in buffer.fills:
        filled = moved(value, source, target, widths, buffer.size, "value")
        out = out.to(value.device) + filled.to(dtype)
    try:
        return out.view(*shape)
    except RuntimeError:
        raise InputError(f"shape {tuple(shape)} does not hold the buffer of {buffer.size} elements") from None


def _dims(dims: Sequence[int], column: Ragged, name: str) -> Tensor:
    """int64 [rows]: the size of a value for each row of the column."""
    sizes = checks.sizes(dims, "dims")
    rows = column.row_splits.shape[0] - 1
    if len(sizes) != rows:
        raise InputError(f"dims has {len(sizes)} sizes for {rows} rows of {name}")
    return torch.tensor(sizes, dtype=torch.int64, device=column.values.device)


def _runs(pos: Ragged, where: OffsetMap, dims: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """For each place of each chosen key: the element of its chunk, the element of the place, the size."""
    if not isinstance(pos, Ragged) or not isinstance(where, OffsetMap):
        raise InputError("pos must be a Ragged and value_offset_map an OffsetMap")
    chosen = checks.whole(pos.values, "pos.values")
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


# ---- rows for ids


def map_id_to_embedding(
    ids: Sequence[Tensor], embeddings: Sequence[Tensor], input: Tensor, use_multi_threads: bool = True
) -> Tensor:
    """The row of each id of the input, from several pieces of (ids, rows): int [...] -> [..., d].

    ids: int [k] each, embeddings: [k, d] each; an id's first occurrence over all pieces counts. Raises
    InputError for an id that is in none. `use_multi_threads` is accepted and changes nothing:
    torch.get_num_threads() decides.
    """
    joined, rows = _join(ids, embeddings)
    return gather(rows, match(joined, input, name="input"))


def map_id_to_embedding_gradient_back_prop(
    ids: Sequence[Tensor], input: Tensor, grads: Tensor
) -> list[Tensor]:
    """Sums gradient rows by the piece and place of each id: [..., d] -> [k, d] for each piece."""
    pieces = [checks.whole(piece, f"ids[{i}]") for i, piece in enumerate(checks.tensors(ids, "ids"))]
    if not pieces:
        raise InputError("ids is empty; give at least one tensor")
    index = match(torch.cat(pieces), input, name="input").reshape(-1)
    rows = _matrix(grads, "grads", index.shape[0])
    sizes = [p.shape[0] for p in pieces]
    return list(scatter_sum(rows, index, sum(sizes), name="input").split(sizes))


def gather_embeddings_by_input(
    ids: Tensor, embeddings: Tensor, input: Tensor, use_multi_threads: bool = False
) -> tuple[Tensor, Tensor]:
    """The row of each id of the input, and its place: int [...] -> [..., d], int64 [...]."""
    ids = checks.whole(ids, "ids")
    embeddings = checks.floats(embeddings, "embeddings", (ids.shape[0], None))
    index = match(ids, input, name="input")
    return gather(embeddings, index), index


def gather_embeddings_by_ids_gradient_back_prop(ids: Tensor, grads: Tensor, index_mapping: Tensor) -> Tensor:
    """Sums gradient rows by place: [..., d], int [...] -> [m, d], a row for each of the m ids."""
    ids = checks.whole(ids, "ids")
    index = checks.whole(index_mapping, "index_mapping", None).reshape(-1)
    rows = _matrix(grads, "grads", index.shape[0])
    return scatter_sum(rows, index, ids.shape[0], name="index_mapping")


def fused_gather_embeddings_by_input(
    fused_embeddings: Tensor, fused_embedding_offsets: Sequence[Tensor], embedding_dims: Sequence[int]
) -> list[Tensor]:
    """Rows out of one flat buffer: output m is [n_m, dim_m], each row beginning at its offset."""
    fused = checks.floats(fused_embeddings, "fused_embeddings", (None,))
    offsets, dims = _offsets(fused_embedding_offsets, embedding_dims)
    return gather_pieces(fused, offsets, dims, name="fused_embedding_offsets")


def fused_gather_embeddings_by_input_gradient(
    fused_size: int | Tensor,
    grads: Sequence[Tensor],
    fused_embedding_offsets: Sequence[Tensor],
    embedding_dims: Sequence[int],
    scale: float = 1.0,
) -> Tensor:
    """Sums gradient rows into a flat buffer [fused_size], times `scale`."""
    size = _number(fused_size, "fused_size")
    offsets, dims = _offsets(fused_embedding_offsets, embedding_dims)
    checks.same_length(grads=checks.tensors(grads, "grads"), fused_embedding_offsets=offsets)
    rows = [checks.floats(g, f"grads[{m}]", (offsets[m].shape[0], dims[m])) for m, g in enumerate(grads)]
    total = scatter_pieces(rows, offsets, size, name="fused_embedding_offsets")
    return total if scale == 1 else total * scale


def _offsets(offsets: Sequence[Tensor], dims: Sequence[int]) -> tuple[list[Tensor], list[int]]:
    name = "fused_embedding_offsets"
    checked = [checks.whole(o, f"{name}[{m}]") for m, o in enumerate(checks.tensors(offsets, name))]
    sizes = checks.sizes(dims, "embedding_dims")
    checks.same_length(fused_embedding_offsets=checked, embedding_dims=sizes)
    return checked, sizes


def _join(ids: Sequence[Tensor], embeddings: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    pieces = [checks.whole(p, f"ids[{i}]") for i, p in enumerate(checks.tensors(ids, "ids"))]
    rows = checks.tensors(embeddings, "embeddings")
    checks.same_length(ids=pieces, embeddings=rows)
    if not pieces:
        raise InputError("ids is empty; give at least one tensor")
    dim = checks.floats(rows[0], "embeddings[0]", (None, None)).shape[1]
    for i, (piece, block) in enumerate(zip(pieces, rows, strict=True)):
        checks.floats(block, f"embeddings[{i}]", (piece.shape[0], dim))
    return torch.cat(pieces), torch.cat(rows)


def _matrix(grads: Tensor, name: str, rows: int) -> Tensor:
    checks.floats(grads, name, None)
    if grads.dim() < 1 or grads.shape[:-1].numel() != rows:
        raise InputError(f"{name} must have one row for each of the {rows} ids, got {list(grads.shape)}")
    return grads.reshape(rows, grads.shape[-1])


def _number(value: int | Tensor, name: str) -> int:
    """A whole number given as such or as a tensor of one element."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_floating_point():
            raise InputError(f"{name} must be one whole number, got a tensor {list(value.shape)}")
        value = int(value)
    return checks.positive(value, name, least=0)


# ---- rows of a batch


def reduce_sum(id_indices: Tensor, id_values: Tensor, id_length: int | Tensor) -> Tensor:
    """The sum of the rows of each batch row: int [n, 1] or [n], [n, d] -> [id_length, d]."""
    index, values, size = _segments(id_indices, id_values, id_length)
    return scatter_sum(values, index, size, name="id_indices")


def reduce_mean(id_indices: Tensor, id_values: Tensor, id_length: int | Tensor) -> Tensor:
    """The mean of the rows of each batch row; 0 where a batch row has none."""
    index, values, size = _segments(id_indices, id_values, id_length)
    total = scatter_sum(_wide(values), index, size, name="id_indices")
    counts = scatter_sum(torch.ones_like(index, dtype=total.dtype)[:, None], index, size, name="id_indices")
    return (total / counts.clamp(min=1)).to(values.dtype)


def reduce_sqrtn(id_indices: Tensor, id_values: Tensor, id_length: int | Tensor) -> Tensor:
    """The L2 norm of each column over the rows of a batch row; its gradient is 0 at 0.

    Not the combiner `Sqrtn`, which is sum / sqrt(n): the name is Monolith's.
    """
    index, values, size = _segments(id_indices, id_values, id_length)
    wide = _wide(values)
    squares = scatter_sum(wide * wide, index, size, name="id_indices")
    none = squares == 0
    return torch.where(none, 0, torch.where(none, 1, squares).sqrt()).to(values.dtype)


def fused_sorted_segment_sum(
    indices: Sequence[Tensor], values: Sequence[Tensor], shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Several segment sums: int [n] (sorted or not), [n, d] -> the shape (segments, d) of each."""
    lists = [checks.tensors(x, n) for x, n in ((indices, "indices"), (values, "values"), (shapes, "shapes"))]
    checks.same_length(indices=indices, values=values, shapes=shapes)
    results = []
    for i, (index, rows, shape) in enumerate(zip(*lists, strict=True)):
        if not isinstance(shape, list | tuple) or len(shape) != 2:
            raise InputError(f"shapes[{i}] must be (segments, columns), got {shape!r}")
        segments, columns = (checks.positive(size, f"shapes[{i}]", least=0) for size in shape)
        index, rows, size = _segments(index, rows, segments, names=(f"indices[{i}]", f"values[{i}]"))
        checks.floats(rows, f"values[{i}]", (None, columns))
        results.append(scatter_sum(rows, index, size, name=f"indices[{i}]"))
    return results


def fused_reduce_sum_and_split(
    id_indices: Tensor, id_values: Tensor, id_length: int | Tensor, split_dims: Sequence[int]
) -> list[Tensor]:
    """The sum of each batch row, cut into columns: a [id_length, dim] for each of split_dims."""
    index, values, size = _segments(id_indices, id_values, id_length)
    dims = checks.sizes(split_dims, "split_dims")
    if sum(dims) != values.shape[1]:
        raise InputError(f"split_dims add up to {sum(dims)}, id_values have {values.shape[1]} columns")
    return list(scatter_sum(values, index, size, name="id_indices").split(dims, dim=1))


def fused_reduce_and_split(
    splits: Sequence[Tensor], embeddings: Sequence[Tensor], slice_dims: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Sums each row of several columns and cuts the sums: a [batch, dim] for each slice, in order.

    splits: row_splits [batch + 1] of each, embeddings: [n, width] of each, slice_dims: sizes that add up to
    the width.
    """
    for each, name in ((splits, "splits"), (embeddings, "embeddings"), (slice_dims, "slice_dims")):
        checks.tensors(each, name)
    checks.same_length(splits=splits, embeddings=embeddings, slice_dims=slice_dims)
    results: list[Tensor] = []
    for k, (cuts, rows, sizes) in enumerate(zip(splits, embeddings, slice_dims, strict=True)):
        dims = checks.sizes(sizes, f"slice_dims[{k}]")
        rows = checks.floats(rows, f"embeddings[{k}]", (None, sum(dims)))
        offsets = checks.splits(cuts, f"splits[{k}]", rows.shape[0])
        starts = _running(dims)
        parts = tuple(OutputSlice(i, 0, starts[i], starts[i + 1]) for i in range(len(dims)))
        batch = offsets.shape[0] - 1
        shapes = [(batch, d) for d in dims]
        results += pool_rows(rows, None, [Bags(offsets, parts)], shapes, name=f"embeddings[{k}]")
    return results


fused_reduce_and_split_gpu = fused_reduce_and_split


def _wide(values: Tensor) -> Tensor:
    """Float32 for smaller types, whose sums of counts and squares would overflow."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _segments(
    index: Tensor, values: Tensor, size: int | Tensor, names: tuple[str, str] = ("id_indices", "id_values")
) -> tuple[Tensor, Tensor, int]:
    values = checks.floats(values, names[1], (None, None))
    if isinstance(index, Tensor) and index.dim() == 2:
        index = checks.whole(index, names[0], (values.shape[0], 1))[:, 0]
    return checks.whole(index, names[0], (values.shape[0],)), values, _number(size, "id_length")


# ---- splits and flat buffers


def normalize_merged_split(row_split: Tensor, row_split_size: Tensor) -> Tensor:
    """Joins row_splits that follow each other, each beginning at 0, into those of all rows.

    row_split: int [sum of sizes]. row_split_size: int [k], the length of each. Returns int64 [n + 1 - k].
    """
    splits = checks.whole(row_split, "row_split")
    sizes = checks.whole(row_split_size, "row_split_size")
    if sizes.shape[0] < 1:
        raise InputError("row_split_size is empty; give the length of each row_splits")
    total = splits.shape[0]
    checks.require(
        (sizes >= 1).all() & (sizes.sum() == total), "row_split_size must add up to row_split's length"
    )
    ends = torch.cumsum(sizes, 0)
    first = torch.zeros_like(splits, dtype=torch.bool).index_fill(0, ends - sizes, True)
    checks.require(torch.where(first, splits, 0) == 0, "row_split: each part must begin at 0")
    steps = torch.diff(splits, prepend=splits.new_zeros(1))
    checks.require((steps >= 0) | first, "row_split must not descend within a part")
    # Leading zeros vanish; every other entry adds its step to the running total.
    kept = torch.argsort(first.to(torch.int8), stable=True)[: total - sizes.shape[0]]
    return torch.cat([splits.new_zeros(1), torch.cumsum(steps[kept], 0)])


def aligned_flat_concat(inputs: Sequence[Tensor], scale: float = 1.0, alignment: int = 64) -> Tensor:
    """All tensors flattened into one, each padded to a multiple of `alignment` bytes, times scale."""
    tensors = _same_type(inputs)
    pieces = [
        torch.nn.functional.pad(t.reshape(-1), (0, _aligned(t, alignment) - t.numel())) for t in tensors
    ]
    flat = torch.cat(pieces)
    return flat if scale == 1 else flat * scale


def aligned_flat_split(inputs: Sequence[Tensor], flat: Tensor, alignment: int = 64) -> list[Tensor]:
    """The pieces of `aligned_flat_concat` in the shapes of the inputs: views of `flat`, no copies."""
    tensors = _same_type(inputs)
    sizes = [_aligned(t, alignment) for t in tensors]
    flat = checks.floats(flat, "flat", (sum(sizes),))
    return [piece[: t.numel()].view(t.shape) for piece, t in zip(flat.split(sizes), tensors, strict=True)]


def _same_type(inputs: Sequence[Tensor]) -> list[Tensor]:
    tensors = checks.tensors(inputs, "inputs")
    if not tensors:
        raise InputError("inputs is empty; give at least one tensor")
    for i, t in enumerate(tensors):
        checks.floats(t, f"inputs[{i}]", None)
        if t.dtype != tensors[0].dtype:
            raise InputError(f"inputs[{i}] is {t.dtype}, inputs[0] is {tensors[0].dtype}: give one type")
    return tensors


def _aligned(tensor: Tensor, alignment: int) -> int:
    """Elements of the tensor, rounded up to a multiple of `alignment` bytes."""
    item = tensor.element_size()
    if alignment < item or alignment % item:
        raise InputError(f"alignment must be a multiple of {item} bytes, got {alignment}")
    return -(-tensor.numel() * item // alignment) * alignment // item
