"""Block arithmetic of Monolith's fused path: K tables' ids from N shards in one flat tensor.

Block n * K + k holds the ids that shard n asks of table k (tables by sorted name); embeddings
and gradients lie in the same order, each id taking its table's dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.shards.local import LocalShards


class FusedLookup(NamedTuple):
    """The five outputs of `fused_lookup`.

    embeddings: float32, flat. embedding_splits: int32 [N], floats per shard. id_offsets and
    emb_offsets: int32 [K * N + 1]. indices: the ids.
    """

    embeddings: Tensor
    embedding_splits: Tensor
    id_offsets: Tensor
    emb_offsets: Tensor
    indices: Tensor


@dataclass(frozen=True)
class Blocks:
    """Where each id and its floats lie. `block`: of each id, int64 [n]; `start`: of its floats."""

    dims: list[int]
    block: Tensor
    start: Tensor
    id_offsets: Tensor
    embedding_offsets: Tensor
    embedding_splits: Tensor

    def of_table(self, table: int) -> Tensor:
        """Positions of a table's ids."""
        return torch.nonzero(self.block % len(self.dims) == table).flatten()

    def floats_of(self, table: int) -> Tensor:
        """Positions of a table's floats, [ids, dim]."""
        return self.start[self.of_table(table), None] + torch.arange(self.dims[table])

    def check_offsets(self, id_offsets: Tensor, embedding_offsets: Tensor) -> None:
        """Raises InputError unless these are this layout's offsets."""
        for name, given, own in (
            ("id_offsets", id_offsets, self.id_offsets),
            ("grad_offsets", embedding_offsets, self.embedding_offsets),
        ):
            if given.shape != own.shape or not torch.equal(given.long(), own.long()):
                raise InputError(f"{name} do not belong to these ids and sizes")


def fused_blocks(ids: Tensor, sizes: Tensor, num_of_shards: int, dims: list[int]) -> Blocks:
    """The layout of a fused call. Raises InputError if sizes and ids do not fit."""
    tables = len(dims)
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"ids must be int64 [n], got {ids.dtype} {list(ids.shape)}")
    if num_of_shards < 1 or sizes.dim() != 1 or sizes.numel() != num_of_shards * tables:
        raise InputError(
            f"fused_slot_size must have {num_of_shards} shards x {tables} tables entries, got {sizes.numel()}"
        )
    sizes = sizes.long()
    if bool((sizes < 0).any()) or int(sizes.sum()) != ids.numel():
        raise InputError(
            f"fused_slot_size must not be negative and must add up to {ids.numel()} ids, got {sizes.tolist()}"
        )
    dim_of_block = torch.tensor(dims).repeat(num_of_shards)
    id_offsets = _offsets(sizes)
    embedding_offsets = _offsets(sizes * dim_of_block)
    block = torch.repeat_interleave(torch.arange(sizes.numel()), sizes)
    rank = torch.arange(ids.numel()) - id_offsets[block]
    return Blocks(
        dims=dims,
        block=block,
        start=embedding_offsets[block] + rank * dim_of_block[block],
        id_offsets=_small(id_offsets),
        embedding_offsets=_small(embedding_offsets),
        embedding_splits=_small((sizes * dim_of_block).view(num_of_shards, tables).sum(1)),
    )


def scatter_blocks(blocks: Blocks, rows: list[Tensor]) -> Tensor:
    """Rows per table -> one flat tensor in block order."""
    flat = torch.empty(int(blocks.embedding_offsets[-1]))
    for table, values in enumerate(rows):
        flat[blocks.floats_of(table)] = values
    return flat


def gather_blocks(blocks: Blocks, flat: Tensor) -> list[Tensor]:
    """One flat tensor in block order -> rows per table."""
    size = int(blocks.embedding_offsets[-1])
    if flat.dtype != torch.float32 or tuple(flat.shape) != (size,):
        raise InputError(f"id_grads must be float32 [{size}], got {flat.dtype} {list(flat.shape)}")
    return [flat[blocks.floats_of(table)] for table in range(len(blocks.dims))]


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def _small(x: Tensor) -> Tensor:
    """int32 as Monolith has it, int64 where that would overflow."""
    return x.to(torch.int32) if not x.numel() or int(x.max()) < 2**31 else x


def fused_lookup(
    shards: LocalShards,
    ids: Tensor,
    fused_slot_size: Tensor,
    num_of_shards: int,
    req_time: float | None = None,
) -> FusedLookup:
    """Looks up many tables' ids, grouped by requesting shard, in one call.

    ids: int64, shard-major and within a shard by table name. fused_slot_size: int32
    [num_of_shards * tables], ids of each block. `req_time` is accepted for callers that pass it;
    a look-up never ages a row.
    """
    names = sorted(shards.configs)
    dims = [shards.configs[name].dim for name in names]
    blocks = fused_blocks(ids, fused_slot_size, num_of_shards, dims)
    rows = [shards.local[name].lookup(ids[blocks.of_table(k)]) for k, name in enumerate(names)]
    return FusedLookup(
        scatter_blocks(blocks, rows),
        blocks.embedding_splits,
        blocks.id_offsets,
        blocks.embedding_offsets,
        ids,
    )


def fused_apply_gradients(
    shards: LocalShards,
    ids: Tensor,
    indices: Tensor,
    fused_slot_size: Tensor,
    id_grads: Tensor,
    id_offsets: Tensor,
    grad_offsets: Tensor,
    global_step: int,
    req_time: float | None,
    num_of_shards: int,
) -> None:
    """The way back of `fused_lookup`: one summed step per distinct id, across shards too.

    id_grads: float32, flat, laid out as the embeddings were. The offsets must be those of the
    look-up.
    """
    names = sorted(shards.configs)
    dims = [shards.configs[name].dim for name in names]
    blocks = fused_blocks(ids, fused_slot_size, num_of_shards, dims)
    blocks.check_offsets(id_offsets, grad_offsets)
    if indices.shape != ids.shape:
        raise InputError(f"indices must have the shape of ids, {list(ids.shape)}")
    grads = gather_blocks(blocks, id_grads)
    positions = [blocks.of_table(k) for k in range(len(names))]
    present = [k for k in range(len(names)) if positions[k].numel()]
    shards.apply_gradients(
        {names[k]: ids[positions[k]] for k in present},
        {names[k]: grads[k] for k in present},
        step=global_step,
        time=req_time,
    )
