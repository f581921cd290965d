"""Watcher: receives the events of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.shards import CommReport
from megalith.training.publishing import Pushed


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
