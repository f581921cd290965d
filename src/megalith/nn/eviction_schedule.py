"""EvictionSchedule: spreads passes of eviction over the steps of training."""

from __future__ import annotations

from megalith.errors import InputError
from megalith.shards import Shards

MIN_PARTS = 40
"""A pass is divided into at least this many parts, so that no step waits for more than 5 % of one."""


class EvictionSchedule:
    """Makes one pass over the tables in `every` steps, a small part after each step.

    All ranks use the same time, the latest one of all ranks when the pass began. The position in the table is
    not saved: a resumed run continues at the part that belongs to its step. So a row is visited within two
    passes, however often the run is interrupted.
    """

    def __init__(self, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError(f"EmbeddingCollection: evict_every must be a positive integer, got {every!r}")
        self.parts = max(every, MIN_PARTS)
        self._done: int | None = None  # parts of this pass; None: this process has not begun
        self._now = 0

    def after_step(self, shards: Shards, time: float | None, step: int) -> None:
        """Evict a part of the rows. A collective call over ranks."""
        start = None
        if self._done is None:
            self._done = step % self.parts
            start = self._done / self.parts
        if self._done == 0 or start is not None:
            self._now = shards.latest_time(time)
        shards.evict_part(self._now, parts=self.parts, start=start)
        self._done = (self._done + 1) % self.parts
