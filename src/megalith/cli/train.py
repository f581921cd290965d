"""megalith train: a run from a config file and flags, with a bar of how it gets on."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from megalith.cli.console import bar, console, told
from megalith.data import DataUnavailableError
from megalith.errors import InputError
from megalith.report import write_report
from megalith.training import Evaluation, Run, RunConfig, Watcher

INTERRUPTED = 130


def train(
    run: Annotated[Path, typer.Option("--run", help="Directory of the run.")] = Path("runs/run"),
    config: Annotated[Path | None, typer.Option("--config", help="TOML file; flags win over it.")] = None,
    data: Annotated[
        str | None, typer.Option(help="movielens, teacher, parquet, csv, criteo or monolith.")
    ] = None,
    path: Annotated[str | None, typer.Option(help="File, directory or pattern to train on.")] = None,
    test_path: Annotated[str | None, typer.Option(help="What to evaluate on.")] = None,
    model: Annotated[str | None, typer.Option(help="deepfm, dlrm, dcnv2 or din.")] = None,
    dim: Annotated[int | None, typer.Option(help="How wide an embedding is.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows of a batch.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after so many batches.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the dense weights.")] = None,
    table_optimizer: Annotated[
        str | None, typer.Option(help="adagrad, adam, ftrl, rowwise_adagrad or sgd.")
    ] = None,
    table_lr: Annotated[float | None, typer.Option(help="Learning rate of the tables.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of rows, weights, the order of samples.")] = None,
    threads: Annotated[int | None, typer.Option(help="Of torch and the native module.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Batches between checkpoints.")] = None,
    log_every: Annotated[int | None, typer.Option(help="Batches between lines of metrics.jsonl.")] = None,
    on_error: Annotated[str | None, typer.Option(help="raise or skip: what to do with bad rows.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's checkpoint.")] = False,
    start_over: Annotated[bool, typer.Option("--start-over", help="Replace the run that is there.")] = False,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="Train on teacher data when movielens cannot be had.")
    ] = False,
    comparison: Annotated[
        Path | None, typer.Option(help="JSON of a benchmark for the report to show.", hidden=True)
    ] = None,
) -> None:
    """Train a model; evaluate it on held-back data; save a checkpoint; write report.html.

    Ctrl-C saves and ends the run; --resume goes on exactly where it stopped.

    Example: megalith train --data movielens --run runs/demo

    Example: megalith train --config run.toml --epochs 2 --run runs/mine
    """
    flags: dict[str, Any] = {
        "data_kind": data,
        "data_path": path,
        "data_test_path": test_path,
        "data_batch_size": batch_size,
        "data_on_error": on_error,
        "model_name": model,
        "model_dim": dim,
        "train_epochs": epochs,
        "train_max_steps": max_steps,
        "train_lr": lr,
        "train_table_optimizer": table_optimizer,
        "train_table_lr": table_lr,
        "train_seed": seed,
        "train_threads": threads,
        "train_save_every": save_every,
        "train_log_every": log_every,
    }
    with told():
        opened = _resume(run, config, flags) if resume else _start(run, config, flags, start_over, fallback)
        console.print(f"[bold]{opened.config.model.name}[/] on {opened.source.title}", highlight=False)
        with _stopping(opened), _Bar(opened) as watcher:
            opened.train(watcher)
        for reason, count in opened.source.train.skipped.items():
            console.print(f"skipped {count:,} rows: {reason}", highlight=False)
        if opened.stopped:
            console.print(f"stopped after step {opened.step:,}; `--resume --run {run}` goes on")
            raise typer.Exit(INTERRUPTED)
        result = None
        if opened.source.test is not None:
            with bar("evaluating", opened.source.test.num_rows) as on_batch:
                result = opened.evaluate(on_batch)
        page = write_report(opened.directory, comparison=comparison)
        _summary(opened, result, page)


def _start(run: Path, config: Path | None, flags: dict[str, Any], start_over: bool, fallback: bool) -> Run:
    chosen = (RunConfig() if config is None else RunConfig.from_toml(config)).changed(**flags)
    try:
        return Run(chosen, run, start_over=start_over)
    except DataUnavailableError as error:
        if not fallback:
            raise
        console.print(f"[yellow]{error}[/]", highlight=False)
        console.print("Training on the made-up data of a known teacher instead.")
        return Run(chosen.changed(data_kind="teacher"), run, start_over=start_over)


def _resume(run: Path, config: Path | None, flags: dict[str, Any]) -> Run:
    if config is not None:
        raise InputError("a resumed run brings its config: leave --config out")
    given = {name: value for name, value in flags.items() if value is not None}
    for name in given:
        if not name.startswith("train_"):
            flag = name.partition("_")[2].replace("_", "-")
            raise InputError(f"--{flag} cannot change when a run is resumed")
    return Run.resume(run, {name.removeprefix("train_"): value for name, value in given.items()})


@contextmanager
def _stopping(run: Run) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the batch under way; a second one at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if run.stopped:
            raise KeyboardInterrupt
        run.stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Bar(Watcher):
    """Samples, samples/s, loss, AUC, rows, memory."""

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
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("training", total=total, completed=run.samples, note="")
        self._more = ""

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def batch(self, step: int, samples: int, loss: float) -> None:
        """After every batch."""
        speed = samples / self._run.seconds if self._run.seconds else 0.0
        note = f"{samples:,} samples  {speed:,.0f}/s  loss {loss:.4f}{self._more}"
        self._progress.update(self._task, completed=samples, note=note)

    def logged(self, record: Mapping[str, Any]) -> None:
        """After every line of the log."""
        auc = "" if record["auc"] is None else f"  AUC {record['auc']:.4f}"
        rows = sum(record["rows"].values())
        self._more = f"{auc}  {rows:,} rows  {record['memory'] / 2**20:,.1f} MiB"


def _summary(run: Run, result: Evaluation | None, page: Path) -> None:
    table = Table(show_header=False, box=None)
    if result is not None:
        table.add_row("AUC", f"{result.auc:.4f}", "of held-back data")
        table.add_row("log loss", f"{result.log_loss:.4f}", f"{result.samples:,} samples")
    rows = sum(stats.rows for stats in run.model.embeddings.shards.stats().values())
    table.add_row("rows", f"{rows:,}", f"in {len(run.model.embeddings.shards.configs)} tables")
    table.add_row("trained", f"{run.samples:,}", f"samples in {run.seconds:.1f} s")
    table.add_row("checkpoint", str(run.directory / "checkpoint"))
    table.add_row("report", str(page))
    console.print(table)
