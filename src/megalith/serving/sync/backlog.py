"""The backlog: what one target has yet to be sent.

Ids alone: their values are read when a message is built, so a target that was away is sent the newest value
of each once. Ids come in intervals. Those of an interval are all sent before later ones, so a target that is
slower than training still gets intervals complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from megalith.errors import InputError
from megalith.serving.sync.id_sets import IdSets

Keep = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Interval:
    """A stretch of training that ended at a time, in seconds since 1970."""

    number: int
    time: float


class Backlog:
    """Ids to send. max_rows: the most it may hold. Not for several threads at once.

    keep: which of a table's ids concern the target; None: all.
    """

    def __init__(self, max_rows: int, *, keep: Keep | None = None) -> None:
        if max_rows < 1:
            raise InputError(f"a backlog holds at least one row, got {max_rows}")
        self._max_rows = max_rows
        self._keep = keep
        self._now, self._later = IdSets(), IdSets()
        self._interval_now: Interval | None = None
        self._interval_later: Interval | None = None
        self._completed: Interval | None = None

    def __len__(self) -> int:
        """Rows to send; some may be counted twice."""
        return len(self._now) + len(self._later)

    def begin(self, ids: Mapping[str, Tensor], interval: Interval) -> None:
        """The first ids, up to an interval: they go before others, and do not count against max_rows."""
        self._now.add(ids)
        self._now.settle(self._keep)
        self._interval_now = interval
        self._interval_later = self._interval_later or interval
        self._max_rows += len(self._now)

    def add(self, ids: Mapping[str, Tensor], interval: Interval) -> bool:
        """Adds the ids of an interval; whether there is room for them."""
        self._later.add(ids)
        self._interval_later = interval
        if len(self) > self._max_rows:
            self._later.settle(self._keep)
        return len(self) <= self._max_rows

    @property
    def waits(self) -> bool:
        """Whether there is something to send, be it that an interval is complete."""
        return len(self) > 0 or self._completed is not self._interval_later

    def take(self, budget: int, costs: Mapping[str, int]) -> tuple[dict[str, Tensor], Interval | None]:
        """Removes ids that cost at most `budget`, and the interval that is complete with them, if one is.

        costs: of an id, by table.
        """
        if not len(self._now):
            self._later.settle(self._keep)
            self._now, self._later = self._later, IdSets()
            self._interval_now = self._interval_later
        taken = self._now.take(budget, costs)
        if len(self._now) or self._completed is self._interval_now:
            return taken, None
        self._completed = self._interval_now
        return taken, self._completed
