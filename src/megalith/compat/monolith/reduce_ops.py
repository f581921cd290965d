"""Monolith's reduce ops: sums, means and norms of the rows of a batch, and their slices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops import checks
from megalith.ops.gather_rows import scatter_sum
from megalith.ops.pooling import Bags, OutputSlice, pool_rows


def reduce_sum(
    id_indices: Tensor, id_values: Tensor, id_length: int | Tensor, name: str | None = None
) -> Tensor:
    """Sum the rows of each batch row.

    Args:
        id_indices: int [n, 1] or [n], the batch row of each value.
        id_values: float [n, d].
        id_length: The number of batch rows, an int or a tensor of one element.
        name: Ignored; the name of a graph node in Monolith.

    Returns:
        [id_length, d].
    """
    index, values, size = _segments(id_indices, id_values, id_length)
    return scatter_sum(values, index, size, name="id_indices")


def reduce_mean(
    id_indices: Tensor, id_values: Tensor, id_length: int | Tensor, name: str | None = None
) -> Tensor:
    """Average the rows of each batch row; a batch row without values is 0.

    Args:
        id_indices: int [n, 1] or [n], the batch row of each value.
        id_values: float [n, d].
        id_length: The number of batch rows, an int or a tensor of one element.
        name: Ignored; the name of a graph node in Monolith.

    Returns:
        [id_length, d].
    """
    index, values, size = _segments(id_indices, id_values, id_length)
    total = scatter_sum(_wide(values), index, size, name="id_indices")
    counts = scatter_sum(torch.ones_like(index, dtype=total.dtype)[:, None], index, size, name="id_indices")
    return (total / counts.clamp(min=1)).to(values.dtype)


def reduce_sqrtn(
    id_indices: Tensor, id_values: Tensor, id_length: int | Tensor, name: str | None = None
) -> Tensor:
    """Compute the L2 norm of each column over the rows of a batch row; its gradient at 0 is 0.

    This is not the combiner `Sqrtn`, which is sum / sqrt(n); the name is Monolith's.

    Args:
        id_indices: int [n, 1] or [n], the batch row of each value.
        id_values: float [n, d].
        id_length: The number of batch rows, an int or a tensor of one element.
        name: Ignored; the name of a graph node in Monolith.

    Returns:
        [id_length, d].
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
    """Sum the rows of each batch row and splits the sums by column.

    Args:
        id_indices: int [n, 1] or [n], the batch row of each value.
        id_values: float [n, d].
        id_length: The number of batch rows, an int or a tensor of one element.
        split_dims: Sizes that add up to d.
        name: Ignored; the name of a graph node in Monolith.

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
    """Sum each row of several columns and splits the sums.

    Args:
        splits: Row splits, int [batch + 1], of each column.
        embeddings: float [n, d] of each column.
        slice_dims: For each column, sizes that add up to d.
        name: Ignored; the name of a graph node in Monolith.

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
    values = checks.floats(values, names[1], (None, None))
    if isinstance(index, Tensor) and index.dim() == 2:
        index = checks.int64(index, names[0], (values.shape[0], 1))[:, 0]
    return checks.int64(index, names[0], (values.shape[0],)), values, checks.scalar(size, "id_length")
