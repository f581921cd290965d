"""Updates of tables that share launches: admission, missing rows, sums and optimizer steps.

    all optimizers have a rule   create missing rows -> sort by row -> sums and steps in kernels
    some optimizer has none      sums per distinct id -> complete rows -> Optimizer.update in torch -> write

Without policies the first way does not wait for the device. The second does, once per table.

A lookup keeps its memory for the update (graphs.py), which is then a copy of the numbers of the call and one
replay of recorded launches. Without that, and with policies, the same launches are made one after another.

Gradients are summed by row in a fixed order, from sorted occurrences; with
`TableConfig(deterministic=False)` they are summed by atomic additions, in any order. The kernels of both
are in update_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalith.errors import UsageError
from megalith.table.engines.cuda import update_kernels
from megalith.table.engines.cuda.device_functions import SKIPPED
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
from megalith.table.engines.cuda.launch_group import AdmissionCall, IntArray, JoinedRows, LaunchGroup, Spans
from megalith.table.engines.cuda.step_rules import NUM_SETTINGS, step_numbers
from megalith.table.engines.cuda.streams import hold, is_captured
from megalith.table.engines.cuda.triton_runtime import INTERPRETED, PLAIN_ARITHMETIC, Bound, padded
from megalith.table.engines.torch_step import update_chunk
from megalith.table.policies import MAX_COUNT
from megalith.table.rounding import round_step
from megalith.table.table_data import Chunk, Step, Update

if TYPE_CHECKING:
    from megalith.table.engines.cuda.engine import CudaEngine
    from megalith.table.engines.cuda.graphs import SearchSlot

GRADS: int = update_kernels.GRADS.value
NUMBERS: int = update_kernels.TIME.value
RATES: int = update_kernels.RATES.value
NO_FIELDS = np.zeros(0, dtype=np.int64)


class GradientPlaces(NamedTuple):
    """The gradient of each occurrence. Without addresses, occurrence k of a table has row k of its matrix."""

    addresses: Tensor | None = None  # int64 [n] of all tables, 0 for no gradient
    factors: Tensor | None = None  # float32 [n]: factor of each gradient; None: 1
    wanted: Tensor | None = None  # int8 [n]: which occurrences count; None: all

    def part(self, first: int, end: int) -> GradientPlaces:
        """Return those of some occurrences."""
        return GradientPlaces(*(None if own is None else own[first:end] for own in self))


class GradientSource:
    """Where the gradients of an update are: in a matrix for each table, or where launches find them."""

    def __init__(self, bases: IntArray, strides: IntArray, fields: IntArray = NO_FIELDS) -> None:
        self.bases = bases  # int64 [tables], the address of the gradient of the first occurrence
        self.strides = strides  # int64 [tables], bytes from one gradient to the next
        self.fields = fields  # what `places` reads on the device
        self.tensors: Sequence[Tensor] = ()  # what the addresses refer to, alive until the launches
        self.aligned = not bool(((bases | strides) & 15).any())
        """Whether all addresses are multiples of 16."""

    @classmethod
    def of(cls, matrices: Sequence[Tensor]) -> GradientSource:
        """Return the gradients of matrices."""
        # matrices: float32 [n, dim] of each table.
        hold(matrices)
        places = [(matrix.data_ptr(), 4 * matrix.stride(0)) for matrix in matrices]
        source = cls(*np.array(places, dtype=np.int64).T)
        source.tensors = matrices
        return source

    def of_table(self, number: int) -> GradientSource:
        """Return the gradients of one table."""
        own = GradientSource(self.bases[number : number + 1], self.strides[number : number + 1])
        own.aligned = self.aligned
        return own

    def places(self, fields: Tensor, n: int) -> GradientPlaces:
        """Launch what finds the gradients of n occurrences."""
        return GradientPlaces()


class SharedLaunches:
    """Tables that share launches: their searches and updates."""

    def __init__(self, engines: Sequence[CudaEngine], group: LaunchGroup) -> None:
        self.engines, self.group = list(engines), group
        self.names = [engine.name for engine in engines]
        self._by_host = any(engine.policies.by_host for engine in engines)
        self._tiered = any(engine.tier is not None for engine in engines)
        self._counted = [(number, engine) for number, engine in enumerate(engines) if engine.config.counted]
        self._none = torch.empty(0, dtype=torch.int64, device=group.device)
        # The numbers of a call, even so that the fields after them are aligned: Triton compiles a kernel once
        # more for pointers that are not.
        fields = num_call_fields(group)
        self._numbers = np.zeros(-(-len(engines) * fields // 2) * 2, dtype=np.int64)
        self._by_table = self._numbers[: len(engines) * fields].reshape(-1, fields)
        optimizers = [tuple(segment.optimizer for segment in engine.config.segments) for engine in engines]
        self._optimizers = [optimizers.index(own) for own in optimizers]
        # The tables that share the numbers of a step, by the first one with equal optimizers, and rates
        self._equal: dict[tuple[float, ...], list[int]] = {}
        self._rates: Mapping[str, Sequence[float]] | None = None

    def find(
        self,
        ids: Mapping[str, Tensor],
        sizes: list[int],
        looked_up: Mapping[str, int | None] = MappingProxyType({}),
    ) -> JoinedRows:
        """Find the rows of ids; those in host memory move to the device."""
        # ids: int64 [n] by table; sizes: number of ids of each table, 0 for one whose ids are left out;
        # looked_up: tables for which a lookup has counted the use of these rows, and their epoch then.
        columns = [ids[name] if size else self._none for name, size in zip(self.names, sizes, strict=True)]
        hold(columns)
        joined = columns[0] if len(columns) == 1 else torch.cat(columns)
        rows = JoinedRows(joined, self.group.spans(sizes), self.group.find(joined, sizes), sizes)
        self.fetch(rows, looked_up)
        return rows

    def fetch(self, rows: JoinedRows, looked_up: Mapping[str, int | None] = MappingProxyType({})) -> None:
        """Move rows that were found now from host memory to the device."""
        if self._tiered:
            n = sum(rows.sizes)
            ids, found = rows.ids[:n].split(rows.sizes), rows.search.rows[:n].split(rows.sizes)
            for engine, own, own_rows in zip(self.engines, ids, found, strict=True):
                # While the epoch stays, no row moves: those of the lookup are on the device.
                if looked_up.get(engine.name) != engine.epoch:
                    engine.fetch(own, own_rows, counted=engine.name not in looked_up)

    def sizes_of(self, ids: Mapping[str, Tensor]) -> list[int]:
        """Return the number of ids of each table."""
        return [ids[name].numel() if name in ids else 0 for name in self.names]

    def stage_update(
        self,
        update: Update,
        ids: Mapping[str, Tensor],
        sizes: list[int],
        rows: JoinedRows | None,
        source: GradientSource,
        slot: SearchSlot | None = None,
        looked_up: Mapping[str, int | None] = MappingProxyType({}),
    ) -> Callable[[], None]:
        """Do the part of an update that may raise: memory for new rows, and the user's optimizers."""
        # ids, sizes, looked_up: as for `find`; rows: what a lookup found for these ids, if it is current;
        # slot: its memory, if launches may be recorded.
        if not any(sizes):
            return lambda: None
        if is_captured(self.group.device):
            raise UsageError(
                f"tables {', '.join(self.names)}: an update cannot be part of a CUDA graph of yours, because "
                "the host makes room for new rows before each one. Its launches are replayed as graphs "
                "already: capture the dense part alone"
            )
        if self.group.layout.has_rules:
            if not self._by_host:
                self.group.make_room(sizes)
            return partial(self._update, update, ids, sizes, rows, source, slot, looked_up)
        places = source.places(self.group.upload(source.fields), sum(sizes))
        staged, first = [], 0
        for number, size in enumerate(sizes):
            if size:
                name = self.names[number]
                staged.append(
                    _stage_in_torch(
                        self.engines[number],
                        ids[name],
                        update.of(name),
                        update.occurrences.get(name),
                        source.of_table(number),
                        places.part(first, first + size),
                        counted=name not in looked_up,
                    )
                )
            first += size

        def write() -> None:
            for each in staged:
                each()

        return write

    @torch.no_grad()
    def _update(
        self,
        update: Update,
        ids: Mapping[str, Tensor],
        sizes: list[int],
        rows: JoinedRows | None,
        source: GradientSource,
        slot: SearchSlot | None,
        looked_up: Mapping[str, int | None],
    ) -> None:
        group, order = self.group, self.engines[0].order
        fields = self._call_fields(update, source)
        calls = group.write(group.scratch("calls", fields.size, torch.int64)[: fields.size], fields)
        saves = order.num_snapshots > 0 and group.evicts
        seen = self._occurrences(update, sizes)
        if self._by_host or saves or seen is not None:
            slot = None
        if slot is not None and rows is not None:
            self._expect(sizes)
            launch = partial(self._launch, rows, source, calls)
        else:
            places = source.places(calls[self._numbers.size :], sum(sizes))
            if self._by_host:
                self._make_room_on_host(update, ids, sizes, places.wanted)
                rows = None  # some may have been removed
            if self._by_host or any(map(_was_counted, group.tables, sizes)):
                group.make_room(sizes)
            self._expect(sizes)
            if rows is None:
                rows = self.find(ids, sizes, looked_up)
            save = partial(self._save_rows, sizes=sizes) if saves else None
            decision = AdmissionCall(calls, seen)
            launch = partial(self._make_steps, rows, places, decision, save, aligned=source.aligned)
        if order.num_snapshots:
            self._save_rows(rows.search.rows, sizes)
        if slot is None:
            launch()
        else:
            slot.run(("update", group, type(source), source.aligned), launch)
        group.report()
        if group.admits:
            for engine in self.engines:
                engine.policies.limit_counted()
        order.writes += 1
        for number, engine in self._counted:
            if sizes[number]:  # the step of a table without ids is that of another table
                engine.latest_step = max(engine.latest_step, min(update.step, MAX_COUNT))

    def _launch(self, rows: JoinedRows, source: GradientSource, calls: Tensor) -> None:
        places = source.places(calls[self._numbers.size :], rows.spans.n)
        self._make_steps(rows, places, AdmissionCall(calls), None, aligned=source.aligned)

    def _expect(self, sizes: Sequence[int]) -> None:
        if self.group.evicts or self.group.admits:
            for engine, size in zip(self.engines, sizes, strict=True):
                if size:
                    engine.policies.expect(size)

    def _occurrences(self, update: Update, sizes: Sequence[int]) -> Tensor | None:
        """Return how many occurrences each id stands for, int64 [n], if an admission policy needs it."""
        if not self.group.admits or not update.occurrences:
            return None
        device = self.group.device
        ones = [torch.ones(size, dtype=torch.int64, device=device) for size in sizes]
        given = [update.occurrences.get(name) for name in self.names]
        pairs = zip(given, ones, strict=True)
        return torch.cat([one if own is None else own.to(device) for own, one in pairs])

    def _make_room_on_host(
        self, update: Update, ids: Mapping[str, Tensor], sizes: list[int], wanted: Tensor | None
    ) -> None:
        split = [None] * len(sizes) if wanted is None else wanted.split(sizes)
        for engine, size, own in zip(self.engines, sizes, split, strict=True):
            if size and engine.policies.by_host:
                seen = update.occurrences.get(engine.name)
                engine.policies.make_room(ids[engine.name], own, seen, update.step)

    def _save_rows(self, rows: Tensor, sizes: Sequence[int]) -> None:
        """Save rows of all tables for open snapshots, int32 [n or more]."""
        for engine, own in zip(self.engines, rows[: sum(sizes)].split(list(sizes)), strict=True):
            engine.save_rows(own)

    def _make_steps(
        self,
        rows: JoinedRows,
        places: GradientPlaces,
        decision: AdmissionCall,
        save: Callable[[Tensor], None] | None,
        *,
        aligned: bool,
    ) -> None:
        group, spans = self.group, rows.spans
        wanted = places.wanted
        slots = group.launch_create(rows.ids, rows.search, spans, wanted, None, save, decision)
        keys = group.finish(slots, rows.search, spans, wanted, keys=True)
        step_rows(group, keys, spans, places, decision.calls, aligned=aligned)

    def _call_fields(self, update: Update, source: GradientSource) -> IntArray:
        """Return what differs between the calls of recorded launches: numbers, then fields of gradients."""
        fields = self._by_table
        assert update.time is not None
        fields[:, GRADS], fields[:, GRADS + 1] = source.bases, source.strides
        fields[:, NUMBERS:RATES] = (
            update.time,
            update.step,
            float_bits(update.scale),
            float_bits(update.clip_norm),
        )
        if update.rates is not self._rates:
            self._rates, self._equal = update.rates, {}
            for number, engine in enumerate(self.engines):
                if engine.name in update.rates:
                    key = self._optimizers[number], *update.rates[engine.name]
                    self._equal.setdefault(key, []).append(number)
        for (_, *rates), numbers in self._equal.items():
            segments = self.engines[numbers[0]].config.segments
            fields[numbers, RATES:] = [
                float_bits(x)
                for segment, rate in zip(segments, rates, strict=True)
                for x in step_numbers(segment.optimizer, rate, update.step)
            ]
        return np.concatenate((self._numbers, source.fields))


