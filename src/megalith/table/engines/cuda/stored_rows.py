"""StoredRows: the calls of the cuda engine that are not on the hot path.

They compose kernels and torch operations, and wait for the device where they return data to the host. Ids and
chunks that come from or go to the host may be on the CPU in these calls. Scans and snapshots are in
streamed_rows.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.table.engines.cuda.cuda_policies import CudaPolicies
from megalith.table.engines.cuda.device_table import FLAGS
from megalith.table.engines.cuda.host_copies import all_columns, with_columns
from megalith.table.engines.cuda.launch_group import RowSearch
from megalith.table.engines.cuda.occurrences import first_occurrences, last_occurrences
from megalith.table.engines.cuda.row_layout import CHUNK_BYTES
from megalith.table.engines.cuda.row_writes import COUNT, STEP, TIME, assign_in_order, write_chunk
from megalith.table.engines.cuda.streamed_rows import StreamedRows
from megalith.table.engines.reference_policies import is_sparse
from megalith.table.initializers import table_key
from megalith.table.table_config import PRECISIONS, TableConfig
from megalith.table.table_data import Chunk, HostTierUse, MemoryUse, RowCounters

NUM_WATCHES = 8


class StoredRows(StreamedRows):
    """The calls that write single rows, policies and touched rows. See `Engine`."""

    def __init__(
        self, config: TableConfig, *, seed: int = 0, num_shards: int = 1, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        super().__init__(config, seed=seed, num_shards=num_shards, chunk_bytes=chunk_bytes)
        self.policies = CudaPolicies(self)
        self._watches: set[int] = set()
        self._none = torch.empty(0, dtype=torch.int64, device=self.device)

    def reseed(self, seed: int) -> None:
        with self.order:
            self.seed = seed
            self._key = self.table.key = table_key(seed, self.name)
            self.table.changed()
            self.policies.set_key(self._key)

    # ---- rows

    def find_or_create(self, ids: Tensor, fresh: Tensor | None = None) -> Tensor:
        """Find the rows of ids, create missing ones, and make room for them if the table has a capacity."""
        # ids: int64 [n] on the device; fresh: int8 [n] of zeros; returns: int32 [n].
        sizes = [ids.numel()]
        found = self.group.find(ids, sizes)
        if self.policies.active and ids.numel():
            missing = first_occurrences(ids[found.rows < 0])[0]
            if self.policies.make_place(missing.numel(), ids):
                found = self.group.find(ids, sizes)
            self.policies.created(missing)
        self.save_rows(found.rows)
        slots = self.group.create(ids, found, sizes, fresh=fresh)
        self.group.finish(slots, found, sizes, keys=False)
        self.wrote()
        return found.rows

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
        for removed in self._removed.values():
            removed.append(ids.cpu())
        self.writes += 1
        self._length = None
        return ids

    def restore(self, chunk: Chunk) -> None:
        # The host fills a block of rows while the one before travels.
        self.wait_for_reader()
        with self.order:
            last = last_occurrences(chunk.ids)
            chunk = chunk if last.numel() == chunk.ids.numel() else chunk.select(last)
            n = chunk.ids.numel()
            if n:
                (ids,) = self.copies.to_device([chunk.ids])
                rows = self.find_or_create(ids)
                for start in range(0, n, self.block_rows):
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
        initial = [c.initial for c in self.config.state_columns for _ in range(c.end - c.start)]
        values = torch.tensor(initial, dtype=torch.float32, device=self.device)
        states = values.expand(rows.numel(), -1).contiguous()
        exists = (rows >= 0).nonzero()[:, 0]
        known = torch.empty(exists.numel(), len(initial), dtype=torch.float32, device=self.device)
        self.table.copy_states(rows[exists].contiguous(), known, write=False)
        states[exists] = known
        return weights, states

    def clear(self) -> None:
        with self.order:
            if self.open_snapshot is not None:
                self.open_snapshot.save_all()
            if self._removed:
                ids = torch.cat([headers[0] for _, headers in self.live_blocks()] or [self._none]).cpu()
                for removed in self._removed.values():
                    removed.append(ids)
            self.policies.removed += len(self)
            self.policies.forget()
            self.table.empty()
            if self.tier is not None:
                self.tier.forget()
            self._length = 0
            self.writes += 1
            self._epoch += 1
            self.moves += 1

    def reserve(self, n: int) -> None:
        with self.order:
            self.table.reserve(n)

    # ---- policies

    def admitted(self, ids: Tensor, seen: Tensor, step: int) -> Tensor:
        with self.order:
            known = self.group.find(ids.to(self.device), [ids.numel()]).rows >= 0
            return known | self.policies.admission.admits(ids.cpu(), seen.cpu(), step).to(self.device)

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
        self.policies.evicted += gone.numel()
        self.policies.evicted_log.add(gone.tolist())
        self._epoch += bool(gone.numel())
        return gone

    def compact(self, limit: int) -> bool:
        # Moves all rows in one call.
        with self.order:
            used = self.table.read_counters()[0]
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
            self.writes += 1
            self._epoch += 1
            return True

    def drain_evicted(self) -> Tensor:
        with self.order:
            return self.policies.evicted_log.take()

    def drain_refused(self) -> Tensor:
        with self.order:
            return self.policies.admission.refused.take()

    def pending(self) -> tuple[Tensor, Tensor]:
        with self.order:
            counts = self.policies.admission.counts
            ids, numbers = list(counts), list(counts.values())
            return torch.tensor(ids, dtype=torch.int64, device="cpu"), torch.tensor(
                numbers, dtype=torch.int64, device="cpu"
            )

    def restore_pending(self, ids: Tensor, counts: Tensor) -> None:
        with self.order:
            absent = self.group.find(ids.to(self.device), [ids.numel()]).rows < 0
            self.policies.count(ids.to(self.device)[absent].tolist(), counts.to(self.device)[absent].tolist())

    def counters(self) -> RowCounters:
        with self.order:
            _, _, created, skipped = self.table.read_counters()
            if skipped:
                self.table.counters[3] = 0
                raise InputError(
                    f"table {self.name!r}: {skipped} rows got gradients with NaN or Inf since the last call; "
                    "these rows were not changed"
                )
            return self.policies.counters(created)

    # ---- touched rows

    def track(self, consumer: int) -> None:
        with self.order:
            self._removed[consumer] = []
            self._forget(consumer)
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
            if self._length is None:
                used, free, *_ = self.table.read_counters()
                self._length = used - free
            return self._length

    def shape(self) -> tuple[int, int, int, bool]:
        with self.order:
            return len(self), max(len(self), self.table.slot_limit), self._epoch, False

    def host_tier(self) -> HostTierUse | None:
        with self.order:
            return None if self.tier is None else self.tier.use(self.table.read_counters()[0])

    def memory(self) -> MemoryUse:
        with self.order:
            used, table = len(self), self.table
            weights = used * sum(s.dim * PRECISIONS[s.precision] for s in self.config.segments)
            states = used * 4 * self.layout.state_floats
            side = (
                used * self.layout.stride - weights - states + (0 if self.tier is None else self.tier.bytes)
            )
            slack = (table.row_capacity - used) * self.layout.stride + 4 * table.free.numel()
            index = 8 * table.entries.numel()
            return MemoryUse(index, weights, states, side, self.policies.memory(), slack)
