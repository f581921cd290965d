"""The plain data that tables give and take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

MAX_TIME = 2**32 - 1
MAX_CONSUMERS = 8


@dataclass(frozen=True)
class Chunk:
    """A piece of a table, whole rows: what `scan` yields and `restore` takes.

    ids: int64 [n]. rows: float32 [n, dim]. state: by "segment number/name", float32 [n, size] each.
    time: int64 [n], last update in seconds. count: int64 [n] updates, or None where no policy counts.
    """

    ids: Tensor
    rows: Tensor
    state: Mapping[str, Tensor]
    time: Tensor
    count: Tensor | None = None

    def part(self, start: int, end: int) -> Chunk:
        """Some of its rows, in the same memory."""
        return self._each(lambda column: column[start:end])

    def select(self, which: Tensor) -> Chunk:
        """The rows of these numbers (int64) or flags (bool), copied."""
        return self._each(lambda column: column[which])

    def columns(self) -> list[Tensor]:
        """Weights, then state: the floats of a stored row."""
        return [self.rows, *self.state.values()]

    def _each(self, change: Callable[[Tensor], Tensor]) -> Chunk:
        return Chunk(
            change(self.ids),
            change(self.rows),
            {key: change(column) for key, column in self.state.items()},
            change(self.time),
            None if self.count is None else change(self.count),
        )


class Step(NamedTuple):
    """An update's rates (one per segment), time in seconds, scale and clip_norm (0: none), checked."""

    rates: list[float]
    time: int
    scale: float
    clip_norm: float


@dataclass(frozen=True)
class TableStats:
    """A table at a glance. `capacity` is the number of rows that fit before the index grows."""

    name: str
    engine: str
    rows: int
    capacity: int
    growing: bool
    epoch: int
    consumers: tuple[str, ...]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes a table holds: ids to rows, weights with optimizer state, and what lies beside each row."""

    index: int
    rows: int
    side: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.index + self.rows + self.side