def num_call_fields(group: LaunchGroup) -> int:
    """Return the number of int64 that describe an update of one table."""
    return RATES + 3 * group.layout.num_segments


def _was_counted(table: DeviceTable, size: int) -> bool:
    """Whether the rows of a table were counted after room was made, so that the bound has no new ones."""
    return size > 0 and table.known_at == table.requested


@torch.no_grad()
def _stage_in_torch(
    engine: CudaEngine,
    ids: Tensor,
    step: Step,
    occurrences: Tensor | None,
    source: GradientSource,
    places: GradientPlaces,
    *,
    counted: bool,
) -> Callable[[], None]:
    table, group, config = engine.table, engine.group, engine.config
    sizes = [ids.numel()]
    table.ensure_room(ids.numel())
    group.descriptors()
    inverse = torch.unique(ids, return_inverse=True)[1]
    wanted = places.wanted
    keys = inverse if wanted is None else torch.where(wanted != 0, inverse, table.row_capacity)
    first, sums = sum_rows(group, keys.to(group.key_type), source, places)
    own = ids[first]
    finite = torch.isfinite(sums).all(1)
    skipped, own, sums = own[~finite], own[finite].contiguous(), sums[finite].contiguous()
    search = group.find(own, [own.numel()])
    engine.fetch(own, search.rows, counted=counted)
    weights, states = engine.complete_rows(own, search)
    columns = {
        c.key: states[:, c.start - config.dim : c.end - config.dim].contiguous() for c in config.state_columns
    }
    chunk = Chunk(own, weights, columns, torch.zeros_like(own))
    if own.numel():
        update_chunk(config, sums, chunk, step, engine.view)  # it may raise, so nothing is written before
        chunk.rows.copy_(round_step(config, table.key, own, chunk.rows, step.step))

    def write() -> None:
        if engine.policies.by_host:
            engine.policies.make_room(ids, wanted, occurrences, step.step)
        found = group.find(ids, sizes)
        engine.save_rows(found.rows)
        numbers = np.zeros(num_call_fields(group), dtype=np.int64)
        numbers[update_kernels.STEP.value] = step.step
        seen = None if occurrences is None else occurrences.to(group.device)
        decision = AdmissionCall(group.upload(numbers), seen)
        slots = engine.create(ids, found, wanted, decision=decision)
        group.finish(slots, found, group.spans(sizes), wanted, keys=False)
        table.counters[SKIPPED.value] += (group.find(skipped, [skipped.numel()]).rows >= 0).sum()
        rows = group.find(own, [own.numel()]).rows
        kept = rows >= 0  # others were refused
        rows = rows[kept].contiguous()
        if rows.numel():
            headers = table.headers(rows)
            write_chunk(table, rows, chunk.select(kept))
            table.write_header(TIME, rows, torch.full_like(rows, step.time, dtype=torch.int64))
            table.write_header(FLAGS, rows, torch.full_like(rows, table.tracked), 1)
            table.write_header(COUNT, rows, (headers[3] + 1).clamp(max=MAX_COUNT))
            table.write_header(STEP, rows, torch.full_like(headers[4], min(step.step, MAX_COUNT)))
        engine.wrote(step.step)

    return write


