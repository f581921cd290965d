"""The cuda engine: the Engine contract over tables in GPU memory.

The hot calls (find, read, pool, update) launch kernels and return without waiting for the device. All
other calls compose kernels and torch operations, and wait for the device where they return data to the
host. Ids and chunks that come from or go to the host may be on the CPU in these calls.

Reads and writes may come from several threads and CUDA streams: a lock orders the launches, and a call on
another stream than the previous one waits for that stream on the device (streams.py).

Scans and snapshots are streams of blocks: a block of rows is gathered on the device and travels to the
host while the host uses the block before it (streams.py, streamed_snapshot.py). No call copies the whole
table.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.ops.pooling import Pooling
from megalith.table.config import PRECISIONS, TableConfig
from megalith.table.engines.contract import Engine
from megalith.table.engines.cuda.cuda_policies import CudaPolicies, first_occurrences, last_of_each
from megalith.table.engines.cuda.device_functions import SKIPPED
from megalith.table.engines.cuda.device_table import COUNT, FLAGS, STEP, TIME, DeviceTable, write_chunk
from megalith.table.engines.cuda.graphs import FoundTogether
from megalith.table.engines.cuda.host_tier import HostTier
from megalith.table.engines.cuda.launch_group import (
    AdmissionCall,
    JoinedRows,
    LaunchGroup,
    RowSearch,
    assign_in_order,
)
from megalith.table.engines.cuda.pooling_plans import PlannedPooling, PoolingPlans, TableKind
from megalith.table.engines.cuda.row_layout import CHUNK_BYTES, RowLayout
from megalith.table.engines.cuda.streamed_snapshot import StreamedSnapshot, flag_rows
from megalith.table.engines.cuda.streams import (
    ChunkDownload,
    HostCopies,
    StreamOrder,
    all_columns,
    block_rows,
    hold,
    is_captured,
    with_columns,
)
from megalith.table.engines.cuda.triton_runtime import find_device
from megalith.table.engines.cuda.updates import GradientSource, SharedLaunches
from megalith.table.engines.reference_policies import is_sparse
from megalith.table.engines.shard_capacity import check_capacity
from megalith.table.initializers import table_key
from megalith.table.policies import MAX_COUNT
from megalith.table.table_data import (
    Chunk,
    FoundRows,
    HostTierUse,
    MemoryUse,
    RowCounters,
    SnapshotStart,
    Step,
    Update,
)

SCAN_ROWS = 1 << 16
LIVE_ROWS = 1 << 20  # Row numbers whose headers are read at once
FIRST_CONSUMER_BIT = 8
FIRST_WATCH_BIT = 16
NUM_WATCHES = 8


class ScannedPart(NamedTuple):
    rows: int
    download: ChunkDownload
    writes: int  # of the order when it was read


def _read_again(parts: Generator[ScannedPart, bool, None]) -> ScannedPart | None:
    try:
        return parts.send(True)
    except StopIteration:  # its rows were removed
        return None


def found_by(found: FoundRows | None) -> FoundTogether | None:
    """Return the search that found rows; it stays with the tensor of row numbers, which users may hold."""
    by: FoundTogether | None = None if found is None else getattr(found.rows, "megalith_found", None)
    return by


class CudaEngine(Engine):
    engine = "cuda"
    snapshot_rows = 1 << 16  # writers are locked out only while a block is gathered

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
            limits = self.limits
            self.table = DeviceTable(
                config, self.layout, self._key, self.device, budget, limits.rows, limits.log_ids
            )
            self.tier = None if budget is None else HostTier(self.table)
        self.group = LaunchGroup([self.table])
        self._epoch = 0
        self._length = 0, 0  # and the number of writes of the order at that time
        self.latest_step = 0
        self._removed: dict[int, list[Tensor]] = {}  # consumer -> removed ids
        self.open_snapshot: StreamedSnapshot | None = None
        self._snapshot_consumer = -1
        self._drained: tuple[Tensor, Tensor] | None = None  # for the open snapshot
        self.policies = CudaPolicies(self)
        self.launches = SharedLaunches([self], self.group)
        self._watches: set[int] = set()
        self._plans = PoolingPlans([TableKind(self.group, [self.name])])
        self._none = torch.empty(0, dtype=torch.int64, device=self.device)

    @cached_property
    def copies(self) -> HostCopies:
        return HostCopies(self.device)

    @cached_property
    def block_rows(self) -> int:
        return block_rows(32 + 4 * self.config.row_floats)

    # ---- writes

    def wrote(self, step: int = 0) -> None:
        """Note that a call wrote rows and may have created some."""
        self.order.writes += 1
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
        if is_captured(self.device):
            return  # when the graph is replayed, the host does not note that rows moved
        # A thread that holds the lock to return memory waits for this one.
        with self._moving.without_waiting() as alone:
            if alone and not self.places_kept and self.open_snapshot is None:
                self.order.writes += 1
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
            snapshot.wait_for_reader(self.name, self.reader_seconds)

    # ---- scans

    @staticmethod
    def _bit(consumer: int) -> int:
        return 1 << (FIRST_CONSUMER_BIT + consumer)

    @staticmethod
    def _watch_bit(watch: int) -> int:
        return 1 << (FIRST_WATCH_BIT + watch)

    def live_blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows in use in blocks, in order: their numbers, int32 [n], and headers, int64 [5, n]."""
        used = self.table.read_size()[0]
        for start in range(0, used, LIVE_ROWS):
            yield self.table.live_rows(start, min(used, start + LIVE_ROWS))

    def scan(self, chunk_size: int, *, watch: int | None = None) -> Iterator[Chunk]:
        # A chunk that fits in a block travels while the caller uses the one before it.
        ahead = chunk_size <= self.block_rows  # otherwise the blocks of a chunk follow each other
        with self.scanning():
            parts = self._parts(chunk_size, watch)
            part = next(parts, None)
            while part is not None:
                following = next(parts, None) if ahead else None
                yield self._finish_part(part, rows=True)
                if following is not None and following.writes != self.order.writes:
                    following = _read_again(parts)
                part = following if ahead else next(parts, None)

    def _parts(self, limit: int, watch: int | None) -> Generator[ScannedPart, bool, None]:
        """Start the copies of all rows, part by part; a part that is sent True is read again."""
        # The rows in use are found in windows of many parts: the host waits for the device to learn their
        # number, and a small copy waits for the large ones before it.
        place = 0  # the number of the next row
        while place >= 0:
            with self.order:
                used, writes = self.table.read_size()[0], self.order.writes
                end = min(used, place + max(LIVE_ROWS, limit))
                numbers, headers = self.table.live_rows(place, end)
            at = 0
            while at < numbers.numel():
                with self.order:
                    if self.order.writes != writes:
                        break
                    own = numbers[at : at + limit]
                    chunk = self._read_part(own, headers[:, at : at + limit], rows=True, watch=watch)
                    download = ChunkDownload(self.copies, chunk, self.block_rows)
                if (yield ScannedPart(own.numel(), download, writes)):
                    break
                at += own.numel()
            else:
                place = end if end < used else -1
                continue
            place = int(numbers[at])

    def _finish_part(self, part: ScannedPart, *, rows: bool) -> Chunk:
        return part.download.finish(lambda: self.new_chunk(part.rows, rows=rows))

    def scan_part(
        self,
        start: int,
        limit: int,
        *,
        rows: bool = True,
        watch: int | None = None,
        stop: int | None = None,
    ) -> tuple[Chunk, int]:
        with self.order:
            chunk, following = self._scan(start, limit, rows=rows, watch=watch, stop=stop)
            download = ChunkDownload(self.copies, chunk, self.block_rows)
            part = ScannedPart(chunk.ids.numel(), download, self.order.writes)
        return self._finish_part(part, rows=rows), following

    def scan_on_device(
        self, start: int, limit: int, *, rows: bool = True, watch: int, stop: int | None = None
    ) -> tuple[Chunk, int]:
        with self.order:
            return self._scan(start, limit, rows=rows, watch=watch, stop=stop)

    def _scan(
        self, start: int, limit: int, *, rows: bool, watch: int | None, stop: int | None
    ) -> tuple[Chunk, int]:
        """Read the next rows into a chunk on the device."""
        used = self.table.read_size()[0]
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
        return self._read_part(chosen, header, rows=rows, watch=watch), at if at < used else -1

    def _read_part(self, numbers: Tensor, headers: Tensor, *, rows: bool, watch: int | None) -> Chunk:
        """Read rows of a scan into a chunk on the device."""
        if watch is not None:  # a write sets the flag again
            kept = torch.full_like(numbers, ~self._watch_bit(watch))
            self.table.write_header(FLAGS, numbers, kept, 2)
        return self._chunk(numbers, headers, rows=rows)

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
            total, used = len(self), self.table.read_size()[0]
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
            self.order.num_snapshots += 1
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
            self.order.num_snapshots -= 1
            if drained is not None and give_back and self._snapshot_consumer in self._removed:
                for ids in drained:
                    self.mark(self._snapshot_consumer, ids)
        return snapshot.waited

    def reseed(self, seed: int) -> None:
        with self.order:
            self.seed = seed
            self._key = self.table.key = table_key(seed, self.name)
            self.table.changed()

    # ---- rows

    def find_or_create(self, ids: Tensor, fresh: Tensor | None = None) -> Tensor:
        """Find the rows of ids, create missing ones, and make room for them if the table has a capacity."""
        # ids: int64 [n] on the device; fresh: int8 [n] of zeros; returns: int32 [n].
        sizes = [ids.numel()]
        self.policies.make_room(ids)
        found = self.group.find(ids, sizes)
        self.save_rows(found.rows)
        slots = self.create(ids, found, fresh=fresh)
        self.group.finish(slots, found, self.group.spans(sizes), keys=False)
        self.wrote()
        return found.rows

    def create(
        self,
        ids: Tensor,
        found: RowSearch,
        wanted: Tensor | None = None,
        fresh: Tensor | None = None,
        decision: AdmissionCall | None = None,
    ) -> Tensor:
        """Create the rows of ids that have none; see `LaunchGroup.launch_create`."""
        sizes = [ids.numel()]
        self.group.make_room(sizes)
        self.policies.expect(sizes[0])
        save = None if self.open_snapshot is None else self.save_rows
        spans = self.group.spans(sizes)
        slots = self.group.launch_create(ids, found, spans, wanted, fresh, save, decision)
        self.group.report()
        self.policies.limit_counted()
        return slots

    def assign(self, ids: Tensor, rows: Tensor, *, add: bool, time: int) -> None:
        self.wait_for_reader()
        with self.order:
            if ids.numel():
                found = self.find_or_create(ids.to(self.device))
                assign_in_order(self.group, found, rows.to(self.device), add=add, time=time)
                self._note_assigned(found)

    def reinitialize(self, ids: Tensor, time: int) -> Tensor:
        self.wait_for_reader()
        with self.order:
            fresh = torch.zeros(ids.numel(), dtype=torch.int8, device=self.device)
            rows = torch.unique(self.find_or_create(ids.to(self.device), fresh))
            self.group.initialize(rows)
            self._write_headers(rows, time)
            self._note_assigned(rows)
            return 1 - fresh.to(torch.int32)

    def _note_assigned(self, rows: Tensor) -> None:
        """Note that rows were written by other means than an update, at the latest step."""
        if self.config.counted:
            rows = torch.unique(rows)
            counts = self.table.headers(rows)[3].clamp(min=1)
            self.table.write_header(COUNT, rows, counts)
            self.table.write_header(STEP, rows, torch.full_like(counts, self.latest_step))

    def _write_headers(self, rows: Tensor, time: int | Tensor) -> None:
        times = torch.full_like(rows, time, dtype=torch.int64) if isinstance(time, int) else time
        self.table.write_header(TIME, rows, times)
        self.table.write_header(FLAGS, rows, torch.full_like(rows, self.table.tracked), 1)

    def remove(self, ids: Tensor) -> int:
        self.wait_for_reader()
        with self.order:
            distinct, _ = first_occurrences(ids.to(self.device))
            gone = self._remove(distinct)
            self.policies.removed += gone.numel()
            self._epoch += 1
            return gone.numel()

    def _remove(self, distinct: Tensor) -> Tensor:
        """Remove the rows of distinct ids; return the ids that had one."""
        rows = self.group.find(distinct, [distinct.numel()]).rows
        exists = rows >= 0
        ids, own = distinct[exists].contiguous(), rows[exists].contiguous()
        self.save_rows(own)
        self.table.remove(ids, own)
        self.note_removed(ids)
        self.order.writes += 1
        return ids

    def note_removed(self, ids: Tensor) -> None:
        """Note that rows were removed, for the consumers of touched rows."""
        # ids: int64 [n].
        if self._removed:
            ids = ids.cpu()
            for removed in self._removed.values():
                removed.append(ids)

    @property
    def consumers(self) -> bool:
        """Whether somebody needs all ids that are removed."""
        return bool(self._removed)

    def advance_epoch(self) -> None:
        """Note that row numbers may become invalid."""
        self._epoch += 1

    def restore(self, chunk: Chunk) -> None:
        # The host fills a block of rows while the one before travels, and never waits for the device: of
        # equal ids all but the last have no row to write.
        self.wait_for_reader()
        with self.order:
            if chunk.ids.numel():
                (ids,) = self.copies.to_device([chunk.ids])
                rows = last_of_each(self.find_or_create(ids))
                for start in range(0, ids.numel(), self.block_rows):
                    part = chunk.part(start, start + self.block_rows)
                    part = with_columns(part, self.copies.to_device(all_columns(part)))
                    own = rows[start : start + self.block_rows]
                    write_chunk(self.table, own, part)
                    self._write_headers(own, part.time)
                if chunk.step is not None:
                    self.latest_step = max(self.latest_step, int(chunk.step.max()))
            self._epoch += 1

    def complete_rows(self, ids: Tensor, found: RowSearch) -> tuple[Tensor, Tensor]:
        """Read weights and states; an id without a row reads as the row that would be created."""
        # ids: int64 [n], distinct; returns: float32 [n, dim] and float32 [n, state floats], on the device.
        rows = found.rows
        weights = torch.empty(rows.numel(), self.dim, dtype=torch.float32, device=self.device)
        self.group.read(ids.contiguous(), found, [rows.numel()], weights)
        states = self.table.state_values.repeat(rows.numel(), 1)[:, : self.layout.state_floats].contiguous()
        exists = (rows >= 0).nonzero()[:, 0]
        known = torch.empty_like(states[exists])
        self.table.copy_states(rows[exists].contiguous(), known, write=False)
        states[exists] = known
        return weights, states

    def clear(self) -> None:
        with self.order:
            if self.open_snapshot is not None:
                self.open_snapshot.save_all()
            if self._removed:
                self.note_removed(
                    torch.cat([headers[0] for _, headers in self.live_blocks()] or [self._none])
                )
                self.policies.collect()
            self.policies.removed += len(self)
            self.table.empty()
            if self.tier is not None:
                self.tier.forget()
            self.order.writes += 1
            self._epoch += 1
            self.moves += 1

    def reserve(self, n: int) -> None:
        with self.order:
            self.table.reserve(n)

    # ---- policies

    def admitted(self, ids: Tensor, seen: Tensor, step: int) -> Tensor:
        with self.order:
            known = self.group.find(ids.to(self.device), [ids.numel()]).rows >= 0
            return known | self.policies.admits(ids, seen, step)

    def open_watch(self) -> int:
        with self.order:
            number = next((k for k in range(NUM_WATCHES) if k not in self._watches), None)
            if number is None:
                raise UsageError(f"table {self.name!r}: {NUM_WATCHES} passes over the table are in progress")
            self._watches.add(number)
            self.table.tracked |= self._watch_bit(number)
            self.table.changed()
            return number

    def close_watch(self, watch: int) -> None:
        with self.order:
            self._watches.remove(watch)
            self.table.tracked &= ~self._watch_bit(watch)
            self.table.changed()

    def evict(self, ids: Tensor, watch: int) -> Tensor:
        self.wait_for_reader()
        with self.order:
            # A search for low scores visits a row twice if it changes its place on the way.
            ids, _ = first_occurrences(ids.to(self.device))
            rows = self.group.find(ids, [ids.numel()]).rows
            exists = (rows >= 0).nonzero()[:, 0]
            flags = self.table.headers(rows[exists].contiguous())[2]
            return self.evict_ids(ids[exists[(flags & self._watch_bit(watch)) == 0]])

    def evict_ids(self, ids: Tensor) -> Tensor:
        """Remove rows, log their ids and count them as evicted."""
        # ids: int64 [n], distinct.
        gone = self._remove(ids).cpu()
        self.policies.evict(gone)
        self._epoch += bool(gone.numel())
        return gone

    def compact(self, limit: int) -> bool:
        # Moves all rows in one call.
        with self.order:
            used = self.table.read_size()[0]
            if self.open_snapshot is not None or not is_sparse(len(self), used):
                return True
            rows, headers = self.table.live_rows()
            boundary = max(1, rows.numel())
            taken = torch.zeros(boundary, dtype=torch.bool, device=self.device)
            taken[rows[rows < boundary].long()] = True
            far = rows >= boundary
            targets = (~taken).nonzero()[:, 0].to(torch.int32)
            moved, spare = targets[: int(far.sum())], targets[int(far.sum()) :]
            self.table.move(rows[far].contiguous(), moved.contiguous())
            rows[far] = moved
            self.table.rebuild_index(headers[0].contiguous(), rows)
            self.table.shrink(boundary, spare)
            if self.tier is not None:
                self.tier.forget()
            self.order.writes += 1
            self._epoch += 1
            return True

    def drain_evicted(self) -> Tensor:
        with self.order:
            self.policies.collect()
            return self.policies.evicted_log.take()

    def drain_refused(self) -> Tensor:
        with self.order:
            self.policies.collect()
            return self.policies.refused_log.take()

    def pending(self) -> tuple[Tensor, Tensor]:
        with self.order:
            return self.policies.pending()

    def restore_pending(self, ids: Tensor, counts: Tensor) -> None:
        with self.order:
            absent = self.group.find(ids.to(self.device), [ids.numel()]).rows < 0
            self.policies.count(ids.to(self.device)[absent], counts.to(self.device)[absent])

    def counters(self) -> RowCounters:
        with self.order:
            values = self.table.read_counters()
            skipped = values[SKIPPED.value]
            if skipped:
                self.table.counters[SKIPPED.value] = 0
                raise InputError(
                    f"table {self.name!r}: {skipped} rows got gradients with NaN or Inf since the last call; "
                    "these rows were not changed"
                )
            return self.policies.counters(values)

    # ---- touched rows

    def track(self, consumer: int) -> None:
        with self.order:
            self.policies.collect()
            self._removed[consumer] = []
            self._forget(consumer)
            none = torch.full((1,), -1, dtype=torch.int32, device=self.device)
            self.table.write_header(FLAGS, none, none, 2)  # compiles what a drain needs before the first step
            self.table.tracked |= self._bit(consumer)
            self.table.changed()

    def _forget(self, consumer: int) -> Tensor:
        """Clear the flags of touched rows; return their ids."""
        ids = [self._none]
        for rows, headers in self.live_blocks():
            touched = (headers[2] & self._bit(consumer)) != 0
            own = rows[touched].contiguous()
            self.table.write_header(FLAGS, own, torch.full_like(own, ~self._bit(consumer)), 2)
            ids.append(headers[0][touched])
        return torch.cat(ids)

    def untrack(self, consumer: int) -> None:
        with self.order:
            del self._removed[consumer]
            self.table.tracked &= ~self._bit(consumer)
            self.table.changed()

    def drain(self, consumer: int) -> tuple[Tensor, Tensor]:
        # It reads the flags of all rows, at the speed of the device's memory.
        with self.order:
            updated = self._forget(consumer).cpu()
            self.policies.collect()
            removed = torch.unique(torch.cat([self._none.cpu(), *self._removed[consumer]]))
            self._removed[consumer] = []
            absent = self.group.find(removed.to(self.device), [removed.numel()]).rows.cpu() < 0
            return updated, removed[absent]

    def mark(self, consumer: int, ids: Tensor) -> None:
        with self.order:
            distinct = torch.unique(ids.to(self.device))
            rows = self.group.find(distinct, [distinct.numel()]).rows
            own = rows[rows >= 0].contiguous()
            self.table.write_header(FLAGS, own, torch.full_like(own, self._bit(consumer)), 1)
            self._removed[consumer].append(distinct[rows < 0].cpu())

    # ---- state

    @property
    def epoch(self) -> int:
        return self._epoch

    def __len__(self) -> int:
        with self.order:
            length, writes = self._length
            if writes != self.order.writes:
                used, free = self.table.read_size()
                length = used - free
                self._length = length, self.order.writes
            return length

    @property
    def most_rows(self) -> int:
        most = self.table.most_rows
        return min(most, self.table.row_limit) if self.table.row_limit else most

    def shape(self) -> tuple[int, int, int, bool]:
        with self.order:
            return len(self), max(len(self), self.table.slot_limit), self._epoch, False

    def host_tier(self) -> HostTierUse | None:
        with self.order:
            return None if self.tier is None else self.tier.use(self.table.read_size()[0])

    def memory(self) -> MemoryUse:
        with self.order:
            used, table = len(self), self.table
            weights = used * sum(s.dim * PRECISIONS[s.precision] for s in self.config.segments)
            states = used * 4 * self.layout.state_floats
            side = (
                used * self.layout.stride - weights - states + (0 if self.tier is None else self.tier.bytes)
            )
            slack = (table.row_capacity - used) * self.layout.stride
            slack += 4 * table.free.numel() + table.stamps.numel()
            index = 8 * table.entries.numel()
            return MemoryUse(index, weights, states, side, self.policies.memory(), slack)

    # ---- the hot calls

    def find(self, ids: Tensor) -> FoundRows:
        with self.order:
            ids = ids.to(self.device)
            rows = self._find(ids)
            by = FoundTogether(self.order.writes, [self.group], [rows])
            # A view: rows that refer to a search that refers to them would be freed late.
            return self.note_found(rows.search.rows.view(-1), by)

    def has_rows(self, ids: Tensor) -> Tensor:
        with self.order:
            ids = ids.to(self.device)
            return self.group.find(ids, [ids.numel()]).rows >= 0

    def _find(self, ids: Tensor, *, counted: bool = True) -> JoinedRows:
        """Find rows that a call uses; with a host tier they move to the device."""
        return self.launches.find({self.name: ids}, [ids.numel()], {} if counted else {self.name: None})

    def note_found(self, rows: Tensor, by: FoundTogether) -> FoundRows:
        # rows: int32 [n], the rows of this table.
        rows.megalith_found = by  # type: ignore[attr-defined]
        return FoundRows(rows, self._epoch)

    def _known(self, ids: Tensor, found: FoundRows | None) -> JoinedRows | None:
        """Return what this engine found for ids, if it is current."""
        by = found_by(found)
        current = by is not None and by.writes == self.order.writes
        return by.rows(self.group, [ids.numel()]) if by is not None and current else None

    def read(self, ids: Tensor, found: FoundRows | None = None, out: Tensor | None = None) -> Tensor:
        with self.order:
            ids = ids.to(self.device)
            rows = self._known(ids, found)  # None: found by the kernel that reads
            if rows is None and self.fetches:
                rows = self._find(ids, counted=found is None)
            direct = out is not None and out.device == self.device
            shape = ids.numel(), self.dim
            result = out if direct else torch.empty(shape, dtype=torch.float32, device=self.device)
            assert result is not None
            self.group.read(ids, None if rows is None else rows.search, [ids.numel()], result)
            if out is not None and not direct:
                out.copy_(result)
            return result if out is None else out

    def pool(self, ids: Tensor, found: FoundRows | None, pooling: Pooling, outputs: list[Tensor]) -> None:
        with self.order:
            ids = ids.to(self.device)
            planned = self._planned(pooling, ids)
            rows = self._known(ids, found) or self._find(ids, counted=found is None)
            planned.pool([rows], outputs)

    def _planned(self, pooling: Pooling, ids: Tensor) -> PlannedPooling:
        """Return the pooling of this table; raise if it does not fit."""
        return self._plans.find(pooling, {self.name: ids})

    def update(
        self,
        ids: Tensor,
        found: FoundRows | None,
        grads: list[Tensor],
        pooling: Pooling | None,
        step: Step,
        occurrences: Tensor | None = None,
    ) -> None:
        # A row whose summed gradient is not finite is not changed; the next call that waits for the device
        # and returns counters raises.
        with self.stage_update(ids, found, grads, pooling, step, occurrences) as write:
            write()

    @contextmanager
    def stage_update(
        self,
        ids: Tensor,
        found: FoundRows | None,
        grads: list[Tensor],
        pooling: Pooling | None,
        step: Step,
        occurrences: Tensor | None = None,
    ) -> Iterator[Callable[[], None]]:
        self.wait_for_reader()
        with self.order:
            check_capacity(self, ids, pooling, step, occurrences)
            if pooling is None:
                source = GradientSource.of(grads)
            else:
                grads = [grad.contiguous() for grad in grads]
                hold(grads)
                source = self._planned(pooling, ids).gradients(0, grads)
            rows = self._known(ids, found)
            if rows is not None:  # a copy, because rows of new ids are filled in
                hold([rows.search.rows])
                rows = rows._replace(search=rows.search._replace(rows=rows.search.rows.clone()))
            seen = {} if occurrences is None else {self.name: occurrences}
            update = Update(step.step, step.time, step.scale, step.clip_norm, {self.name: step.rates}, seen)
            looked_up = {} if found is None else {self.name: None}
            yield self.launches.stage_update(
                update, {self.name: ids}, [ids.numel()], rows, source, None, looked_up
            )

    def pool_lookup(
        self,
        ids: Tensor,
        found: FoundRows | None,
        pooling: Pooling,
        outputs: list[Tensor],
        *,
        step: int | None = None,
    ) -> None:
        # A view is applied in torch.
        if self.view is None:
            return self.pool(ids, found, pooling, outputs)
        self._planned(pooling, ids)  # checks it
        self.pool_rows(self.lookup(ids, found, step=step), pooling.of(self.name), outputs)
