"""fused_lookup and fused_apply_gradient: the ids of K tables from N shards in one flat tensor.

Block n * K + k holds the ids that shard n requests from table k (tables sorted by name). Embeddings and
gradients have the same order; each id takes as many floats as its table's dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.ops import checks
from megalith.shards.local import LocalShards


class FusedLookup(NamedTuple):
    """Result of `fused_lookup` for N shards and K tables."""

    embeddings: Tensor
    """float32 [floats]: the rows, block by block."""
    embedding_splits: Tensor
    """int32 [N]: the number of floats of each shard."""
    id_offsets: Tensor
    """int32 [K * N + 1]: where the ids of each block begin."""
    emb_offsets: Tensor
    """int32 [K * N + 1]: where the floats of each block begin."""
    indices: Tensor
    """int64 [n]: the ids."""


def fused_lookup(
    shards: LocalShards,
    ids: Tensor,
    fused_slot_size: Tensor,
    num_of_shards: int,
    req_time: float | Tensor | None = None,
    global_step: int | Tensor | None = None,
) -> FusedLookup:
    """Look up the ids of many tables, grouped by requesting shard, in one call.

    Args:
        shards: The tables.
        ids: int64 [n], block by block.
        fused_slot_size: int32 [num_of_shards * tables], the number of ids of each block.
        num_of_shards: The number of requesting shards.
        req_time: Ignored; a lookup does not change a row's last-update time.
        global_step: The step of the training that uses the rows, an int or a tensor of one element. Needed
            for tables with `OneBit`, whose rows depend on it.

    Returns:
        The rows, block by block, and where the ids and rows of each block begin.

    Raises:
        InputError: The sizes do not match the ids or the tables.
        UsageError: A table has `OneBit`, and there is no global_step. `shards.lookup` returns what is served.
    """
    names, blocks = _blocks(shards, ids, fused_slot_size, num_of_shards)
    step = None if global_step is None else checks.scalar(global_step, "global_step")
    if step is None and shards.stepwise:
        raise UsageError(
            f"table {shards.stepwise[0]!r}: what a lookup returns depends on the step (OneBit); pass "
            "global_step to fused_lookup, the one of fused_apply_gradient"
        )
    embeddings = torch.empty(int(blocks.emb_offsets[-1]), device="cpu")
    for table, name in enumerate(names):
        embeddings[blocks.floats_of(table)] = shards.local[name].lookup(ids[blocks.ids_of(table)], step=step)
    return FusedLookup(embeddings, blocks.embedding_splits, blocks.id_offsets, blocks.emb_offsets, ids)


def fused_apply_gradient(
    shards: LocalShards,
    ids: Tensor,
    indices: Tensor,
    fused_slot_size: Tensor,
    id_grads: Tensor,
    id_offsets: Tensor,
    grad_offsets: Tensor,
    global_step: int | Tensor,
    req_time: float | Tensor | None,
    num_of_shards: int,
    enable_grad_accumulation: bool = False,
) -> None:
    """Apply the gradients of a `fused_lookup`: one summed step per distinct id, also across shards.

    Args:
        shards: The tables.
        ids: int64 [n], as in the lookup.
        indices: `FusedLookup.indices`.
        fused_slot_size: As in the lookup.
        id_grads: float32 [floats], in the order of the embeddings.
        id_offsets: `FusedLookup.id_offsets`.
        grad_offsets: `FusedLookup.emb_offsets`.
        global_step: The step for learning rates, an int or a tensor of one element.
        req_time: The last-update time of the rows in seconds, a number or a tensor of one element; None is
            now.
        num_of_shards: As in the lookup.
        enable_grad_accumulation: Ignored; the gradients of an id are always summed.

    Raises:
        InputError: The sizes, offsets or gradients do not match the lookup; nothing is written.
    """
    names, blocks = _blocks(shards, ids, fused_slot_size, num_of_shards)
    checks.flag(enable_grad_accumulation, "enable_grad_accumulation")
    if isinstance(req_time, Tensor):
        req_time = checks.scalar(req_time, "req_time")
    step = checks.scalar(global_step, "global_step")
    for name, given, own in (
        ("id_offsets", id_offsets, blocks.id_offsets),
        ("grad_offsets", grad_offsets, blocks.emb_offsets),
    ):
        given = checks.integers(given, name)
        if given.shape != own.shape or not given.is_cpu or not torch.equal(given.long(), own.long()):
            raise InputError(f"{name} do not belong to these ids and sizes; pass those of the lookup")
    if checks.integers(indices, "indices", None).shape != ids.shape:
        raise InputError(f"indices must have the shape of ids, {list(ids.shape)}")
    size = int(blocks.emb_offsets[-1])
    if not isinstance(id_grads, Tensor) or id_grads.layout != torch.strided or not id_grads.is_cpu:
        raise InputError(
            f"id_grads must be a float32 tensor [{size}] on the CPU, got {checks.kind(id_grads)}"
        )
    if id_grads.dtype != torch.float32 or tuple(id_grads.shape) != (size,):
        raise InputError(f"id_grads must be float32 [{size}], got {id_grads.dtype} {list(id_grads.shape)}")
    positions = {name: blocks.ids_of(k) for k, name in enumerate(names)}
    grads = {name: id_grads[blocks.floats_of(k)] for k, name in enumerate(names)}
    present = [name for name in names if positions[name].numel()]
    shards.apply_gradients(
        {name: ids[positions[name]] for name in present},
        {name: grads[name] for name in present},
        step=step,
        time=req_time,
    )


fused_apply_gradients = fused_apply_gradient
"""An earlier name of this package for `fused_apply_gradient`."""


@dataclass(frozen=True)
class _Blocks:
    """Where each id and its floats are."""

    dims: list[int]
    """The dim of each table."""
    block: Tensor
    """int64 [n]: the block of each id."""
    start: Tensor
    """int64 [n]: the first float of each id."""
    id_offsets: Tensor
    emb_offsets: Tensor
    embedding_splits: Tensor

    def ids_of(self, table: int) -> Tensor:
        """Return the positions of a table's ids."""
        return torch.nonzero(self.block % len(self.dims) == table).flatten()

    def floats_of(self, table: int) -> Tensor:
        """Return the positions of a table's floats, [ids, dim]."""
        return self.start[self.ids_of(table), None] + torch.arange(self.dims[table], device="cpu")


