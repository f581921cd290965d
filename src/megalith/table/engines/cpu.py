"""The cpu engine: the Engine contract over the native module, for one table and for groups of tables.

Each call passes tensors without a copy and uses `torch.get_num_threads()` threads. Results do not depend
on the number of threads. `CpuEngineGroup` shares the threads of a call across tables:

    forward    read_tables     every table and feature: find rows, read and reduce them, in one pass
    backward   update_tables   every table: sum gradients per distinct id, one optimizer step each

The native descriptor of a table (dim, segments, optimizer, precision) lives in its native table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalith.errors import NativeMissingError, TableFullError
from megalith.library import span
from megalith.ops.pooling import Bags, Pooling
from megalith.table.config import TableConfig
from megalith.table.engines.contract import Engine, ForkSafeLock
from megalith.table.engines.group import EngineGroup
from megalith.table.engines.shard_capacity import check_capacity, make_room
from megalith.table.engines.torch_step import distinct_ids, ids_without_bag, sum_per_id, update_chunk
from megalith.table.initializers import table_key
from megalith.table.optimizers import Optimizer, native_rule
from megalith.table.policies import MinCount, Probability
from megalith.table.rounding import round_step
from megalith.table.table_data import (
    MAX_CONSUMERS,
    Chunk,
    FoundRows,
    MemoryUse,
    RowCounters,
    SnapshotStart,
    Step,
    Update,
)

try:
    from megalith import _native
except ImportError as error:
    raise NativeMissingError(
        "the cpu engine needs megalith's native module, which is not built here: run "
        "`pip install .` in a checkout (a C++17 compiler is enough), install a wheel, "
        'or use engine="reference"'
    ) from error

_MAX_PLACE = 2**62

NativeCall = tuple[Any, ...]
"""The part of one table of a native call over several tables; see native/bind_group.cpp."""


def set_huge_pages(on: bool) -> None:
    """Set whether tables ask for 2 MiB pages when they allocate memory (the default)."""
    # They make random access in large tables 1.5 to 3 times faster; on some virtual machines the first write
    # of each page is slower.
    _native.set_huge_pages(on)


class CpuEngine(Engine):
    """Rows in native memory. See `Engine`."""

    engine = "cpu"

    def __init__(
        self,
        config: TableConfig,
        *,
        seed: int = 0,
        num_shards: int = 1,
        kernels: str = "",
        max_rows: int = _native.MAX_ROWS,
    ) -> None:
        super().__init__(config, seed=seed, num_shards=num_shards)
        segments = []
        for number, segment in enumerate(config.segments):
            rule = native_rule(segment.optimizer)
            name, base, hyper = ("custom", "", ()) if rule is None else rule
            columns = [c for c in config.state_columns if c.segment == number]
            initial = [c.initial for c in columns for _ in range(c.end - c.start)]
            kind, params = segment.initializer.kind, segment.initializer.params
            precision = _native.PRECISIONS.index(segment.precision)
            stochastic = segment.rounding == "stochastic"
            segments.append(
                (segment.dim, name, base, list(hyper), initial, kind, *params, precision, stochastic)
            )
        self._key = table_key(seed, config.name)
        self._native = _native.Table(
            config.name,
            segments,
            key=self._key,
            missing_zeros=config.missing == "zeros",
            max_rows=max_rows,
            kernels=kernels,
            counted=config.counted,
            huge_pages=config.huge_pages,
            **self._policies(),
        )
        optimizers = [segment.optimizer for segment in config.segments]
        self._in_torch = any(native_rule(optimizer) is None for optimizer in optimizers)
        # A step in torch reads rows and writes them later: other writers wait.
        # The gradient of a view is computed from the stored weights, which must not change before the step.
        self._bends_gradients = self.view is not None and self.view.depends_on_step
        # The room that a score function makes is for one write.
        by_function = callable(getattr(config.capacity, "score", None))
        locks = self._in_torch or self._bends_gradients or by_function
        self.joins_updates = not locks
        self._writing: AbstractContextManager[Any] = ForkSafeLock() if locks else nullcontext()
        self._corrections = [1.0] * len(optimizers)
        self._corrected = [o for o in optimizers if type(o).correction is not Optimizer.correction]
        assert self._native.row_floats == config.row_floats
        assert _native.MAX_CONSUMERS == MAX_CONSUMERS

    def _policies(self) -> dict[str, int]:
        """The settings of policies that the native table applies."""
        settings = {"log_ids": self.limits.log_ids}
        admission, capacity = self.config.admission, self.config.capacity
        if isinstance(admission, MinCount):
            settings |= {"min_count": admission.n, "max_counted_ids": self.limits.counted_ids}
        elif isinstance(admission, Probability):
            settings |= {"admission_limit": admission.limit}
        if capacity is not None:
            assert self.row_limit is not None
            settings |= {"capacity": self.row_limit}
            if isinstance(capacity.score, str):
                settings |= {"score": _native.SCORES.index(capacity.score)}
        return settings

    @property
    def native_table(self) -> Any:
        """The native table, for calls over several tables."""
        return self._native

    def reseed(self, seed: int) -> None:
        with self._writing:
            self.seed = seed
            self._key = table_key(seed, self.name)
            self._native.set_key(self._key)

    def _with_room(
        self, ids: Tensor, write: Callable[[], None], new_rows: Callable[[], int] | None = None
    ) -> None:
        """Run a write; if the table is full and its score is a Python function, make room and repeat it."""
        # `new_rows` returns how many rows the write creates, if not every id gets one.
        try:
            write()
        except TableFullError:
            capacity = self.config.capacity
            if capacity is None or not callable(capacity.score):
                raise
            missing = self._missing(ids) if new_rows is None else new_rows()
            make_room(self, ids, missing)
            write()

    def _missing(self, ids: Tensor) -> int:
        """The number of distinct ids without a row."""
        return int((self.find(torch.unique(ids)).rows < 0).sum())

    def admitted(self, ids: Tensor, seen: Tensor, step: int) -> Tensor:
        if self.config.admission is None:
            return torch.ones_like(ids, dtype=torch.bool)
        admitted = torch.empty_like(ids)
        self._native.admits(ids, seen, step, admitted)
        return admitted.bool()

    # ---- hot calls; `CpuEngineGroup` makes them for several tables at once

    def native_read(
        self, ids: Tensor, found: FoundRows | None, rows: Tensor | None, bags: object
    ) -> NativeCall:
        """Return the part of this table of `_native.read_tables`."""
        # ids: int64 [n]; rows: int32 [n], receives the rows otherwise.
        if found is None:
            return self._native, ids, rows, None, bags
        return self._native, ids, *_native_rows(found), bags

    def native_block(self, ids: Tensor, found: FoundRows | None) -> NativeCall:
        """Return the part of this table of `_native.read_blocks`."""
        # ids: int64 [n].
        return self._native, ids, *_native_rows(found)

    def native_update(
        self,
        ids: Tensor,
        found: FoundRows | None,
        bags: object,
        gradient: Tensor | None,
        step: Step,
        occurrences: Tensor | None,
    ) -> NativeCall:
        """Return the part of this table of `_native.update_tables`."""
        # ids: int64 [n]; gradient: float32 [n, dim], without bags.
        corrections = self._corrections
        if self._corrected:
            corrections = [s.optimizer.correction(step.step) for s in self.config.segments]
        return self._native, ids, *_native_rows(found), bags, gradient, step, corrections, occurrences

    def find(self, ids: Tensor) -> FoundRows:
        rows = torch.empty(ids.numel(), dtype=torch.int32, device="cpu")
        (epoch,) = _native.read_tables([self.native_read(ids, None, rows, ())], (), torch.get_num_threads())
        return FoundRows(rows, epoch)

    def read(self, ids: Tensor, found: FoundRows | None = None, out: Tensor | None = None) -> Tensor:
        out = torch.empty(ids.numel(), self.dim, dtype=torch.float32, device="cpu") if out is None else out
        self._native.read(*_native_rows(found), ids, out, torch.get_num_threads())
        return out

    def read_finite(self, ids: Tensor, found: FoundRows, out: Tensor) -> bool:
        """Read rows into given memory, and check them while they are in the cache."""
        # ids: int64 [n]; out: float32 [n, dim].
        return self._native.read_finite(*_native_rows(found), ids, out, torch.get_num_threads())

    def pool(self, ids: Tensor, found: FoundRows | None, pooling: Pooling, outputs: list[Tensor]) -> None:
        rows = torch.empty(ids.numel(), dtype=torch.int32, device="cpu") if found is None else None
        call = self.native_read(ids, found, rows, pooling.native(self.name))
        _native.read_tables([call], outputs, torch.get_num_threads())

    def apply_view(self, rows: Tensor, step: int | None) -> None:
        assert self.view is not None
        _native.view_rows(rows, self.view.native_parts(step), torch.get_num_threads())

    def pool_rows(self, rows: Tensor, bags: Sequence[Bags], outputs: list[Tensor]) -> None:
        forms, threads = [each.native for each in bags], torch.get_num_threads()
        _native.pool(rows.view(-1), None, self.dim, self.dim, forms, outputs, "ids", threads)

    def update(
        self,
        ids: Tensor,
        found: FoundRows | None,
        grads: list[Tensor],
        pooling: Pooling | None,
        step: Step,
        occurrences: Tensor | None = None,
    ) -> None:
        if self._in_torch:
            with self.stage_update(ids, found, grads, pooling, step, occurrences) as write:
                write()
        elif self._bends_gradients:
            self._update_viewed(ids, grads, pooling, step, occurrences)
        elif pooling is None:
            self._update(self.native_update(ids, found, None, grads[0], step, occurrences), ())
        else:
            bags = pooling.native(self.name)
            self._update(self.native_update(ids, found, bags, None, step, occurrences), grads, pooling)

    def _update(self, call: NativeCall, gradients: Sequence[Tensor], pooling: Pooling | None = None) -> None:
        _, ids, _, _, _, _, step, _, occurrences = call

        def new_rows() -> int:
            distinct, seen = distinct_ids(ids, pooling, self.name, occurrences)
            return self._missing(distinct[self.admitted(distinct, seen, step.step)])

        with self._writing:
            self._with_room(
                ids, lambda: _native.update_tables([call], gradients, torch.get_num_threads()), new_rows
            )

    def _update_viewed(
        self,
        ids: Tensor,
        grads: list[Tensor],
        pooling: Pooling | None,
        step: Step,
        occurrences: Tensor | None,
    ) -> None:
        """Update with gradients of a view, which become those of the stored weights first."""
        assert self.view is not None
        others = self._kept_ids(ids, pooling)
        ids, sums, seen = sum_per_id(ids, grads, pooling, self.name, self.dim, occurrences)
        threads = torch.get_num_threads()
        with self._writing:
            if self.config.missing == "initial":
                found = self.find(ids)
                rows = self.read(ids, found)
            else:  # the initial rows are needed
                found, chunk = None, self.new_chunk(ids.numel())
                self._native.read_complete(ids, chunk.columns(), threads)
                rows = chunk.rows
            sums *= step.scale
            parts, slopes = self.view.native_parts(step.step), self.view.slopes(step.step)
            _native.view_slopes(sums, rows, parts, slopes, threads)
            step = step._replace(scale=1.0)
            if not others.numel():
                self._update(self.native_update(ids, found, None, sums, step, seen), ())
                return
            each = Pooling.sum(self.name, torch.arange(ids.numel() + 1, device="cpu"), self.dim)
            ids, seen = torch.cat([ids, others]), torch.cat([seen, torch.ones_like(others)])
            call = self.native_update(ids, None, each.native(self.name), None, step, seen)
            self._update(call, [sums], each)

    def _kept_ids(self, ids: Tensor, pooling: Pooling | None) -> Tensor:
        """The ids that an update does not write, whose rows a capacity must not remove."""
        if self.config.capacity is None:
            return ids[:0]
        return ids_without_bag(ids, pooling, self.name)

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
        # An optimizer that is written in torch makes its step here.
        if not self._in_torch:
            with super().stage_update(ids, found, grads, pooling, step, occurrences) as write:
                yield write
            return
        own, sums, seen = sum_per_id(ids, grads, pooling, self.name, self.dim, occurrences)
        others = self._kept_ids(ids, pooling)
        call, counts = torch.cat([own, others]), torch.cat([seen, torch.ones_like(others)])
        threads = torch.get_num_threads()
        with self._writing:
            check_capacity(self, ids, pooling, step, occurrences)
            kept = self.admitted(own, seen, step.step)
            trained = own[kept]
            chunk = self.new_chunk(trained.numel())
            if trained.numel():
                self._native.read_complete(trained, chunk.columns(), threads)
                self._step_in_torch(trained, sums[kept], chunk, step)

            def write_rows() -> None:
                columns, n = chunk.columns(), trained.numel()
                self._native.write_rows(call, counts, own.numel(), columns, n, step.step, step.time, threads)

            yield lambda: self._with_room(call, write_rows, lambda: self._missing(trained))

    def _step_in_torch(self, ids: Tensor, sums: Tensor, chunk: Chunk, step: Step) -> None:
        update_chunk(self.config, sums, chunk, step, self.view)
        chunk.rows.copy_(round_step(self.config, self._key, ids, chunk.rows, step.step))

    # ---- rows

    def assign(self, ids: Tensor, rows: Tensor, *, add: bool, time: int) -> None:
        with self._writing:
            self._with_room(ids, lambda: self._native.assign(ids, rows, add, time, torch.get_num_threads()))

    def assign_filled(self, ids: Tensor, rows: Tensor, fill: float, time: int) -> None:
        """Assign the first columns of rows, and one number to all columns after them."""
        # ids: int64 [n]; rows: float32 [n, width], contiguous.
        with self._writing:
            threads = torch.get_num_threads()
            self._with_room(ids, lambda: self._native.assign_filled(ids, rows, fill, time, threads))

    def reinitialize(self, ids: Tensor, time: int) -> Tensor:
        status = torch.empty(ids.numel(), dtype=torch.int32, device="cpu")
        with self._writing:
            self._with_room(
                ids, lambda: self._native.reinitialize(ids, time, status, torch.get_num_threads())
            )
        return status

    def remove(self, ids: Tensor) -> int:
        with self._writing:
            return self._native.remove(ids)

    def scan_part(
        self,
        start: int,
        limit: int,
        *,
        rows: bool = True,
        watch: int | None = None,
        stop: int | None = None,
    ) -> tuple[Chunk, int]:
        chunk = self.new_chunk(min(limit, len(self) + 1), rows=rows)  # one more: the scan reaches the end
        n, end = self._native.scan(
            start, *_native_chunk(chunk), -1 if watch is None else watch, _MAX_PLACE if stop is None else stop
        )
        return chunk.part(0, n), end

    def restore(self, chunk: Chunk) -> None:
        with self._writing:
            threads = torch.get_num_threads()
            self._with_room(chunk.ids, lambda: self._native.restore(*_native_chunk(chunk), threads))

    def clear(self) -> None:
        with self._writing:
            self._native.clear()
            self.moves += 1

    def reserve(self, n: int) -> None:
        self._native.reserve(n)

    # ---- policies

    def open_watch(self) -> int:
        return self._native.open_watch()

    def close_watch(self, watch: int) -> None:
        self._native.close_watch(watch)

    def evict(self, ids: Tensor, watch: int) -> Tensor:
        with self._writing:
            return torch.from_numpy(self._native.evict(ids, watch))

    def compact(self, limit: int) -> bool:
        return self._native.compact(limit)

    def drain_evicted(self) -> Tensor:
        return torch.from_numpy(self._native.drain_evicted())

    def drain_refused(self) -> Tensor:
        return torch.from_numpy(self._native.drain_refused())

    def pending(self) -> tuple[Tensor, Tensor]:
        ids, counts = self._native.pending()
        return torch.from_numpy(ids), torch.from_numpy(counts)

    def restore_pending(self, ids: Tensor, counts: Tensor) -> None:
        with self._writing:
            self._native.restore_pending(ids, counts)

    def counters(self) -> RowCounters:
        return RowCounters(*self._native.counters())

    # ---- snapshots

    def begin_snapshot(
        self, consumer: int, touched_only: bool, room: int, with_pending: bool
    ) -> SnapshotStart:
        rows, live, *found = self._native.begin_snapshot(
            consumer, touched_only, room, with_pending, self.reader_seconds
        )
        removed, ids, counts = map(torch.from_numpy, found)
        return SnapshotStart(rows, live, removed, (ids, counts))

    def read_snapshot(self, chunk: Chunk) -> int:
        return self._native.read_snapshot(*_native_chunk(chunk))

    def snapshot_pressure(self) -> float:
        return self._native.snapshot_pressure()

    def end_snapshot(self, give_back: bool) -> float:
        return self._native.end_snapshot(give_back)

    # ---- touched rows

    def track(self, consumer: int) -> None:
        self._native.track(consumer)

    def untrack(self, consumer: int) -> None:
        self._native.untrack(consumer)

    def drain(self, consumer: int) -> tuple[Tensor, Tensor]:
        updated, removed = self._native.drain(consumer)
        return torch.from_numpy(updated), torch.from_numpy(removed)

    def mark(self, consumer: int, ids: Tensor) -> None:
        self._native.mark(consumer, ids)

    # ---- state

    @property
    def epoch(self) -> int:
        return self._native.epoch

    def __len__(self) -> int:
        return len(self._native)

    def shape(self) -> tuple[int, int, int, bool]:
        return self._native.shape()

    def memory(self) -> MemoryUse:
        use = MemoryUse(*self._native.memory())
        return (
            use
            if self.score_search is None
            else replace(use, counters=use.counters + self.score_search.bytes)
        )


def _native_rows(found: FoundRows | None) -> tuple[Tensor | None, int]:
    if found is None:
        return None, _native.UNKNOWN_EPOCH
    return found.rows, _native.UNKNOWN_EPOCH if found.epoch is None else found.epoch


def _native_chunk(chunk: Chunk) -> tuple[Tensor, list[Tensor], Tensor, Tensor | None, Tensor | None]:
    return chunk.ids, chunk.columns(), chunk.time, chunk.count, chunk.step


class CpuEngineGroup(EngineGroup):
    """See `EngineGroup`."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        super().__init__(engines)
        self._cpu = {name: engine for name, engine in engines.items() if isinstance(engine, CpuEngine)}
        assert len(self._cpu) == len(engines)
        self._views = any(engine.view is not None for engine in self._cpu.values())

    def find(self, ids: Mapping[str, Tensor]) -> dict[str, FoundRows]:
        found: dict[str, FoundRows] = {}
        with span("megalith.ids"):
            self._read(ids, found, dict.fromkeys(ids, ()), ())
        return found

    def read_blocks(
        self,
        ids: Mapping[str, Tensor],
        found: Mapping[str, FoundRows],
        counts: Tensor,
        out: Tensor,
        *,
        step: int | None = None,
    ) -> None:
        if self._views:
            super().read_blocks(ids, found, counts, out, step=step)
            return
        with span("megalith.rows"):
            reads = [engine.native_block(ids[name], found.get(name)) for name, engine in self._cpu.items()]
            _native.read_blocks(reads, counts, out, torch.get_num_threads())

    def pool(
        self,
        ids: Mapping[str, Tensor],
        found: MutableMapping[str, FoundRows],
        pooling: Pooling,
        *,
        step: int | None = None,
    ) -> list[Tensor]:
        # Tables with a view are read in torch.
        with span("megalith.pool"):
            outputs = pooling.new_outputs()
            if not self._views:
                self._read(ids, found, pooling.native_bags, outputs)
                return outputs
            together: dict[str, object] = {}
            for name, bags in pooling.native_bags.items():
                engine = self._cpu[name]
                if engine.view is None:
                    together[name] = bags
                    continue
                self._read(ids, found, together, outputs)  # before this table: outputs are added to in order
                together = {}
                if name not in found:
                    found[name] = engine.find(ids[name])
                engine.pool_lookup(ids[name], found[name], pooling, outputs, step=step)
            self._read(ids, found, together, outputs)
            return outputs

    def _read(
        self,
        ids: Mapping[str, Tensor],
        found: MutableMapping[str, FoundRows],
        bags: Mapping[str, object],
        outputs: Sequence[Tensor],
    ) -> None:
        """Read the tables of `bags`; add the rows that had to be found."""
        if not bags:
            return
        missing = [name for name in bags if name not in found]
        sizes = [ids[name].shape[0] for name in missing]
        rows = dict(
            zip(missing, torch.empty(sum(sizes), dtype=torch.int32, device="cpu").split(sizes), strict=True)
        )
        reads = [
            self._cpu[name].native_read(ids[name], found.get(name), rows.get(name), own)
            for name, own in bags.items()
        ]
        epochs = _native.read_tables(reads, outputs, torch.get_num_threads())
        for name, epoch in zip(bags, epochs, strict=True):
            if name in rows:
                found[name] = FoundRows(rows[name], epoch)

    def update(
        self,
        ids: Mapping[str, Tensor],
        found: Mapping[str, FoundRows],
        grads: Mapping[str, list[Tensor]],
        pooling: Pooling | None,
        update: Update,
    ) -> None:
        # Tables that need Python in their update are written afterwards.
        occurrences = update.occurrences
        with span("megalith.optimizer"), ExitStack() as staged:
            calls = []
            bags = None if pooling is None else pooling.native_bags
            gradients: Sequence[Tensor] = ()
            for name, own in grads.items():
                engine = self._cpu[name]
                if not engine.joins_updates:
                    continue
                seen, step = occurrences.get(name), update.of(name)
                if bags is None:
                    call = engine.native_update(ids[name], found.get(name), None, own[0], step, seen)
                else:
                    call = engine.native_update(
                        ids[name], found.get(name), bags.get(name, ()), None, step, seen
                    )
                    gradients = own  # those of the outputs, the same for each table
                calls.append(call)
            # What may raise comes before the first write. In one order, because tables may be locked.
            writes = [
                staged.enter_context(
                    self._cpu[name].stage_update(
                        ids[name],
                        found.get(name),
                        grads[name],
                        pooling,
                        update.of(name),
                        occurrences.get(name),
                    )
                )
                for name in sorted(grads)
                if not self._cpu[name].joins_updates
            ]
            if calls:
                _native.update_tables(calls, gradients, torch.get_num_threads())
            for write in writes:
                write()
