"""The reference engine: plain torch and a dict. It is the test oracle of the other engines.

It is slow and simple. It runs wherever torch runs, so Megalith works without the native module.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.pooling import Pooling, pool, unpool
from megalith.table.engines.contract import Engine
from megalith.table.engines.torch_step import update_chunk, update_in_torch
from megalith.table.initializers import initial_rows, table_key
from megalith.table.optimizers import Optimizer, native_rule
from megalith.table.table_config import TableConfig
from megalith.table.table_data import Chunk, FoundRows, MemoryUse, Step


class ReferenceEngine(Engine):
    """Rows in one tensor, found through a dict. See `Engine`.

    Args:
        config: The config of the table.
        seed: As for `Engine`.
    """

    engine = "reference"

    def __init__(self, config: TableConfig, *, seed: int = 0) -> None:
        super().__init__(config, seed=seed)
        self._key = table_key(seed, config.name)
        self._initializers = [(s.dim, s.initializer) for s in config.segments]
        self._lock = threading.RLock()
        self._epoch = 0
        self._touched: dict[int, dict[int, None]] = {}  # consumer -> ids, in order
        self._removed: dict[int, dict[int, None]] = {}
        self._snapshot: _Copy | None = None
        self._empty()

    def _empty(self) -> None:
        self._row_of: dict[int, int] = {}
        self._data = torch.empty(0, self.config.row_floats)
        self._ids_of = torch.empty(0, dtype=torch.int64)
        self._time = torch.empty(0, dtype=torch.int64)
        self._free: list[int] = []
        self._used = 0  # all row numbers in use are below

    @property
    def epoch(self) -> int:
        """See `Engine.epoch`."""
        return self._epoch

    def __len__(self) -> int:
        return len(self._row_of)

    def shape(self) -> tuple[int, int, int, bool]:
        """See `Engine.shape`."""
        with self._lock:
            return len(self), max(len(self), self._data.shape[0]), self._epoch, False

    def memory(self) -> MemoryUse:
        """See `Engine.memory`; counts 100 bytes for a dict entry."""
        return MemoryUse(len(self) * 100, self._data.nbytes, self._ids_of.nbytes + self._time.nbytes)

    def clear(self) -> None:
        """See `Engine.clear`."""
        with self._lock:
            self._note_removed(list(self._row_of))
            self._empty()
            self._epoch += 1

    def reserve(self, n: int) -> None:
        """See `Engine.reserve`."""
        with self._lock:
            self._grow(n)

    # ---- rows

    def _grow(self, capacity: int) -> None:
        have = self._data.shape[0]
        if capacity <= have:
            return
        more = max(capacity, 2 * have) - have
        self._data = torch.cat([self._data, torch.zeros(more, self.config.row_floats)])
        self._ids_of = torch.cat([self._ids_of, torch.zeros(more, dtype=torch.int64)])
        self._time = torch.cat([self._time, torch.zeros(more, dtype=torch.int64)])

    def _create(self, id: int) -> int:
        if self._free:
            row = self._free.pop()
        else:
            self._grow(self._used + 1)
            row = self._used
            self._used += 1
        self._row_of[id] = row
        self._ids_of[row] = id
        self._reset(row, id)
        return row

    def _reset(self, row: int, id: int) -> None:
        self._data[row, : self.dim] = self._initial(torch.tensor([id]))[0]
        for column in self.config.state_columns:
            self._data[row, column.start : column.end] = column.initial

    def _initial(self, ids: Tensor) -> Tensor:
        return initial_rows(self._key, ids, self._initializers)

    def _find_or_create(self, ids: Tensor) -> Tensor:
        rows = [self._row_of[i] if i in self._row_of else self._create(i) for i in ids.tolist()]
        return torch.tensor(rows, dtype=torch.int64)

    def _written(self, ids: Tensor, rows: Tensor, time: int | Tensor) -> None:
        self._time[rows] = time if isinstance(time, Tensor) else torch.tensor(time)
        for touched in self._touched.values():
            touched.update(dict.fromkeys(ids.tolist()))

    def _note_removed(self, ids: list[int]) -> None:
        for consumer, touched in self._touched.items():
            for id in ids:
                touched.pop(id, None)
                self._removed[consumer][id] = None

    # ---- hot calls

    def find(self, ids: Tensor) -> FoundRows:
        """See `Engine.find`."""
        with self._lock:
            rows = [self._row_of.get(i, -1) for i in ids.tolist()]
            return FoundRows(torch.tensor(rows, dtype=torch.int32), self._epoch)

    def _current(self, found: FoundRows | None, ids: Tensor) -> Tensor:
        if found is None or found.epoch != self._epoch or not self._all_rows_exist(found.rows):
            found = self.find(ids)
        return found.rows.to(torch.int64)

    def _all_rows_exist(self, rows: Tensor) -> bool:
        return bool(((rows >= 0) & (rows < self._used)).all())

    def read(self, ids: Tensor, found: FoundRows | None = None, out: Tensor | None = None) -> Tensor:
        """See `Engine.read`."""
        with self._lock:
            rows = self._current(found, ids)
            exists = rows >= 0
            out = torch.zeros(ids.numel(), self.dim) if out is None else out.zero_()
            out[exists] = self._data[rows[exists], : self.dim]
            if self.config.missing == "initial":
                out[~exists] = self._initial(ids[~exists])
            return out

    @torch.no_grad()
    def pool(self, ids: Tensor, found: FoundRows | None, pooling: Pooling, outputs: list[Tensor]) -> None:
        """See `Engine.pool`."""
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
    ) -> None:
        """See `Engine.update`. It finds rows itself."""
        flat = grads[0] if pooling is None else None
        if pooling is not None:
            pooling.check(self.name, ids.numel(), self.dim)
            flat, reached = unpool(grads, pooling.of(self.name), ids.numel(), self.dim)
            ids, flat = ids[reached], flat[reached]
        assert flat is not None
        with self._lock:
            distinct, where = _first_occurrences(ids)
            sums = torch.zeros(distinct.numel(), self.dim)
            for occurrence, row in enumerate(where.tolist()):  # in input order
                sums[row] += flat[occurrence]
            created = [id for id in distinct.tolist() if id not in self._row_of]
            rows = self._find_or_create(distinct)
            chunk = self._chunk(rows)
            try:
                update_chunk(self.config, sums, chunk, step, _update_one_segment)
            except BaseException:  # a user's optimizer may raise
                for id in created:
                    self._free.append(self._row_of.pop(id))
                raise
            self._data[rows] = torch.cat(chunk.columns(), dim=1)
            self._written(distinct, rows, step.time)

    # ---- rows

    def assign(self, ids: Tensor, rows: Tensor, *, add: bool, time: int) -> None:
        """See `Engine.assign`."""
        with self._lock:
            found = self._find_or_create(ids)
            for row, values in zip(found.tolist(), rows, strict=True):
                self._data[row, : self.dim] = self._data[row, : self.dim] + values if add else values
            self._written(ids, found, time)

    def reinitialize(self, ids: Tensor, time: int) -> Tensor:
        """See `Engine.reinitialize`."""
        with self._lock:
            status = []
            for id in ids.tolist():
                status.append(int(id in self._row_of))
                if status[-1]:
                    self._reset(self._row_of[id], id)
                else:
                    self._create(id)
            self._written(ids, self._find_or_create(ids), time)
            return torch.tensor(status, dtype=torch.int32)

    def remove(self, ids: Tensor) -> int:
        """See `Engine.remove`."""
        with self._lock:
            gone = [id for id in dict.fromkeys(ids.tolist()) if id in self._row_of]
            for id in gone:
                self._free.append(self._row_of.pop(id))
            self._note_removed(gone)
            self._epoch += 1
            return len(gone)

    def restore(self, ids: Tensor, columns: list[Tensor], times: Tensor) -> None:
        """See `Engine.restore`."""
        with self._lock:
            found = self._find_or_create(ids)
            raw = torch.cat(columns, dim=1)
            for row, values, time in zip(found.tolist(), raw, times.tolist(), strict=True):
                self._data[row] = values
                self._time[row] = time
            self._written(ids, found, self._time[found])
            self._epoch += 1

    def scan(self, chunk_size: int) -> Iterator[Chunk]:
        """See `Engine.scan`."""
        at = 0
        while True:
            with self._lock:
                live = [r for r in range(at, self._used) if self._is_live(r)][:chunk_size]
                if not live:
                    return
                at = live[-1] + 1
                chunk = self._chunk(torch.tensor(live))
            yield chunk

    def _chunk(self, rows: Tensor) -> Chunk:
        raw = self._data[rows]
        state = {c.key: raw[:, c.start : c.end].contiguous() for c in self.config.state_columns}
        return Chunk(self._ids_of[rows], raw[:, : self.dim].contiguous(), state, self._time[rows])

    def begin_snapshot(self, consumer: int, touched_only: bool, room: int) -> tuple[int, int, Tensor]:
        """See `Engine.begin_snapshot`; copies the rows at once."""
        with self._lock:
            if self._snapshot is not None:
                raise InputError(f"table {self.name!r} already has an open snapshot: close it first")
            drained = (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
            if consumer >= 0:
                drained = self.drain(consumer)
            ids = drained[0].tolist() if touched_only else list(self._row_of)
            chunk = self._chunk(torch.tensor([self._row_of[id] for id in ids], dtype=torch.int64))
            self._snapshot = _Copy(chunk, consumer, drained)
            return len(ids), len(self._row_of), drained[1]

    def read_snapshot(self, chunk: Chunk) -> int:
        """See `Engine.read_snapshot`."""
        copy = self._snapshot
        assert copy is not None
        n = min(chunk.ids.numel(), copy.rows.ids.numel() - copy.at)
        part = copy.rows.part(copy.at, copy.at + n)
        chunk.ids[:n], chunk.time[:n] = part.ids, part.time
        for target, column in zip(chunk.columns(), part.columns(), strict=True):
            target[:n] = column
        copy.at += n
        return n

    def snapshot_pressure(self) -> float:
        """See `Engine.snapshot_pressure`."""
        return 0.0

    def end_snapshot(self, give_back: bool) -> float:
        """See `Engine.end_snapshot`."""
        with self._lock:
            copy, self._snapshot = self._snapshot, None
            if copy is not None and give_back and copy.consumer in self._touched:
                for ids in copy.drained:
                    self.mark(copy.consumer, ids)
        return 0.0

    def _is_live(self, row: int) -> bool:
        return self._row_of.get(int(self._ids_of[row])) == row

    def track(self, consumer: int) -> None:
        """See `Engine.track`."""
        with self._lock:
            self._touched[consumer] = {}
            self._removed[consumer] = {}

    def untrack(self, consumer: int) -> None:
        """See `Engine.untrack`."""
        with self._lock:
            del self._touched[consumer], self._removed[consumer]

    def drain(self, consumer: int) -> tuple[Tensor, Tensor]:
        """See `Engine.drain`."""
        with self._lock:
            updated = list(self._touched[consumer])
            removed = [id for id in self._removed[consumer] if id not in self._row_of]
            self.track(consumer)
        return torch.tensor(updated, dtype=torch.int64), torch.tensor(removed, dtype=torch.int64)

    def mark(self, consumer: int, ids: Tensor) -> None:
        """See `Engine.mark`."""
        with self._lock:
            for id in ids.tolist():
                kept = self._touched if id in self._row_of else self._removed
                kept[consumer][id] = None


@dataclass
class _Copy:
    """The rows of a snapshot, the next row to read, and the ids that were drained for it."""

    rows: Chunk
    consumer: int
    drained: tuple[Tensor, Tensor]
    at: int = 0


def _first_occurrences(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids in order of first occurrence, and the position of each id among them."""
    order: dict[int, int] = {}
    where = [order.setdefault(id, len(order)) for id in ids.tolist()]
    return torch.tensor(list(order), dtype=torch.int64), torch.tensor(where, dtype=torch.int64)


def _update_one_segment(
    optimizer: Optimizer, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int
) -> None:
    if native_rule(optimizer) is not None:
        return optimizer.update(rows, grads, state, lr, step)
    for i in range(rows.shape[0]):  # one row at a time: the oracle of the cpu engine's batched call
        one = slice(i, i + 1)
        own = {name: values[one] for name, values in state.items()}
        update_in_torch(optimizer, rows[one], grads[one], own, lr, step)