def _blocks(shards: LocalShards, ids: Tensor, sizes: Tensor, num_of_shards: int) -> tuple[list[str], _Blocks]:
    """Check ids and sizes; return the names of the tables and the blocks."""
    if not isinstance(shards, LocalShards):
        raise InputError(f"shards must be LocalShards, got {type(shards).__name__}")
    names = sorted(shards.configs)
    dims = [shards.configs[name].dim for name in names]
    tables = len(dims)
    for name, tensor in (("ids", ids), ("fused_slot_size", sizes)):
        if not checks.integers(tensor, name).is_cpu:
            raise InputError(f"{name} must be on the CPU, got {tensor.device}")
    num_of_shards = checks.integer(num_of_shards, "num_of_shards")
    if sizes.numel() != num_of_shards * tables:
        raise InputError(
            f"fused_slot_size must have {num_of_shards} shards x {tables} tables entries, got {sizes.numel()}"
        )
    sizes = sizes.long()
    if bool((sizes < 0).any()) or int(sizes.sum()) != ids.numel():
        raise InputError(
            f"fused_slot_size must not be negative and must add up to {ids.numel()} ids, got {sizes.tolist()}"
        )
    dim_of_block = torch.tensor(dims, device="cpu").repeat(num_of_shards)
    id_offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    emb_offsets = torch.cat([sizes.new_zeros(1), (sizes * dim_of_block).cumsum(0)])
    block = torch.repeat_interleave(torch.arange(sizes.numel(), device="cpu"), sizes)
    rank = torch.arange(ids.numel(), device="cpu") - id_offsets[block]
    return names, _Blocks(
        dims=dims,
        block=block,
        start=emb_offsets[block] + rank * dim_of_block[block],
        id_offsets=_small(id_offsets),
        emb_offsets=_small(emb_offsets),
        embedding_splits=_small((sizes * dim_of_block).view(num_of_shards, tables).sum(1)),
    )


def _small(x: Tensor) -> Tensor:
    """Convert to int32, Monolith's type, unless that would overflow."""
    return x.to(torch.int32) if not x.numel() or int(x.max()) < 2**31 else x
