"""The logs of a run: metrics.jsonl, TensorBoard scalars and histograms, and the metrics between two lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megalith.metrics import BinnedAUC
from megalith.training.steps import BatchScores


class MetricsLog:
    """metrics.jsonl: one JSON object per line."""

    def __init__(self, path: Path, *, keep_steps: int) -> None:
        self.path = path
        kept = [line for line in read_log(path) if line["step"] <= keep_steps] if keep_steps else []
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a line."""
        with open(self.path, "a") as file:
            file.write(json.dumps(record) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a log. An incomplete last line is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class ScalarWriter:
    """Writes the numbers of records as TensorBoard scalars, and histograms, if tensorboard is installed."""

    def __init__(self, directory: Path, first_step: int) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._writer = SummaryWriter(str(directory), purge_step=first_step or None)

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds the numbers of a record of metrics.jsonl at its step."""
        if self._writer is None:
            return
        rows = {f"rows/{table}": n for table, n in record["rows"].items()}
        speed = record["samples"] / record["seconds"] if record["seconds"] else None
        scalars = {
            "loss": record["loss"],
            "auc": record["auc"],
            "memory": record["memory"],
            "samples/s": speed,
        }
        counters = {
            f"{kind}/{table}": n
            for table, counts in record["counters"].items()
            for kind, n in counts.items()
            if kind != "removed"
        }
        parts = {f"memory/{part}": n for part, n in record["memory_parts"].items()}
        tiers = {
            f"{kind}/{table}": use[kind]
            for table, use in record.get("host_tier", {}).items()
            for kind in ("hit_rate", "device_rows", "host_rows")
        }
        self.add({**scalars, **rows, **counters, **parts, **tiers}, record["step"])

    def add(self, scalars: Mapping[str, float | None], step: int) -> None:
        """Adds numbers by name. None is left out."""
        if self._writer is None:
            return
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def add_histograms(self, values: Mapping[str, Sequence[float]], step: int) -> None:
        """Add the distribution of values by name."""
        if self._writer is None:
            return
        for name, each in values.items():
            if each:
                self._writer.add_histogram(name, torch.tensor(each, device="cpu"), step)

    def close(self) -> None:
        """Flushes and closes the event files."""
        if self._writer is not None:
            self._writer.close()


class LogWindow:
    """Loss and AUC since the last line of the log."""

    def __init__(self) -> None:
        self.auc = BinnedAUC()
        self.total = 0.0
        self.samples = 0

    def add(self, scored: list[BatchScores], loss: float, samples: int) -> None:
        for batch, logits in scored:
            self.auc.update(logits, batch.labels, batch.weights)
        self.total += loss * samples
        self.samples += samples
