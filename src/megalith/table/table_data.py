"""The plain data that tables, engines and their callers exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.errors import InputError

MAX_TIME = 2**32 - 1
MAX_CONSUMERS = 8


@dataclass(frozen=True)
class Chunk:
    """Complete rows of a table: what `scan` yields and `restore` takes.

    Attributes:
        ids: int64 [n].
        rows: Weights, float32 [n, dim].
        state: Optimizer state by "segment number/state name", float32 [n, size] each.
        time: Last update in seconds, int64 [n].
        count: Number of updates, int64 [n], or None if no policy counts them (`TableConfig.counted`). An
            assigned row starts with 1.
        step: Step of the last write, int64 [n], or None under the same condition.
    """

    ids: Tensor
    rows: Tensor
    state: Mapping[str, Tensor]
    time: Tensor
    count: Tensor | None = None
    step: Tensor | None = None

    def part(self, start: int, end: int) -> Chunk:
        """Return a part of the rows as views.

        Args:
            start: First row.
            end: Row after the last one.

        Returns:
            A chunk of rows `start:end`, fewer if the chunk ends before `end`.

        Raises:
            InputError: A bound is not an integer.
        """
        for bound in (start, end):
            if isinstance(bound, bool) or not isinstance(bound, int):
                raise InputError(f"Chunk: rows are counted by integers, got {bound!r}")
        return self._each(lambda column: column[start:end])

    def select(self, which: Tensor) -> Chunk:
        """Return a copy of some rows.

        Args:
            which: Positions, int64 [m], or flags, bool [n].

        Returns:
            A chunk of the selected rows, in the order of the positions or flags.

        Raises:
            InputError: `which` has another type, shape or device, or a position is out of range.
        """
        n = self.ids.shape[0]
        good = isinstance(which, Tensor) and which.dim() == 1 and which.device == self.ids.device
        if good and which.dtype == torch.int64 and which.numel():
            good = -n <= int(which.min()) and int(which.max()) < n
        elif good:
            good = which.dtype == torch.int64 or (which.dtype == torch.bool and which.shape[0] == n)
        if not good:
            raise InputError(f"Chunk: select takes positions, int64 [m] below {n}, or flags, bool [{n}]")
        return self._each(lambda column: column[which])

    def columns(self) -> list[Tensor]:
        """Return weights, then state: the floats of a stored row."""
        return [self.rows, *self.state.values()]

    def _each(self, change: Callable[[Tensor], Tensor]) -> Chunk:
        return Chunk(
            change(self.ids),
            change(self.rows),
            {key: change(column) for key, column in self.state.items()},
            change(self.time),
            None if self.count is None else change(self.count),
            None if self.step is None else change(self.step),
        )


def concatenated_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """Return the rows of several chunks of one table, one chunk after another, with their own memory."""
    counts = [chunk.count for chunk in chunks if chunk.count is not None]
    steps = [chunk.step for chunk in chunks if chunk.step is not None]
    return Chunk(
        torch.cat([chunk.ids for chunk in chunks]),
        torch.cat([chunk.rows for chunk in chunks]),
        {key: torch.cat([chunk.state[key] for chunk in chunks]) for key in chunks[0].state},
        torch.cat([chunk.time for chunk in chunks]),
        torch.cat(counts) if len(counts) == len(chunks) else None,
        torch.cat(steps) if len(steps) == len(chunks) else None,
    )


class FoundRows(NamedTuple):
    """The row numbers of ids in one table. Callers pass them back to the engine and do not interpret them."""

    rows: Tensor  # int32 [n], on the engine's device; -1 where an id has no row
    # The table's epoch when the rows were found. An engine trusts rows of its current epoch and finds others
    # again. None: unknown, so the engine verifies each row.
    epoch: int | None


class SnapshotStart(NamedTuple):
    """What a table held when a snapshot began, besides the rows, which are read later."""

    rows: int  # Number of rows in the snapshot
    live: int  # Number of rows in the table
    removed: Tensor  # Ids removed since the consumer's last drain, int64
    # Ids without a row that `MinCount` counted, and their counts, int64 each; empty unless asked for
    pending: tuple[Tensor, Tensor]


class Step(NamedTuple):
    """The validated numbers of one update."""

    rates: list[float]  # Learning rate of each segment
    time: int  # Seconds; becomes the last-update time of the rows
    scale: float  # Factor of each summed gradient
    clip_norm: float  # Largest L2 norm of a summed gradient; 0 for no limit
    step: int  # The global step, from 0


class Update(NamedTuple):
    """The validated numbers of one update of several tables."""

    step: int  # The global step, from 0
    time: int | None  # Seconds; None: the clock of the owner of the rows
    scale: float  # Factor of each summed gradient
    clip_norm: float  # Largest L2 norm of a summed gradient; 0 for no limit
    # Learning rate of each segment, by table. The owner of the rows may not need those of all tables.
    rates: Mapping[str, list[float]] = MappingProxyType({})
    # How many occurrences each id stands for, int64 [n] by table; one each for a table without an entry
    occurrences: Mapping[str, Tensor] = MappingProxyType({})

    def of(self, table: str) -> Step:
        """Return the numbers for the engine of one table, when the time is known."""
        assert self.time is not None
        return Step(self.rates[table], self.time, self.scale, self.clip_norm, self.step)


class RowCounters(NamedTuple):
    """What happened to the rows of a table in this process. rows = created - removed - evicted.

    Attributes:
        created: Rows created by updates, assignments and restored chunks.
        removed: Rows removed by `remove` and `clear`.
        evicted: Rows removed by eviction policies.
        refused: Ids without a row whose gradient an admission policy dropped; an id counts once per call.
        pending: Ids that an admission policy counts now.
        pending_dropped: Ids that it stopped counting because it had too many (`MinCount.max_ids`).
        log_lost: Evicted and refused ids that no longer fit in the logs of `drain_evicted` and
            `drain_refused`.
    """

    created: int
    removed: int
    evicted: int
    refused: int
    pending: int
    pending_dropped: int
    log_lost: int


class HostTierUse(NamedTuple):
    """Where the rows of a table with a budget of GPU memory are, and how often calls found them there.

    The calls that count are lookups, and updates whose rows no lookup found before.

    Attributes:
        device_rows: Places of rows in GPU memory that are or were in use.
        host_rows: Places of rows in pinned host memory that are or were in use.
        hits: Distinct rows of these calls that were in GPU memory, since the first row was in host memory.
        misses: Distinct rows of these calls that were in host memory.
        moved: Rows that moved from host to GPU memory.
    """

    device_rows: int
    host_rows: int
    hits: int
    misses: int
    moved: int

    @property
    def hit_rate(self) -> float:
        """Hits divided by hits and misses; 1.0 before the first."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 1.0


