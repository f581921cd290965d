"""TrainingBar: the progress bar of `megalith train`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from megalith.cli import output
from megalith.training import Run, Watcher
from megalith.training.publishing import Pushed


class TrainingBar(Watcher):
    """Shows samples, samples/s, loss, AUC, rows and memory, the lowest hit rate of GPU memory of tables with
    rows in host memory, and the rows written by a slow save.
    """

    def __init__(self, run: Run) -> None:
        rows = run.source.train.num_rows
        total = None if rows is None else rows * run.config.train.epochs
        limit = run.config.train.max_steps
        if limit is not None:
            at_most = limit * run.config.data.batch_size
            total = at_most if total is None else min(total, at_most)
        self._run = run
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=output.console(),
        )
        self._task = self._progress.add_task("training", total=total, completed=run.samples, note="")
        self._more = ""
        self._save: TaskID | None = None
        self._began = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def batch(self, step: int, samples: int, loss: float) -> None:
        speed = samples / self._run.seconds if self._run.seconds else 0.0
        note = f"{samples:,} samples  {speed:,.0f}/s  loss {loss:.4f}{self._more}"
        self._progress.update(self._task, completed=samples, note=note)

    def logged(self, record: Mapping[str, Any]) -> None:
        auc = "" if record["auc"] is None else f"  AUC {record['auc']:.4f}"
        rows = sum(record["rows"].values())
        rates = [use["hit_rate"] for use in record.get("host_tier", {}).values()]
        hits = f"  GPU hits {min(rates):.1%}" if rates else ""
        self._more = f"{auc}  {rows:,} rows  {record['memory'] / 2**20:,.1f} MiB{hits}"

    def saving(self, rows: int) -> None:
        self._began = time.monotonic()
        self._save = self._progress.add_task("saving", total=rows, note="", visible=False)

    def wrote(self, rows: int) -> None:
        if self._save is not None and time.monotonic() - self._began > output.PATIENCE:
            note = f"{rows:,} rows"
            self._progress.update(self._save, completed=rows, note=note, visible=True, refresh=True)

    def saved(self) -> None:
        if self._save is not None:
            self._progress.remove_task(self._save)
        self._save = None

    def pushed(self, pushed: Pushed) -> None:
        lines = [f"pushed {pushed.rows:,} rows to {output.plural(pushed.servers, 'server')}"]
        if not pushed.servers and not pushed.lagging:
            lines = [f"nothing was pushed: {self._run.config.train.publish} lists no server of this model"]
        for target in pushed.lagging:
            lines.append(f"some rows were not pushed: {target}")
        for line in lines:
            self._progress.console.print(line, markup=False)
