"""Table: a map from 64-bit ids to trained rows.

`Table` validates the input of each call (`megalith.table.validation`), then calls the `Engine` that holds
the rows. Nothing is written unless the whole input of a call is valid. The table itself keeps only the
names of the consumers of touched rows; storage and kernels belong to the engine.

`merge` and `filter` are made of other calls of `Table`, so they work with any engine and between engines.
Other threads may read the tables during these two calls, but must not write to them.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from megalith.errors import InputError, TableFullError, UnknownNameError, UsageError
from megalith.ops.pooling import Pooling
from megalith.table.config import TableConfig
from megalith.table.engines import engine_class
from megalith.table.eviction_pass import EvictionPass
from megalith.table.snapshot import Snapshot
from megalith.table.table_data import MAX_CONSUMERS, Chunk, FoundRows, MemoryUse, TableStats
from megalith.table.validation import InputChecks, check_flag, check_pooling, check_start, check_step

DEFAULT_CHUNK = 65536
SNAPSHOT_BYTES = 64 << 20


class Table:
    """A row for any 64-bit id, created when the id is first trained or assigned.

    Several threads may call one table: reads run in parallel, and a write is atomic for readers.

    Args:
        config: Name, segments and optimizers.
        engine: "cpu" (native), "reference" (plain torch) or "cuda" (rows in GPU memory, kernels in Triton).
            Tensors of a cuda table may be on its GPU or on the CPU; results are on the device of the ids.
        seed: Together with the table's name and an id it determines the initial row of that id.
        num_shards: Number of shards of which this table is one; they share its `Capacity`.

    Attributes:
        checks: The validation of this table's input.
        engine_impl: The engine. It takes validated input only.

    Raises:
        InputError: An argument is wrong, or no engine has this name.
    """

    def __init__(
        self, config: TableConfig, *, engine: str = "cpu", seed: int = 0, num_shards: int = 1
    ) -> None:
        if not isinstance(config, TableConfig):
            raise InputError(f"Table: config must be a TableConfig, got {config!r}")
        if isinstance(num_shards, bool) or not isinstance(num_shards, int) or num_shards < 1:
            raise InputError(f"table {config.name!r}: num_shards must be positive, got {num_shards!r}")
        self.config = config
        self.name = config.name
        self.dim = config.dim
        self.seed = self._check_seed(config.name, seed)
        self.engine_impl = engine_class(engine)(config, seed=seed, num_shards=num_shards)
        self.checks = InputChecks(config, self.engine_impl.device)
        self._consumers: list[str | None] = []
        self._consumers_lock = threading.Lock()
        self._eviction = EvictionPass(self.engine_impl, self.checks)

    @property
    def engine(self) -> str:
        """The name of the engine."""
        return self.engine_impl.engine

    # ---- the three primitives

    def find(self, ids: Tensor) -> Tensor:
        """Find the rows of ids.

        Args:
            ids: int64 or int32 [n].

        Returns:
            Row numbers, int32 [n]; -1 where an id has no row. Valid until `epoch` changes.
        """
        return self.engine_impl.find(self.checks.ids(ids)).rows.to(ids.device)

    def read(
        self,
        rows: Tensor,
        ids: Tensor,
        pooling: Pooling | None = None,
        *,
        epoch: int | None = None,
        out: Sequence[Tensor] | None = None,
        step: int | None = None,
        stored: bool = False,
    ) -> Any:
        """Read the weights of found rows.

        Args:
            rows: int32 [n], from `find`.
            ids: int64 or int32 [n], the ids of these rows.
            pooling: Reduces the rows into its outputs.
            epoch: The table's epoch before that `find`. Rows of the current epoch are trusted, rows of
                another epoch are found again. Without it each row is verified.
            out: Outputs to fill, with zeros where no bag writes.
            step: As for `lookup`.
            stored: As for `lookup`.

        Returns:
            float32 [n, dim], or with `pooling` the list of its outputs.
        """
        own = self.checks.ids(ids)
        found = FoundRows(self.checks.found(own, rows), self.checks.epoch(epoch))
        step, engine = self._lookup_step(step, stored), self.engine_impl
        if pooling is None:
            result = engine.read(own, found) if stored else engine.lookup(own, found, step=step)
            return result.to(ids.device)
        check_pooling(pooling)
        pooling = self._moved(pooling)
        if out is not None:
            outputs = self.checks.outputs(out, pooling)
        else:
            outputs = pooling.new_outputs([self.name], engine.device)
        if stored:
            engine.pool(own, found, pooling, outputs)
        else:
            engine.pool_lookup(own, found, pooling, outputs, step=step)
        return outputs if out is not None else [output.to(ids.device) for output in outputs]

    def _moved(self, pooling: Pooling) -> Pooling:
        """Return a pooling on the GPU of the table; a table on the CPU checks the one it gets."""
        device = self.engine_impl.device
        return pooling if device.type == "cpu" else pooling.to(device)

    def update(
        self,
        rows: Tensor | None,
        ids: Tensor,
        grads: Tensor | Sequence[Tensor],
        pooling: Pooling | None = None,
        *,
        step: int,
        time: float | None = None,
        scale: float = 1.0,
        clip_norm: float | None = None,
        epoch: int | None = None,
    ) -> None:
        """Make one optimizer step per distinct id on its summed gradient; create missing rows.

        A sum of finite gradients that overflows is not detected.

        Args:
            rows: int32 [n], from `find`, or None.
            ids: int64 or int32 [n].
            grads: float32 [n, dim], or with `pooling` one gradient per output.
            pooling: The pooling that `read` used.
            step: The global step, from 0. Learning rates are evaluated at it.
            time: Seconds; becomes the last-update time of the rows (None: now).
            scale: Multiplies each summed gradient.
            clip_norm: Then shortens each summed gradient to this L2 norm over the whole row.
            epoch: As for `read`.

        Raises:
            InputError: An argument is wrong or a gradient is not finite. Nothing was written.
            UsageError: The table is not trainable.
        """
        ids = self.checks.ids(ids)
        epoch = self.checks.epoch(epoch)
        found = None if rows is None else FoundRows(self.checks.found(ids, rows), epoch)
        checked = self.checks.grads(ids, grads, pooling)
        numbers = self.checks.step(step, time, scale, clip_norm)
        pooling = None if pooling is None else self._moved(pooling)
        self.engine_impl.update(ids, found, checked, pooling, numbers)

    # ---- composed calls

    def lookup(self, ids: Tensor, *, step: int | None = None, stored: bool = False) -> Tensor:
        """Read weights; never create a row.

        Args:
            ids: int64 or int32 [n].
            step: For segments with a view (`Segment.serving`): what training sees at this global step. None:
                what servers return.
            stored: Return the stored weights of these segments instead.

        Returns:
            float32 [n, dim]. An id without a row reads as `TableConfig.missing` defines.
        """
        own, step = self.checks.ids(ids), self._lookup_step(step, stored)
        result = self.engine_impl.read(own) if stored else self.engine_impl.lookup(own, step=step)
        return result.to(ids.device)

    def _lookup_step(self, step: int | None, stored: bool) -> int | None:
        check_flag(stored, "stored")
        return None if step is None else check_step(step, f"table {self.name!r}")

    def apply_gradients(self, ids: Tensor, grads: Tensor, *, step: int, time: float | None = None) -> None:
        """Call `update` without rows: sum duplicates in input order and create missing rows.

        Args:
            ids: int64 or int32 [n].
            grads: float32 [n, dim].
            step: The global step, from 0.
            time: Seconds; becomes the last-update time of the rows (None: now).
        """
        self.update(None, ids, grads, step=step, time=time)

    def assign(self, ids: Tensor, rows: Tensor, *, time: float | None = None) -> None:
        """Set weights.

        A new row gets fresh optimizer state, an existing row keeps its own. For a `Capacity` the row is as
        old as the latest update; a new row counts as updated once.

        Args:
            ids: int64 or int32 [n]. The last of several equal ids wins.
            rows: float32 [n, dim].
            time: Seconds; becomes the last-update time of the rows (None: now).
        """
        self._write(ids, rows, add=False, time=time)

    def assign_add(self, ids: Tensor, rows: Tensor, *, time: float | None = None) -> None:
        """Add to weights.

        Args:
            ids: int64 or int32 [n]. Duplicates are added in order; a new row starts from its initial weights.
            rows: float32 [n, dim].
            time: Seconds; becomes the last-update time of the rows (None: now).
        """
        self._write(ids, rows, add=True, time=time)

    def _write(self, ids: Tensor, rows: Tensor, *, add: bool, time: float | None) -> None:
        ids = self.checks.ids(ids)
        rows = self.checks.rows(ids, rows)
        self.engine_impl.assign(ids, rows, add=add, time=self.checks.time(time))

    def reinitialize(self, ids: Tensor, *, time: float | None = None) -> Tensor:
        """Reset rows to their initial weights and optimizer state; create missing rows.

        Args:
            ids: int64 or int32 [n].
            time: Seconds; becomes the last-update time of the rows (None: now).

        Returns:
            int32 [n] in input order: 0 created, 1 existed.
        """
        own, seconds = self.checks.ids(ids), self.checks.time(time)
        return self.engine_impl.reinitialize(own, seconds).to(ids.device)

    def remove(self, ids: Tensor) -> int:
        """Remove rows; their memory is reused.

        Args:
            ids: int64 or int32 [n].

        Returns:
            How many of the ids had a row.
        """
        return self.engine_impl.remove(self.checks.ids(ids))

    def evict(self, now: float | None = None) -> Tensor:
        """Remove the rows that the config's eviction policies find expired.

        The pass over the table is made in small parts, and other threads may use the table between them. Rows
        that are written after the pass has read them stay.

        Args:
            now: Time in seconds (None: now).

        Returns:
            The removed ids, int64.
        """
        return self._eviction.complete(self.checks.time(now))

    def evict_part(self, now: float | None = None, *, rows: int, start: float | None = None) -> Tensor:
        """Continue a pass of `evict` for a limited number of rows; after the last row it starts again.

        A row of the cuda engine that moves between GPU and host memory meanwhile may be visited in the next
        pass instead of this one.

        Args:
            now: Time in seconds (None: now).
            rows: Number of rows to visit in this call.
            start: Where to begin, as a part of the table from 0 to 1, for instance in a resumed run; None:
                where the previous call ended.

        Returns:
            The removed ids, int64.
        """
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise InputError(f"table {self.name!r}: rows must be a positive integer, got {rows!r}")
        check_start(start, f"table {self.name!r}")
        return self._eviction.part(self.checks.time(now), rows, start)

    def drain_evicted(self) -> Tensor:
        """Return and clear the log of ids that were removed by `evict` or by a `Capacity`.

        The log keeps the most recent 2^20 ids, fewer with `Capacity(max_bytes)`;
        `stats().counters.log_lost` counts the others.

        Returns:
            int64, from the oldest on.
        """
        return self.engine_impl.drain_evicted()

    def drain_refused(self) -> Tensor:
        """Return and clear the log of ids that the admission policy refused.

        The log keeps the most recent 2^20 ids; `stats().counters.log_lost` counts the others.

        Returns:
            int64, from the oldest on; an id occurs once for each call that refused it.
        """
        return self.engine_impl.drain_refused()

    def pending(self) -> tuple[Tensor, Tensor]:
        """Return the ids that `MinCount` counts because they have no row yet.

        Returns:
            Ids and their numbers of occurrences, int64 each, from the id that was counted first.
        """
        return self.engine_impl.pending()

    def restore_pending(self, ids: Tensor, counts: Tensor) -> None:
        """Add occurrences of ids that have no row, as `pending` returned them. Ids with a row are ignored.

        Args:
            ids: int64 or int32 [n].
            counts: int64 [n], positive.
        """
        ids = self.checks.ids(ids)
        self.engine_impl.restore_pending(ids, self.checks.occurrences(ids, counts))

    def scan(self, chunk_size: int = DEFAULT_CHUNK) -> Iterator[Chunk]:
        """Yield all rows in chunks.

        Each chunk is consistent. A row that is not removed during the scan is yielded exactly once.

        Args:
            chunk_size: Largest number of rows of a chunk.

        Yields:
            Chunks of ids, weights, optimizer state and times.

        Raises:
            InputError: `chunk_size` is not a positive integer.
        """
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
            raise InputError(f"table {self.name!r}: chunk_size must be positive, got {chunk_size!r}")
        return self.engine_impl.scan(chunk_size)

    def restore(self, chunk: Chunk) -> None:
        """Write complete rows, including optimizer state and time; existing rows are replaced.

        Args:
            chunk: The rows, for example from `scan`. If they exceed the `Capacity`, some of those with low
                scores are not kept.

        Raises:
            TableFullError: The rows do not fit, and the `Capacity` has no score. Nothing was written.
        """
        checked, limit = self.checks.chunk(chunk), self.engine_impl.row_limit
        capacity = self.config.capacity
        if limit is None or capacity is None or capacity.score is None or checked.ids.numel() <= limit:
            return self.engine_impl.restore(checked)
        for start in range(0, checked.ids.numel(), limit):
            self.engine_impl.restore(checked.part(start, min(start + limit, checked.ids.numel())))

    def merge(self, other: Table, *, on_conflict: str = "newer") -> MergeCounts:
        """Copy the rows of another table into this one, with optimizer state, times and counts.

        Rows are written in chunks, like `restore`; ids that `MinCount` counts in the other table are counted
        here too. No other thread may write to the tables meanwhile.

        Args:
            other: A table with the same dims and optimizer states, on any engine. It does not change.
            on_conflict: Which row stays if both have an id: "newer" (the later last update; this table's row
                if both are equal), "ours" (this table's) or "theirs".

        Returns:
            How many rows of the other table were added, replaced a row, or were not taken.

        Raises:
            InputError: An argument is wrong, or the rows of the tables differ. Nothing was written.
            TableFullError: The rows do not fit in the capacity; some may have been written.
        """
        _check_merge(self, other, on_conflict)
        own_ids, own_times = _times(self) if on_conflict == "newer" else (None, None)
        added = replaced = kept = 0
        for chunk in other.scan(MERGE_ROWS):
            exists = self.engine_impl.has_rows(self.checks.ids(chunk.ids)).to(chunk.ids.device)
            if on_conflict == "ours":
                taken = ~exists
            elif own_ids is None or own_times is None or own_ids.numel() == 0:
                taken = torch.ones_like(exists)
            else:
                at = torch.searchsorted(own_ids, chunk.ids).clamp(max=own_ids.numel() - 1)
                taken = ~exists | (chunk.time > own_times[at])
            added += int((~exists).sum())
            replaced += int((taken & exists).sum())
            kept += int((~taken).sum())
            self.restore(chunk.select(taken))
        self.restore_pending(*other.pending())
        return MergeCounts(added, replaced, kept)

    def filter(self, predicate: Predicate, *, chunk_size: int = DEFAULT_CHUNK) -> Tensor:
        """Remove the rows that a predicate does not keep, as `remove` does.

        No row is removed if the predicate raises. No other thread may write to the table meanwhile.

        Args:
            predicate: Takes a `Chunk` and returns which of its rows stay, bool [n].
            chunk_size: Largest number of rows of a chunk.

        Returns:
            The removed ids, int64.

        Raises:
            InputError: The predicate does not return bool [n], or `chunk_size` is wrong.
        """
        if not callable(predicate) or isinstance(predicate, type):
            raise InputError(f"table {self.name!r}: filter takes a function of a Chunk, got {predicate!r}")
        unwanted = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for chunk in self.scan(chunk_size):
            keep = predicate(chunk)
            if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.shape != chunk.ids.shape:
                got = f"{keep.dtype} {list(keep.shape)}" if isinstance(keep, Tensor) else repr(keep)
                raise InputError(
                    f"table {self.name!r}: filter: the predicate must return a bool tensor "
                    f"[{chunk.ids.numel()}] of rows to keep, got {got}"
                )
            unwanted.append(chunk.ids[~keep])
        removed = torch.cat(unwanted)
        if removed.numel():
            self._eviction.remove(removed)
        return removed

    def reseed(self, seed: int) -> None:
        """Change the seed of initial rows and of the draws of `Probability`.

        Rows that exist stay as they are. Ids without a row read as their new initial row, and `reinitialize`
        uses it too. A checkpoint records the seed; `checkpoint.load` does not change that of a table.

        Args:
            seed: The new seed; the same on all ranks.

        Raises:
            InputError: The seed is not an integer.
        """
        self.seed = self._check_seed(self.name, seed)
        self.engine_impl.reseed(seed)

    @staticmethod
    def _check_seed(name: str, seed: Any) -> int:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InputError(f"table {name!r}: seed must be an integer, got {seed!r}")
        return seed

    def check_fits(self, rows: int) -> None:
        """Check, before a table is cleared, that this number of rows can be restored afterwards.

        Args:
            rows: Number of rows.

        Raises:
            TableFullError: They exceed a `Capacity` without a score, so none of them can be left out.
        """
        rows = self.checks.row_count(rows, "check_fits")
        capacity, limit = self.config.capacity, self.engine_impl.row_limit
        if capacity is not None and capacity.score is None and limit is not None and rows > limit:
            raise TableFullError(
                f"table {self.name!r}: {rows} rows exceed its Capacity of {limit}; raise it, or pass a score"
            )

    def clear(self) -> None:
        """Remove every row and free the memory."""
        self.engine_impl.clear()

    def reserve(self, n: int) -> None:
        """Allocate memory, so that the table does not grow before it has more rows.

        Args:
            n: Number of rows.
        """
        self.engine_impl.reserve(self.checks.row_count(n))

    def new_chunk(self, n: int) -> Chunk:
        """Return an uninitialized chunk with the columns of this table.

        Args:
            n: Number of rows.

        Returns:
            The chunk: ids int64 [n], weights float32 [n, dim], a float32 [n, size] per state, times int64
            [n].
        """
        return self.engine_impl.new_chunk(self.checks.row_count(n, "new_chunk"))

    def snapshot(
        self,
        *,
        consumer: str | None = None,
        touched_only: bool = False,
        pending: bool = False,
        buffer_bytes: int = SNAPSHOT_BYTES,
    ) -> Snapshot:
        """Start a snapshot of the table as it is now, to be read while writes continue. At most one is open.

        Args:
            consumer: The consumer whose touched rows are drained.
            touched_only: Whether the snapshot holds only the touched rows of `consumer`.
            pending: Whether it also holds, as `Snapshot.pending`, the ids that `MinCount` counts.
            buffer_bytes: Limit for copies of rows that change before they are read. When it is reached,
                writers wait, and raise UsageError if nothing is read for ten minutes.

        Returns:
            The snapshot; the caller must close it.

        Raises:
            InputError: An argument is wrong, or a snapshot is already open.
            UnknownNameError: The table does not have this consumer.
        """
        for name, flag in (("touched_only", touched_only), ("pending", pending)):
            if not isinstance(flag, bool):
                raise InputError(f"table {self.name!r}: {name} must be True or False, got {flag!r}")
        if isinstance(buffer_bytes, bool) or not isinstance(buffer_bytes, int) or buffer_bytes < 0:
            raise InputError(f"table {self.name!r}: buffer_bytes must be >= 0, got {buffer_bytes!r}")
        row_bytes = self.config.row_bytes + 20
        room = max(1, buffer_bytes // row_bytes)
        with self._consumers_lock:
            if touched_only and consumer is None:
                raise InputError(f"table {self.name!r}: a snapshot of touched rows needs a consumer")
            number = -1 if consumer is None else self.consumer_number(consumer)
            start = self.engine_impl.begin_snapshot(number, touched_only, room, pending)
            return Snapshot(self.engine_impl, start)

    # ---- touched rows

    def track(self, consumer: str) -> None:
        """Start to record, for a consumer, which rows change. A second call has no effect.

        Args:
            consumer: Name of the consumer.

        Raises:
            UsageError: The table already has the maximum number of consumers.
        """
        if not isinstance(consumer, str) or not consumer:
            raise InputError(f"table {self.name!r}: a consumer needs a name, got {consumer!r}")
        with self._consumers_lock:
            if consumer in self._consumers:
                return
            number = self._consumers.index(None) if None in self._consumers else len(self._consumers)
            if number == MAX_CONSUMERS:
                raise UsageError(
                    f"table {self.name!r} already has {MAX_CONSUMERS} consumers: "
                    f"{', '.join(map(str, self._consumers))}; untrack one first"
                )
            self.engine_impl.track(number)
            self._consumers[number : number + 1] = [consumer]

    def untrack(self, consumer: str) -> None:
        """Drop a consumer and its record of changed rows.

        Args:
            consumer: Name of the consumer.
        """
        with self._consumers_lock:
            number = self.consumer_number(consumer)
            self.engine_impl.untrack(number)
            self._consumers[number] = None

    def drain_touched(self, consumer: str) -> tuple[Tensor, Tensor]:
        """Return and clear a consumer's record of changed rows.

        The time depends on the number of changed rows. Other threads may write meanwhile: a change during the
        call is in this result, in the next one, or in both.

        Args:
            consumer: Name of the consumer.

        Returns:
            Ids written and ids removed since the last drain, int64 each; an id is in one of them.
        """
        with self._consumers_lock:
            return self.engine_impl.drain(self.consumer_number(consumer))

    def mark_touched(self, consumer: str, ids: Tensor) -> None:
        """Add ids to a consumer's record of changed rows, for instance after a failed send.

        Args:
            consumer: Name of the consumer.
            ids: int64 or int32 [n]. An id that no longer has a row counts as removed.
        """
        ids = self.checks.ids(ids)
        with self._consumers_lock:
            self.engine_impl.mark(self.consumer_number(consumer), ids)

    def consumer_number(self, consumer: str) -> int:
        """Return the number under which the engine knows a consumer.

        Args:
            consumer: Name of the consumer.

        Returns:
            0 to MAX_CONSUMERS - 1.

        Raises:
            UnknownNameError: The table does not have this consumer; the message lists the known ones.
        """
        if not isinstance(consumer, str) or consumer not in self._consumers:
            known = ", ".join(repr(c) for c in self._consumers if c is not None) or "none"
            raise UnknownNameError(
                f"table {self.name!r} has no consumer {consumer!r} (known: {known}); call track() first"
            )
        return self._consumers.index(consumer)

    # ---- state

    @property
    def epoch(self) -> int:
        """Advances when row numbers may have become invalid: remove, evict, restore, clear.

        If rows of the cuda engine are in host memory, also lookups move them and advance it.
        """
        return self.engine_impl.epoch

    def __len__(self) -> int:
        return len(self.engine_impl)

    def __contains__(self, id: object) -> bool:
        try:
            id = operator.index(id)  # type: ignore[arg-type]
        except TypeError:
            return False
        if not -(2**63) <= id < 2**63:
            return False
        return bool(
            self.engine_impl.has_rows(
                self.checks.ids(torch.tensor([id], dtype=torch.int64, device="cpu"))
            ).item()
        )

    def stats(self) -> TableStats:
        """Return numbers about the table."""
        rows, capacity, epoch, growing = self.engine_impl.shape()
        consumers = tuple(c for c in self._consumers if c is not None)
        counters = self.engine_impl.counters()
        tier = self.engine_impl.host_tier()
        return TableStats(self.name, self.engine, rows, capacity, growing, epoch, consumers, counters, tier)

    def memory(self) -> MemoryUse:
        """Return the bytes in use."""
        return self.engine_impl.memory()

    def __repr__(self) -> str:
        return f"Table({self.config!r}, engine={self.engine!r}, rows={len(self)})"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            f"table {self.name!r} cannot be copied or pickled: use scan() and restore(), or pass ids and rows"
        )


ON_CONFLICT = ("newer", "ours", "theirs")
MERGE_ROWS = 65536
"""Number of rows that are read and written at once."""

Predicate = Callable[[Chunk], Tensor]


class MergeCounts(NamedTuple):
    """What happened to the rows of the other table in a merge.

    Attributes:
        added: Rows of ids that had no row.
        replaced: Rows that replaced a row of the same id.
        kept: Rows that were not taken, because the row of the same id stayed.
    """

    added: int
    replaced: int
    kept: int


def _check_merge(table: Table, other: Any, on_conflict: Any) -> None:
    where = f"table {table.name!r}: merge"
    if not isinstance(other, type(table)) or other is table:
        raise InputError(f"{where} takes another Table, got {'itself' if other is table else repr(other)}")
    if not isinstance(on_conflict, str) or on_conflict not in ON_CONFLICT:
        raise InputError(f"{where}: on_conflict must be one of {', '.join(ON_CONFLICT)}, got {on_conflict!r}")
    own, theirs = _columns(table), _columns(other)
    if own != theirs:
        raise InputError(
            f"{where}: the rows differ: dims and states are {own}, and {theirs} in table {other.name!r}"
        )


def _columns(table: Table) -> tuple[list[int], dict[str, int]]:
    dims = [segment.dim for segment in table.config.segments]
    return dims, {column.key: column.end - column.start for column in table.config.state_columns}


def _times(table: Table) -> tuple[Tensor, Tensor]:
    """Return all ids in increasing order, and their last-update times."""
    ids, times, at = (
        [torch.empty(0, dtype=torch.int64, device="cpu")],
        [torch.empty(0, dtype=torch.int64, device="cpu")],
        0,
    )
    with table.engine_impl.scanning():
        while at >= 0:
            chunk, at = table.engine_impl.scan_part(at, MERGE_ROWS, rows=False)
            ids.append(chunk.ids)
            times.append(chunk.time)
    order = torch.argsort(torch.cat(ids))
    return torch.cat(ids)[order], torch.cat(times)[order]
