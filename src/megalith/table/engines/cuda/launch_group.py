"""LaunchGroup: the kernels of several tables with equal row layouts, one set of launches for all of them.

The ids of the tables follow each other in one tensor; `sizes` says how many each table has. A group of one
table serves the calls of an engine. Nothing here waits for the device, except `DeviceTable.ensure_room` when
memory runs out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.table.engines.cuda import index_kernels, row_kernels, update_kernels
from megalith.table.engines.cuda.device_table import BLOCK, WARPS, DeviceTable, float_bits
from megalith.table.engines.cuda.step_settings import NUM_SETTINGS, step_numbers
from megalith.table.engines.cuda.triton_runtime import INTERPRETED, PLAIN_ARITHMETIC, padded
from megalith.table.table_data import Step

CHUNK = 8 if INTERPRETED else 64
"""Sorted occurrences that one program of an update sums."""
READ_TILE = 4096
"""Weights that one program reads."""
FIND_BLOCK = 1024 if INTERPRETED else 64
SCAN = 1024
MAX_CACHED = 64
MAX_PROGRAMS = 1 if INTERPRETED else 2112
"""Programs of a launch that does not know its size."""


class Gradients(NamedTuple):
    """Where the gradients of the occurrences are.

    Attributes:
        matrices: float32 [n, dim] of each table, or none if `addresses` is given.
        addresses: int64 [n] of all tables: the address of the gradient of each occurrence.
        factors: float32 [n]: factor of each gradient, or None.
        wanted: int8 [n]: which occurrences count; None: all.
        aligned: Whether the addresses are multiples of 16.
    """

    matrices: Sequence[Tensor] = ()
    addresses: Tensor | None = None
    factors: Tensor | None = None
    wanted: Tensor | None = None
    aligned: bool = False


class CounterReport(NamedTuple):
    """Numbers of rows on their way to the host.

    Attributes:
        event: Recorded after the copy.
        numbers: int64 [3 * tables]: new rows, and free rows and used row numbers before.
        requested: Sum of the rows that each table had room for, including this call.
    """

    event: torch.cuda.Event
    numbers: Tensor
    requested: list[int]


class LaunchGroup:
    """Launches over tables with equal layouts.

    Args:
        tables: The tables, on one device.
    """

    def __init__(self, tables: Sequence[DeviceTable]) -> None:
        self.tables = list(tables)
        self.layout = tables[0].layout
        self.device = tables[0].device
        self._fields = tables[0].num_fields
        self._versions: list[int] = []
        self._descriptors = torch.empty(0)
        self._spans: dict[tuple[int, ...], Tensor] = {}
        self._uploads: dict[tuple[object, ...], tuple[list[int], Tensor]] = {}
        self._reports: deque[CounterReport] = deque()
        self._unknown = torch.ones(1, dtype=torch.int32, device=self.device)
        self.kinds = {"FIELDS": self._fields, "SHIFT": self.layout.shift, "STRIDE": self.layout.stride}

    # ---- descriptors

    def upload(self, values: Sequence[int]) -> Tensor:
        """Copy integers to the device without waiting for it.

        Args:
            values: The integers.

        Returns:
            int64 [n] on the device.
        """
        pinned = self.device.type == "cuda"
        host = torch.tensor(values, dtype=torch.int64, pin_memory=pinned)
        return host.to(self.device, non_blocking=True)

    def upload_once(self, key: tuple[object, ...], values: list[int]) -> Tensor:
        """Copy integers to the device, unless the last call with this key copied the same.

        Args:
            key: Identifies the use.
            values: The integers.

        Returns:
            int64 [n] on the device; not to be changed.
        """
        known = self._uploads.get(key)
        if known is None or known[0] != values:
            known = self._uploads[key] = (values, self.upload(values))
        return known[1]

    def descriptors(self) -> Tensor:
        """Return the descriptors of the tables, int64 [tables * fields]."""
        versions = [table.version for table in self.tables]
        if versions != self._versions:
            fields, base = [], 0
            for table in self.tables:
                fields += table.descriptor(base)
                base += table.row_capacity + 1
            self._descriptors = self.upload(fields)
            self.key_type = torch.int32 if base < 2**31 else torch.int64
            self._versions = versions
        return self._descriptors

    def spans(self, sizes: Sequence[int], block: int) -> Tensor:
        """Return for each table its first position, its end, and the number of its first block.

        Args:
            sizes: Number of positions of each table.
            block: Positions of a block.

        Returns:
            int64 [tables * 3] on the device.
        """
        key = (block, *sizes)
        if key not in self._spans:
            if len(self._spans) >= MAX_CACHED:
                self._spans.clear()
            values, at, blocks = [], 0, 0
            for size in sizes:
                values += [at, at + size, blocks]
                at += size
                blocks += -(-size // block)
            self._spans[key] = self.upload(values)
        return self._spans[key]

    def _grid(self, sizes: Sequence[int], block: int) -> tuple[int, int]:
        return max(1, -(-max(sizes) // block)), len(sizes)

    # ---- rows

    def find(self, ids: Tensor, sizes: Sequence[int]) -> Tensor:
        """Find the rows of ids.

        Args:
            ids: int64 [n], the ids of the tables one after another.
            sizes: Number of ids of each table.

        Returns:
            int32 [n], -1 where an id has no row.
        """
        rows = torch.empty(ids.numel(), dtype=torch.int32, device=self.device)
        missing = torch.zeros(1, dtype=torch.int32, device=self.device)
        if ids.numel():
            index_kernels.find_rows[self._grid(sizes, FIND_BLOCK)](
                self.descriptors(),
                self.spans(sizes, FIND_BLOCK),
                ids,
                rows,
                missing,
                FIELDS=self._fields,
                BLOCK=FIND_BLOCK,
                num_warps=2,
            )
        rows.megalith_missing = missing  # type: ignore[attr-defined]
        return rows

    def missing_of(self, rows: Tensor) -> Tensor:
        """Return the number of ids without a row.

        Args:
            rows: int32 [n].

        Returns:
            int32 [1] on the device, positive if it is not known.
        """
        known: Tensor | None = getattr(rows, "megalith_missing", None)
        return self._unknown if known is None else known

    def read(self, ids: Tensor, rows: Tensor, sizes: Sequence[int], out: Tensor) -> None:
        """Read weights; an id without a row reads as its initial row or zeros.

        Args:
            ids: int64 [n].
            rows: int32 [n].
            sizes: Number of ids of each table.
            out: float32 [n, dim].
        """
        if not ids.numel():
            return
        tables = self.descriptors()
        for run in self.layout.runs:
            columns = min(padded(run.width), 256)
            block = max(1, READ_TILE // columns)
            common = {"DIM": self.layout.dim, "START": run.start, "WIDTH": run.width}
            common |= {"PRECISION": run.precision, "BLOCK": block, "COLUMNS": columns, "num_warps": WARPS}
            grid, spans = self._grid(sizes, block), self.spans(sizes, block)
            row_kernels.read_rows[grid](
                tables, spans, rows, out, OFFSET=run.offset, **self.kinds, **common, **PLAIN_ARITHMETIC
            )
            if self.layout.initial:
                row_kernels.read_missing[(min(grid[0], MAX_PROGRAMS), grid[1])](
                    tables,
                    spans,
                    ids,
                    rows,
                    self.missing_of(rows),
                    out,
                    FIELDS=self._fields,
                    NUM_SEGMENTS=len(self.layout.segments),
                    **common,
                    **PLAIN_ARITHMETIC,
                )

    def create(
        self,
        ids: Tensor,
        rows: Tensor,
        sizes: Sequence[int],
        wanted: Tensor | None = None,
        fresh: Tensor | None = None,
    ) -> Tensor:
        """Create the rows of ids that have none, in the order of their first occurrences.

        Args:
            ids: int64 [n].
            rows: int32 [n], -1 where an id has no row; completed in place after `finish`.
            sizes: Number of ids of each table.
            wanted: int8 [n], not 0 for ids that may get a row; None: all.
            fresh: int8 [n] of zeros; becomes 1 at the first occurrence of each new id.

        Returns:
            The slots of new ids, int64 [n], for `finish`.
        """
        self._read_reports()
        for table, size in zip(self.tables, sizes, strict=True):
            table.ensure_room(size)
        n, layout, device = ids.numel(), self.layout, self.device
        slots = torch.empty(n, dtype=torch.int64, device=device)
        if not n:
            return slots
        tables, spans, grid = self.descriptors(), self.spans(sizes, BLOCK), self._grid(sizes, BLOCK)
        num_blocks = sum(-(-size // BLOCK) for size in sizes)
        counts = torch.empty(num_blocks, dtype=torch.int32, device=device)
        created = torch.empty(3 * len(sizes), dtype=torch.int64, device=device)
        new_rows = torch.empty(n, dtype=torch.int32, device=device)
        common = {"FIELDS": self._fields, "BLOCK": BLOCK}
        index_kernels.claim_slots[grid](
            tables,
            spans,
            ids,
            rows,
            rows if wanted is None else wanted,
            slots,
            ALL=wanted is None,
            **common,
            num_warps=BLOCK // 32,  # atomic_cas needs an element per thread
        )
        index_kernels.count_new[grid](tables, spans, slots, counts, **common, num_warps=WARPS)
        index_kernels.number_new[(len(sizes),)](tables, spans, counts, created, SCAN=SCAN, **common)
        index_kernels.create_rows[grid](
            tables,
            spans,
            ids,
            slots,
            counts,
            created,
            new_rows,
            rows if fresh is None else fresh,
            HEADER=layout.header,
            MARK=fresh is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
            **self.kinds,
        )
        self._initialize(new_rows, created, spans, n)
        if any(table.needs_report(size) for table, size in zip(self.tables, sizes, strict=True)):
            self._report(created)
        return slots

    def _report(self, created: Tensor) -> None:
        """Send the numbers of rows to the host, for later calls."""
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        host = torch.empty(created.numel(), dtype=torch.int64, pin_memory=True)
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
            numbers = report.numbers.view(-1, 3).tolist()
            for table, (new, free, used), requested in zip(
                self.tables, numbers, report.requested, strict=True
            ):
                if requested > table.known_at:
                    table.know(used + max(0, new - free), max(0, free - new), requested)

    def _initialize(self, rows: Tensor, counts: Tensor, spans: Tensor, n: int) -> None:
        layout = self.layout
        for number, run in enumerate(layout.runs):
            columns = min(128, padded(max(run.width, layout.state_floats)))
            block = padded(min(n, 256)) if INTERPRETED else max(1, 1024 // columns)
            programs = min(-(-n // block), MAX_PROGRAMS)
            row_kernels.initialize_rows[(programs, len(self.tables))](
                self.descriptors(),
                spans,
                rows,
                counts,
                HEADER=layout.header,
                OFFSET=run.offset,
                START=run.start,
                WIDTH=run.width,
                PRECISION=run.precision,
                STATE_OFFSET=layout.state_offset,
                STATES=layout.state_floats if number == 0 else 0,
                NUM_SEGMENTS=len(layout.segments),
                BLOCK=block,
                COLUMNS=columns,
                **self.kinds,
                **PLAIN_ARITHMETIC,
            )

    def initialize(self, rows: Tensor) -> None:
        """Reset rows of the only table of the group to their initial weights and states.

        Args:
            rows: int32 [n], distinct.
        """
        if rows.numel():
            counts = self.upload([rows.numel(), 0, 0])
            self._initialize(rows, counts, self.spans([rows.numel()], BLOCK), rows.numel())

    def finish(
        self,
        slots: Tensor | None,
        rows: Tensor,
        sizes: Sequence[int],
        wanted: Tensor | None = None,
        *,
        keys: bool,
    ) -> Tensor:
        """Complete the rows after `create`.

        Args:
            slots: What `create` returned; None: the rows are complete.
            rows: int32 [n], completed in place.
            sizes: Number of ids of each table.
            wanted: As for `create`.
            keys: Whether to compute sort keys.

        Returns:
            int32 or int64 [n]: a key per occurrence, equal for equal rows and ascending by table; an
            occurrence that has no row or is not wanted gets the last key of its table. Empty without `keys`.
        """
        tables = self.descriptors()
        out = torch.empty(rows.numel() if keys else 0, dtype=self.key_type, device=self.device)
        if rows.numel():
            index_kernels.finish_keys[self._grid(sizes, BLOCK)](
                tables,
                self.spans(sizes, BLOCK),
                rows if slots is None else slots,
                rows,
                rows if wanted is None else wanted,
                out if keys else rows,
                FIELDS=self._fields,
                ALL=wanted is None,
                WITH_SLOTS=slots is not None,
                WITH_KEYS=keys,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
        return out

    # ---- updates

    def step_rows(
        self, keys: Tensor, sizes: Sequence[int], gradients: Gradients, steps: Sequence[Step]
    ) -> None:
        """Sum the gradients of each row in the order of its occurrences, and make one step per row.

        Args:
            keys: From `finish`.
            sizes: Number of occurrences of each table.
            gradients: The gradients of the occurrences.
            steps: The step of each table.
        """
        layout = self.layout
        walk = _Walk(self, keys, sizes, gradients, steps)
        measured = len(layout.segments) > 1
        if measured:
            walk.factors()
        for number in range(len(layout.segments)):
            walk.segment(number, measured)

    def sum_rows(self, keys: Tensor, sizes: Sequence[int], gradients: Gradients) -> tuple[Tensor, Tensor]:
        """Sum the gradients of each row.

        Args:
            keys: As for `step_rows`; the group has one table.
            sizes: Number of occurrences.
            gradients: The gradients of the occurrences.

        Returns:
            The positions of the first occurrence of each row, int64 [u], by ascending row, and the sums,
            float32 [u, dim]. It waits for the device.
        """
        walk = _Walk(self, keys, sizes, gradients, [Step([], 0, 1.0, 0.0, 0)])
        heads = walk.sums()
        limit = self.tables[0].row_capacity
        heads = heads[walk.keys[heads] < limit]
        return walk.order[heads], walk.buffer.view(-1, self.layout.dim)[heads]


class _Walk:
    """The launches of one update: sorted occurrences, scratch memory and the descriptors of the call."""

    def __init__(
        self,
        group: LaunchGroup,
        keys: Tensor,
        sizes: Sequence[int],
        gradients: Gradients,
        steps: Sequence[Step],
    ) -> None:
        self.group, self.sizes, self.gradients = group, sizes, gradients
        self.keys, self.order = torch.sort(keys, stable=True)
        fields: list[int] = []
        same: dict[tuple[object, ...], list[int]] = {}  # tables often share their numbers
        for number, step in enumerate(steps):
            segments = group.tables[number].config.segments
            key = (step.time, step.step, step.scale, step.clip_norm, *step.rates)
            if key not in same:
                bits = [step.time, step.step, float_bits(step.scale), float_bits(step.clip_norm)]
                for segment, rate in zip(segments, step.rates, strict=False):
                    bits += [float_bits(x) for x in step_numbers(segment.optimizer, rate, step.step)]
                same[key] = bits
            fields.append(gradients.matrices[number].data_ptr() if gradients.matrices else 0)
            fields += same[key]
        self.num_fields = len(fields) // len(steps)
        self.calls = group.upload(fields)
        self.spans = group.spans(sizes, CHUNK)
        self.grid = group._grid(sizes, CHUNK)
        self.num_chunks = sum(-(-size // CHUNK) for size in sizes)
        device = group.device
        self.heads = torch.empty(self.num_chunks, dtype=torch.int64, device=device)
        self.buffer = torch.empty(0, device=device)

    def segment(self, number: int, measured: bool) -> None:
        place = self.group.layout.segments[number]
        assert place.rule is not None
        self._launch(
            {
                "OFFSET": place.offset,
                "STATE": place.state,
                "START": place.start,
                "WIDTH": place.width,
                "SEGMENT": number,
                "PRECISION": place.precision,
                "STOCHASTIC": place.stochastic,
                "RULE": place.rule.rule,
                "OPTIONS": place.rule.options,
                "MEASURED": measured,
                "COUNTED": self.group.layout.counted,
            },
            place.rule.settings,
        )

    def factors(self) -> None:
        """Compute the factor of each row's gradient, which depends on all columns."""
        self.buffer = torch.empty(self.keys.numel(), device=self.group.device)
        self._launch(self._whole_row(update_kernels.MEASURE.value), (0.0,) * NUM_SETTINGS)

    def sums(self) -> Tensor:
        """Compute the sums; return the sorted positions of the first occurrence of each row."""
        n = self.keys.numel()
        self.buffer = torch.empty(n * self.group.layout.dim, device=self.group.device)
        self._launch(self._whole_row(update_kernels.SUM.value), (0.0,) * NUM_SETTINGS)
        first = torch.ones(n, dtype=torch.bool, device=self.group.device)
        first[1:] = self.keys[1:] != self.keys[:-1]
        return first.nonzero()[:, 0]

    def _whole_row(self, rule: int) -> dict[str, int | bool]:
        return {
            "OFFSET": 0,
            "STATE": 0,
            "START": 0,
            "WIDTH": self.group.layout.dim,
            "SEGMENT": 0,
            "PRECISION": 0,
            "STOCHASTIC": False,
            "RULE": rule,
            "OPTIONS": 0,
            "MEASURED": False,
            "COUNTED": False,
        }

    def _is_aligned(self) -> bool:
        matrices = self.gradients.matrices
        if not matrices:
            return self.gradients.aligned
        return self.group.layout.dim % 4 == 0 and all(matrix.data_ptr() % 16 == 0 for matrix in matrices)

    def _launch(self, what: dict[str, int | bool], settings: tuple[float, ...]) -> None:
        if not self.keys.numel():
            return
        group, layout, gradients = self.group, self.group.layout, self.gradients
        columns = padded(int(what["WIDTH"]))
        parts = torch.empty(2 * self.num_chunks * columns, device=group.device)
        common = {
            "FIELDS": group._fields,
            "CALL_FIELDS": self.num_fields,
            "SHIFT": layout.shift,
            "STRIDE": layout.stride,
            "HEADER": layout.header,
            "DIM": layout.dim,
            "CHUNK": CHUNK,
            "COLUMNS": columns,
            "num_warps": max(1, min(8, columns // 128)),
            **what,
            **PLAIN_ARITHMETIC,
        }
        tables = group.descriptors()
        keys, none = self.keys, self.keys
        update_kernels.walk_chunks[self.grid](
            tables,
            self.calls,
            self.spans,
            keys,
            self.order,
            none if gradients.addresses is None else gradients.addresses,
            self.buffer if gradients.factors is None else gradients.factors,
            parts,
            self.heads,
            self.buffer,
            *settings,
            ADDRESSED=gradients.addresses is not None,
            WEIGHTED=gradients.factors is not None,
            ALIGNED=self._is_aligned(),
            **common,
        )
        update_kernels.finish_chunks[self.grid](
            tables,
            self.calls,
            self.spans,
            keys,
            parts,
            self.heads,
            self.buffer,
            *settings,
            AHEAD=max(2, min(16, 2048 // columns)),
            **common,
        )
