"""CommMetrics: the traffic of a SyncShards by table and rank, and the time of its exchanges.

Counting is local and cheap; `collect` gathers the counters of all ranks since the last call. Without a
CommMetrics nothing is counted. The caller decides where the numbers go: `CommReport.scalars` and
`CommReport.histograms` name them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.shards.contract import EXCHANGES, Recorder
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
SPLITS = EXCHANGES[1:]
"""The exchanges whose content is counted by receiver."""
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
        """Return the numbers under the names of scalars."""
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
class ExchangeSplits:
    """How many ids, rows or gradients each rank sent to each rank, including those that stayed on a rank."""

    by_sender: tuple[tuple[int, ...], ...]  # by_sender[i][j] were sent from rank i to rank j

    @property
    def sent(self) -> Spread:
        """The number that each rank sent to all ranks together."""
        return Spread(tuple(map(sum, self.by_sender)))

    @property
    def received(self) -> Spread:
        """The number that each rank received from all ranks together."""
        return Spread(tuple(map(sum, zip(*self.by_sender, strict=True))))

    def of(self, sender: int) -> Spread:
        """Return what one rank sent, by receiver."""
        return Spread(self.by_sender[sender])


@dataclass(frozen=True)
class CommReport:
    """The traffic since the last report.

    Attributes:
        step: The step of the report.
        lookups: The number of lookups.
        tables: By table, the numbers of COUNTS and distinct_ratio.
        waits: The seconds in each of EXCHANGES, including the wait for other ranks.
        splits: By table, then by exchange of SPLITS: who sent how much to whom.
    """

    step: int
    lookups: int
    tables: dict[str, dict[str, Spread]]
    waits: dict[str, Spread]
    splits: dict[str, dict[str, ExchangeSplits]]

    def scalars(self) -> dict[str, float]:
        """Return all numbers by name, for TensorBoard and similar tools."""
        found: dict[str, float] = {"comm/lookups": self.lookups}
        for table, numbers in self.tables.items():
            for name, spread in numbers.items():
                found |= spread.scalars(f"comm/{table}/{name}")
        for exchange, spread in self.waits.items():
            found |= spread.scalars(f"comm_wait/{exchange}")
        return found

    def histograms(self) -> dict[str, tuple[float, ...]]:
        """Return the values to draw as histograms by name, e.g. for `SummaryWriter.add_histogram`.

        `comm/TABLE/EXCHANGE_splits` has a value per sender and receiver, `comm/TABLE/EXCHANGE_dist` one per
        sender.
        """
        found: dict[str, tuple[float, ...]] = {}
        for table, exchanges in self.splits.items():
            for exchange, splits in exchanges.items():
                found[f"comm/{table}/{exchange}_splits"] = tuple(n for row in splits.by_sender for n in row)
                found[f"comm/{table}/{exchange}_dist"] = splits.sent.by_rank
        return found


class CommMetrics(Recorder):
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
        self.tables = list(shards.configs) if tables is None else list(dict.fromkeys(tables))
        self._shards = shards
        self._callback = callback
        self._rank = shards.rank
        order = list(shards.configs)
        self._columns = torch.tensor(
            [order.index(name) for name in self.tables], dtype=torch.int64, device="cpu"
        )
        self._reset()
        shards.add_recorder(self)

    def collect(self, step: int) -> CommReport:
        """Return the counters of all ranks since the last call, and reset them. A collective call.

        Args:
            step: The step, for the report.

        Returns:
            The report, the same on all ranks. The callback has received it.
        """
        everywhere = self._shards.exchange.gather(self._shards.exchange.run(self._take))
        tables, splits = {}, {}
        for t, name in enumerate(self.tables):
            numbers = {
                count: Spread(tuple(counted[t][c] for counted, *_ in everywhere))
                for c, count in enumerate(COUNTS)
            }
            both = zip(numbers["distinct"].by_rank, numbers["ids"].by_rank, strict=True)
            numbers["distinct_ratio"] = Spread(tuple(kept / all_ if all_ else 1.0 for kept, all_ in both))
            tables[name] = numbers
            splits[name] = {
                exchange: ExchangeSplits(tuple(tuple(own[e][t]) for _, own, _, _ in everywhere))
                for e, exchange in enumerate(SPLITS)
            }
        waits = {
            exchange: Spread(tuple(waited[exchange] for _, _, waited, _ in everywhere))
            for exchange in EXCHANGES
        }
        report = CommReport(step, everywhere[self._rank][3], tables, waits, splits)
        if self._callback is not None:
            self._callback(report)
        return report

    def close(self) -> None:
        """Stop counting."""
        self._shards.remove_recorder(self)

    # ---- in the thread of the exchange

    def _reset(self) -> None:
        self._counts = torch.zeros(len(self.tables), len(COUNTS), dtype=torch.int64, device="cpu")
        self._splits = torch.zeros(
            len(SPLITS), len(self.tables), self._shards.world_size, dtype=torch.int64, device="cpu"
        )
        self._waits = dict.fromkeys(EXCHANGES, 0.0)
        self._lookups = 0

    def _take(self) -> tuple[Any, Any, dict[str, float], int]:
        taken = self._counts.tolist(), self._splits.tolist(), self._waits, self._lookups
        self._reset()
        return taken

    def _add(self, name: str, by_table: Tensor) -> None:
        self._counts[:, _AT[name]] += by_table[self._columns]

    def requested(self, call: str, occurrences: Mapping[str, int], out: Tensor, into: Tensor) -> None:
        self._add("ids_sent", self._away(out))
        self._add("ids_received", self._away(into))
        if call != "lookup":
            return
        self._lookups += 1
        for t, name in enumerate(self.tables):
            self._counts[t, _AT["ids"]] += occurrences.get(name, 0)
        self._add("distinct", out.sum(0))
        self._add("served", into.sum(0))

    def sent(self, exchange: str, out: Tensor, into: Tensor, row_bytes: Sequence[int]) -> None:
        self._splits[SPLITS.index(exchange)] += out.t()[self._columns]
        each = torch.tensor(row_bytes, dtype=torch.int64, device="cpu")
        self._add("bytes_sent", self._away(out) * each)
        self._add("bytes_received", self._away(into) * each)

    def waited(self, exchange: str, seconds: float) -> None:
        self._waits[exchange] += seconds

    def read(self, misses: Mapping[str, int]) -> None:
        for t, name in enumerate(self.tables):
            self._counts[t, _AT["misses"]] += misses.get(name, 0)

    def created(self, table: str, rows: int) -> None:
        if table in self.tables:
            self._counts[self.tables.index(table), _AT["created"]] += rows

    def _away(self, counts: Tensor) -> Tensor:
        """Return per table what is sent to or received from other ranks."""
        return counts.sum(0) - counts[self._rank]
