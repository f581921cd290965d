"""Updates of tables that share launches: admission, missing rows, sums and optimizer steps.

    all optimizers have a rule   create missing rows -> sort by row -> sums and steps in kernels
    some optimizer has none      sums per distinct id -> complete rows -> Optimizer.update in torch -> write

Without policies the first way does not wait for the device. The second does, once per table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megalith.ops.pooling import Pooling
from megalith.table.engines.cuda.device_table import FLAGS
from megalith.table.engines.cuda.launch_group import Gradients, LaunchGroup
from megalith.table.engines.cuda.pooling_parts import PoolingParts
from megalith.table.engines.cuda.row_writes import COUNT, STEP, TIME, write_chunk
from megalith.table.engines.torch_step import update_chunk
from megalith.table.policies.min_count import MAX_COUNT
from megalith.table.rounding import round_step
from megalith.table.table_data import Chunk, FoundRows, Step

if TYPE_CHECKING:
    from megalith.table.engines.cuda.engine import CudaEngine


class TableUpdate(NamedTuple):
    """The arguments of one table's update; see `Engine.update`."""

    engine: CudaEngine
    ids: Tensor
    found: FoundRows | None
    grads: list[Tensor]
    step: Step
    occurrences: Tensor | None


@torch.no_grad()
def stage_updates(
    group: LaunchGroup,
    updates: Sequence[TableUpdate],
    pooling: Pooling | None,
    *,
    outputs: Sequence[Tensor] | None = None,
    known: tuple[Tensor, Tensor] | None = None,
) -> Callable[[], None]:
    """Do the part of an update that may raise because of the user's optimizers.

    Args:
        group: The group; its tables are those of the engines, in this order.
        updates: One per table.
        pooling: The pooling whose outputs the gradients belong to.
        outputs: With `pooling`, the gradients of the outputs; None: those of the first table.
        known: Ids and current rows of all tables, if the caller has them; the rows are changed.

    Returns:
        A function that writes the update.
    """
    sizes = [update.ids.numel() for update in updates]
    if not sum(sizes):
        return lambda: None
    if known is not None:
        ids = known[0]
    else:
        ids = updates[0].ids if len(updates) == 1 else torch.cat([update.ids for update in updates])
    if pooling is None:
        gradients = Gradients([update.grads[0].contiguous() for update in updates])
    else:
        names = [update.engine.name for update in updates]
        whole = [grad.contiguous() for grad in (updates[0].grads if outputs is None else outputs)]
        gradients = PoolingParts(group, names, sizes, pooling).gradients(whole)
    if group.layout.has_rules:
        rows = None if known is None else known[1]
        return lambda: _update_in_kernels(group, updates, ids, rows, sizes, gradients)
    writes = _stage_in_torch(updates, sizes, gradients)

    def write() -> None:
        for each in writes:
            each()

    return write


@torch.no_grad()
def _update_in_kernels(
    group: LaunchGroup,
    updates: Sequence[TableUpdate],
    ids: Tensor,
    rows: Tensor | None,
    sizes: list[int],
    gradients: Gradients,
) -> None:
    wanted = gradients.wanted
    if any(update.engine.policies.active for update in updates):
        pieces = []
        for update, own in zip(updates, _split(wanted, sizes), strict=True):
            pieces.append(update.engine.policies.admit(update.ids, own, update.occurrences, update.step.step))
        wanted = torch.cat(pieces)
    if rows is None:
        pieces = [update.engine.current_rows(update.ids, update.found, copy=True) for update in updates]
        rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    slots = group.create(ids, rows, sizes, wanted)
    keys = group.finish(slots, rows, sizes, wanted, keys=True)
    group.step_rows(keys, sizes, gradients, [update.step for update in updates])
    for update in updates:
        update.engine.wrote(update.step.step)


def _split(wanted: Tensor | None, sizes: list[int]) -> list[Tensor | None]:
    return [None] * len(sizes) if wanted is None else list(wanted.split(sizes))


def _stage_in_torch(
    updates: Sequence[TableUpdate], sizes: list[int], gradients: Gradients
) -> list[Callable[[], None]]:
    """Make the steps of optimizers that are written in torch; return functions that write them."""
    matrices, writes = list(gradients.matrices), []
    for number, (update, wanted) in enumerate(zip(updates, _split(gradients.wanted, sizes), strict=True)):
        if not sizes[number]:
            continue
        own = Gradients(matrices[number : number + 1], wanted=wanted)
        if gradients.addresses is not None:
            factors = gradients.factors
            own = Gradients(
                (),
                gradients.addresses.split(sizes)[number],
                None if factors is None else factors.split(sizes)[number],
                wanted,
                gradients.aligned,
            )
        writes.append(_stage_one_in_torch(update, own))
    return writes


def _stage_one_in_torch(update: TableUpdate, gradients: Gradients) -> Callable[[], None]:
    engine, ids, step = update.engine, update.ids, update.step
    table, group, config = engine.table, engine.group, engine.config
    sizes = [ids.numel()]
    table.ensure_room(ids.numel())
    group.descriptors()
    inverse = torch.unique(ids, return_inverse=True)[1]
    wanted, plan = gradients.wanted, None
    if engine.policies.active:
        plan = engine.policies.plan(ids, wanted, update.occurrences, step.step)
        wanted = plan.wanted
    keys = inverse if wanted is None else torch.where(wanted != 0, inverse, table.row_capacity)
    first, sums = group.sum_rows(keys.to(group.key_type), sizes, gradients)
    own = ids[first]
    finite = torch.isfinite(sums).all(1)
    skipped = int((~finite).sum())
    if skipped:
        own, sums = own[finite].contiguous(), sums[finite].contiguous()
    weights, states = engine.complete_rows(own, group.find(own, [own.numel()]))
    columns = {
        c.key: states[:, c.start - config.dim : c.end - config.dim].contiguous() for c in config.state_columns
    }
    chunk = Chunk(own, weights, columns, torch.zeros_like(own))
    if own.numel():
        update_chunk(config, sums, chunk, step, engine.view)  # it may raise, so nothing is written before
        chunk.rows.copy_(round_step(config, table.key, own, chunk.rows, step.step))

    def write() -> None:
        table.counters[3] += skipped
        if plan is not None:
            engine.policies.apply(plan, ids)
        rows = group.find(ids, sizes)
        slots = group.create(ids, rows, sizes, wanted)
        group.finish(slots, rows, sizes, wanted, keys=False)
        if own.numel():
            rows = group.find(own, [own.numel()])
            headers = table.headers(rows)
            write_chunk(table, rows, chunk)
            table.write_header(TIME, rows, torch.full_like(own, step.time))
            table.write_header(FLAGS, rows, torch.full_like(rows, table.tracked), 1)
            table.write_header(COUNT, rows, (headers[3] + 1).clamp(max=MAX_COUNT))
            table.write_header(STEP, rows, torch.full_like(own, min(step.step, MAX_COUNT)))
        engine.wrote(step.step)

    return write
