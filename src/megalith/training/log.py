"""What a run reports: events, metrics.jsonl, and numbers of its tables.

A `Watcher` receives the events. `LogWindow` holds loss and AUC since the last line of metrics.jsonl,
`Periods` those of batches before the model was trained on them, and `TableNumbers` the rows, counters and
bytes of all tables on all ranks together; its calls are collective. Metrics for other systems are in
`trackers.py`, the frequencies of ids in `id_frequencies.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalith.data import Batch
from megalith.distributed.ranks import Ranks
from megalith.errors import InputError
from megalith.metrics import BinnedAUC, log_loss
from megalith.models import Model
from megalith.shards import CommReport, LocalShards, Shards
from megalith.table import HostTierUse, MemoryUse
from megalith.training.batches import StepBatch
from megalith.training.config import PERIODS
from megalith.training.model import score
from megalith.training.publishing import Pushed
from megalith.training.steps import BatchScores
from megalith.training.worker_batches import DoneStep


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

    def period(self, record: Mapping[str, Any]) -> None:
        """Called at the end of every period if train.progressive is set.

        Args:
            record: Its line in metrics.jsonl.
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


_BLOCK_ROWS = 65_536


class LogWindow:
    def __init__(self) -> None:
        self._auc = BinnedAUC()
        self._scored: list[BatchScores] = []  # not in the AUC yet: a block costs less than its batches
        self._rows = 0
        self.total = 0.0
        self.samples = 0

    def add(self, scored: list[BatchScores], loss: float, samples: int) -> None:
        self._scored += scored
        self._rows += samples
        if self._rows >= _BLOCK_ROWS:
            _ = self.auc
        self.total += loss * samples
        self.samples += samples

    @property
    def auc(self) -> BinnedAUC:
        if self._scored:
            self._auc.update(*columns_of(self._scored))
        self._scored, self._rows = [], 0
        return self._auc

    def add_rows(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        self.auc.update(logits, labels, weights)
        if len(logits):
            self.total += log_loss(logits, labels, weights) * len(logits)
            self.samples += len(logits)

    @classmethod
    def sum(cls, windows: Sequence[LogWindow]) -> LogWindow:
        total = cls()
        for window in windows:
            total.auc.sums += window.auc.sums
            total.total += window.total
            total.samples += window.samples
        return total

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers of a line of the log; None where there are none."""
        auc = self.auc.compute()
        loss = self.total / self.samples if self.samples else None
        return {"samples": self.samples, "loss": loss, "auc": None if math.isnan(auc) else auc}


def columns_of(scored: Sequence[BatchScores]) -> tuple[Tensor, ...]:
    """Logits, labels and, if the data has any, weights of all rows."""
    columns = [torch.cat([x.logits for x in scored]), torch.cat([x.batch.labels for x in scored])]
    weights = [x.batch.weights for x in scored if x.batch.weights is not None]
    return (*columns, torch.cat(weights)) if weights else tuple(columns)


ALL_ROWS = ""
"""The name of the window of all rows, next to those of rows with new ids of a feature."""


class Periods:
    """Progressive validation: each batch is scored before the model is trained on it (`train.progressive`).

    A batch belongs to the period of its newest row, or of its step. A period ends at the first line of the
    log at which no rank is in it, and at the end of the run: after a stop it has a second line.
    """

    def __init__(self, model: Model, ranks: Ranks, unit: str, size: int) -> None:
        self._model, self._ranks, self._unit, self._size = model, ranks, unit, size
        self._open: dict[int, dict[str, LogWindow]] = {}
        self._last: int | None = None
        # Scores in training are those of serving, unless the model drops weights at random.
        self._scores_again = any(isinstance(x, nn.Dropout) and x.p > 0 for x in model.modules())

    def before(self, number: int, step: StepBatch | DoneStep) -> Scored:
        """Find the period of a batch and its rows with new ids; score it as far as training does not."""
        time = step.batch.time if isinstance(step, StepBatch) else step.time
        at = number if self._unit == "steps" else time
        if at is None:
            raise InputError(
                "train.progressive: the data has no times: name the time column (--time, or time in "
                "[data.schema]), or give a number of batches"
            )
        self._last = at // self._size
        if not isinstance(step, StepBatch):
            return Scored(self._last, None, {})
        own = step.part(self._ranks.rank, self._ranks.size, range(self._ranks.rank, self._ranks.rank + 1))
        scores = None
        if self._scores_again:
            self._model.eval()
            with torch.no_grad():
                scores = [BatchScores(own, score(self._model, own))]
            self._model.train()
        return Scored(self._last, scores, self._new_ids(own))

    def _new_ids(self, batch: Batch) -> dict[str, Tensor]:
        """Return which rows have an id without a row of its table, by feature, if the tables are here."""
        shards, found = self._model.embeddings.shards, {}
        if isinstance(shards, LocalShards):
            for feature in self._model.embeddings.features:
                column = batch.features[feature.name]
                absent = shards.local[feature.table].find(column.values) < 0
                found[feature.name] = torch.zeros(len(batch), dtype=torch.bool, device="cpu")
                found[feature.name][column.row_ids()[absent]] = True
        return found

    def add(self, before: Scored, trained: list[BatchScores]) -> None:
        """Add a batch with the scores of its training step."""
        scored = trained if before.scores is None else before.scores
        if not scored:
            return
        windows = self._open.setdefault(before.period, {})
        columns = columns_of(scored)
        for name, rows in ((ALL_ROWS, None), *before.new.items()):
            parts = columns if rows is None else [column[rows] for column in columns]
            windows.setdefault(name, LogWindow()).add_rows(*parts)

    def ended(self, *, everything: bool = False) -> list[dict[str, Any]]:
        """Return the records of the periods that have ended. A collective call."""
        last = [each for each in self._ranks.gather(self._last) if each is not None]
        ended = [key for key in self._open if everything or key < min(last)]
        keys = sorted(set().union(*self._ranks.gather(ended)))
        return [self._record(key, self._ranks.gather(self._open.pop(key, {}))) for key in keys]

    def _record(self, key: int, everywhere: list[dict[str, LogWindow]]) -> dict[str, Any]:
        numbers: dict[str, dict[str, Any]] = {}
        for name in dict.fromkeys(name for windows in everywhere for name in windows):
            numbers[name] = LogWindow.sum(
                [windows[name] for windows in everywhere if name in windows]
            ).numbers
        return {"period": self._label(key), **numbers.pop(ALL_ROWS), "new": numbers}

    def _label(self, key: int) -> str:
        if self._unit == "steps":
            return f"steps {key * self._size} to {(key + 1) * self._size - 1}"
        start = datetime.fromtimestamp(key * self._size, UTC)
        return start.strftime("%Y-%m-%d %H:00" if self._size < PERIODS["day"] else "%Y-%m-%d")


class Scored(NamedTuple):
    """A batch before the model is trained on it."""

    period: int
    scores: list[BatchScores] | None
    """None: those of the training step."""
    new: dict[str, Tensor]
    """Feature -> whether a row has an id without a row of its table, bool [rows]."""


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
