"""The ids of changed rows: those to send, by target, and those changed since each checkpoint.

    class   | holds                                              | bound
    --------+----------------------------------------------------+-----------------------------------------
    IdSets  | sets of ids by table                               | about twice the number of distinct ids
    Journal | for each epoch, the ids changed in it              | max_ids; the oldest epochs are dropped
    Backlog | the ids that one target has not been sent yet      | max_rows; `add` reports an overflow

Only ids are stored: the row of an id is read when a message is built, so a target that was unreachable is
sent the newest value of each row once. An epoch is the part of a training session after one save; its label
is the id of that save. A target whose rows are those of a save needs the ids of that epoch and of all later
ones; a target whose save is no longer in the journal needs all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from megalith.ops.bucketing import dedup

MIN_COMPACTION = 4096  # The number of ids below which compaction is not worth its cost
MAX_EPOCHS = 1000

Keep: TypeAlias = Callable[[str, Tensor], Tensor]  # Selects the ids of a table that stay


class IdSets:
    """Sets of int64 ids by table. Not safe to share between threads.

    `add` appends tensors as they come, and compacts a table once its size has doubled. So at most about twice
    the distinct ids are held, and each id is processed a bounded number of times.
    """

    def __init__(self, *, lazy: bool = False) -> None:
        self._lazy = lazy
        self._parts: dict[str, list[Tensor]] = {}
        self._sizes: dict[str, int] = {}
        self._compacted: dict[str, int] = {}

    def __len__(self) -> int:
        """The number of ids held; duplicates count until `compact`."""
        return sum(self._sizes.values())

    def add(self, ids: Mapping[str, Tensor]) -> None:
        """Add ids."""
        # ids: the ids of each table, int64 [n], without duplicates.
        for table, given in ids.items():
            if not given.numel():
                continue
            self._parts.setdefault(table, []).append(given)
            self._sizes[table] = self._sizes.get(table, 0) + given.numel()
            self._compacted.setdefault(table, given.numel())
            if not self._lazy and self._has_doubled(table):
                self._compact(table)

    def _has_doubled(self, table: str) -> bool:
        return self._sizes[table] > 2 * self._compacted[table] + MIN_COMPACTION

    def needs_compaction(self) -> dict[str, tuple[Tensor, ...]]:
        """Return the tensors to compact, by table."""
        return {table: tuple(parts) for table, parts in self._parts.items() if self._has_doubled(table)}

    def replace(self, table: str, parts: tuple[Tensor, ...], ids: Tensor) -> None:
        """Replace tensors by their distinct ids, if they are still held."""
        # ids: their distinct ids, int64 [n].
        now = self._parts[table]
        if len(now) >= len(parts) and all(a is b for a, b in zip(now, parts, strict=False)):
            self._parts[table] = [ids, *now[len(parts) :]]
            self._sizes[table] += ids.numel() - sum(part.numel() for part in parts)
            self._compacted[table] = ids.numel()

    def compact(self, keep: Keep | None = None) -> None:
        """Remove duplicates, and the ids that `keep` does not select."""
        for table in list(self._parts):
            self._compact(table, keep)

    def _compact(self, table: str, keep: Keep | None = None) -> None:
        parts = self._parts[table]
        ids = parts[0] if len(parts) == 1 else dedup(torch.cat(parts)).ids
        self._set(table, ids if keep is None else keep(table, ids))

    def _set(self, table: str, ids: Tensor) -> None:
        self._parts[table] = [ids]
        self._sizes[table] = self._compacted[table] = ids.numel()

    def tensors(self) -> dict[str, Tensor]:
        """Return the distinct ids of each table, int64 [n]; tables without ids are absent."""
        self.compact()
        return {table: parts[0] for table, parts in self._parts.items() if parts[0].numel()}

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ids of each table; duplicates count until `compact`."""
        return dict(self._sizes)

    def take(self, budget: int, costs: Mapping[str, int]) -> dict[str, Tensor]:
        """Remove and return ids."""
        # returns: the ids of each table, int64 [n].
        taken: dict[str, Tensor] = {}
        for table, ids in self.tensors().items():
            count = min(ids.numel(), max(0 if taken else 1, budget // costs[table]))
            if not count:
                break
            taken[table] = ids[:count]
            self._set(table, ids[count:])
            budget -= count * costs[table]
        return taken


@dataclass
class _Epoch:
    label: str
    ids: IdSets = field(default_factory=lambda: IdSets(lazy=True))


# Sets of ids, one of their tables, and the tensors of that table to compact
Uncompacted: TypeAlias = tuple[IdSets, str, tuple[Tensor, ...]]


class Journal:
    """The ids changed in each epoch. Not safe to share between threads."""

    def __init__(self, max_ids: int = 20_000_000) -> None:
        self._max_ids = max_ids
        self._epochs: list[_Epoch] = []

    def __len__(self) -> int:
        """The number of ids held; an id that changed in several epochs counts several times."""
        return sum(len(epoch.ids) for epoch in self._epochs)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the epochs, oldest first."""
        return tuple(epoch.label for epoch in self._epochs)

    def begin_epoch(self, label: str) -> None:
        """Start an epoch. If the label exists, its epoch restarts here and loses its ids."""
        for number, epoch in enumerate(self._epochs):
            if epoch.label == label:
                del self._epochs[number]
                if number:  # they still count for older labels
                    self._epochs[number - 1].ids.add(epoch.ids.tensors())
                break
        self._epochs.append(_Epoch(label))
        del self._epochs[:-MAX_EPOCHS]

    def add(self, ids: Mapping[str, Tensor]) -> None:
        """Add changed ids to the current epoch; without an epoch they are ignored."""
        # ids: the ids of each table, int64 [n], without duplicates.
        if not self._epochs:
            return
        self._epochs[-1].ids.add(ids)
        if len(self) > self._max_ids:
            for epoch in self._epochs:
                epoch.ids.compact()
        while self._epochs and len(self) > self._max_ids:
            del self._epochs[0]

    @property
    def fullness(self) -> float:
        """The number of ids held divided by the maximum."""
        return len(self) / self._max_ids

    def needs_compaction(self) -> list[Uncompacted]:
        """Return the tensors to compact."""
        # Compaction takes long, so the owner leaves it to another thread: `dedup` of the tensors needs no
        # lock, `IdSets.replace` with the result does.
        return [
            (epoch.ids, table, parts)
            for epoch in self._epochs
            for table, parts in epoch.ids.needs_compaction().items()
        ]

    def since(self, label: str) -> dict[str, Tensor] | None:
        """Return the ids changed after a save."""
        # returns: the ids of each table, int64 [n].
        if label not in self.labels:
            return None
        found = IdSets()
        for epoch in self._epochs[self.labels.index(label) :]:
            found.add(epoch.ids.tensors())
        return found.tensors()

    def is_not_older(self, later: str, earlier: str) -> bool:
        """Return whether both labels are known and one is not older than the other."""
        labels = self.labels
        return earlier in labels and later in labels and labels.index(earlier) <= labels.index(later)


@dataclass(frozen=True)
class Interval:
    """A numbered interval of training that ended at `time`, in seconds since 1970."""

    number: int
    time: float


class Backlog:
    """The ids that one target has not been sent yet. Not safe to share between threads.

    Ids are added by interval. All ids of an interval are taken before later ones, so a target that is slower
    than training still gets complete intervals.
    """

    def __init__(self, max_rows: int, *, keep: Keep | None = None) -> None:
        self._max_rows = max_rows
        self._keep = keep
        self._now, self._later = IdSets(), IdSets()
        self._interval_now: Interval | None = None
        self._interval_later: Interval | None = None
        self._completed: Interval | None = None

    def __len__(self) -> int:
        """The number of ids to send; some may count twice."""
        return len(self._now) + len(self._later)

    def begin(self, ids: Mapping[str, Tensor], interval: Interval) -> None:
        """Set the first ids, which are taken before all others."""
        # ids: the ids of each table, int64 [n], without duplicates.
        self._now.add(ids)
        self._now.compact(self._keep)
        self._interval_now = interval
        self._interval_later = self._interval_later or interval
        self._max_rows += len(self._now)

    def add(self, ids: Mapping[str, Tensor], interval: Interval) -> bool:
        """Add the ids of an interval."""
        # ids: the ids of each table, int64 [n], without duplicates.
        self._later.add(ids)
        self._interval_later = interval
        if len(self) > self._max_rows:
            self._later.compact(self._keep)
        return len(self) <= self._max_rows

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ids of each table that are left of the interval from which ids were taken last."""
        return self._now.sizes

    @property
    def is_pending(self) -> bool:
        """Whether there is something to send: ids, or only the end of an interval."""
        return len(self) > 0 or self._completed is not self._interval_later

    def take(self, budget: int, costs: Mapping[str, int]) -> tuple[dict[str, Tensor], Interval | None]:
        """Remove and return ids."""
        # returns: the ids of each table, int64 [n], and the interval that is complete with them, if one is.
        if not len(self._now):
            self._later.compact(self._keep)
            self._now, self._later = self._later, IdSets()
            self._interval_now = self._interval_later
        taken = self._now.take(budget, costs)
        if len(self._now) or self._completed is self._interval_now:
            return taken, None
        self._completed = self._interval_now
        return taken, self._completed