@dataclass(frozen=True)
class TableStats:
    """Numbers about one table.

    Attributes:
        name: Name of the table.
        engine: Name of its engine.
        rows: Number of rows.
        capacity: Number of rows that fit before the index grows.
        growing: Whether the index is moving its entries to a larger one.
        epoch: See `Table.epoch`.
        consumers: Names of the consumers that track touched rows.
        counters: Rows created, removed and refused since the table was created.
        host_tier: The rows in host memory and the hit rate of those in GPU memory, of a table with
            `TableConfig.device_bytes` on the cuda engine; None for any other.
    """

    name: str
    engine: str
    rows: int
    capacity: int
    growing: bool
    epoch: int
    consumers: tuple[str, ...]
    counters: RowCounters
    host_tier: HostTierUse | None = None


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a table holds.

    Attributes:
        index: The map from ids to rows.
        rows: Weights of the rows in use.
        state: Optimizer state of the rows in use.
        side: Id, last-update time, counts and flags of each row in use, and records of touched rows.
        counters: Counts of ids that have no row yet (`MinCount`), logs of evicted and refused ids, and the
            candidates of a score function.
        slack: Places of removed rows that are not in use again.
    """

    index: int
    rows: int
    state: int
    side: int
    counters: int
    slack: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.index + self.rows + self.state + self.side + self.counters + self.slack
