"""LaunchGroup: the kernels of several tables, one set of launches for all of them; see row_layout.py.

The ids of the tables follow each other in one tensor; `sizes` says how many each table has, and `Spans`
is what kernels read of it. A group of one table serves the calls of an engine. Nothing here waits for the
device, except `DeviceTable.ensure_room` when memory runs out.

A group also holds integers on their way to the device, and memory that calls use again. Recorded launches
(graphs.py) refer to such memory, so the group advances `generation` when it is replaced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.table.engines import reference_policies
from megalith.table.engines.cuda import (
    admission_kernels,
    device_functions,
    index_kernels,
    row_kernels,
    update_kernels,
    victim_kernels,
)
from megalith.table.engines.cuda.device_table import BLOCK, CALLS_AHEAD, WARPS, DeviceTable
from megalith.table.engines.cuda.row_layout import SharedLayout
from megalith.table.engines.cuda.streams import retire
from megalith.table.engines.cuda.triton_runtime import INTERPRETED, PLAIN_ARITHMETIC, Bound, padded

IntArray = NDArray[np.int64]


class LaunchMemory:
    """The memory of launches on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generation = 0
        self._scratch: dict[str, Tensor] = {}
        self._captured: list[Tensor] = []

    # ---- integers

    def upload(self, values: Sequence[int] | IntArray) -> Tensor:
        """Copy integers to the device without waiting for it."""
        # returns: int64 [n] on the device.
        return self.write(torch.empty(len(values), dtype=torch.int64, device=self.device), values)

    def write(self, target: Tensor, values: Sequence[int] | IntArray) -> Tensor:
        """Copy integers to given memory on the device without waiting for it."""
        # target: int64 [n].
        host = torch.from_numpy(np.asarray(values, dtype=np.int64))
        if self.device.type == "cpu":
            return target.copy_(host)
        pinned = torch.empty(len(values), dtype=torch.int64, pin_memory=True, device="cpu").copy_(host)
        if torch.cuda.is_current_stream_capturing():
            self._captured.append(pinned)  # the graph reads it in each replay
        return target.copy_(pinned, non_blocking=True)

    # ---- memory

    def scratch(self, use: str, n: int, dtype: torch.dtype) -> Tensor:
        """Return memory that is needed until the end of a call; later calls use it again."""
        known = self._scratch.get(use)
        if known is None or known.numel() < n or known.dtype != dtype:
            room = n
            if known is not None:
                retire(known)
                room += n // 8
            self.generation += 1
            known = self._scratch[use] = torch.empty(room, dtype=dtype, device=self.device)
        return known

    def filled(self, use: str, n: int, value: float, dtype: torch.dtype) -> Tensor:
        """Return memory that is filled with a value when it is allocated; callers leave it so."""
        known = self._scratch.get(use)
        memory = self.scratch(use, n, dtype)
        return memory if memory is known else memory.fill_(value)