CHUNK = 8 if INTERPRETED else 64
"""Sorted occurrences that one program of an update sums."""


def step_rows(
    group: LaunchGroup, keys: Tensor, spans: Spans, places: GradientPlaces, calls: Tensor, *, aligned: bool
) -> None:
    """Sum the gradients of each row in the order of its occurrences, and make one step per row."""
    if not keys.numel():
        return
    if not group.layout.deterministic:
        addresses = places.addresses
        if addresses is None:
            order = torch.arange(keys.numel(), device=group.device)
            addresses, _ = _sorted_gradients(group, spans, places, calls, order)
        return step_rows_atomically(group, keys, spans, addresses, places.factors, calls, aligned=aligned)
    walk = _Walk(group, keys, spans, places, calls, aligned=aligned)
    measured = group.layout.num_segments > 1
    if measured:
        walk.measure()
    for number in range(group.layout.num_segments):
        walk.segment(number, measured)


def sum_rows(
    group: LaunchGroup, keys: Tensor, source: GradientSource, places: GradientPlaces
) -> tuple[Tensor, Tensor]:
    """Sum the gradients of each row of the only table of a group."""
    # returns: the positions of the first occurrence of each row, int64 [u], by ascending row, and the sums,
    # float32 [u, dim].
    dim = group.layout.max_dim
    if not keys.numel():
        return torch.empty(0, dtype=torch.int64, device=group.device), torch.empty(
            0, dim, device=group.device
        )
    numbers = np.zeros(num_call_fields(group), dtype=np.int64)
    numbers[GRADS], numbers[GRADS + 1] = source.bases[0], source.strides[0]
    spans = group.spans([keys.numel()])
    walk = _Walk(group, keys, spans, places, group.upload(numbers), aligned=source.aligned)
    heads = walk.sums()
    heads = heads[walk.keys[heads] < group.tables[0].row_capacity]
    return walk.order[heads], walk.buffer.view(-1, dim)[heads]


