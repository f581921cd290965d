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

from megalith.table.engines.cuda.device_table import FLAGS, DeviceTable
from megalith.table.engines.cuda.launch_group import LaunchGroup, RowSearch
from megalith.table.engines.cuda.recorded_calls import RecordedCalls
from megalith.table.engines.cuda.row_steps import Gradients, call_fields, step_rows, sum_rows
from megalith.table.engines.cuda.row_writes import COUNT, STEP, TIME, write_chunk
from megalith.table.engines.torch_step import update_chunk
from megalith.table.policies.min_count import MAX_COUNT
from megalith.table.rounding import round_step
from megalith.table.table_data import Chunk, Step

if TYPE_CHECKING:
    from megalith.table.engines.cuda.engine import CudaEngine


class TableUpdate(NamedTuple):
    """The arguments of one table's update; see `Engine.update`."""

    engine: CudaEngine
    ids: Tensor  # As for `Engine.update`.
    step: Step  # As for `Engine.update`.
    occurrences: Tensor | None  # As for `Engine.update`.
    looked_up: bool  # Whether a lookup found the rows before, and counted their use


@torch.no_grad()
def stage_updates(
    group: LaunchGroup,
    updates: Sequence[TableUpdate],
    gradients: Gradients,
    known: tuple[Tensor, RowSearch] | None,
    recorded: RecordedCalls | None = None,
) -> Callable[[], None]:
    """Do the part of an update that may raise: memory for new rows, and the user's optimizers."""
    sizes = [update.ids.numel() for update in updates]
    if not sum(sizes):
        return lambda: None
    if group.layout.has_rules:
        if not any(update.engine.policies.active for update in updates):
            group.make_room(sizes)
        return lambda: _update_in_kernels(group, updates, sizes, gradients, known, recorded)
    staged = [
        _stage_one_in_torch(update, gradients.part(number, sizes))
        for number, update in enumerate(updates)
        if sizes[number]
    ]

    def write() -> None:
        for each in staged:
            each()

    return write


def _was_counted(table: DeviceTable, size: int) -> bool:
    """Whether the rows of a table were counted after room was made, so that the bound has no new ones."""
    return size > 0 and table.known_at == table.requested


@torch.no_grad()
def _update_in_kernels(
    group: LaunchGroup,
    updates: Sequence[TableUpdate],
    sizes: list[int],
    gradients: Gradients,
    known: tuple[Tensor, RowSearch] | None,
    recorded: RecordedCalls | None,
) -> None:
    wanted = gradients.wanted
    if any(update.engine.policies.active for update in updates):
        pieces = []
        split = [None] * len(sizes) if wanted is None else list(wanted.split(sizes))
        for update, own in zip(updates, split, strict=True):
            pieces.append(update.engine.policies.admit(update.ids, own, update.occurrences, update.step.step))
        wanted = torch.cat(pieces)
        known = None  # policies may have removed rows
    if wanted is not gradients.wanted or any(map(_was_counted, group.tables, sizes)):
        group.make_room(sizes)
    if known is None:
        ids = updates[0].ids if len(updates) == 1 else torch.cat([update.ids for update in updates])
        known = ids, group.find(ids, sizes)
        for update, rows in zip(updates, known[1].rows.split(sizes), strict=True):
            update.engine.fetch(update.ids, rows, counted=not update.looked_up)
    ids, found = known
    if any(update.engine.open_snapshot is not None for update in updates):
        for update, rows in zip(updates, found.rows.split(sizes), strict=True):
            update.engine.save_rows(rows)
    fields = call_fields(group, gradients, [update.step for update in updates])
    repeats = recorded is not None and found.slot is not None and wanted is None
    calls = group.overwrite("calls", fields) if repeats else group.upload(fields)

    def launch() -> None:
        slots = group.launch_create(ids, found, sizes, wanted, None)
        keys = group.finish(slots, found, sizes, wanted, keys=True)
        step_rows(group, keys, sizes, gradients, calls)

    if recorded is not None and repeats:
        recorded.run(("update", id(found.slot), gradients.aligned), launch)
        found.used = True
    else:
        launch()
    group.report(sizes)
    for update, size in zip(updates, sizes, strict=True):
        if size:  # the step of a table without ids is that of another table
            update.engine.wrote(update.step.step)


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
    first, sums = sum_rows(group, keys.to(group.key_type), sizes, gradients)
    own = ids[first]
    finite = torch.isfinite(sums).all(1)
    skipped = int((~finite).sum())
    if skipped:
        own, sums = own[finite].contiguous(), sums[finite].contiguous()
    search = group.find(own, [own.numel()])
    engine.fetch(own, search.rows, counted=not update.looked_up)
    weights, states = engine.complete_rows(own, search)
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
        found = group.find(ids, sizes)
        engine.save_rows(found.rows)
        slots = group.create(ids, found, sizes, wanted)
        group.finish(slots, found, sizes, wanted, keys=False)
        if own.numel():
            rows = group.find(own, [own.numel()]).rows
            headers = table.headers(rows)
            write_chunk(table, rows, chunk)
            table.write_header(TIME, rows, torch.full_like(own, step.time))
            table.write_header(FLAGS, rows, torch.full_like(rows, table.tracked), 1)
            table.write_header(COUNT, rows, (headers[3] + 1).clamp(max=MAX_COUNT))
            table.write_header(STEP, rows, torch.full_like(own, min(step.step, MAX_COUNT)))
        engine.wrote(step.step)

    return write
