"""Updates of tables that share launches: admission, missing rows, sums and optimizer steps.

    all optimizers have a rule   create missing rows -> sort by row -> sums and steps in kernels
    some optimizer has none      sums per distinct id -> complete rows -> Optimizer.update in torch -> write

Without policies the first way does not wait for the device. The second does, once per table.

Gradients are summed by row in a fixed order, from sorted occurrences; with
`TableConfig(deterministic=False)` they are summed by atomic additions, in any order. The kernels of both
are in update_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megalith.table.engines.cuda import update_kernels
from megalith.table.engines.cuda.device_table import (
    BLOCK,
    COUNT,
    FLAGS,
    STEP,
    TIME,
    WARPS,
    DeviceTable,
    float_bits,
    write_chunk,
)
from megalith.table.engines.cuda.graphs import RecordedCalls
from megalith.table.engines.cuda.launch_group import LaunchGroup, RowSearch
from megalith.table.engines.cuda.step_rules import NUM_SETTINGS, step_numbers
from megalith.table.engines.cuda.streams import hold
from megalith.table.engines.cuda.triton_runtime import INTERPRETED, PLAIN_ARITHMETIC, Bound, padded
from megalith.table.engines.torch_step import update_chunk
from megalith.table.policies import MAX_COUNT
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


CHUNK = 8 if INTERPRETED else 64
"""Sorted occurrences that one program of an update sums."""


class Gradients(NamedTuple):
    """Where the gradients of the occurrences are."""

    # For each table, the address of the gradient of its first occurrence; none with `addresses`
    bases: Sequence[int] = ()
    strides: Sequence[int] = ()  # For each table, the bytes from one gradient to the next
    addresses: Tensor | None = None  # int64 [n] of all tables: the address of the gradient of each occurrence
    factors: Tensor | None = None  # float32 [n]: factor of each gradient, or None
    wanted: Tensor | None = None  # int8 [n]: which occurrences count; None: all
    all_aligned: bool = False  # With `addresses`, whether they are multiples of 16
    held: Sequence[Tensor] = ()  # The tensors that the addresses belong to

    @classmethod
    def of(cls, matrices: Sequence[Tensor], wanted: Tensor | None = None) -> Gradients:
        """Return the gradients of matrices."""
        # matrices: float32 [n, dim] of each table; wanted: int8 [n]: which occurrences count.
        hold(matrices)
        bases = [matrix.data_ptr() for matrix in matrices]
        return cls(bases, [4 * matrix.stride(0) for matrix in matrices], wanted=wanted, held=matrices)

    @property
    def aligned(self) -> bool:
        """Whether all addresses are multiples of 16."""
        if self.addresses is not None:
            return self.all_aligned
        return not any(base % 16 for base in self.bases) and not any(stride % 16 for stride in self.strides)

    def part(self, number: int, sizes: list[int]) -> Gradients:
        """Return the gradients of one table."""

        def own(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.split(sizes)[number]

        return Gradients(
            self.bases[number : number + 1],
            self.strides[number : number + 1],
            own(self.addresses),
            own(self.factors),
            own(self.wanted),
            self.all_aligned,
            self.held,
        )


def call_fields(group: LaunchGroup, gradients: Gradients, steps: Sequence[Step]) -> list[int]:
    """Return the numbers of an update that change from call to call."""
    fields: list[int] = []
    bits: list[int] = []
    before: Step | None = None
    bases, strides = gradients.bases, gradients.strides
    for number, step in enumerate(steps):
        if step != before:  # tables often have equal numbers
            bits = [step.time, step.step, float_bits(step.scale), float_bits(step.clip_norm)]
            segments = group.tables[number].config.segments
            for segment, rate in zip(segments, step.rates, strict=False):
                bits += [float_bits(x) for x in step_numbers(segment.optimizer, rate, step.step)]
            before = step
        fields += (bases[number], strides[number]) if bases else (0, 0)
        fields += bits
    return fields


def step_rows(
    group: LaunchGroup, keys: Tensor, sizes: Sequence[int], gradients: Gradients, calls: Tensor
) -> None:
    """Sum the gradients of each row in the order of its occurrences, and make one step per row."""
    if not keys.numel():
        return
    if not group.layout.deterministic:
        addresses, factors = gradients.addresses, gradients.factors
        if addresses is None:
            order = torch.arange(keys.numel(), device=group.device)
            addresses, _ = _sorted_gradients(group, sizes, gradients, calls, order)
        return step_rows_atomically(group, keys, sizes, addresses, factors, gradients.aligned, calls)
    walk = _Walk(group, keys, sizes, gradients, calls)
    measured = group.layout.num_segments > 1
    if measured:
        walk.measure()
    for number in range(group.layout.num_segments):
        walk.segment(number, measured)


def sum_rows(
    group: LaunchGroup, keys: Tensor, sizes: Sequence[int], gradients: Gradients
) -> tuple[Tensor, Tensor]:
    """Sum the gradients of each row."""
    # returns: the positions of the first occurrence of each row, int64 [u], by ascending row, and the sums,
    # float32 [u, dim].
    dim = group.layout.max_dim
    if not keys.numel():
        return torch.empty(0, dtype=torch.int64, device=group.device), torch.empty(
            0, dim, device=group.device
        )
    calls = group.upload(call_fields(group, gradients, [Step([], 0, 1.0, 0.0, 0)]))
    walk = _Walk(group, keys, sizes, gradients, calls)
    heads = walk.sums()
    heads = heads[walk.keys[heads] < group.tables[0].row_capacity]
    return walk.order[heads], walk.buffer.view(-1, dim)[heads]


def _sorted_gradients(
    group: LaunchGroup, sizes: Sequence[int], gradients: Gradients, calls: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the addresses and factors of gradients in the order of sorted occurrences."""
    n, num_fields = order.numel(), calls.numel() // len(sizes)
    addressed, weighted = gradients.addresses is not None, gradients.factors is not None
    addresses = group.scratch("addresses", n, torch.int64)
    factors = group.scratch("factors", n if weighted else 0, torch.float32)
    key = ("sort", addressed, weighted, num_fields)
    if key not in group.bound:
        group.bound[key] = update_kernels.sort_gradients.bind(
            CALL_FIELDS=num_fields,
            ADDRESSED=addressed,
            WEIGHTED=weighted,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    group.bound[key](
        group.grid(sizes, BLOCK),
        calls,
        group.spans(sizes, BLOCK),
        order,
        order if gradients.addresses is None else gradients.addresses,
        factors if gradients.factors is None else gradients.factors,
        addresses,
        factors,
    )
    return addresses, factors


class _Walk:
    """The launches of one update: sorted occurrences, scratch memory and the descriptors of the call."""

    def __init__(
        self,
        group: LaunchGroup,
        keys: Tensor,
        sizes: Sequence[int],
        gradients: Gradients,
        calls: Tensor,
    ) -> None:
        self.group, self.sizes, self.gradients, self.calls = group, sizes, gradients, calls
        self.keys, self.order = torch.sort(keys, stable=True)
        self.num_fields = calls.numel() // len(sizes)
        self.spans = group.spans(sizes, CHUNK)
        self.grid = group.grid(sizes, CHUNK)
        self.num_chunks = sum(-(-size // CHUNK) for size in sizes)
        self.heads = group.scratch("heads", self.num_chunks, torch.int64)
        self.addresses, self.factors = _sorted_gradients(group, sizes, gradients, calls, self.order)
        self.buffer = self.factors

    def segment(self, number: int, measured: bool) -> None:
        layout = self.group.layout
        what = {**layout.step_constants[number], "MEASURED": measured, "COUNTED": layout.counted}
        self._launch(("walk", number, measured), what, layout.rule(number).settings)

    def measure(self) -> None:
        """Compute the factor of each row's gradient, which depends on all columns."""
        self.buffer = torch.empty(self.keys.numel(), dtype=torch.float32, device=self.group.device)
        self._whole_row("measure", update_kernels.MEASURE.value)

    def sums(self) -> Tensor:
        """Compute the sums; return the sorted positions of the first occurrence of each row."""
        n = self.keys.numel()
        size = n * self.group.layout.max_dim
        self.buffer = torch.empty(size, dtype=torch.float32, device=self.group.device)
        self._whole_row("sum", update_kernels.SUM.value)
        first = torch.ones(n, dtype=torch.bool, device=self.group.device)
        first[1:] = self.keys[1:] != self.keys[:-1]
        return first.nonzero()[:, 0]

    def _whole_row(self, use: str, rule: int) -> None:
        """Do something with the sums of whole rows that is no optimizer step."""
        what = {**self.group.layout.whole_row_constants(rule), "MEASURED": False, "COUNTED": False}
        self._launch((use,), what, (0.0,) * NUM_SETTINGS)

    def _launch(self, use: tuple[object, ...], what: dict[str, float], settings: tuple[float, ...]) -> None:
        group, gradients = self.group, self.gradients
        key = (*use, gradients.factors is not None, gradients.aligned, self.num_fields)
        if key not in group.bound:
            self._bind(key, what)
        tables, columns = group.descriptors(), int(what["COLUMNS"])
        parts = group.scratch("parts", 2 * self.num_chunks * columns, torch.float32)
        group.bound[key](
            self.grid,
            tables,
            self.calls,
            self.spans,
            self.keys,
            self.addresses,
            self.factors,
            parts,
            self.heads,
            self.buffer,
            *settings,
        )
        group.bound[(*key, "finish")](
            self.grid,
            tables,
            self.calls,
            self.spans,
            self.keys,
            parts,
            self.heads,
            self.buffer,
            *settings,
        )

    def _bind(self, key: tuple[object, ...], what: dict[str, float]) -> None:
        group, layout, gradients = self.group, self.group.layout, self.gradients
        columns = int(what["COLUMNS"])
        common = {
            **group.kinds,
            "CALL_FIELDS": self.num_fields,
            "HEADER": layout.header,
            "DIM": layout.max_dim,
            "CHUNK": CHUNK,
            "num_warps": max(1, min(8, columns // 128)),
            **what,
            **PLAIN_ARITHMETIC,
        }
        group.bound[key] = update_kernels.walk_chunks.bind(
            WEIGHTED=gradients.factors is not None, ALIGNED=gradients.aligned, **common
        )
        group.bound[(*key, "finish")] = update_kernels.finish_chunks.bind(
            AHEAD=max(2, min(16, 2048 // columns)), **common
        )


ADD_TILE = 2048
"""Gradients that one program adds."""


def step_rows_atomically(
    group: LaunchGroup,
    keys: Tensor,
    sizes: Sequence[int],
    addresses: Tensor,
    factors: Tensor | None,
    aligned: bool,
    calls: Tensor,
) -> None:
    """Sum the gradients of each row by atomic additions, and make one step per row."""
    # addresses: int64 [n], the address of the gradient of each occurrence; factors: float32 [n], factor of
    # each gradient, or None.
    n, layout, tables = keys.numel(), group.layout, group.descriptors()
    # The last launch leaves them as they were.
    num_keys = sum(table.row_capacity + 1 for table in group.tables)
    marks = group.filled("marks", num_keys, update_kernels.UNUSED.value, torch.int32)
    sums = group.filled("sums", n * layout.max_dim, 0.0, torch.float32)
    counts = group.scratch("row counts", len(sizes), torch.int32)[: len(sizes)].zero_()
    numbers = group.scratch("row numbers", n, torch.int32)
    row_keys = group.scratch("row keys", n, torch.int64)
    spans, programs = group.spans(sizes, BLOCK), group.grid(sizes, BLOCK)
    if ("claim rows",) not in group.bound:
        common = {"FIELDS": group.fields, "BLOCK": BLOCK, "num_warps": WARPS}
        group.bound["claim rows",] = update_kernels.claim_rows.bind(**common)
        group.bound["number rows",] = update_kernels.number_rows.bind(**common)
    group.bound["claim rows",](programs, tables, spans, keys, marks)
    group.bound["number rows",](programs, tables, spans, keys, marks, counts, numbers, row_keys)
    columns = min(256, padded(layout.max_dim))
    block = max(1, ADD_TILE // columns)
    key = ("add gradients", factors is not None, aligned)
    if key not in group.bound:
        group.bound[key] = update_kernels.add_gradients.bind(
            FIELDS=group.fields,
            WIDTH=layout.dim,
            DIM=layout.max_dim,
            WEIGHTED=factors is not None,
            ALIGNED=aligned,
            BLOCK=block,
            COLUMNS=columns,
            num_warps=WARPS,
        )
    weights = sums if factors is None else factors
    group.bound[key](
        group.grid(sizes, block),
        tables,
        group.spans(sizes, block),
        keys,
        marks,
        numbers,
        addresses,
        weights,
        sums,
    )
    measured = layout.num_segments > 1
    given = (tables, calls, spans, counts, row_keys, marks, sums)
    few = (min(n, group.few_programs), len(sizes))
    fields = calls.numel() // len(sizes)
    measures = group.scratch("measures", n if measured else 1, torch.float32)
    if measured:
        step = _bound_step(group, None, fields, measured=False, last=False)
        step(few, *given, measures, *[0.0] * NUM_SETTINGS)
    for number in range(layout.num_segments):
        last = number == layout.num_segments - 1
        step = _bound_step(group, number, fields, measured=measured, last=last)
        step(few, *given, measures, *layout.rule(number).settings)


def _bound_step(
    group: LaunchGroup, segment: int | None, call_fields: int, *, measured: bool, last: bool
) -> Bound:
    """Return the kernel of a segment's step, or of the measurement of whole rows."""
    layout = group.layout
    key = ("step sums", segment, call_fields)
    if key in group.bound:
        return group.bound[key]
    if segment is None:
        what = layout.whole_row_constants(update_kernels.MEASURE.value)
    else:
        what = layout.step_constants[segment]
    group.bound[key] = update_kernels.step_sums.bind(
        CALL_FIELDS=call_fields,
        HEADER=layout.header,
        DIM=layout.max_dim,
        MEASURED=measured,
        COUNTED=layout.counted and segment is not None,
        LAST=last,
        num_warps=max(1, min(8, int(what["COLUMNS"]) // 128)),
        **group.kinds,
        **what,
        **PLAIN_ARITHMETIC,
    )
    return group.bound[key]
