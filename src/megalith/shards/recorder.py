"""Recorder: observes the exchanges of shards between ranks. `CommMetrics` is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

EXCHANGES = ("sizes", "ids", "rows", "gradients")
"""The exchanges of a training step, in order."""


@runtime_checkable
class Recorder(Protocol):
    """Receives numbers in the thread of the exchange, so its methods must be fast.

    Counts are int64 [ranks, tables], with the tables in the order of the configs, and include this rank.
    """

    def requested(self, call: str, occurrences: Mapping[str, int], out: Tensor, into: Tensor) -> None:
        """Record that ids were exchanged."""

    def sent(self, exchange: str, out: Tensor, into: Tensor, row_bytes: Sequence[int]) -> None:
        """Record what was sent and received."""

    def waited(self, exchange: str, seconds: float) -> None:
        """Record the time of an exchange."""

    def read(self, misses: Mapping[str, int]) -> None:
        """Record that rows were read."""

    def created(self, table: str, rows: int) -> None:
        """Record that an update created rows."""