READ_TILE = 4096 if INTERPRETED else 1024
"""Weights that one program reads."""
READ_WARPS = 2
FIND_BLOCK = 1024 if INTERPRETED else 64
SCAN = 1024
MAX_CACHED = 64
MAX_PROGRAMS = 1 if INTERPRETED else 2112
"""Programs of a launch that does not know its size."""
WINDOW_BLOCK = 1024
"""Rows of a search for low scores that one program visits at a time."""
FEW_PROGRAMS = 528
CALL_NUMBERS: int = update_kernels.RATES.value
STEP_FIELD: int = update_kernels.STEP.value
CALL_COUNTERS: int = device_functions.CALL_COUNTERS.value
COUNTERS_AHEAD = 64
REPORTED_AHEAD = max(1, CALLS_AHEAD // 2)
"""Calls for which the room of a table suffices when the host asks for its number of rows."""


class Spans(NamedTuple):
    """How the positions of a call are divided among the tables of a group."""

    fields: Tensor  # int64 [tables * SPAN_FIELDS] on the device
    tables: int
    n: int  # Number of positions, or more: launches that are recorded serve smaller calls too
    most: int  # Number of positions of a table, or more

    def grid(self, block: int) -> tuple[int, int]:
        """Return the grid of a launch over the positions of all tables."""
        return max(1, -(-self.most // block)), self.tables

    def num_blocks(self, block: int) -> int:
        """Return a number above those of all blocks; see `first_block` in index_kernels.py."""
        return self.n // block + self.tables


class RowSearch(NamedTuple):
    """Rows that were found, and which ids have none."""

    rows: Tensor  # int32 [n], -1 where an id has no row
    missing: Tensor  # int32 [tables], number of ids of each table without a row
    absent: Tensor  # int32 [n], the positions of these ids, from the first position of their table on


class JoinedRows(NamedTuple):
    """Ids of the tables of a group, one table after another, and their rows."""

    ids: Tensor  # int64 [n]
    spans: Spans
    search: RowSearch
    sizes: list[int]  # Number of ids of each table


class AdmissionCall(NamedTuple):
    """What the admission policies of a call need."""

    calls: Tensor  # The numbers of the call by table; see update_kernels.py
    occurrences: Tensor | None = None  # int64 [n]: how many each id stands for; None: one each


class CounterReport(NamedTuple):
    """Numbers of rows on their way to the host."""

    event: torch.cuda.Event  # Recorded after the copy
    numbers: Tensor  # int64 [tables * CALL_COUNTERS]
    requested: list[int]  # Sum of the rows that each table had room for, including this call


class LaunchGroup(LaunchMemory):
    """Launches over tables."""

    def __init__(self, tables: Sequence[DeviceTable]) -> None:
        super().__init__(tables[0].device)
        self.tables = list(tables)
        self.layout = SharedLayout.of([table.layout for table in tables])
        self.fields = tables[0].num_fields
        self.kinds = {"FIELDS": self.fields, **self.layout.places}
        self.bound: dict[tuple[object, ...], Bound] = {}
        self._versions: list[int] = []
        self._checked = -1
        self._descriptors = torch.empty(0, device="cpu")
        self._spans: dict[tuple[int, ...], Spans] = {}
        self._reports: deque[CounterReport] = deque()
        self._counters: list[Tensor] = []
        self._dims = np.array(self.layout.dims, dtype=np.int64)
        self.evicts = any(table.row_limit for table in tables)
        self.admits = any(table.admits for table in tables)
        self._reporting = False  # whether the host should learn the numbers of rows soon
        # Programs for each table of a launch that does not know its size.
        self.few_programs = MAX_PROGRAMS // len(self.tables) + 1

    # ---- descriptors

    def descriptors(self) -> Tensor:
        """Return the descriptors of the tables, int64 [tables * fields]."""
        if self._checked == DeviceTable.changes:
            return self._descriptors
        self._checked = DeviceTable.changes
        versions = [table.version for table in self.tables]
        if versions != self._versions:
            fields, base = [], 0
            for table in self.tables:
                fields += table.descriptor(base)
                base += table.row_capacity + 1
            if self._versions:
                retire(self._descriptors)
            self.generation += 1
            self._descriptors = self.upload(fields)
            self.key_type = torch.int32 if base < 2**31 else torch.int64
            self._versions = versions
        return self._descriptors

    def spans(self, sizes: Sequence[int]) -> Spans:
        """Return the spans of tables."""
        key = tuple(sizes)
        known = self._spans.get(key)
        if known is None:
            if len(self._spans) >= MAX_CACHED:
                retire(*(own.fields for own in self._spans.values()))
                self._spans.clear()
            uploaded = self.upload(self.span_fields(np.array(sizes, dtype=np.int64)).reshape(-1))
            known = self._spans[key] = Spans(uploaded, len(sizes), sum(sizes), max(sizes))
        return known

    def span_fields(self, sizes: IntArray) -> IntArray:
        """Return the fields of the spans of tables, [tables, SPAN_FIELDS]."""
        ends, floats = np.cumsum(sizes), sizes * self._dims
        return np.stack((ends - sizes, ends, np.cumsum(floats) - floats), axis=1)

    def _new_counters(self) -> Tensor:
        """Return int32 [tables] of zeros; many are cleared at once."""
        if not self._counters:
            count = len(self.tables)
            width = -(-count // 4) * 4  # aligned
            zeros = torch.zeros(COUNTERS_AHEAD, width, dtype=torch.int32, device=self.device)
            self._counters = list(zeros[:, :count].unbind())
        return self._counters.pop()

    # ---- rows

    def find(self, ids: Tensor, sizes: Sequence[int]) -> RowSearch:
        """Find the rows of ids."""
        # ids: int64 [n], the ids of the tables one after another.
        n = ids.numel()
        rows, absent = self._new_positions(n)
        search = RowSearch(rows, self._new_counters(), absent)
        if n:
            self.launch_find(ids, self.spans(sizes), search)
        return search

    def _new_positions(self, n: int) -> tuple[Tensor, ...]:
        aligned = -(-n // 4) * 4  # Triton compiles a kernel once more for pointers that are not
        return torch.empty(2, aligned, dtype=torch.int32, device=self.device)[:, :n].unbind()

    def new_search(self, n: int) -> RowSearch:
        """Allocate memory for searches."""
        rows, absent = self._new_positions(n)
        missing = torch.zeros(len(self.tables), dtype=torch.int32, device=self.device)
        return RowSearch(rows, missing, absent)

    def launch_find(self, ids: Tensor, spans: Spans, into: RowSearch) -> None:
        """Find the rows of ids."""
        # ids: int64 [n], n > 0.
        if ("find",) not in self.bound:
            constants = {"FIELDS": self.fields, "BLOCK": FIND_BLOCK, "num_warps": 2}
            self.bound["find",] = index_kernels.find_rows.bind(**constants)
        self.bound["find",](
            spans.grid(FIND_BLOCK),
            self.descriptors(),
            spans.fields,
            ids,
            into.rows,
            into.missing,
            into.absent,
        )

    def all_found(self, rows: Tensor) -> RowSearch:
        """Return rows that exist as the result of a search."""
        # rows: int32 [n], none negative.
        return RowSearch(rows, self._new_counters(), rows)

    def read(self, ids: Tensor, found: RowSearch | None, sizes: Sequence[int], out: Tensor) -> None:
        """Read weights; an id without a row reads as its initial row or zeros."""
        # ids: int64 [n].
        n = ids.numel()
        if not n:
            return
        if found is None and self.layout.num_runs > 1:
            found = self.find(ids, sizes)
        tables, spans = self.descriptors(), self.spans(sizes)
        for number in range(self.layout.num_runs):
            constants = self.layout.run_constants[number]
            columns = min(padded(constants["WIDEST"]), 256)
            block = max(1, READ_TILE // columns)
            grid = spans.grid(block)
            if ("read", number) not in self.bound:
                self._bind_reads(number, constants, block, columns)
            if found is None:
                missing, absent = self._new_counters(), self.scratch("absent", n, torch.int32)
                self.bound["find_and_read",](grid, tables, spans.fields, ids, missing, absent, out)
            else:
                missing, absent = found.missing, found.absent
                self.bound["read", number](grid, tables, spans.fields, found.rows, out)
            if self.layout.initial:
                few = (min(grid[0], self.few_programs), grid[1])
                self.bound["read_missing", number](few, tables, spans.fields, ids, missing, absent, out)

    def _bind_reads(self, number: int, constants: dict[str, int], block: int, columns: int) -> None:
        common = {"DIM": self.layout.dim, **constants, "BLOCK": block, "COLUMNS": columns}
        common |= {"num_warps": READ_WARPS, **PLAIN_ARITHMETIC}
        where = {"OFFSET": self.layout.run_offset(number), **self.kinds}
        self.bound["read", number] = row_kernels.read_rows.bind(**where, **common)
        self.bound["find_and_read",] = row_kernels.find_and_read.bind(**where, **common)
        self.bound["read_missing", number] = row_kernels.read_missing.bind(FIELDS=self.fields, **common)

    def make_room(self, sizes: Sequence[int]) -> None:
        """Make sure that new rows fit."""
        self._read_reports()
        self._reporting = False
        for table, size in zip(self.tables, sizes, strict=True):
            # `ensure_room` in line: this is the only loop over the tables of a recorded update.
            if size > table.room:
                table.grow(size)
            table.requested += size
            table.room -= size
            if table.room < size * REPORTED_AHEAD:
                self._reporting = True

    def launch_create(
        self,
        ids: Tensor,
        found: RowSearch,
        spans: Spans,
        wanted: Tensor | None,
        fresh: Tensor | None,
        save: Callable[[Tensor], None] | None = None,
        decision: AdmissionCall | None = None,
    ) -> Tensor:
        """Create the rows of ids without one, in the order of their first occurrences, after `make_room`."""
        # ids: int64 [n]; wanted: int8 [n], not 0 for ids that may get a row; fresh: int8 [n] of zeros; save:
        # is called with the rows that make room, int32 [n], -1 after them, before they are removed; decision:
        # None admits all ids.
        n = ids.numel()
        slots = self.scratch("slots", n, torch.int64)
        if not n:
            return slots
        decides = self.admits and decision is not None
        claim, number, create = self._creating(wanted is None, fresh is not None, decides)
        tables, fields, grid = self.descriptors(), spans.fields, spans.grid(BLOCK)
        counts = self.scratch("counts", spans.num_blocks(BLOCK), torch.int32)
        created = self.scratch("created", CALL_COUNTERS * len(self.tables), torch.int64)
        new_rows = self.scratch("new", n, torch.int32)
        rows, missing = found.rows, found.missing
        chosen = rows if wanted is None else wanted
        few = min(self.few_programs, grid[0]), grid[1]
        prior, older, seen = slots, slots, slots
        refusals = counts
        if self.admits:
            prior, older, seen = (self.scratch(use, n, torch.int64) for use in ("prior", "older", "seen"))
        claim(few, tables, fields, ids, rows, missing, found.absent, chosen, slots, prior, older, seen)
        if decides:
            assert decision is not None
            refusals = self.scratch("refusals", spans.num_blocks(BLOCK), torch.int32)
            refused = self.scratch("refused", n, torch.int8)
            given = decision.occurrences
            key = ("count seen", given is not None)
            self.bound[key](
                few, tables, fields, missing, found.absent, slots, slots if given is None else given, prior,
                older, seen,
            )  # fmt: skip
            self.bound["count and decide",](
                grid, tables, decision.calls, fields, ids, rows, slots, missing, seen, refused, counts,
                refusals,
            )  # fmt: skip
        else:
            self.bound["count",](grid, tables, fields, rows, slots, missing, counts)
        number((len(self.tables),), tables, fields, missing, counts, refusals, created)
        if decides:
            self.bound["refuse",](grid, tables, fields, ids, slots, seen, older, refused, refusals, created)
        if self.evicts:
            self._launch_eviction(rows, spans, created, save)
        marked = rows if fresh is None else fresh
        create(grid, tables, fields, ids, rows, slots, counts, created, new_rows, marked)
        self._initialize(new_rows, created, fields, n)
        return slots

    def _creating(self, everyone: bool, marked: bool, decides: bool) -> tuple[Bound, Bound, Bound]:
        common = {"FIELDS": self.fields, "BLOCK": BLOCK}
        if ("claim", everyone) not in self.bound:
            # atomic_cas needs an element per thread
            self.bound["claim", everyone] = index_kernels.claim_slots.bind(
                ALL=everyone, ADMITS=self.admits, **common, num_warps=BLOCK // 32
            )
        if ("number", decides) not in self.bound:
            self.bound["count",] = index_kernels.count_new.bind(**common, num_warps=WARPS)
            self.bound["number", decides] = index_kernels.number_new.bind(
                SCAN=SCAN, EVICTS=self.evicts, ADMITS=decides, **common
            )
        if decides and ("refuse",) not in self.bound:
            common["num_warps"] = WARPS
            for given in (True, False):
                self.bound["count seen", given] = admission_kernels.count_seen.bind(GIVEN=given, **common)
            self.bound["count and decide",] = admission_kernels.count_new.bind(
                CALL_FIELDS=CALL_NUMBERS + 3 * self.layout.num_segments, STEP=STEP_FIELD, **common
            )
            self.bound["refuse",] = admission_kernels.refuse_ids.bind(**common)
        if ("create", marked) not in self.bound:
            self.bound["create", marked] = index_kernels.create_rows.bind(
                HEADER=self.layout.header, MARK=marked, BLOCK=BLOCK, num_warps=WARPS, **self.kinds
            )
        return self.bound["claim", everyone], self.bound["number", decides], self.bound["create", marked]

    def _launch_eviction(
        self, rows: Tensor, spans: Spans, created: Tensor, save: Callable[[Tensor], None] | None
    ) -> None:
        """Remove rows of tables beyond their capacity; see victim_kernels.py."""
        if ("protect",) not in self.bound:
            self._bind_eviction()
        tables, fields, count = self.descriptors(), spans.fields, len(self.tables)
        sample, window = reference_policies.SAMPLE, 2 * reference_policies.LOW_PART
        room = window * spans.n + sample * count
        windows = self.scratch("windows", victim_kernels.WINDOW_FIELDS.value * count, torch.int64)
        marks = self.scratch("low rows", room, torch.int8)
        counts = self.scratch("low counts", room // WINDOW_BLOCK + count + 1, torch.int32)
        sampled = self.scratch("sampled scores", padded(sample) * count, torch.int64)
        victims = self.scratch("victims", spans.n, torch.int32)
        if save is not None:
            victims.fill_(-1)
        one, bound = (count,), self.bound
        all_rows = min(self.few_programs, FEW_PROGRAMS), count
        few = min(self.few_programs, -(-(window * spans.most + sample) // WINDOW_BLOCK)), count
        protecting = min(all_rows[0], spans.grid(BLOCK)[0]), count
        bound["protect",](protecting, tables, fields, rows, created)
        bound["count protected", True](all_rows, tables, fields, created, windows, counts)
        bound["begin search",](one, tables, created, windows)
        bound["find low",](few, tables, fields, created, windows, marks, counts)
        bound["take low",](few, tables, fields, created, windows, marks, counts, victims)
        bound["count protected", False](all_rows, tables, fields, created, windows, counts)
        bound["finish search",](one, tables, fields, created, windows, counts, sampled, victims)
        if save is not None:
            save(victims[: spans.n])
        few = min(self.few_programs, -(-spans.most // BLOCK)), count
        bound["remove victims",](few, tables, fields, created, victims)

    def _bind_eviction(self) -> None:
        policies, bound = reference_policies, self.bound
        kinds = {**self.kinds, "HEADER": self.layout.header}
        walk = {"SAMPLE": policies.SAMPLE, "LOW_PART": policies.LOW_PART, "BLOCK": WINDOW_BLOCK}
        sample = {**walk, "PADDED": padded(policies.SAMPLE), "WALK": policies.WALK}
        fields = {"FIELDS": self.fields}
        bound["protect",] = victim_kernels.protect_rows.bind(**fields, BLOCK=BLOCK, num_warps=WARPS)
        for first in (True, False):
            bound["count protected", first] = victim_kernels.count_protected.bind(
                FIRST=first, **fields, **walk, SCAN=256, num_warps=WARPS
            )
        del sample["BLOCK"]
        bound["begin search",] = victim_kernels.begin_search.bind(**kinds, **sample, num_warps=8)
        bound["find low",] = victim_kernels.find_low.bind(**kinds, **walk, num_warps=WARPS)
        bound["take low",] = victim_kernels.take_low.bind(**fields, **walk, SCAN=256, num_warps=WARPS)
        bound["finish search",] = victim_kernels.finish_search.bind(
            **kinds, **sample, BLOCK=WINDOW_BLOCK, SCAN=SCAN, num_warps=8
        )
        bound["remove victims",] = victim_kernels.remove_victims.bind(**kinds, BLOCK=BLOCK, num_warps=WARPS)

    def report(self) -> None:
        """Send the numbers of rows to the host after `launch_create`, if later calls will need them soon."""
        if not self._reporting or self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        created = self._scratch["created"]
        host = torch.empty(created.numel(), dtype=torch.int64, pin_memory=True, device="cpu")
        host.copy_(created, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._reports.append(CounterReport(event, host, [table.requested for table in self.tables]))

    def _read_reports(self) -> None:
        """Take the reports that have arrived; does not wait."""
        report = None
        while self._reports and self._reports[0].event.query():
            report = self._reports.popleft()
        if report is not None:
            numbers = report.numbers.view(-1, CALL_COUNTERS).tolist()
            for table, own, requested in zip(self.tables, numbers, report.requested, strict=True):
                new, free, used, victims, evicted, slots, refused, before, _, counted = own
                if requested > table.known_at:
                    bounded = slots + victims, evicted + victims, before + refused, counted
                    table.know(used - free + new, bounded, requested)

    def _initialize(self, rows: Tensor, counts: Tensor, spans: Tensor, n: int) -> None:
        layout = self.layout
        for number in range(layout.num_runs):
            runs, states = layout.run_constants[number], layout.state_constants
            columns = min(128, padded(max(runs["WIDEST"], states["MOST_STATES"])))
            block = padded(min(n, 256)) if INTERPRETED else max(1, 1024 // columns)
            key = ("initialize", number, block)
            if key not in self.bound:
                self.bound[key] = row_kernels.initialize_rows.bind(
                    HEADER=layout.header,
                    OFFSET=layout.run_offset(number),
                    BLOCK=block,
                    COLUMNS=columns,
                    **runs,
                    **states,
                    **self.kinds,
                    **PLAIN_ARITHMETIC,
                )
            programs = min(-(-n // block), self.few_programs)
            self.bound[key]((programs, len(self.tables)), self.descriptors(), spans, rows, counts)

    def initialize(self, rows: Tensor) -> None:
        """Reset rows of the only table of the group to their initial weights and states."""
        # rows: int32 [n], distinct.
        if rows.numel():
            counts = self.upload([rows.numel()] + [0] * (CALL_COUNTERS - 1))
            self._initialize(rows, counts, self.spans([rows.numel()]).fields, rows.numel())

    def finish(
        self,
        slots: Tensor,
        found: RowSearch,
        spans: Spans,
        wanted: Tensor | None = None,
        *,
        keys: bool,
    ) -> Tensor:
        """Complete the rows after `launch_create`."""
        # returns: int32 or int64 [n]: a key per occurrence, equal for equal rows and ascending by table.
        tables, rows = self.descriptors(), found.rows
        # Positions after those of all tables get the largest key, so that sorting leaves them there.
        most = torch.iinfo(self.key_type).max
        out = torch.full((rows.numel() if keys else 0,), most, dtype=self.key_type, device=self.device)
        if rows.numel():
            key = ("finish", wanted is None, keys)
            if key not in self.bound:
                self.bound[key] = index_kernels.finish_keys.bind(
                    FIELDS=self.fields,
                    ALL=wanted is None,
                    WITH_KEYS=keys,
                    BLOCK=BLOCK,
                    num_warps=WARPS,
                )
            self.bound[key](
                spans.grid(BLOCK),
                tables,
                spans.fields,
                slots,
                found.missing,
                rows,
                rows if wanted is None else wanted,
                out if keys else rows,
            )
        return out


def assign_in_order(group: LaunchGroup, rows: Tensor, values: Tensor, *, add: bool, time: int) -> None:
    """Set weights, or add to them, one occurrence after another."""
    # rows: int32 [n], none negative; values: float32 [n, dim].
    layout = group.tables[0].layout
    sorted_rows, order = torch.sort(rows, stable=True)
    for run in layout.runs:
        columns = min(256, padded(run.width))
        row_kernels.assign_rows[(rows.numel(), -(-run.width // columns))](
            group.descriptors(),
            group.tables[0].chunk_table,
            sorted_rows,
            order,
            values,
            rows.numel(),
            time,
            layout.dim,
            SHIFT=layout.shift,
            STRIDE=layout.stride,
            HEADER=layout.header,
            OFFSET=run.offset,
            START=run.start,
            WIDTH=run.width,
            PRECISION=run.precision,
            ADD=add,
            COLUMNS=columns,
            num_warps=1,
            **PLAIN_ARITHMETIC,
        )
