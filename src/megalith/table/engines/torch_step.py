"""Steps of optimizers that are written in torch: one call, and the update of a cpu table with such a segment.

    ids, gradients -> a sum per distinct id -> complete rows -> Optimizer.update per segment -> complete rows

Nothing is written if a step raises. One native call admits ids, creates rows and writes all of them, so
readers see the whole update or none of it; the engine holds a lock against other writers in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megalith.errors import UsageError
from megalith.ops import dedup, scatter_sum
from megalith.ops.pooling import Bags, Pooling, unpool, unpool_flat
from megalith.table.config import TableConfig
from megalith.table.optimizers import Optimizer
from megalith.table.optimizers.optimizer import sum_of_squares
from megalith.table.serving_precision import ServingView
from megalith.table.table_data import Chunk, Step


def update_in_torch(
    optimizer: Optimizer, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int
) -> None:
    """Call an optimizer's `update` and check that it works in place."""
    # rows: float32 [n, dim], changed in place; grads: float32 [n, dim]; state: float32 [n, size] by name,
    # changed in place.
    tensors = (rows, *state.values())
    before = [tensor._version for tensor in tensors]
    result: object = optimizer.update(rows, grads, state, lr, step)
    if result is not None or [tensor._version for tensor in tensors] == before:
        raise UsageError(
            f"{optimizer.name}.update must change rows and state in place and return nothing: write "
            "`rows -= ...` or `rows.copy_(...)`, not `rows = rows - ...`"
        )


def sum_per_id(
    ids: Tensor,
    grads: list[Tensor],
    pooling: Pooling | None,
    table: str,
    dim: int,
    occurrences: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the gradients of each distinct id in input order."""
    # ids: int64 [n]; occurrences: number of occurrences that each id stands for, int64 [n]; returns: the
    # distinct ids that the gradients reach, int64 [u], their sums, float32 [u, dim], and their numbers of
    # occurrences, int64 [u].
    flat = grads[0]
    occurrences = torch.ones_like(ids) if occurrences is None else occurrences
    if pooling is not None:
        pooling.check(table, ids.numel(), dim)
        bags = pooling.of(table)
        if bags and _contain_all(bags, ids.numel()):  # every occurrence has a gradient
            distinct = dedup(ids)
            size = distinct.ids.numel() * dim
            sums = unpool_flat(grads, distinct.inverse * dim, bags, size, dim)
            seen = torch.zeros_like(distinct.ids).index_add_(0, distinct.inverse, occurrences)
            return distinct.ids, sums.view(-1, dim), seen
        flat, reached = unpool(grads, bags, ids.numel(), dim)
        ids, flat, occurrences = ids[reached], flat[reached], occurrences[reached]
    distinct = dedup(ids)
    seen = torch.zeros_like(distinct.ids).index_add_(0, distinct.inverse, occurrences)
    return distinct.ids, scatter_sum(flat, distinct.inverse, distinct.ids.numel()), seen


def _contain_all(bags: Sequence[Bags], n: int) -> bool:
    """Return whether bags contain each of n occurrences; features are in the order of the occurrences."""
    ends = [(int(own.offsets[0]), int(own.offsets[-1])) for own in bags]
    starts = [0, *(end for _, end in ends)]
    return all(begin == start for start, (begin, _) in zip(starts, ends, strict=False)) and starts[-1] == n


def distinct_ids(
    ids: Tensor, pooling: Pooling | None, table: str, occurrences: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Find the distinct ids that the gradients of an update reach."""
    # ids: int64 [n]; occurrences: number of occurrences that each id stands for, int64 [n]; returns: the ids,
    # int64 [u], and their numbers of occurrences, int64 [u].
    occurrences = torch.ones_like(ids) if occurrences is None else occurrences
    if pooling is not None:
        ranges = [(int(bags.offsets[0]), int(bags.offsets[-1])) for bags in pooling.of(table)]
        reached = torch.cat([torch.arange(begin, end, device="cpu") for begin, end in ranges] or [ids[:0]])
        ids, occurrences = ids[reached], occurrences[reached]
    distinct = dedup(ids)
    return distinct.ids, torch.zeros_like(distinct.ids).index_add_(0, distinct.inverse, occurrences)


def ids_without_bag(ids: Tensor, pooling: Pooling | None, table: str) -> Tensor:
    """Find the occurrences that the gradients of an update do not reach."""
    # ids: int64 [n]; returns: their ids, int64 [k].
    outside = torch.full(ids.shape, pooling is not None, device="cpu")
    for bags in () if pooling is None else pooling.of(table):
        outside[int(bags.offsets[0]) : int(bags.offsets[-1])] = False
    return ids[outside]


def clip_rows(grads: Tensor, clip_norm: float) -> Tensor:
    """Shorten rows to a largest L2 norm."""
    # grads: float32 [n, dim]; returns: float32 [n, dim].
    if not clip_norm:
        return grads
    norms = sum_of_squares(grads).sqrt()[:, None]
    return torch.where(norms > clip_norm, grads * (clip_norm / norms), grads)


@torch.no_grad()
def update_chunk(
    config: TableConfig,
    sums: Tensor,
    chunk: Chunk,
    step: Step,
    view: ServingView | None = None,
    update: Callable[[Optimizer, Tensor, Tensor, Mapping[str, Tensor], float, int], None] = update_in_torch,
) -> None:
    """Make one optimizer step on complete rows, in place."""
    # sums: float32 [n, dim], one summed gradient per row.
    sums = sums * step.scale
    if view is not None:
        sums = view.gradient(sums, chunk.rows, step.step)
    sums = clip_rows(sums, step.clip_norm)
    start = 0
    for number, (segment, rate) in enumerate(zip(config.segments, step.rates, strict=True)):
        columns = slice(start, start + segment.dim)
        rows = chunk.rows[:, columns].contiguous()
        state = {c.name: chunk.state[c.key] for c in config.state_columns if c.segment == number}
        update(segment.optimizer, rows, sums[:, columns].contiguous(), state, rate, step.step)
        chunk.rows[:, columns] = rows
        start += segment.dim
