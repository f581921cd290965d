"""CommMetrics: the traffic of a SyncShards by table and rank, and the time of its exchanges.

Counting is local and cheap; `collect` gathers the counters of all ranks since the last call. Without a
CommMetrics nothing is counted. The caller decides where the numbers go: `CommReport.scalars` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.shards.preparer import RoutedIds
from megalith.shards.rank_messages import RequestedIds
from megalith.shards.sync import SyncShards

COUNTS = (
    "ids",
    "distinct",
    "served",
    "misses",
    "created",
    "ids_sent",
    "ids_received",
    "bytes_sent",
    "bytes_received",
)
"""The counters of each table, in order; the many-ranks guide explains them."""
EXCHANGES = ("sizes", "ids", "rows", "gradients")
_AT = {name: number for number, name in enumerate(COUNTS)}


@dataclass(frozen=True)
class Spread:
    """One number per rank. Of equal numbers, the one of the lowest rank counts as minimum and maximum."""

    by_rank: tuple[float, ...]

    @property
    def min_rank(self) -> int:
        """The rank with the minimum."""
        return self.by_rank.index(min(self.by_rank))

    @property
    def max_rank(self) -> int:
        """The rank with the maximum."""
        return self.by_rank.index(max(self.by_rank))

    @property
    def skew(self) -> float:
        """Maximum divided by mean: 1 if all are equal or zero, the number of ranks if one rank has all."""
        total = sum(self.by_rank)
        return max(self.by_rank) * len(self.by_rank) / total if total else 1.0

    def scalars(self, name: str) -> dict[str, float]:
        """Returns by name: the number of each rank, minimum and maximum with their ranks, and the skew."""
        ranks = {f"{name}/rank{rank}": value for rank, value in enumerate(self.by_rank)}
        return {
            **ranks,
            f"{name}/min": min(self.by_rank),
            f"{name}/min_rank": self.min_rank,
            f"{name}/max": max(self.by_rank),
            f"{name}/max_rank": self.max_rank,
            f"{name}/skew": self.skew,
        }


@dataclass(frozen=True)
class CommReport:
    """The traffic since the last report.

    Attributes:
        step: The step of the report.
        lookups: The number of lookups.
        tables: By table, the numbers of COUNTS and distinct_ratio.
        waits: The seconds in each of EXCHANGES, including the wait for other ranks.
    """

    step: int
    lookups: int
    tables: dict[str, dict[str, Spread]]
    waits: dict[str, Spread]

    def scalars(self) -> dict[str, float]:
        """Returns all numbers by name, for TensorBoard and similar tools."""
        found: dict[str, float] = {"comm/lookups": self.lookups}
        for table, numbers in self.tables.items():
            for name, spread in numbers.items():
                found |= spread.scalars(f"comm/{table}/{name}")
        for exchange, spread in self.waits.items():
            found |= spread.scalars(f"comm_wait/{exchange}")
        return found


class CommMetrics:
    """Counts the traffic of a SyncShards, from construction until `close`.

    Args:
        shards: The shards to observe.
        tables: The names of the tables to count; None: all.
        callback: A function that receives every report.

    Raises:
        UnknownNameError: For a table that does not exist.
        UsageError: If these are not SyncShards, or already have a CommMetrics.
    """

    def __init__(
        self,
        shards: SyncShards,
        *,
        tables: Sequence[str] | None = None,
        callback: Callable[[CommReport], object] | None = None,
    ) -> None:
        if not isinstance(shards, SyncShards):
            raise UsageError(
                f"CommMetrics counts the traffic of a SyncShards, got {type(shards).__name__}: tables of one "
                "process have no traffic"
            )
        if callback is not None and not callable(callback):
            raise InputError(f"CommMetrics: callback must be a function of a CommReport, got {callback!r}")
        shards.known([] if tables is None else tables, missing_ok=False)
        if shards.recorder is not None:
            raise UsageError("these shards already have a CommMetrics: close() it first")
        self.tables = list(shards.configs) if tables is None else list(dict.fromkeys(tables))
        self._shards = shards
        self._callback = callback
        self._rank = shards.rank
        order = list(shards.configs)
        self._columns = torch.tensor([order.index(name) for name in self.tables], dtype=torch.int64)
        self._reset()
        shards.recorder = self

    def collect(self, step: int) -> CommReport:
        """Returns the counters of all ranks since the last call, and resets them. A collective call.

        Args:
            step: The step, for the report.
        """
        everywhere = self._shards.exchange.gather(self._shards.exchange.run(self._take))
        tables = {}
        for t, name in enumerate(self.tables):
            numbers = {
                count: Spread(tuple(counted[t][c] for counted, _, _ in everywhere))
                for c, count in enumerate(COUNTS)
            }
            both = zip(numbers["distinct"].by_rank, numbers["ids"].by_rank, strict=True)
            numbers["distinct_ratio"] = Spread(tuple(kept / all_ if all_ else 1.0 for kept, all_ in both))
            tables[name] = numbers
        waits = {
            exchange: Spread(tuple(waited[exchange] for _, waited, _ in everywhere)) for exchange in EXCHANGES
        }
        report = CommReport(step, everywhere[self._rank][2], tables, waits)
        if self._callback is not None:
            self._callback(report)
        return report

    def close(self) -> None:
        """Stops counting."""
        if self._shards.recorder is self:
            self._shards.recorder = None

    # ---- in the thread of the exchange

    def _reset(self) -> None:
        self._counts = torch.zeros(len(self.tables), len(COUNTS), dtype=torch.int64)
        self._waits = dict.fromkeys(EXCHANGES, 0.0)
        self._lookups = 0

    def _take(self) -> tuple[Any, dict[str, float], int]:
        taken = self._counts.tolist(), self._waits, self._lookups
        self._reset()
        return taken

    def _add(self, name: str, by_table: Tensor) -> None:
        self._counts[:, _AT[name]] += by_table[self._columns]

    def requested(self, call: str, routed: RoutedIds, counts: Tensor) -> None:
        """See `Recorder.requested`."""
        out = routed.deduped.counts
        self._add("ids_sent", self._away(out))
        self._add("ids_received", self._away(counts))
        if call != "lookup":
            return
        self._lookups += 1
        for t, name in enumerate(self.tables):
            if name in routed.ids:
                self._counts[t, _AT["ids"]] += routed.ids[name].numel()
        self._add("distinct", out.sum(0))
        self._add("served", counts.sum(0))

    def sent(self, out: Tensor, into: Tensor, row_bytes: Sequence[int]) -> None:
        """See `Recorder.sent`."""
        each = torch.tensor(row_bytes, dtype=torch.int64)
        self._add("bytes_sent", self._away(out) * each)
        self._add("bytes_received", self._away(into) * each)

    def waited(self, exchange: str, seconds: float) -> None:
        """See `Recorder.waited`."""
        self._waits[exchange] += seconds

    def read(self, requested: RequestedIds) -> None:
        """See `Recorder.read`."""
        for t, name in enumerate(self.tables):
            if name in requested.found:
                self._counts[t, _AT["misses"]] += int((requested.found[name][0] < 0).sum())

    def created(self, table: str, rows: int) -> None:
        """See `Recorder.created`."""
        if table in self.tables:
            self._counts[self.tables.index(table), _AT["created"]] += rows

    def _away(self, counts: Tensor) -> Tensor:
        """Returns per table what is sent to or received from other ranks."""
        return counts.sum(0) - counts[self._rank]
