"""StreamedRows: the memory of a cuda table, and its rows as a stream: scans and snapshots.

A block of rows is gathered on the device and travels to the host while the host uses the block before it; see
host_copies.py and streamed_snapshot.py. No call copies the whole table.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.table.engines.contract import Engine
from megalith.table.engines.cuda.device_table import FLAGS, DeviceTable
from megalith.table.engines.cuda.host_copies import ChunkDownload, HostCopies, block_rows
from megalith.table.engines.cuda.host_tier import HostTier
from megalith.table.engines.cuda.launch_group import LaunchGroup
from megalith.table.engines.cuda.row_layout import CHUNK_BYTES, RowLayout
from megalith.table.engines.cuda.stream_order import StreamOrder
from megalith.table.engines.cuda.streamed_snapshot import StreamedSnapshot, flag_rows
from megalith.table.engines.cuda.triton_runtime import find_device
from megalith.table.initializers import table_key
from megalith.table.policies.min_count import MAX_COUNT
from megalith.table.table_config import TableConfig
from megalith.table.table_data import Chunk, SnapshotStart

SCAN_ROWS = 1 << 16
LIVE_ROWS = 1 << 20
"""Row numbers whose headers are read at once."""
FIRST_CONSUMER_BIT = 8
FIRST_WATCH_BIT = 16


class ScannedPart:
    """A part of a scan that is on its way to the host."""

    def __init__(self, rows: int, download: ChunkDownload, following: int, writes: int) -> None:
        self.rows = rows
        self.download = download
        self.following = following
        self.writes = writes


class StreamedRows(Engine):
    """Rows in GPU memory. See `Engine`."""

    engine = "cuda"

    def __init__(
        self, config: TableConfig, *, seed: int = 0, num_shards: int = 1, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        super().__init__(config, seed=seed, num_shards=num_shards)
        self.device = find_device()
        self._key = table_key(seed, config.name)
        budget = config.device_bytes
        if budget is not None:
            chunk_bytes = min(chunk_bytes, max(1, budget // 16))
        self.layout = RowLayout.of(config, chunk_bytes)
        self.order = StreamOrder(self.device)
        with self.order:  # calls on other streams wait until the memory is filled
            self.table = DeviceTable(config, self.layout, self._key, self.device, budget)
            self.tier = None if budget is None else HostTier(self.table)
        self.group = LaunchGroup([self.table])
        self._epoch = 0
        self.writes = 0
        self._length: int | None = 0  # None: on the device
        self.latest_step = 0
        self._removed: dict[int, list[Tensor]] = {}  # consumer -> removed ids
        self.open_snapshot: StreamedSnapshot | None = None
        self._snapshot_consumer = -1
        self._drained: tuple[Tensor, Tensor] | None = None  # for the open snapshot

    @cached_property
    def copies(self) -> HostCopies:
        """The copies between host and device."""
        return HostCopies(self.device)

    @cached_property
    def block_rows(self) -> int:
        """Rows that travel at once."""
        return block_rows(32 + 4 * self.config.row_floats)

    # ---- writes

    def wrote(self, step: int = 0) -> None:
        """Note that a call wrote rows and may have created some."""
        self.writes += 1
        self._length = None
        self.latest_step = max(self.latest_step, min(step, MAX_COUNT))

    @property
    def fetches(self) -> bool:
        """Whether rows that a call uses may be in host memory, so that `fetch` launches something."""
        return self.tier is not None and self.tier.active

    def fetch(self, ids: Tensor, rows: Tensor, *, counted: bool = True) -> None:
        """Move the rows of a call from host memory to the device, unless a scan or snapshot is active."""
        # Rows that were found before must be found again afterwards. Does not wait for the device. The caller
        # holds the lock.
        #
        # ids: int64 [n]; rows: int32 [n], rows that were found now, negative where there is none.
        tier = self.tier
        if tier is None or not tier.active or not rows.numel():
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # when the graph is replayed, the host does not note that rows moved
        # A thread that holds the lock to return memory waits for this one.
        with self._moving.without_waiting() as alone:
            if alone and not self.places_kept and self.open_snapshot is None:
                self.writes += 1
                self._epoch += 1
                tier.fetch(ids, rows, counted=counted)
            elif counted:
                tier.count(ids, rows)

    def save_rows(self, rows: Tensor) -> None:
        """Save rows for an open snapshot, before a call changes them. The caller holds the lock."""
        # rows: int32 [n].
        if self.open_snapshot is not None:
            self.open_snapshot.save(rows)

    def wait_for_reader(self) -> None:
        """Wait until an open snapshot has room for saved rows; before a call that writes takes the lock."""
        # A call within another one does not wait: the reader may need the lock that the other one holds.
        snapshot = self.open_snapshot
        if snapshot is not None and not self.order.is_held:
            snapshot.wait_for_reader()

    # ---- scans

    @staticmethod
    def _bit(consumer: int) -> int:
        return 1 << (FIRST_CONSUMER_BIT + consumer)

    @staticmethod
    def _watch_bit(watch: int) -> int:
        return 1 << (FIRST_WATCH_BIT + watch)

    def live_blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows in use in blocks, in order: their numbers, int32 [n], and headers, int64 [5, n]."""
        used = self.table.read_counters()[0]
        for start in range(0, used, LIVE_ROWS):
            yield self.table.live_rows(start, min(used, start + LIVE_ROWS))

    def scan(self, chunk_size: int, *, watch: int | None = None) -> Iterator[Chunk]:
        # A chunk that fits in a block travels while the caller uses the one before it.
        ahead = chunk_size <= self.block_rows  # otherwise the blocks of a chunk follow each other
        with self.scanning():
            part = self._start_part(0, chunk_size, watch)
            while True:
                following = None
                if ahead and part.following >= 0:
                    following = self._start_part(part.following, chunk_size, watch)
                if part.rows:
                    yield self._finish_part(part, rows=True)
                if part.following < 0:
                    return
                if following is None or following.writes != self.writes:  # or rows were removed
                    following = self._start_part(part.following, chunk_size, watch)
                part = following

    def _start_part(
        self, start: int, limit: int, watch: int | None, *, rows: bool = True, stop: int | None = None
    ) -> ScannedPart:
        with self.order:
            chunk, following = self._scan(start, limit, rows=rows, watch=watch, stop=stop)
            download = ChunkDownload(self.copies, chunk, self.block_rows)
            return ScannedPart(chunk.ids.numel(), download, following, self.writes)

    def _finish_part(self, part: ScannedPart, *, rows: bool) -> Chunk:
        chunk = self.new_chunk(part.rows, rows=rows)
        part.download.finish(chunk)
        return chunk

    def scan_part(
        self,
        start: int,
        limit: int,
        *,
        rows: bool = True,
        watch: int | None = None,
        stop: int | None = None,
    ) -> tuple[Chunk, int]:
        part = self._start_part(start, limit, watch, rows=rows, stop=stop)
        return self._finish_part(part, rows=rows), part.following

    def scan_scored(
        self, start: int, limit: int, *, watch: int, stop: int | None = None
    ) -> tuple[Chunk, int]:
        with self.order:
            return self._scan(start, limit, rows=True, watch=watch, stop=stop)

    def _scan(
        self, start: int, limit: int, *, rows: bool, watch: int | None, stop: int | None
    ) -> tuple[Chunk, int]:
        """Read the next rows into a chunk on the device."""
        used = self.table.read_counters()[0]
        last = used if stop is None else min(used, stop)
        found, headers = [], []
        count, at = 0, start
        while at < last and count < limit:
            end = min(last, at + max(SCAN_ROWS, limit))
            live, header = self.table.live_rows(at, end)
            found.append(live[: limit - count])
            headers.append(header[:, : limit - count])
            count += found[-1].numel()
            at = end if count < limit else int(found[-1][-1]) + 1
        none = torch.empty(0, dtype=torch.int32, device=self.device)
        chosen = torch.cat(found) if found else none
        header = torch.cat(headers, 1) if headers else self.table.headers(none)
        if watch is not None:  # a write sets the flag again
            kept = torch.full_like(chosen, ~self._watch_bit(watch))
            self.table.write_header(FLAGS, chosen, kept, 2)
        return self._chunk(chosen, header, rows=rows), at if at < used else -1

    def _chunk(self, numbers: Tensor, headers: Tensor, *, rows: bool = True) -> Chunk:
        """Read rows that exist into a chunk on the device."""
        n, columns = numbers.numel(), self.config.state_columns
        ids, time, _, count, step = headers.unbind()
        widths = (self.dim, self.layout.state_floats) if rows else (0, 0)
        weights, states = (torch.empty(n, k, dtype=torch.float32, device=self.device) for k in widths)
        if rows:
            self.group.read(ids, self.group.all_found(numbers), [n], weights)
            self.table.copy_states(numbers, states, write=False)
        parts = {
            c.key: states[:, c.start - self.dim : c.end - self.dim].contiguous() for c in columns if rows
        }
        counted = (count, step) if self.config.counted else (None, None)
        return Chunk(ids, weights, parts, time, *counted)

    # ---- snapshots

    def begin_snapshot(
        self, consumer: int, touched_only: bool, room: int, with_pending: bool
    ) -> SnapshotStart:
        # It reads the flags of all rows on the device.
        with self.order:
            if self.open_snapshot is not None:
                raise InputError(f"table {self.name!r} already has an open snapshot: close it first")
            none = torch.empty(0, dtype=torch.int64, device="cpu")
            total, used = len(self), self.table.read_counters()[0]
            blocks = (
                rows[(headers[2] & self._bit(consumer)) != 0] if touched_only else rows
                for rows, headers in self.live_blocks()
            )
            snapshot = StreamedSnapshot(
                flag_rows(used, blocks, self.device),
                room,
                self.block_rows,
                self.order,
                lambda rows: self._chunk(rows, self.table.headers(rows)),
                self.copies,
            )
            self._drained = None if consumer < 0 else self.drain(consumer)
            self.open_snapshot, self._snapshot_consumer = snapshot, consumer
            pending = self.pending() if with_pending else (none, none)
            removed = none if self._drained is None else self._drained[1]
            return SnapshotStart(snapshot.rows, total, removed, pending)

    def read_snapshot(self, chunk: Chunk) -> int:
        assert self.open_snapshot is not None
        return self.open_snapshot.read(chunk)

    def snapshot_pressure(self) -> float:
        return 0.0 if self.open_snapshot is None else self.open_snapshot.pressure

    def end_snapshot(self, give_back: bool) -> float:
        snapshot = self.open_snapshot
        if snapshot is None:
            return 0.0
        snapshot.close()  # before the lock: a writer may hold it and wait
        with self.order:
            drained, self._drained, self.open_snapshot = self._drained, None, None
            if drained is not None and give_back and self._snapshot_consumer in self._removed:
                for ids in drained:
                    self.mark(self._snapshot_consumer, ids)
        return snapshot.waited
