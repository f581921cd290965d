"""The Engine contract: storage and kernels of one table.

An engine receives validated input only (`megalith.table.validation`): ids are int64 [n], matrices are
float32, all contiguous and on the engine's device. The one exception is a `Pooling`: an engine validates
the part of its own table in the call that uses it, before it writes anything, because its kernel reads
the offsets anyway.

Every method may be called from several threads. Reads run in parallel; a write is atomic for readers.
`ForkSafeLock` is the lock that engines and passes over a table hold in Python.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from megalith.ops.pooling import Bags, Pooling, pool
from megalith.table.config import TableConfig
from megalith.table.engines.shard_capacity import ScoreSearch, check_capacity, shard_limits
from megalith.table.serving_precision import ServingView
from megalith.table.table_data import (
    Chunk,
    FoundRows,
    HostTierUse,
    MemoryUse,
    RowCounters,
    SnapshotStart,
    Step,
)


class Engine(ABC):
    """Storage and kernels of one table.

    In all methods `ids` is int64 [n] and may repeat unless the method says otherwise; `found` holds the rows
    of the ids if they are known; `outputs` are float32, one per output of the pooling, and zero where no bag
    writes; `time` is in seconds and becomes the last-update time of the rows; `consumer` is a number from 0
    to MAX_CONSUMERS - 1. A call that raises TableFullError has written nothing.

    Args:
        config: The config of the table.
        seed: Together with the table's name and an id it determines the initial row of that id.
        num_shards: Number of shards of the whole table, which divide its `Capacity`.

    Attributes:
        limits: What this shard may hold.
        row_limit: Largest number of rows of this shard, or None.
        view: What lookups return instead of the stored weights, or None.
        moves: Number of calls that moved rows to other places, or removed all of them.
        score_search: Finds rows with low results of a score function, if the `Capacity` has one.
    """

    engine: ClassVar[str]
    """The name of the engine, such as "cpu"."""

    reader_seconds: ClassVar[float] = 600.0
    """A writer that waits for the reader of a snapshot raises if no row is read for that long."""

    snapshot_rows: ClassVar[int] = 4096
    """Number of rows that a call of `read_snapshot` gets; writers may be locked out meanwhile."""

    device = torch.device("cpu")
    """Where the rows are. Ids, gradients and results of the hot calls are there; chunks are on the CPU."""

    def __init__(self, config: TableConfig, *, seed: int = 0, num_shards: int = 1) -> None:
        self.config = config
        self.name = config.name
        self.dim = config.dim
        self.seed = seed
        self.limits = shard_limits(config, num_shards)
        self.row_limit = self.limits.rows
        self.view = ServingView.of(config)
        self._scans = 0  # in progress
        self._leases: dict[int, float] = {}  # scans in parts -> until when they keep rows in their places
        self._moving = ForkSafeLock()  # held while rows are moved, and while a scan begins or ends
        self.moves = 0
        score = None if config.capacity is None else config.capacity.score
        self.score_search: ScoreSearch | None = None
        if callable(score):
            assert self.row_limit is not None
            self.score_search = ScoreSearch(self, score, self.row_limit)

    @abstractmethod
    def reseed(self, seed: int) -> None:
        """Change the seed of initial rows and of random draws. Rows that exist stay as they are."""

    def new_chunk(self, n: int, *, rows: bool = True) -> Chunk:
        """Return an uninitialized chunk with the columns of this table, without weights and state if not
        `rows`.
        """
        counted = self.config.counted
        return Chunk(
            torch.empty(n, dtype=torch.int64, device="cpu"),
            torch.empty(n, self.dim if rows else 0, dtype=torch.float32, device="cpu"),
            {
                c.key: torch.empty(n, c.end - c.start, dtype=torch.float32, device="cpu")
                for c in self.config.state_columns
                if rows
            },
            torch.empty(n, dtype=torch.int64, device="cpu"),
            torch.empty(n, dtype=torch.int64, device="cpu") if counted else None,
            torch.empty(n, dtype=torch.int64, device="cpu") if counted else None,
        )

    # ---- hot calls

    @abstractmethod
    def find(self, ids: Tensor) -> FoundRows:
        """Return the rows of ids, -1 where an id has none, and the epoch in which they are valid."""

    def has_rows(self, ids: Tensor) -> Tensor:
        """Return which ids have a row, bool [n]. Unlike `find`, it is not a use of these rows."""
        return self.find(ids).rows >= 0

    @abstractmethod
    def read(self, ids: Tensor, found: FoundRows | None = None, out: Tensor | None = None) -> Tensor:
        """Return stored weights, float32 [n, dim], in `out` if given; `TableConfig.missing` defines absent
        ids.
        """

    @abstractmethod
    def pool(self, ids: Tensor, found: FoundRows | None, pooling: Pooling, outputs: list[Tensor]) -> None:
        """Read stored weights and reduce them into the outputs of a pooling."""

    def lookup(
        self,
        ids: Tensor,
        found: FoundRows | None = None,
        out: Tensor | None = None,
        *,
        step: int | None = None,
    ) -> Tensor:
        """Read what lookups return: the stored weights, or the view of them.

        An id without a row reads as the view of its initial row, or as zeros. `step` is the global step of
        the training that uses the rows; None: as servers return them.
        """
        rows = self.read(ids, found, out)
        if self.view is None:
            return rows
        self.apply_view(rows, step)
        if self.config.missing == "zeros" and step is None:  # the view of zeros may be something else
            rows[~self.has_rows(ids)] = 0.0
        return rows

    def apply_view(self, rows: Tensor, step: int | None) -> None:
        """Replace stored weights, float32 [n, dim], by what lookups return, in place."""
        assert self.view is not None
        self.view.apply(rows, step)

    def pool_lookup(
        self,
        ids: Tensor,
        found: FoundRows | None,
        pooling: Pooling,
        outputs: list[Tensor],
        *,
        step: int | None = None,
    ) -> None:
        """Reduce what `lookup` returns into the outputs of a pooling."""
        if self.view is None:
            return self.pool(ids, found, pooling, outputs)
        pooling.check(self.name, ids.numel(), self.dim)
        self.pool_rows(self.lookup(ids, found, step=step), pooling.of(self.name), outputs)

    def pool_rows(self, rows: Tensor, bags: Sequence[Bags], outputs: list[Tensor]) -> None:
        """Reduce rows, one for each occurrence, into the outputs of a pooling; the bags are known to fit."""
        pool(rows, bags, outputs)

    @abstractmethod
    def update(
        self,
        ids: Tensor,
        found: FoundRows | None,
        grads: list[Tensor],
        pooling: Pooling | None,
        step: Step,
        occurrences: Tensor | None = None,
    ) -> None:
        """Make one optimizer step per distinct id on its summed gradient; create missing rows.

        The admission policy may refuse ids without a row: their gradients are dropped and counted. A capacity
        may remove rows of other ids to make room. `grads` is one finite tensor [n, dim], or with `pooling`
        one per output; `occurrences` int64 [n] is what each id stands for to the admission policy (None: one
        each).
        """

    # ---- rows

    @abstractmethod
    def assign(self, ids: Tensor, rows: Tensor, *, add: bool, time: int) -> None:
        """Set the weights of ids, or `add` to them, in input order; create missing rows. `rows` is finite."""

    @abstractmethod
    def reinitialize(self, ids: Tensor, time: int) -> Tensor:
        """Reset or create rows; return int32 [n] in input order: 0 created, 1 existed."""

    @abstractmethod
    def remove(self, ids: Tensor) -> int:
        """Remove the rows of ids; return their number."""

    def scan(self, chunk_size: int, *, watch: int | None = None) -> Iterator[Chunk]:
        """Yield all rows in chunks. Each chunk is consistent; a row is yielded once unless it is removed."""
        with self.scanning():
            at = 0
            while at >= 0:
                chunk, at = self.scan_part(at, chunk_size, watch=watch)
                if chunk.ids.numel():
                    yield chunk

    @property
    def places_kept(self) -> bool:
        """Whether a scan is in progress, so that no row may move; the caller holds `_moving`."""
        if self._leases:
            now = time.monotonic()
            self._leases = {scan: until for scan, until in self._leases.items() if until > now}
        return self._scans > 0 or bool(self._leases)

    def keep_places(self, scan: int, seconds: float) -> None:
        """Keep all rows in their places for some time: for a scan whose parts are calls of their own.

        Each part calls this again, and the last one with 0 seconds.
        """
        with self._moving:
            self._leases.pop(scan, None)
            if seconds > 0:
                self._leases[scan] = time.monotonic() + seconds

    @contextmanager
    def scanning(self) -> Iterator[None]:
        """Keep all rows in their places, while a scan is in progress."""
        with self._moving:
            self._scans += 1
        try:
            yield
        finally:
            with self._moving:
                self._scans -= 1

    @abstractmethod
    def scan_part(
        self,
        start: int,
        limit: int,
        *,
        rows: bool = True,
        watch: int | None = None,
        stop: int | None = None,
    ) -> tuple[Chunk, int]:
        """Return the next rows of a scan, at most `limit`, and where the next part starts; -1 at the end.

        `start` is 0, where the previous part ended, or any place of a row; the part ends before `stop`.
        Without `rows` the chunk has no weights and state. With `watch` (from `open_watch`) `evict` removes
        these rows unless they change from now on.
        """

    def host_tier(self) -> HostTierUse | None:
        """Return where the rows of a table with a budget of GPU memory are; None without a budget."""
        return None

    def scan_on_device(
        self, start: int, limit: int, *, rows: bool = True, watch: int, stop: int | None = None
    ) -> tuple[Chunk, int]:
        """Do what `scan_part` does for policies: the chunk is on the device of the table."""
        return self.scan_part(start, limit, rows=rows, watch=watch, stop=stop)

    @abstractmethod
    def restore(self, chunk: Chunk) -> None:
        """Write complete rows; an existing row is replaced, and the last of several equal ids wins.

        A counted table needs counts and steps.
        """

    @abstractmethod
    def clear(self) -> None:
        """Remove every row and free the memory."""

    @abstractmethod
    def reserve(self, n: int) -> None:
        """Allocate memory, so that the table does not grow before it has more than `n` rows."""

    # ---- policies

    @abstractmethod
    def open_watch(self) -> int:
        """Start to note which of the rows that a scan reads are written afterwards; return its number."""

    @abstractmethod
    def close_watch(self, watch: int) -> None:
        """End a watch."""

    @abstractmethod
    def evict(self, ids: Tensor, watch: int) -> Tensor:
        """Remove rows that a policy chose, unless they were written since the scan read them.

        `ids` are distinct and were returned by `scan_part` with this watch. A row that `compact` has moved
        since may count as written. Return the removed ids.
        """

    def return_memory(self, limit: int) -> bool:
        """Call `compact`, unless a scan is in progress, which would miss rows that are moved.

        Return whether nothing is left to do now.
        """
        with self._moving:
            if self.places_kept:
                return True
            epoch = self.epoch
            done = self.compact(limit)
            self.moves += self.epoch != epoch
            return done

    @abstractmethod
    def compact(self, limit: int) -> bool:
        """Move rows into free places and return memory, if fewer than half of the places are in use.

        Visit at most `limit` places. Return whether nothing is left to do.
        """

    @abstractmethod
    def drain_evicted(self) -> Tensor:
        """Return and clear the log of evicted ids, int64, from the oldest on; at most the latest 2^20."""

    @abstractmethod
    def drain_refused(self) -> Tensor:
        """Return and clear the log of refused ids, int64; an id may repeat. At most the latest 2^20."""

    @abstractmethod
    def pending(self) -> tuple[Tensor, Tensor]:
        """Return the ids that `MinCount` counts, and their counts, int64 each, from the oldest id on."""

    @abstractmethod
    def restore_pending(self, ids: Tensor, counts: Tensor) -> None:
        """Add positive counts of ids that have no row. They never create a row: the next update decides."""

    @abstractmethod
    def counters(self) -> RowCounters:
        """Return how many rows were created, removed, evicted and refused."""

    @abstractmethod
    def admitted(self, ids: Tensor, seen: Tensor, step: int) -> Tensor:
        """Return which distinct ids, seen so often, have a row or would get one in an update, bool [n]."""

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
        """Do the part of `update` that may raise because of the user's data or code; yield what writes the
        rest.

        Until the end of the context other updates may wait.
        """
        check_capacity(self, ids, pooling, step, occurrences)
        yield lambda: self.update(ids, found, grads, pooling, step, occurrences)

    # ---- snapshots; at most one is open

    @abstractmethod
    def begin_snapshot(
        self, consumer: int, touched_only: bool, room: int, with_pending: bool
    ) -> SnapshotStart:
        """Start a snapshot, which drains the touched rows of a consumer (-1: none).

        `touched_only`: it holds only these rows; `room`: number of changed rows that may be saved before
        writers wait; `with_pending`: the counts of ids without a row are copied too.
        """

    @abstractmethod
    def read_snapshot(self, chunk: Chunk) -> int:
        """Fill a chunk from its start with rows of the snapshot; return their number, 0 at the end."""

    @abstractmethod
    def snapshot_pressure(self) -> float:
        """Return the used part of the room for saved rows, 0 to 1."""

    @abstractmethod
    def end_snapshot(self, give_back: bool) -> float:
        """End the snapshot; return the seconds that writers waited for the reader.

        `give_back`: the drained rows are marked as touched again.
        """

    # ---- touched rows of numbered consumers

    @abstractmethod
    def track(self, consumer: int) -> None:
        """Start to record touched rows for a consumer."""

    @abstractmethod
    def untrack(self, consumer: int) -> None:
        """Drop a consumer and its record."""

    @abstractmethod
    def drain(self, consumer: int) -> tuple[Tensor, Tensor]:
        """Return and clear the updated and the removed ids of a consumer; an id is in one of them."""

    @abstractmethod
    def mark(self, consumer: int, ids: Tensor) -> None:
        """Add ids to the record of a consumer; one without a row counts as removed."""

    # ---- state

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Advances when row numbers may have become invalid: remove, evict, compact, restore, clear."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @property
    def most_rows(self) -> int:
        """A number of rows that the table does not exceed; an engine knows it without waiting."""
        return len(self)

    @abstractmethod
    def shape(self) -> tuple[int, int, int, bool]:
        """Return rows, rows that fit before the index grows, epoch, and whether the index is growing.

        All four are of one moment.
        """

    @abstractmethod
    def memory(self) -> MemoryUse:
        """Return the bytes in use."""


class ForkSafeLock:
    """A lock that one thread may take several times. A forked child starts with a free one: the thread that
    held it does not exist there."""

    def __init__(self) -> None:
        self._lock, self._process = threading.RLock(), os.getpid()

    def __enter__(self) -> None:
        self._renew()
        self._lock.acquire()  # no limit: held for one call

    def _renew(self) -> None:
        if self._process != os.getpid():
            self._lock, self._process = threading.RLock(), os.getpid()

    @contextmanager
    def without_waiting(self) -> Iterator[bool]:
        """Take the lock if no other thread holds it."""
        self._renew()
        taken = self._lock.acquire(blocking=False)
        try:
            yield taken
        finally:
            if taken:
                self._lock.release()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
