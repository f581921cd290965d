"""CommMetrics: what the exchanges of a SyncShards carry, by table and rank, and how long they take.

Counting is local and cheap; `collect` gathers what every rank has counted since the last time. Without one
nothing is counted. Where the numbers go is the caller's: `CommReport.scalars` gives them names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.errors import UsageError
from megalith.shards.preparer import SyncPrepared
from megalith.shards.rank_messages import Asked
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
"""What is counted for each table, in the order of the counters; the guide of many ranks explains them."""
EXCHANGES = ("sizes", "ids", "rows", "gradients")
_AT = {name: number for number, name in enumerate(COUNTS)}


@dataclass(frozen=True)
class Spread:
    """One number on every rank. Of equal ones, the lowest rank counts as least and most."""

    by_rank: tuple[float, ...]

    @property
    def min_rank(self) -> int:
        """Who has the least."""
        return self.by_rank.index(min(self.by_rank))

    @property
    def max_rank(self) -> int:
        """Who has the most."""
        return self.by_rank.index(max(self.by_rank))

    @property
    def skew(self) -> float:
        """The most by the mean: 1 is even, the number of ranks is all on one; 1 where nobody has any."""
        total = sum(self.by_rank)
        return max(self.by_rank) * len(self.by_rank) / total if total else 1.0

    def scalars(self, name: str) -> dict[str, float]:
        """By name: each rank's, the least and the most, who has them, and the skew."""
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
    """What travelled since the last report. tables: by table, the numbers of COUNTS and distinct_ratio.

    lookups: how many there were. waits: seconds in each of EXCHANGES, waiting for other ranks included.
    """

    step: int
    lookups: int
    tables: dict[str, dict[str, Spread]]
    waits: dict[str, Spread]

    def scalars(self) -> dict[str, float]:
        """Everything by name, for TensorBoard and its like."""
        found: dict[str, float] = {"comm/lookups": self.lookups}
        for table, numbers in self.tables.items():
            for name, spread in numbers.items():
                found |= spread.scalars(f"comm/{table}/{name}")
        for exchange, spread in self.waits.items():
            found |= spread.scalars(f"comm_wait/{exchange}")
        return found


class CommMetrics:
    """Counts what a SyncShards exchanges, from now until `close`.

    tables: names; None for all. callback: is given every report. Raises UnknownNameError for a table there is
    not, UsageError if these shards are counted already.
    """

    def __init__(
        self,
        shards: SyncShards,
        *,
        tables: Sequence[str] | None = None,
        callback: Callable[[CommReport], object] | None = None,
    ) -> None:
        for name in tables or ():
            shards.check_name(name)
        if shards.recorder is not None:
            raise UsageError("these shards have CommMetrics already: close() those first")
        self.tables = list(shards.configs) if tables is None else list(dict.fromkeys(tables))
        self._shards = shards
        self._callback = callback
        self._rank = shards.rank
        order = list(shards.configs)
        self._columns = torch.tensor([order.index(name) for name in self.tables], dtype=torch.int64)
        self._reset()
        shards.recorder = self

    def collect(self, step: int) -> CommReport:
        """What all ranks have counted since the last time. A collective call: every rank makes it."""
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
        """Counts no more."""
        if self._shards.recorder is self:
            self._shards.recorder = None

    # ---- in the exchange's thread

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

    def asked(self, call: str, prepared: SyncPrepared, counts: Tensor) -> None:
        """See `Recorder.asked`."""
        out = prepared.deduped.counts
        self._add("ids_sent", self._away(out))
        self._add("ids_received", self._away(counts))
        if call != "lookup":
            return
        self._lookups += 1
        for t, name in enumerate(self.tables):
            if name in prepared.ids:
                self._counts[t, _AT["ids"]] += prepared.ids[name].numel()
        self._add("distinct", out.sum(0))
        self._add("served", counts.sum(0))

    def travelled(self, out: Tensor, into: Tensor, row_bytes: Sequence[int]) -> None:
        """See `Recorder.travelled`."""
        each = torch.tensor(row_bytes, dtype=torch.int64)
        self._add("bytes_sent", self._away(out) * each)
        self._add("bytes_received", self._away(into) * each)

    def waited(self, exchange: str, seconds: float) -> None:
        """See `Recorder.waited`."""
        self._waits[exchange] += seconds

    def read(self, asked: Asked) -> None:
        """See `Recorder.read`."""
        for t, name in enumerate(self.tables):
            if name in asked.found:
                self._counts[t, _AT["misses"]] += int((asked.found[name][0] < 0).sum())

    def created(self, table: str, rows: int) -> None:
        """See `Recorder.created`."""
        if table in self.tables:
            self._counts[self.tables.index(table), _AT["created"]] += rows

    def _away(self, counts: Tensor) -> Tensor:
        """By table, what goes to other ranks or comes from them."""
        return counts.sum(0) - counts[self._rank]
