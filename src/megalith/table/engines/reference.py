"""The reference engine: plain torch and a dict. It is the test oracle of the other engines.

It is slow and simple. It runs wherever torch runs, so Megalith works without the native module. A
snapshot copies all of its rows when it begins.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megalith.errors import InputError, TableFullError
from megalith.ops.pooling import Pooling, pool, unpool
from megalith.table.config import TableConfig
from megalith.table.engines.contract import Engine
from megalith.table.engines.reference_policies import AdmissionState, IdLog, VictimSearch, is_sparse
from megalith.table.engines.shard_capacity import check_capacity, make_room
from megalith.table.engines.torch_step import update_chunk, update_in_torch
from megalith.table.initializers import initial_rows, table_key
from megalith.table.optimizers import Optimizer, native_rule
from megalith.table.policies import MAX_COUNT
from megalith.table.rounding import round_rows, round_step
from megalith.table.table_data import Chunk, FoundRows, MemoryUse, RowCounters, SnapshotStart, Step


class CopiedSnapshot:
    """The rows of a snapshot, the next row to read, and the ids that were drained for it."""

    def __init__(self, rows: Chunk, consumer: int, drained: tuple[Tensor, Tensor]) -> None:
        self._rows = rows
        self._at = 0
        self.consumer = consumer
        self.drained = drained

    def read(self, chunk: Chunk) -> int:
        """Fill a chunk with the next rows."""
        n = min(chunk.ids.numel(), self._rows.ids.numel() - self._at)
        part = self._rows.part(self._at, self._at + n)
        chunk.ids[:n], chunk.time[:n] = part.ids, part.time
        if chunk.count is not None and chunk.step is not None:
            assert part.count is not None
            assert part.step is not None
            chunk.count[:n], chunk.step[:n] = part.count, part.step
        for target, column in zip(chunk.columns(), part.columns(), strict=True):
            target[:n] = column
        self._at += n
        return n


class CopyingEngine(Engine):
    """An engine that copies the rows of a snapshot at once. A subclass says which rows and how."""

    _snapshot: CopiedSnapshot | None = None

    @property
    @abstractmethod
    def _guard(self) -> AbstractContextManager[object]:
        """The lock of the table."""

    @property
    @abstractmethod
    def _consumers(self) -> Container[int]:
        """The numbers of the consumers of touched rows."""

    @abstractmethod
    def _copy_rows(self, consumer: int) -> Chunk:
        """Copy the rows that a consumer has not drained, or all rows if it is -1."""

    def begin_snapshot(
        self, consumer: int, touched_only: bool, room: int, with_pending: bool
    ) -> SnapshotStart:
        # Copies the rows at once.
        with self._guard:
            if self._snapshot is not None:
                raise InputError(f"table {self.name!r} already has an open snapshot: close it first")
            none = torch.empty(0, dtype=torch.int64, device="cpu")
            total = len(self)
            rows = self._copy_rows(consumer if touched_only else -1)
            drained = (none, none) if consumer < 0 else self.drain(consumer)
            self._snapshot = CopiedSnapshot(rows, consumer, drained)
            pending = self.pending() if with_pending else (none, none)
            return SnapshotStart(rows.ids.numel(), total, drained[1], pending)

    def read_snapshot(self, chunk: Chunk) -> int:
        assert self._snapshot is not None
        return self._snapshot.read(chunk)

    def snapshot_pressure(self) -> float:
        return 0.0

    def end_snapshot(self, give_back: bool) -> float:
        with self._guard:
            copy, self._snapshot = self._snapshot, None
            if copy is not None and give_back and copy.consumer in self._consumers:
                for ids in copy.drained:
                    self.mark(copy.consumer, ids)
        return 0.0


class ReferenceEngine(CopyingEngine):
    """Rows in one tensor, found through a dict. See `Engine`.

    Weights of 16 bits are rounded in the same way as in other engines, but occupy 32 bits.
    """

    engine = "reference"

    def __init__(self, config: TableConfig, *, seed: int = 0, num_shards: int = 1) -> None:
        super().__init__(config, seed=seed, num_shards=num_shards)
        self._key = table_key(seed, config.name)
        self._initializers = [(s.dim, s.initializer) for s in config.segments]
        self._lock = threading.RLock()
        self._epoch = 0
        self._touched: dict[int, dict[int, None]] = {}  # consumer -> ids, in order
        self._removed: dict[int, dict[int, None]] = {}
        limits = self.limits
        self._admission = AdmissionState(config.admission, self._key, limits.counted_ids, limits.log_ids)
        self._evicted = IdLog(limits.log_ids)
        self._watches: dict[int, dict[int, bool]] = {}  # watch -> id -> whether it did not change
        self._latest_step = 0  # the largest step of an update or of a restored row
        self._counters = dict.fromkeys(("created", "removed", "evicted"), 0)
        self._search = VictimSearch()
        self._empty()

    def _empty(self) -> None:
        self._row_of: dict[int, int] = {}
        self._data = torch.empty(0, self.config.row_floats, dtype=torch.float32, device="cpu")
        self._ids_of = torch.empty(0, dtype=torch.int64, device="cpu")
        self._time = torch.empty(0, dtype=torch.int64, device="cpu")
        self._count = torch.empty(0, dtype=torch.int64, device="cpu")
        self._step = torch.empty(0, dtype=torch.int64, device="cpu")
        self._free: list[int] = []
        self._used = 0  # all row numbers in use are below
        self._boundary = 0  # rows from here on are being moved; 0: no compaction in progress

    def reseed(self, seed: int) -> None:
        with self._lock:
            self.seed = seed
            self._key = table_key(seed, self.name)
            self._admission.set_key(self._key)

    @property
    def epoch(self) -> int:
        return self._epoch

    def __len__(self) -> int:
        return len(self._row_of)

    def shape(self) -> tuple[int, int, int, bool]:
        with self._lock:
            return len(self), max(len(self), self._data.shape[0]), self._epoch, False

    def memory(self) -> MemoryUse:
        # Counts 100 bytes for a dict entry.
        places, used = self._data.shape[0], len(self)
        state = 4 * (self.config.row_floats - self.dim)
        side = 32 if self.config.counted else 16
        counters = 100 * len(self._admission.counts) + 8 * (len(self._evicted) + len(self._admission.refused))
        counters += 0 if self.score_search is None else self.score_search.bytes
        slack = (places - used) * (4 * self.dim + state + side)
        return MemoryUse(used * 100, 4 * used * self.dim, used * state, used * side, counters, slack)

    def clear(self) -> None:
        with self._lock:
            self._note_removed(list(self._row_of))
            self._counters["removed"] += len(self)
            self._admission.counts.clear()
            self._search = VictimSearch()
            self._empty()
            self._epoch += 1
            self.moves += 1

    def reserve(self, n: int) -> None:
        with self._lock:
            self._grow(n)

    # ---- rows

    def _grow(self, capacity: int) -> None:
        have = self._data.shape[0]
        if capacity <= have:
            return
        more = max(capacity, 2 * have) - have
        self._data = torch.cat(
            [self._data, torch.zeros(more, self.config.row_floats, dtype=torch.float32, device="cpu")]
        )
        self._ids_of = torch.cat([self._ids_of, torch.zeros(more, dtype=torch.int64, device="cpu")])
        for name in ("_time", "_count", "_step"):
            setattr(
                self,
                name,
                torch.cat([getattr(self, name), torch.zeros(more, dtype=torch.int64, device="cpu")]),
            )

    def _create(self, id: int) -> int:
        if self._free:
            row = self._free.pop()
        else:
            self._grow(self._used + 1)
            row = self._used
            self._used += 1
        self._row_of[id] = row
        self._ids_of[row] = id
        self._count[row] = self._step[row] = 0
        self._counters["created"] += 1
        self._admission.counts.pop(id, None)
        self._reset(row, id)
        return row

    def _reset(self, row: int, id: int) -> None:
        self._data[row, : self.dim] = self._initial(torch.tensor([id], device="cpu"))[0]
        for column in self.config.state_columns:
            self._data[row, column.start : column.end] = column.initial

    def _initial(self, ids: Tensor) -> Tensor:
        return round_rows(self.config, initial_rows(self._key, ids, self._initializers))

    def _find_or_create(self, ids: Tensor) -> Tensor:
        self._make_place([id for id in dict.fromkeys(ids.tolist()) if id not in self._row_of], ids.tolist())
        rows = [self._row_of[i] if i in self._row_of else self._create(i) for i in ids.tolist()]
        return torch.tensor(rows, dtype=torch.int64, device="cpu")

    def _written(self, ids: Tensor, rows: Tensor, time: int | Tensor) -> None:
        self._time[rows] = time if isinstance(time, Tensor) else torch.tensor(time, device="cpu")
        for touched in self._touched.values():
            touched.update(dict.fromkeys(ids.tolist()))
        for watch in self._watches.values():
            watch.update(dict.fromkeys(ids.tolist(), False))

    def _assigned(self, ids: Tensor, rows: Tensor, time: int) -> None:
        """Note that rows were written by other means than an update, now and at the latest step."""
        self._count[rows] = self._count[rows].clamp(min=1)
        self._step[rows] = self._latest_step
        self._written(ids, rows, time)

    def _note_removed(self, ids: list[int]) -> None:
        for consumer, touched in self._touched.items():
            for id in ids:
                touched.pop(id, None)
                self._removed[consumer][id] = None

    # ---- hot calls

    def find(self, ids: Tensor) -> FoundRows:
        with self._lock:
            rows = [self._row_of.get(i, -1) for i in ids.tolist()]
            return FoundRows(torch.tensor(rows, dtype=torch.int32, device="cpu"), self._epoch)

    def _current(self, found: FoundRows | None, ids: Tensor) -> Tensor:
        if found is None or found.epoch != self._epoch or not self._all_rows_exist(found.rows):
            found = self.find(ids)
        return found.rows.to(torch.int64)

    def _all_rows_exist(self, rows: Tensor) -> bool:
        return bool(((rows >= 0) & (rows < self._used)).all())

    def read(self, ids: Tensor, found: FoundRows | None = None, out: Tensor | None = None) -> Tensor:
        with self._lock:
            rows = self._current(found, ids)
            exists = rows >= 0
            out = (
                torch.zeros(ids.numel(), self.dim, dtype=torch.float32, device="cpu")
                if out is None
                else out.zero_()
            )
            out[exists] = self._data[rows[exists], : self.dim]
            if self.config.missing == "initial":
                out[~exists] = self._initial(ids[~exists])
            return out

    @torch.no_grad()
    def pool(self, ids: Tensor, found: FoundRows | None, pooling: Pooling, outputs: list[Tensor]) -> None:
        pooling.check(self.name, ids.numel(), self.dim)
        pool(self.read(ids, found), pooling.of(self.name), outputs)

    @torch.no_grad()
    def update(
        self,
        ids: Tensor,
        found: FoundRows | None,
        grads: list[Tensor],
        pooling: Pooling | None,
        step: Step,
        occurrences: Tensor | None = None,
    ) -> None:
        # It finds rows itself.
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
        flat = grads[0] if pooling is None else None
        call, all_occurrences = ids, occurrences
        occurrences = torch.ones_like(ids) if occurrences is None else occurrences
        if pooling is not None:
            pooling.check(self.name, ids.numel(), self.dim)
            flat, reached = unpool(grads, pooling.of(self.name), ids.numel(), self.dim)
            ids, flat, occurrences = ids[reached], flat[reached], occurrences[reached]
        assert flat is not None
        with torch.no_grad(), self._lock:
            distinct, where = _first_occurrences(ids)
            sums = torch.zeros(distinct.numel(), self.dim, dtype=torch.float32, device="cpu")
            for occurrence, row in enumerate(where.tolist()):  # in input order
                sums[row] += flat[occurrence]
            seen = torch.zeros_like(distinct).index_add_(0, where, occurrences)
            known = torch.tensor([id in self._row_of for id in distinct.tolist()], device="cpu").bool()
            admitted = ~known & self._admission.admits(distinct, seen, step.step)
            kept = known | admitted
            refused = list(zip(distinct[~kept].tolist(), seen[~kept].tolist(), strict=True))
            new, own, sums = distinct[admitted].tolist(), distinct[kept], sums[kept]
            before = self._complete(own)
            check_capacity(self, call, pooling, step, all_occurrences)
            # It may raise, so nothing is written before.
            update_chunk(self.config, sums, before, step, self.view, _update_one_segment)
            before.rows.copy_(round_step(self.config, self._key, own, before.rows, step.step))

            def write() -> None:
                self._make_place(new, call.tolist())
                rows = self._find_or_create(own)
                self._admission.refuse(refused)  # after the counts of the created ids made room
                self._data[rows] = torch.cat(before.columns(), dim=1)
                self._latest_step = max(self._latest_step, min(step.step, MAX_COUNT))
                self._count[rows] = (self._count[rows] + 1).clamp(max=MAX_COUNT)
                self._step[rows] = min(step.step, MAX_COUNT)
                self._written(own, rows, step.time)

            yield write

    # ---- rows

    def assign(self, ids: Tensor, rows: Tensor, *, add: bool, time: int) -> None:
        with self._lock:
            found = self._find_or_create(ids)
            for row, values in zip(found.tolist(), rows, strict=True):
                new = self._data[row, : self.dim] + values if add else values
                self._data[row, : self.dim] = round_rows(self.config, new[None])[0]
            self._assigned(ids, found, time)

    def reinitialize(self, ids: Tensor, time: int) -> Tensor:
        with self._lock:
            new = [id for id in dict.fromkeys(ids.tolist()) if id not in self._row_of]
            self._make_place(new, ids.tolist())
            status = []
            for id in ids.tolist():
                status.append(int(id in self._row_of))
                if status[-1]:
                    self._reset(self._row_of[id], id)
                else:
                    self._create(id)
            self._assigned(ids, self._find_or_create(ids), time)
            return torch.tensor(status, dtype=torch.int32, device="cpu")

    def remove(self, ids: Tensor) -> int:
        with self._lock:
            gone = [id for id in dict.fromkeys(ids.tolist()) if id in self._row_of]
            self._remove(gone, "removed")
            self._epoch += 1
            return len(gone)

    def _remove(self, ids: list[int], counter: str) -> None:
        for id in ids:
            row = self._row_of.pop(id)
            if not self._boundary or row < self._boundary:  # compaction removes the places after it
                self._free.append(row)
        self._note_removed(ids)
        self._counters[counter] += len(ids)

    def restore(self, chunk: Chunk) -> None:
        with self._lock:
            found = self._find_or_create(chunk.ids)
            raw = torch.cat(chunk.columns(), dim=1)
            raw[:, : self.dim] = round_rows(self.config, chunk.rows)
            for at, row in enumerate(found.tolist()):
                self._data[row] = raw[at]
                self._time[row] = chunk.time[at]
                if chunk.count is not None and chunk.step is not None:
                    self._count[row], self._step[row] = chunk.count[at], chunk.step[at]
                    self._latest_step = max(self._latest_step, int(chunk.step[at]))
            self._written(chunk.ids, found, self._time[found])
            self._epoch += 1

    def scan_part(
        self,
        start: int,
        limit: int,
        *,
        rows: bool = True,
        watch: int | None = None,
        stop: int | None = None,
    ) -> tuple[Chunk, int]:
        with self._lock:
            end = self._used if stop is None else min(stop, self._used)
            live = [r for r in range(start, end) if self._is_live(r)][:limit]
            end = live[-1] + 1 if len(live) == limit else end
            chunk = self._chunk(torch.tensor(live, dtype=torch.int64, device="cpu"))
            if not rows:
                chunk = replace(chunk, rows=chunk.rows[:, :0], state={})
            if watch is not None:
                self._watches[watch].update(dict.fromkeys(chunk.ids.tolist(), True))
            return chunk, end if end < self._used else -1

    def _chunk(self, rows: Tensor) -> Chunk:
        raw = self._data[rows]
        state = {c.key: raw[:, c.start : c.end].contiguous() for c in self.config.state_columns}
        weights = raw[:, : self.dim].contiguous()
        counted = (self._count[rows], self._step[rows]) if self.config.counted else (None, None)
        return Chunk(self._ids_of[rows], weights, state, self._time[rows], *counted)

    def _complete(self, ids: Tensor) -> Chunk:
        """Return complete rows; an id without a row reads as the row that would be created."""
        raw = torch.empty(ids.numel(), self.config.row_floats, dtype=torch.float32, device="cpu")
        raw[:, : self.dim] = self._initial(ids)
        for column in self.config.state_columns:
            raw[:, column.start : column.end] = column.initial
        for at, id in enumerate(ids.tolist()):
            if id in self._row_of:
                raw[at] = self._data[self._row_of[id]]
        state = {c.key: raw[:, c.start : c.end].contiguous() for c in self.config.state_columns}
        return Chunk(ids, raw[:, : self.dim].contiguous(), state, torch.zeros_like(ids))

    # ---- policies

    def admitted(self, ids: Tensor, seen: Tensor, step: int) -> Tensor:
        with self._lock:
            known = torch.tensor([id in self._row_of for id in ids.tolist()], device="cpu").bool()
            return known | self._admission.admits(ids, seen, step)

    def open_watch(self) -> int:
        with self._lock:
            number = max(self._watches, default=-1) + 1
            self._watches[number] = {}
            return number

    def close_watch(self, watch: int) -> None:
        with self._lock:
            del self._watches[watch]

    def evict(self, ids: Tensor, watch: int) -> Tensor:
        with self._lock:
            unchanged = self._watches[watch]
            gone = [id for id in ids.tolist() if id in self._row_of and unchanged.get(id, False)]
            self._evict(gone)
            return torch.tensor(gone, dtype=torch.int64, device="cpu")

    def _evict(self, ids: list[int]) -> None:
        self._remove(ids, "evicted")
        self._evicted.add(ids)
        self._epoch += bool(ids)

    def _make_place(self, new: list[int], call: list[int]) -> None:
        """Remove rows so that the new ids fit; none that belongs to the call."""
        capacity = self.config.capacity
        if capacity is None or self.row_limit is None or not new:
            return
        need = len(self) + len(new) - self.row_limit
        if need > 0 and callable(capacity.score):
            make_room(self, torch.tensor(call, dtype=torch.int64, device="cpu"), len(new))
            need = len(self) + len(new) - self.row_limit
        if need <= 0:
            return
        kept = {self._row_of[id] for id in call if id in self._row_of}
        if capacity.score is None or callable(capacity.score) or len(self) - len(kept) < need:
            raise TableFullError(
                f"table {self.name!r} holds {len(self)} rows and needs {len(new)} more, but its Capacity is "
                f"{self.row_limit} rows"
            )
        live = [self._is_live(row) for row in range(self._used)]
        scores = {"lru": self._time, "lfu": (self._count << 32) | self._time, "step": self._step}
        unsigned = [score % 2**64 for score in scores[str(capacity.score)].tolist()]
        rows = self._search.choose(need, live, unsigned, kept, len(self))
        self._evict([int(self._ids_of[row]) for row in rows])

    def compact(self, limit: int) -> bool:
        with self._lock:
            if self._snapshot is not None or not (self._boundary or is_sparse(len(self), self._used)):
                return True
            if not self._boundary:
                self._boundary = max(1, len(self))
                self._free = [row for row in self._free if row < self._boundary]
            self._epoch += 1
            while limit and self._used > self._boundary:
                last = self._used - 1
                if self._is_live(last):
                    if not self._free:
                        break
                    self._move(last, self._free.pop())
                self._used -= 1
                limit -= 1
            if limit:
                # If new rows took all free places before the boundary, the places after it stay.
                places = range(self._used - 1, self._boundary - 1, -1)
                self._free += [row for row in places if not self._is_live(row)]
                self._boundary = 0
                for name in ("_data", "_ids_of", "_time", "_count", "_step"):
                    setattr(self, name, getattr(self, name)[: self._used].clone())
            return limit > 0

    def _move(self, old: int, new: int) -> None:
        for column in (self._data, self._ids_of, self._time, self._count, self._step):
            column[new] = column[old]
        self._row_of[int(self._ids_of[new])] = new

    def drain_evicted(self) -> Tensor:
        with self._lock:
            return self._evicted.take()

    def drain_refused(self) -> Tensor:
        with self._lock:
            return self._admission.refused.take()

    def pending(self) -> tuple[Tensor, Tensor]:
        with self._lock:
            counts = self._admission.counts
            return torch.tensor(list(counts), dtype=torch.int64, device="cpu"), torch.tensor(
                list(counts.values()), dtype=torch.int64, device="cpu"
            )

    def restore_pending(self, ids: Tensor, counts: Tensor) -> None:
        with self._lock:
            for id, count in zip(ids.tolist(), counts.tolist(), strict=True):
                if id not in self._row_of:
                    self._admission.count(id, count)

    def counters(self) -> RowCounters:
        with self._lock:
            state = self._admission
            return RowCounters(
                **self._counters,
                refused=state.refusals,
                pending=len(state.counts),
                pending_dropped=state.dropped,
                log_lost=self._evicted.lost + state.refused.lost,
            )

    @property
    def _guard(self) -> AbstractContextManager[object]:
        return self._lock

    @property
    def _consumers(self) -> Container[int]:
        return self._touched

    def _copy_rows(self, consumer: int) -> Chunk:
        ids = list(self._row_of) if consumer < 0 else list(self._touched[consumer])
        return self._chunk(torch.tensor([self._row_of[id] for id in ids], dtype=torch.int64, device="cpu"))

    def _is_live(self, row: int) -> bool:
        return self._row_of.get(int(self._ids_of[row])) == row

    def track(self, consumer: int) -> None:
        with self._lock:
            self._touched[consumer] = {}
            self._removed[consumer] = {}

    def untrack(self, consumer: int) -> None:
        with self._lock:
            del self._touched[consumer], self._removed[consumer]

    def drain(self, consumer: int) -> tuple[Tensor, Tensor]:
        with self._lock:
            updated = list(self._touched[consumer])
            removed = [id for id in self._removed[consumer] if id not in self._row_of]
            self.track(consumer)
        return torch.tensor(updated, dtype=torch.int64, device="cpu"), torch.tensor(
            removed, dtype=torch.int64, device="cpu"
        )

    def mark(self, consumer: int, ids: Tensor) -> None:
        with self._lock:
            for id in ids.tolist():
                kept = self._touched if id in self._row_of else self._removed
                kept[consumer][id] = None


def _first_occurrences(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids in order of first occurrence, and the position of each id among them."""
    order: dict[int, int] = {}
    where = [order.setdefault(id, len(order)) for id in ids.tolist()]
    return torch.tensor(list(order), dtype=torch.int64, device="cpu"), torch.tensor(
        where, dtype=torch.int64, device="cpu"
    )


def _update_one_segment(
    optimizer: Optimizer, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int
) -> None:
    if native_rule(optimizer) is not None:
        return optimizer.update(rows, grads, state, lr, step)
    for i in range(rows.shape[0]):  # one row at a time: the oracle of the cpu engine's batched call
        one = slice(i, i + 1)
        own = {name: values[one] for name, values in state.items()}
        update_in_torch(optimizer, rows[one], grads[one], own, lr, step)