def _sorted_gradients(
    group: LaunchGroup, spans: Spans, places: GradientPlaces, calls: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the addresses and factors of gradients in the order of sorted occurrences."""
    n = order.numel()
    addressed, weighted = places.addresses is not None, places.factors is not None
    addresses = group.scratch("addresses", n, torch.int64)
    factors = group.scratch("factors", n if weighted else 0, torch.float32)
    key = ("sort", addressed, weighted)
    if key not in group.bound:
        group.bound[key] = update_kernels.sort_gradients.bind(
            CALL_FIELDS=num_call_fields(group),
            ADDRESSED=addressed,
            WEIGHTED=weighted,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    group.bound[key](
        spans.grid(BLOCK),
        calls,
        spans.fields,
        order,
        order if places.addresses is None else places.addresses,
        factors if places.factors is None else places.factors,
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
        spans: Spans,
        places: GradientPlaces,
        calls: Tensor,
        *,
        aligned: bool,
    ) -> None:
        self.group, self.spans, self.calls = group, spans, calls
        self.weighted, self.aligned = places.factors is not None, aligned
        self.keys, self.order = torch.sort(keys, stable=True)
        self.num_chunks = spans.num_blocks(CHUNK)
        self.heads = group.scratch("heads", self.num_chunks, torch.int64)
        self.addresses, self.factors = _sorted_gradients(group, spans, places, calls, self.order)
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
        """Do something with the sums of whole rows that is not an optimizer step."""
        what = {**self.group.layout.whole_row_constants(rule), "MEASURED": False, "COUNTED": False}
        self._launch((use,), what, (0.0,) * NUM_SETTINGS)

    def _launch(self, use: tuple[object, ...], what: dict[str, float], settings: tuple[float, ...]) -> None:
        group, grid = self.group, self.spans.grid(CHUNK)
        key = (*use, self.weighted, self.aligned)
        if key not in group.bound:
            self._bind(key, what)
        tables, columns = group.descriptors(), int(what["COLUMNS"])
        parts = group.scratch("parts", 2 * self.num_chunks * columns, torch.float32)
        group.bound[key](
            grid,
            tables,
            self.calls,
            self.spans.fields,
            self.keys,
            self.addresses,
            self.factors,
            parts,
            self.heads,
            self.buffer,
            *settings,
        )
        group.bound[(*key, "finish")](
            grid,
            tables,
            self.calls,
            self.spans.fields,
            self.keys,
            parts,
            self.heads,
            self.buffer,
            *settings,
        )

    def _bind(self, key: tuple[object, ...], what: dict[str, float]) -> None:
        group, layout = self.group, self.group.layout
        columns = int(what["COLUMNS"])
        common = {
            **group.kinds,
            "CALL_FIELDS": num_call_fields(group),
            "HEADER": layout.header,
            "DIM": layout.max_dim,
            "CHUNK": CHUNK,
            "num_warps": max(1, min(8, columns // 128)),
            **what,
            **PLAIN_ARITHMETIC,
        }
        group.bound[key] = update_kernels.walk_chunks.bind(
            WEIGHTED=self.weighted, ALIGNED=self.aligned, **common
        )
        group.bound[(*key, "finish")] = update_kernels.finish_chunks.bind(
            AHEAD=max(2, min(16, 2048 // columns)), **common
        )


ADD_TILE = 2048
"""Gradients that one program adds."""


def step_rows_atomically(
    group: LaunchGroup,
    keys: Tensor,
    spans: Spans,
    addresses: Tensor,
    factors: Tensor | None,
    calls: Tensor,
    *,
    aligned: bool,
) -> None:
    """Sum the gradients of each row by atomic additions, and make one step per row."""
    # addresses: int64 [n], the address of the gradient of each occurrence; factors: float32 [n], factor of
    # each gradient, or None.
    n, layout, tables = keys.numel(), group.layout, group.descriptors()
    # The last launch leaves them as they were.
    num_keys = sum(table.row_capacity + 1 for table in group.tables)
    marks = group.filled("marks", num_keys, update_kernels.UNUSED.value, torch.int32)
    sums = group.filled("sums", n * layout.max_dim, 0.0, torch.float32)
    num_tables = len(group.tables)
    counts = group.scratch("row counts", num_tables, torch.int32)[:num_tables].zero_()
    numbers = group.scratch("row numbers", n, torch.int32)
    row_keys = group.scratch("row keys", n, torch.int64)
    fields, programs = spans.fields, spans.grid(BLOCK)
    if ("claim rows",) not in group.bound:
        common = {"FIELDS": group.fields, "BLOCK": BLOCK, "num_warps": WARPS}
        group.bound["claim rows",] = update_kernels.claim_rows.bind(**common)
        group.bound["number rows",] = update_kernels.number_rows.bind(**common)
    group.bound["claim rows",](programs, tables, fields, keys, marks)
    group.bound["number rows",](programs, tables, fields, keys, marks, counts, numbers, row_keys)
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
        spans.grid(block),
        tables,
        fields,
        keys,
        marks,
        numbers,
        addresses,
        weights,
        sums,
    )
    measured = layout.num_segments > 1
    given = (tables, calls, fields, counts, row_keys, marks, sums)
    few = (min(n, group.few_programs), num_tables)
    measures = group.scratch("measures", n if measured else 1, torch.float32)
    if measured:
        step = _bound_step(group, None, measured=False, last=False)
        step(few, *given, measures, *[0.0] * NUM_SETTINGS)
    for number in range(layout.num_segments):
        last = number == layout.num_segments - 1
        step = _bound_step(group, number, measured=measured, last=last)
        step(few, *given, measures, *layout.rule(number).settings)


def _bound_step(group: LaunchGroup, segment: int | None, *, measured: bool, last: bool) -> Bound:
    """Return the kernel of a segment's step, or of the measurement of whole rows."""
    layout = group.layout
    key = ("step sums", segment)
    if key in group.bound:
        return group.bound[key]
    if segment is None:
        what = layout.whole_row_constants(update_kernels.MEASURE.value)
    else:
        what = layout.step_constants[segment]
    group.bound[key] = update_kernels.step_sums.bind(
        CALL_FIELDS=num_call_fields(group),
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
