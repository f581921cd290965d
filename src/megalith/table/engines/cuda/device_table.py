"""DeviceTable: the memory of one table on the device: index, chunks of rows, counters, free rows.

The host does not know how many rows a launch created: the count is on the device, and reading it would
wait for all launches. It keeps an upper bound instead: after `ensure_room(n)` the bound grows by n. When
the bound exceeds what is allocated, the host reads the counters, and allocates only if they require it.

Kernels keep a table within a `Capacity` with a named score (`row_limit`). They write the ids that they remove
to a ring, from which `CudaPolicies` takes them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.errors import TableFullError
from megalith.table.config import TableConfig
from megalith.table.engines.cuda import device_functions, index_kernels, row_kernels
from megalith.table.engines.cuda.device_functions import (
    COUNTED,
    EMPTY,
    EVICTED,
    LIVE,
    NUM_FREE,
    REFUSED,
    REMOVED,
    REMOVED_SLOTS,
    RUN_FIELDS,
    SEGMENT_FIELDS,
    SEGMENTS,
    SEQUENCE,
    USED,
)
from megalith.table.engines.cuda.row_layout import RowLayout
from megalith.table.engines.cuda.streams import retire
from megalith.table.engines.cuda.triton_runtime import INTERPRETED, PLAIN_ARITHMETIC
from megalith.table.policies import MinCount, Probability
from megalith.table.table_data import Chunk

MIN_SLOTS = 16
MAX_ROWS = 2**31 - 2
CALLS_AHEAD = 1 if INTERPRETED else 8
AHEAD_BYTES = 2 << 30
BLOCK = 1024 if INTERPRETED else 256
WARPS = 4
FLAGS = 12
NUM_COUNTERS: int = device_functions.NUM_COUNTERS.value
BOUNDED: list[int] = [x.value for x in (REMOVED_SLOTS, EVICTED, REFUSED, COUNTED)]
"""Counters for which the host keeps an upper bound, besides the number of rows."""
SCORES = ("lru", "lfu", "step")
FIRST_SEARCH = (0, 0, 1, 2**63 - 1)
"""The state of a search for low scores that has not begun; see victim_kernels.py."""
FIRST_LOG = 1 << 16  # Ids of the ring of removed ids at first
HOST_BLOCK = 256 << 20  # Bytes of pinned memory that are allocated at once, at most


def grid(n: int, block: int) -> tuple[int]:
    return (-(-n // block),)


def float_bits(x: float) -> int:
    try:
        return int(struct.unpack("<i", struct.pack("<f", x))[0])
    except OverflowError:
        return float_bits(float("inf") if x > 0 else float("-inf"))


class DeviceTable:
    changes = 0

    def __init__(
        self,
        config: TableConfig,
        layout: RowLayout,
        key: int,
        device: torch.device,
        device_bytes: int | None = None,
        row_limit: int | None = None,
        log_ids: int = FIRST_LOG,
    ) -> None:
        limit = MAX_ROWS if device_bytes is None else max(1, device_bytes // (layout.stride << layout.shift))
        self._device_chunks = limit
        self._spare: list[Tensor] = []  # chunks of host memory
        self.config = config
        self.layout = layout
        self.key = key
        self.device = device
        self.tracked = 0
        self.version = 0
        self.requested = 0  # sum of the rows that calls asked room for
        self.row_limit = 0  # rows that kernels keep; 0: they remove none
        self._score = 0
        capacity = config.capacity
        if capacity is not None and isinstance(capacity.score, str) and row_limit is not None:
            self.row_limit, self._score = row_limit, SCORES.index(capacity.score)
        initial = [c.initial for c in config.state_columns for _ in range(c.end - c.start)]
        self.counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device)
        self._chunks: list[Tensor] = []
        self.entries = self.chunk_table = self.free = self.stamps = self.search = self.counters
        self._admission, self._level = 0, 0
        if isinstance(config.admission, MinCount):
            self._admission, self._level = 1, config.admission.n
        elif isinstance(config.admission, Probability):
            self._admission, self._level = 2, config.admission.limit
        # Of `CudaPolicies`
        self.evicted_log = self._new_log(log_ids if self.row_limit else 1)
        self.refused_log = self._new_log(log_ids if self.admits else 1)
        self.state_values = torch.tensor(initial or [0.0], dtype=torch.float32, device=device)
        self.empty()

    def empty(self) -> None:
        if self._chunks:
            retire(self.entries, self.chunk_table, self.free, self.stamps, self.search, *self._chunks)
        if self.row_capacity > self.device_rows and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # host memory may be used again at once
        self._spare = []
        self.slots = MIN_SLOTS
        self.entries = self._new_entries(self.slots)
        self._chunks = []
        self.chunk_table = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.counters[: NUM_FREE.value + 1] = 0
        self.counters[REMOVED_SLOTS.value] = self.counters[COUNTED.value] = 0
        self.free = torch.empty(1, dtype=torch.int32, device=self.device)
        self.stamps = torch.zeros(1, dtype=torch.int8, device=self.device)
        self.search = torch.tensor(FIRST_SEARCH, dtype=torch.int64, device=self.device)
        self.read_counters()
        self.changed()

    def _new_log(self, most: int) -> Tensor:
        return torch.empty(min(most, FIRST_LOG), dtype=torch.int64, device=self.device)

    @property
    def admits(self) -> bool:
        """Whether kernels apply an admission policy."""
        return self._admission > 0

    # ---- sizes

    @property
    def row_capacity(self) -> int:
        return len(self._chunks) << self.layout.shift

    @property
    def device_rows(self) -> int:
        """Number of rows that fit in the memory of the device; row numbers from here on are on the host."""
        return self._device_chunks << self.layout.shift

    @property
    def slot_limit(self) -> int:
        """Number of slots that may be in use before the index grows."""
        return self.slots * 5 // 8

    def read_counters(self) -> list[int]:
        """Wait for the device and return the counters; see device_functions.py."""
        values: list[int] = self.counters.tolist()
        self.know(values[USED.value] - values[NUM_FREE.value], [values[k] for k in BOUNDED], self.requested)
        return values

    def read_size(self) -> tuple[int, int]:
        """Wait for the device and return used row numbers and free rows."""
        values = self.read_counters()
        return values[USED.value], values[NUM_FREE.value]

    def know(self, rows: int, bounded: Sequence[int], requested: int) -> None:
        """Take numbers that the device had when `requested` rows had been asked for."""
        self._live, self.known_at = rows, requested
        self._removed_slots, self._evicted, self._refused, self._counted = bounded
        self._count_room()

    def _count_room(self) -> None:
        """Find how many more rows calls may ask for. New rows take the places of removed ones first."""
        most = self.slot_limit - self._removed_slots - self._counted
        if not self.row_limit or self.row_capacity < self.row_limit:
            most = min(most, self.row_capacity)
        self.room = most - self.most_rows

    @property
    def most_rows(self) -> int:
        """The largest number of rows that there may be, apart from a capacity."""
        return self._live + self.requested - self.known_at

    @property
    def most_evicted(self) -> int:
        """The largest number of rows that kernels may have removed."""
        return self._evicted + self.requested - self.known_at

    @property
    def most_refused(self) -> int:
        """The largest number of ids that kernels may have refused."""
        return self._refused + self.requested - self.known_at

    @property
    def most_counted(self) -> int:
        """The largest number of ids without a row that may be counted."""
        return self._counted + self.requested - self.known_at

    def changed(self) -> None:
        self.version += 1
        DeviceTable.changes += 1

    def ensure_room(self, n: int) -> None:
        """Make sure that n new rows fit; the bound then includes them."""
        if n > self.room:
            self.grow(n)
        self.requested += n
        self.room -= n

    def grow(self, n: int) -> None:
        """Wait for the device and allocate memory for n new rows, if the table is really full."""
        used, free = self.read_size()
        if used - free + n > MAX_ROWS:
            raise TableFullError(f"table {self.config.name!r}: more than {MAX_ROWS} rows")
        # Reports of the device come some calls later: room for several calls avoids waiting for it.
        most = max(AHEAD_BYTES // self.layout.stride, self.row_capacity // 8)
        ahead = n * max(1, min(CALLS_AHEAD, most // n))
        if used - free + self._counted + self._removed_slots + ahead > self.slot_limit:
            self._rehash(used - free + self._counted + ahead)
        most = self.row_limit or MAX_ROWS
        if min(most, used + max(0, ahead - free)) > self.row_capacity:
            self._add_chunks(min(most, used + max(0, ahead - free)), min(most, used + max(0, n - free)))

    def reserve(self, n: int) -> None:
        self.read_counters()
        if n + self._counted > self.slot_limit - self._removed_slots:
            self._rehash(n + self._counted)
        if n > self.row_capacity:
            self._add_chunks(n)

    # ---- index

    def _new_entries(self, slots: int) -> Tensor:
        entries = torch.empty(slots + 2, 2, dtype=torch.int64, device=self.device)
        entries[:, 0] = EMPTY.value
        entries[:, 1] = -1
        return entries.view(-1)

    def _rehash(self, rows: int) -> None:
        """Move the index to one in which `rows` rows fit; slots of removed ids become empty."""
        slots = MIN_SLOTS
        while slots * 5 // 8 < rows:
            slots *= 2
        slots = max(slots, self.slots)
        entries = self._new_entries(slots)
        index_kernels.rehash[grid(self.slots, BLOCK)](
            self.entries, self.slots, entries, slots - 1, BLOCK=BLOCK, num_warps=WARPS * 2
        )
        entries[-4:] = self.entries[-4:]
        self._replace_index(entries, slots)

    def _replace_index(self, entries: Tensor, slots: int) -> None:
        retire(self.entries)
        self.entries, self.slots = entries, slots
        self.counters[REMOVED_SLOTS.value] = 0
        self.changed()
        self.read_counters()

    def rebuild_index(self, ids: Tensor, rows: Tensor) -> None:
        """Replace the index by one that holds these rows and the ids that are counted."""
        # ids: int64 [n], distinct; rows: int32 [n].
        if self.admits:
            counted, values = self.counted_ids()
            ids, rows = torch.cat([ids, counted]), torch.cat([rows.long(), values])
        slots = MIN_SLOTS
        while slots * 5 // 8 < ids.numel():
            slots *= 2
        entries = self._new_entries(slots)
        self._insert(entries, slots, ids, rows)
        self._replace_index(entries, slots)

    def _insert(self, entries: Tensor, slots: int, ids: Tensor, values: Tensor) -> None:
        n = ids.numel()
        if n:
            index_kernels.insert_rows[grid(n, BLOCK)](
                entries, slots - 1, ids, values.long(), n, BLOCK=BLOCK, num_warps=WARPS * 2
            )

    # ---- ids without a row

    def counted_ids(self) -> tuple[Tensor, Tensor]:
        """Return the counted ids and their values, int64 each, in the order in which they were counted."""
        entries = self.entries.view(-1, 2)
        slots = (entries[:, 1] < -1).nonzero()[:, 0]
        ids, values = entries[slots].unbind(1)
        for slot, id in ((self.slots, EMPTY.value), (self.slots + 1, REMOVED.value)):
            ids = torch.where(slots == slot, id, ids)
        order = values.argsort(descending=True)
        return ids[order], values[order]

    def drop_counted(self, ids: Tensor) -> None:
        """Forget counted ids, int64 [n], distinct."""
        n = ids.numel()
        if n:
            index_kernels.remove_ids[grid(n, BLOCK)](
                self.entries, self.slots - 1, ids, n, BLOCK=BLOCK, num_warps=WARPS
            )
            self.counters[COUNTED.value] -= n
            self.counters[REMOVED_SLOTS.value] += n
            self.read_counters()

    def set_counted(self, ids: Tensor, counts: Tensor) -> None:
        """Replace the counted ids. They have no row."""
        # ids, counts: int64 [n], in the order in which they were counted.
        n = ids.numel()
        self.drop_counted(self.counted_ids()[0])
        self.ensure_room(n)
        numbers = torch.arange(n, dtype=torch.int64, device=self.device)
        self._insert(self.entries, self.slots, ids, -2 - ((numbers << 32) | counts))
        self.counters[COUNTED.value] = self.counters[SEQUENCE.value] = n
        self.read_counters()

    def remove(self, ids: Tensor, rows: Tensor) -> None:
        # ids: int64 [n], distinct ids that have a row; rows: their rows, int32 [n].
        n = ids.numel()
        if not n:
            return
        index_kernels.remove_ids[grid(n, BLOCK)](
            self.entries, self.slots - 1, ids, n, BLOCK=BLOCK, num_warps=WARPS
        )
        self.write_header(FLAGS, rows, torch.zeros_like(rows))
        free = self.read_size()[1]
        self.free[free : free + n] = rows
        self.counters[NUM_FREE.value] += n
        self.counters[REMOVED_SLOTS.value] += n
        self.read_counters()

    # ---- rows

    def _add_chunks(self, rows: int, least: int = MAX_ROWS) -> None:
        """Allocate chunks for `rows` rows; fewer if memory is short and `least` rows fit without them."""
        # Nothing is changed if memory does not suffice.
        chunks, shift = list(self._chunks), self.layout.shift
        words = (self.layout.stride << shift) // 8
        try:
            while len(chunks) << shift < rows:
                if len(chunks) < self._device_chunks:
                    chunks.append(torch.zeros(words, dtype=torch.int64, device=self.device))
                else:
                    chunks.append(self._host_chunk(words, len(chunks) - self._device_chunks))
        except torch.OutOfMemoryError:
            if len(chunks) << shift < least:
                raise
        self._set_chunks(chunks)

    def _host_chunk(self, words: int, known: int) -> Tensor:
        """Return a chunk of pinned memory, which kernels access under its address."""
        # Several are allocated together, because torch rounds pinned memory up to a power of two.
        if not self._spare:
            count = max(1, min(known, HOST_BLOCK // (8 * words)))
            pinned = self.device.type == "cuda"
            self._spare = list(
                torch.zeros(count * words, dtype=torch.int64, pin_memory=pinned, device="cpu").split(words)
            )
        return self._spare.pop()

    def _set_chunks(self, chunks: list[Tensor]) -> None:
        """Replace the chunks; what is allocated for that is allocated first."""
        pointers = [chunk.data_ptr() for chunk in chunks] or [0]
        table = torch.tensor(pointers, dtype=torch.int64, device=self.device)
        rows = len(chunks) << self.layout.shift
        free = torch.empty(max(1, rows), dtype=torch.int32, device=self.device)
        kept = min(free.numel(), self.free.numel())
        free[:kept] = self.free[:kept]
        stamps = torch.zeros(rows if self.row_limit else 1, dtype=torch.int8, device=self.device)
        retire(self.chunk_table, self.free, self.stamps, *self._chunks[len(chunks) :])
        self._chunks, self.chunk_table, self.free, self.stamps = chunks, table, free, stamps
        self.changed()
        self._count_room()

    def shrink(self, used: int, free: Tensor) -> None:
        """Return the chunks after the last used row, and replace the list of free rows."""
        kept = -(-used >> self.layout.shift)
        self._set_chunks(self._chunks[:kept])
        self.free[: free.numel()] = free
        self.counters[USED.value] = used
        self.counters[NUM_FREE.value] = free.numel()
        self.read_counters()

    def move(self, sources: Tensor, targets: Tensor) -> None:
        # sources: int32 [n]; targets: int32 [n], distinct and not among the sources.
        layout = self.layout
        if sources.numel():
            row_kernels.move_rows[grid(sources.numel(), 8)](
                self.chunk_table,
                sources,
                targets,
                sources.numel(),
                SHIFT=layout.shift,
                STRIDE=layout.stride,
                BLOCK=8,
                WORDS=64,
            )

    def headers(self, rows: Tensor) -> Tensor:
        # rows: int32 [n], allocated rows; returns: int64 [5, n]: ids, times, flags, counts, steps.
        n = rows.numel()
        out = torch.empty(5, n, dtype=torch.int64, device=self.device)
        if n:
            layout = self.layout
            row_kernels.read_headers[grid(n, BLOCK)](
                self.chunk_table,
                rows,
                out,
                n,
                SHIFT=layout.shift,
                STRIDE=layout.stride,
                HEADER=layout.header,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
        return out

    def write_header(self, offset: int, rows: Tensor, values: Tensor, operation: int = 0) -> None:
        """Change one 32-bit field of the headers of distinct rows."""
        # rows: int32 [n]; values: int64 or int32 [n].
        n = rows.numel()
        if n:
            layout = self.layout
            row_kernels.write_header_field[grid(n, BLOCK)](
                self.chunk_table,
                rows,
                values,
                n,
                SHIFT=layout.shift,
                STRIDE=layout.stride,
                OFFSET=layout.header + offset,
                OPERATION=operation,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )

    def live_rows(self, start: int = 0, end: int | None = None) -> tuple[Tensor, Tensor]:
        # returns: their numbers, int32 [n], and their headers, int64 [5, n].
        end = self.read_size()[0] if end is None else end
        rows = torch.arange(start, max(start, end), dtype=torch.int32, device=self.device)
        headers = self.headers(rows)
        live = (headers[2] & LIVE.value) != 0
        return rows[live], headers[:, live].contiguous()

    def copy_states(self, rows: Tensor, values: Tensor, *, write: bool) -> None:
        # rows: int32 [n], distinct; values: float32 [n, state_floats].
        n, layout = rows.numel(), self.layout
        if n and layout.state_floats:
            row_kernels.copy_states[grid(n, 8)](
                self.chunk_table,
                rows,
                values,
                n,
                SHIFT=layout.shift,
                STRIDE=layout.stride,
                OFFSET=layout.state_offset,
                WIDTH=layout.state_floats,
                WRITE=write,
                BLOCK=8,
                COLUMNS=128,
            )

    def write_weights(self, rows: Tensor, values: Tensor) -> None:
        # rows: int32 [n], distinct; values: float32 [n, dim].
        n, layout = rows.numel(), self.layout
        for run in layout.runs if n else ():
            row_kernels.write_rows[grid(n, 8)](
                self.chunk_table,
                rows,
                values,
                n,
                layout.dim,
                SHIFT=layout.shift,
                STRIDE=layout.stride,
                OFFSET=run.offset,
                START=run.start,
                WIDTH=run.width,
                PRECISION=run.precision,
                BLOCK=8,
                COLUMNS=128,
                **PLAIN_ARITHMETIC,
            )

    # ---- descriptor

    @property
    def num_fields(self) -> int:
        layout = self.layout
        segments, runs = SEGMENT_FIELDS.value * len(layout.segments), RUN_FIELDS.value * len(layout.runs)
        return int(SEGMENTS.value + segments + runs)

    def descriptor(self, base: int) -> list[int]:
        """Return what kernels need to know about the table; valid until `version` changes."""
        key = self.key - (1 << 64) if self.key >= 1 << 63 else self.key
        layout = self.layout
        fields = [
            self.entries.data_ptr(),
            self.slots - 1,
            self.chunk_table.data_ptr(),
            key,
            self.counters.data_ptr(),
            self.free.data_ptr(),
            base,
            self.row_capacity,
            self.state_values.data_ptr(),
            self.tracked,
            int(layout.initial),
            int(layout.counted),
            self.row_limit,
            self._score,
            self.stamps.data_ptr(),
            self.search.data_ptr(),
            self.evicted_log.data_ptr(),
            self.evicted_log.numel(),
            self._admission,
            self._level,
            self.refused_log.data_ptr(),
            self.refused_log.numel(),
            layout.shift,
            layout.stride,
            layout.header,
            layout.dim,
            layout.state_offset,
            layout.state_floats,
        ]
        for segment, place in zip(self.config.segments, layout.segments, strict=True):
            a, b = segment.initializer.params
            fields += [segment.initializer.kind, float_bits(a), float_bits(b)]
            fields += [place.start, place.start + place.width, place.width, place.offset, place.state]
        for run in layout.runs:
            fields += [run.start, run.width, run.offset]
        return fields


TIME, COUNT, STEP = 8, 16, 20  # Fields of a header, in bytes from its start


def write_chunk(table: DeviceTable, rows: Tensor, chunk: Chunk) -> None:
    """Write complete rows, except for their times."""
    # rows: int32 [n], distinct.
    device = table.device
    table.write_weights(rows, chunk.rows.to(device))
    if chunk.state:
        columns = [column.to(device) for column in chunk.state.values()]
        states = torch.cat(columns, 1) if len(columns) > 1 else columns[0].contiguous()
        table.copy_states(rows, states, write=True)
    if chunk.count is not None and chunk.step is not None:
        table.write_header(COUNT, rows, chunk.count.to(device))
        table.write_header(STEP, rows, chunk.step.to(device))
