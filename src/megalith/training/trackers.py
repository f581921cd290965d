"""Trackers: what receives the metrics of a run, next to metrics.jsonl.

TensorBoard is here, and is used if it is installed. The others are in `megalith.integrations.trackers`, which
is loaded by name: `train.tracker` lists them. docs/guides/trackers.md lists the names of metrics.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megalith.errors import InputError

logger = logging.getLogger(__name__)

TRACKERS = ("wandb", "mlflow", "opentelemetry", "prometheus")
TRACKER_RUNS = "trackers.json"
"""File of a run with its ids in Weights & Biases and MLflow, where a resumed run continues."""


class Tracker:
    """Receives the metrics of a run. The methods do nothing by default.

    If one of them raises, the run logs a warning and continues without this tracker.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Called with every line of metrics.jsonl.

        Args:
            metrics: Numbers by name.
            step: Number of batches so far.
        """

    def log_histograms(self, values: Mapping[str, Sequence[float]], step: int) -> None:
        """Called with the exchanges between ranks if train.comm_metrics is set.

        Args:
            values: Numbers by name, of which the distribution is of interest.
            step: Number of batches so far.
        """

    def close(self) -> None:
        """Called when the training ends or stops."""


class TensorBoard(Tracker):
    """Writes event files, if tensorboard is installed; later steps of an earlier attempt are replaced."""

    def __init__(self, directory: Path, first_step: int) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._writer = SummaryWriter(str(directory), purge_step=first_step or None)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    def log_histograms(self, values: Mapping[str, Sequence[float]], step: int) -> None:
        if self._writer is not None:
            for name, each in values.items():
                self._writer.add_histogram(name, torch.tensor(each, device="cpu"), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class RunTrackers(Tracker):
    """Passes metrics to several trackers, and drops those that raise."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, metrics: Mapping[str, float | None], step: int) -> None:
        known = {name: float(value) for name, value in metrics.items() if value is not None}
        self._each("log", known, step)

    def log_histograms(self, values: Mapping[str, Sequence[float]], step: int) -> None:
        self._each("log_histograms", {name: each for name, each in values.items() if each}, step)

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *args: Any) -> None:
        for tracker in tuple(self._trackers):
            try:
                getattr(tracker, method)(*args)
            except Exception as error:  # of a service or a callback of the user; the run is worth more
                self._trackers.remove(tracker)
                logger.warning("%s gets no more metrics: %s", type(tracker).__name__, error, exc_info=True)


def metrics_of(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers of a line of metrics.jsonl under the names of metrics."""
    counters = {
        f"{kind}/{table}": n
        for table, counts in record["counters"].items()
        for kind, n in counts.items()
        if kind != "removed"
    }
    tiers = {
        f"{kind}/{table}": use[kind]
        for table, use in record.get("host_tier", {}).items()
        for kind in ("hit_rate", "device_rows", "host_rows")
    }
    return {
        "loss": record["loss"],
        "auc": record["auc"],
        "memory": record["memory"],
        "samples_per_second": record["samples"] / record["seconds"] if record["seconds"] else None,
        **{f"rows/{table}": n for table, n in record["rows"].items()},
        **counters,
        **{f"memory_part/{part}": n for part, n in record["memory_parts"].items()},
        **tiers,
    }


def tracker_names(text: str | None) -> list[tuple[str, str]]:
    """Return the names in train.tracker, each with the text after its colon."""
    found = []
    for each in filter(None, (text or "").split(",")):
        name, _, option = each.strip().partition(":")
        if name not in TRACKERS:
            raise InputError(
                f"config: train.tracker: {name!r} is not a tracker: choose from {', '.join(TRACKERS)} "
                "(TensorBoard is used if it is installed)"
            )
        found.append((name, option))
    return found


def open_trackers(text: str | None, directory: Path, config: Mapping[str, Any], step: int) -> list[Tracker]:
    """Open TensorBoard and the trackers that train.tracker names."""
    trackers: list[Tracker] = [TensorBoard(directory / "tensorboard", step)]
    for name, option in tracker_names(text):
        # By name: nothing in the core imports integrations.
        integration = importlib.import_module("megalith.integrations.trackers")
        trackers.append(integration.open_tracker(name, option, directory, config))
    return trackers
