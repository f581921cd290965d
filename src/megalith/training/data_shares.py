"""DataShares: the training data in shares that workers take one after the other, and how far each was read.

    an epoch is read in       when
    shares                    workers read their own rows; their number does not depend on who takes them
    one share                 all workers read the same rows (a fixed number of micro-batches), or an epoch is
                              continued that one process had begun

Positions have the form of `run_batches.py`: {"shards": [...]} in the midst of an epoch of shares, otherwise
the position of the reader. So a run continues on workers, ranks or one process, whatever began the epoch.
"""

from __future__ import annotations

from collections import deque

from megalith.data import Reader
from megalith.data.batch import Position
from megalith.errors import InputError
from megalith.training.worker_messages import DataShare

SHARES_PER_WORKER = 4
"""More shares than workers: one that joins finds some to read, and a slow one reads fewer."""


class DataShares:
    """See the module."""

    def __init__(self, reader: Reader, *, split: bool) -> None:
        self._reader = reader
        self._split = split
        self._at: list[Position] = []
        self._free: deque[int] = deque()
        self._start = reader.shard(0, 1).position
        self._continued: Position | None = None

    @property
    def begun(self) -> bool:
        """Whether the position is in the midst of an epoch."""
        return bool(self._at)

    def begin(self, epoch: int, workers: int) -> None:
        """Begin an epoch, unless one has begun."""
        if self._at:
            return
        if self._continued is not None:
            self._at = [self._continued]
        else:
            count = workers * SHARES_PER_WORKER if self._split else 1
            starts = (self._reader.shard(index, count).position for index in range(count))
            self._at = [{**at, "epoch": epoch} if "epoch" in at else at for at in starts]
        self._continued = None
        self._free = deque(range(len(self._at)))

    def take(self) -> DataShare | None:
        """Return a share that nobody reads, at its position; None: there is none."""
        return self.share(self._free.popleft()) if self._free else None

    def share(self, index: int) -> DataShare:
        """Return a share at its position."""
        return DataShare(index, len(self._at), self._at[index])

    def give_back(self, index: int) -> None:
        """Return a share whose worker has left: another one reads it next."""
        self._free.appendleft(index)

    def record(self, index: int, position: Position) -> None:
        """Record how far a share was read."""
        self._at[index] = position

    def end(self, epoch: int) -> None:
        self._at = []
        self._start = {**self._start, "epoch": epoch} if "epoch" in self._start else self._start

    def position(self) -> Position:
        """Return where the run is, as a JSON-compatible dict."""
        if not self._at:
            return self._start if self._continued is None else self._continued
        return self._at[0] if len(self._at) == 1 else {"shards": list(self._at)}

    def seek(self, position: Position) -> None:
        """Continue at a position."""
        if not isinstance(position, dict) or "shards" not in position:
            self._reader.shard(0, 1).seek(position)
            start = {**self._start, "epoch": position["epoch"]} if "epoch" in self._start else self._start
            self._start = start
            self._continued = None if position == start else position
            return
        found = position["shards"]
        if not isinstance(found, list) or not found:
            raise InputError(f"the position of the shards must be a list, got {found!r}")
        for index, at in enumerate(found):
            self._reader.shard(index, len(found)).seek(at)
        self._at, self._free = list(found), deque(range(len(found)))
