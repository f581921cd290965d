"""What a run reports: events, metrics.jsonl, and numbers of its tables.

A `Watcher` receives the events. `LogWindow` holds loss and AUC since the last line of metrics.jsonl, and
`TableNumbers` the rows, counters and bytes of all tables on all ranks together; its calls are collective.
Metrics for other systems are in `trackers.py`, the frequencies of ids in `id_frequencies.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megalith.distributed.ranks import Ranks
from megalith.metrics import BinnedAUC
from megalith.shards import CommReport, Shards
from megalith.table import HostTierUse, MemoryUse
from megalith.training.publishing import Pushed
from megalith.training.steps import BatchScores


class Watcher:
    """Receives the events of a run. The methods do nothing by default."""

    def batch(self, step: int, samples: int, loss: float) -> None:
        """Called after every batch.

        Args:
            step: Number of batches so far.
            samples: Number of samples so far.
            loss: Mean loss of the batch.
        """

    def logged(self, record: Mapping[str, Any]) -> None:
        """Called after every line of metrics.jsonl.

        Args:
            record: The line.
        """

    def validated(self, record: Mapping[str, Any], best: bool) -> None:
        """Called after every validation.

        Args:
            record: Its line in metrics.jsonl.
            best: Whether it is the best one so far.
        """

    def communicated(self, report: CommReport) -> None:
        """Called with every line of metrics.jsonl if train.comm_metrics is set.

        Args:
            report: The exchanges since the last line.
        """

    def saving(self, rows: int) -> None:
        """Called before a checkpoint is saved.

        Args:
            rows: Number of rows to save.
        """

    def wrote(self, rows: int) -> None:
        """Called while a checkpoint is written, from another thread if saves are asynchronous.

        Args:
            rows: Number of rows written so far.
        """

    def saved(self) -> None:
        """Called when a checkpoint is complete, from the thread of `wrote`."""

    def pushed(self, pushed: Pushed) -> None:
        """Called at the end if the run publishes.

        Args:
            pushed: What was pushed.
        """


class MetricsLog:
    def __init__(self, path: Path, *, keep_steps: int) -> None:
        self.path = path
        kept = [line for line in read_log(path) if line["step"] <= keep_steps] if keep_steps else []
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def write(self, record: Mapping[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(record) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a log. An incomplete last line is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class LogWindow:
    def __init__(self) -> None:
        self.auc = BinnedAUC()
        self.total = 0.0
        self.samples = 0

    def add(self, scored: list[BatchScores], loss: float, samples: int) -> None:
        for batch, logits in scored:
            self.auc.update(logits, batch.labels, batch.weights)
        self.total += loss * samples
        self.samples += samples


_TOTALS = ("created", "removed", "evicted", "refused")
"""The counters of rows that only increase."""


class TableNumbers:
    """See the module. All calls are collective."""

    def __init__(self, shards: Shards, ranks: Ranks) -> None:
        self._shards = shards
        self._ranks = ranks
        self._before: dict[str, dict[str, int]] = {}
        self._logged: dict[str, HostTierUse] = {}

    def continue_from(self, saved: Mapping[str, Mapping[str, int]] | None) -> None:
        """Continue the counters of a saved run: rows that were loaded are not created again."""
        for name, counts in self.counters().items():
            before = counts if saved is None else saved.get(name, counts)
            self._before[name] = {key: before.get(key, 0) - counts[key] for key in _TOTALS}

    def rows(self) -> dict[str, int]:
        own = {name: stats.rows for name, stats in self._shards.stats().items()}
        everywhere = self._ranks.gather(own)
        return {name: sum(rows[name] for rows in everywhere) for name in own}

    def counters(self) -> dict[str, dict[str, int]]:
        own = {
            name: {key: getattr(each.counters, key) for key in (*_TOTALS, "pending")}
            for name, each in self._shards.stats().items()
        }
        everywhere = self._ranks.gather(own)
        return {
            name: {
                key: sum(rank[name][key] for rank in everywhere) + self._before.get(name, {}).get(key, 0)
                for key in counts
            }
            for name, counts in own.items()
        }

    def host_tier(self) -> dict[str, HostTierUse]:
        own = {name: tuple(each.host_tier) for name, each in self._shards.stats().items() if each.host_tier}
        everywhere = self._ranks.gather(own)
        return {
            name: HostTierUse(
                *(sum(parts) for parts in zip(*(rank[name] for rank in everywhere), strict=True))
            )
            for name in own
        }

    def host_tier_since(self) -> dict[str, dict[str, float]]:
        """Return the numbers of `host_tier` for a line of the log."""
        found = {}
        for name, use in self.host_tier().items():
            before = self._logged.get(name, HostTierUse(0, 0, 0, 0, 0))
            since = HostTierUse(
                *use[:2], *(now - then for now, then in zip(use[2:], before[2:], strict=True))
            )
            found[name] = {**since._asdict(), "hit_rate": since.hit_rate}
            self._logged[name] = use
        return found

    def memory(self) -> dict[str, int]:
        uses = [asdict(use) for use in self._shards.memory().values()]
        own = {part.name: sum(use[part.name] for use in uses) for part in fields(MemoryUse)}
        everywhere = self._ranks.gather(own)
        return {part: sum(rank[part] for rank in everywhere) for part in own}
