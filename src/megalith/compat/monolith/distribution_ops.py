"""Monolith's distribution ops: split ids by shard, and gather the rows of ids.

Thin adapters over `megalith.ops`. Arguments and results are Monolith's, with these decisions, which also hold
for `buffer_ops`, `reduce_ops` and `layout_ops`: an index out of range, an unknown id or a short buffer raises
InputError; the mean of an empty row is 0; `scale` works on every device; offsets are int64; every op is
differentiable where a gradient makes sense, on any device, in any float type. A length given as a tensor is
read on the host; inside torch.compile pass it as an int.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops import checks
from megalith.ops.bucketing import _bucketize, dedup, match, split_rows
from megalith.ops.gather_rows import gather, gather_pieces, scatter_pieces, scatter_sum
from megalith.ragged import Ragged
from megalith.routing import Router

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
        use_multi_threads: Ignored; torch.get_num_threads() applies.

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
        ids: int [k] each.
        input: int [...].
        grads: float [..., d].

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
        use_multi_threads: Ignored; torch.get_num_threads() applies.

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
    scale: float = 1.0,
) -> Tensor:
    """Sum gradient rows into a flat buffer: the gradient of `fused_gather_embeddings_by_input`.

    Args:
        fused_embeddings: The number of elements of the buffer, despite its name; an int or a tensor of one
            element.
        grads: float [n, dim] each.
        embedding_offsets: int [n] each: the element where each row begins.
        embedding_dims: The row size of each.
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
