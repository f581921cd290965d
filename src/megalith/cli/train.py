"""megalith train: a run from a config file and flags, with a bar of how it gets on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from typer.core import TyperCommand

from megalith import checkpoint
from megalith.cli import output
from megalith.cli.console import exit_on_error
from megalith.cli.launch import launched
from megalith.cli.output import console, progress
from megalith.data import DataUnavailableError
from megalith.errors import InputError
from megalith.reporting.report import write_report
from megalith.training import Evaluation, Run, RunConfig, TrainConfig, Watcher
from megalith.training.publishing import Pushed
from megalith.training.run_model import CHECKPOINT, config_of

INTERRUPTED = 130


class TrainCommand(TyperCommand):
    """`--comm-metrics` by itself means all tables: an option whose value may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Gives the bare flag its value."""
        return super().parse_args(
            ctx, ["--comm-metrics=*" if arg == "--comm-metrics" else arg for arg in args]
        )


def train(
    # torchrun takes --run, even behind the command, for the beginning of an option of its own.
    run: Annotated[Path, typer.Option("--run", "--run-dir", help="Directory of the run.")] = Path("runs/run"),
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
    save_async: Annotated[
        bool | None,
        typer.Option("--save-async/--no-save-async", help="Train on while a checkpoint is being written."),
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option(help="Keep so many of the newest checkpoints, in RUN/checkpoints.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep the checkpoints of every so many batches there, too.")
    ] = None,
    log_every: Annotated[int | None, typer.Option(help="Batches between lines of metrics.jsonl.")] = None,
    on_error: Annotated[str | None, typer.Option(help="raise or skip: what to do with bad rows.")] = None,
    dist_type: Annotated[
        str | None,
        typer.Option(help="How rows spread over ranks: continuous, roundrobin or hash_roundrobin."),
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="For continuous: the ids of a block.")] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(help="Parts of a batch, a power of two: same bits on any number of ranks up to it."),
    ] = None,
    wire: Annotated[
        str | None,
        typer.Option(help="Precision between ranks: float32, float16, bfloat16, int8; or rows=...,grads=..."),
    ] = None,
    comm_metrics: Annotated[
        str | None,
        typer.Option(metavar="[=TABLE,...]", help="Measure what travels between ranks, of some tables."),
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds that ranks wait for each other.")] = None,
    publish: Annotated[
        str | None,
        typer.Option(help="Push changes to servers: static:HOST:PORT,..., file:PATH or zk://HOST:PORT/ROOT."),
    ] = None,
    publish_interval: Annotated[float | None, typer.Option(help="Seconds between pushes.")] = None,
    model_name: Annotated[
        str | None, typer.Option(help="What servers call the model; default: the kind of model.")
    ] = None,
    publish_token_file: Annotated[
        str | None, typer.Option(help="File with the token that servers ask for.")
    ] = None,
    publish_ca_file: Annotated[
        str | None, typer.Option(help="Certificates (PEM) that vouch for servers: pushes travel by TLS.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the run's checkpoint; with --config, start if none."),
    ] = False,
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

    Example: megalith train --config run.toml --save-every 1000 --keep-last 3 --keep-every 10000

    Example: megalith train --config run.toml --run runs/live --publish static:localhost:8500

    Example: torchrun --nproc-per-node 4 -m megalith train --config run.toml --run-dir runs/big
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
        "train_save_async": save_async,
        "train_keep_last": keep_last,
        "train_keep_every": keep_every,
        "train_log_every": log_every,
        "train_dist_type": dist_type,
        "train_block_size": block_size,
        "train_micro_batches": micro_batches,
        "train_wire": wire,
        "train_comm_metrics": comm_metrics,
        "train_timeout": timeout,
        "train_publish": publish,
        "train_publish_interval": publish_interval,
        "train_publish_name": model_name,
        "train_publish_token_file": publish_token_file,
        "train_publish_ca_file": publish_ca_file,
    }
    with exit_on_error(), launched(run, timeout or TrainConfig.timeout) as ranks:
        out = console() if ranks.rank == 0 else Console(quiet=True)  # the first speaks for all
        begun = (run / CHECKPOINT / "manifest.json").exists()
        if resume and (begun or config is None):
            opened = _resume(run, config, flags)
        else:
            opened = _start(run, config, flags, start_over, fallback, out)
        stopped = _train(opened, out)
        if not stopped:
            _conclude(opened, comparison, out)
    if stopped:
        raise typer.Exit(INTERRUPTED)


def _start(
    run: Path, config: Path | None, flags: dict[str, Any], start_over: bool, fallback: bool, out: Console
) -> Run:
    chosen = (RunConfig() if config is None else RunConfig.from_toml(config)).changed(**flags)
    try:
        return Run(chosen, run, start_over=start_over)
    except DataUnavailableError as error:
        if not fallback:
            raise
        out.print(f"[yellow]{error}[/]")
        out.print("Training on the made-up data of a known teacher instead.")
        return Run(chosen.changed(data_kind="teacher"), run, start_over=start_over)


def _resume(run: Path, config: Path | None, flags: dict[str, Any]) -> Run:
    if config is not None:
        saved = config_of(checkpoint.read_manifest(run / CHECKPOINT), run)
        return Run.resume(run, saved.changes_to(RunConfig.from_toml(config).changed(**flags)))
    given = {name: value for name, value in flags.items() if value is not None}
    for name in given:
        if not name.startswith("train_"):
            flag = name.partition("_")[2].replace("_", "-")
            raise InputError(f"--{flag} cannot change when a run is resumed")
    return Run.resume(run, {name.removeprefix("train_"): value for name, value in given.items()})


def _train(run: Run, out: Console) -> bool:
    """Whether it was stopped."""
    spread = f", {run.ranks.size} ranks" if run.ranks.size > 1 else ""
    out.print(f"[bold]{run.config.model.name}[/] on {run.source.title}{spread}")
    if run.config.train.comm_metrics is not None and run.ranks.size == 1:
        out.print("--comm-metrics: there is one rank, so nothing travels")
    with _stopping(run), _Bar(run) if run.ranks.is_first else nullcontext(Watcher()) as watcher:
        run.train(watcher)
    for reason, count in run.source.train.skipped.items():
        out.print(f"skipped {count:,} rows: {reason}")
    if run.stopped:
        out.print(f"stopped after step {run.step:,}; `--resume --run {run.directory}` goes on")
    return run.stopped


def _conclude(run: Run, comparison: Path | None, out: Console) -> None:
    """Evaluates, and writes the report."""
    result = None
    if run.source.test is not None:
        first = run.ranks.is_first
        with progress("evaluating", run.source.test.num_rows) if first else nullcontext() as on_batch:
            result = run.evaluate(on_batch)
    rows = sum(run.rows().values())
    if run.ranks.is_first:
        page = write_report(run.directory, comparison=comparison)
        out.print(_summary(run, rows, result, page))


@contextmanager
def _stopping(run: Run) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the batch under way; a second one at once.

    Of many ranks none may end alone, and launchers send signals on: there the second counts for nothing.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if run.stop_asked and run.ranks.size == 1:
            raise KeyboardInterrupt
        run.stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Bar(Watcher):
    """Samples, samples/s, loss, AUC, rows, memory; rows written, where saving takes long."""

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
            console=console(),
        )
        self._task = self._progress.add_task("training", total=total, completed=run.samples, note="")
        self._more = ""
        self._save: TaskID | None = None
        self._began = 0.0

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

    def saving(self, rows: int) -> None:
        """Before a checkpoint."""
        self._began = time.monotonic()
        self._save = self._progress.add_task("saving", total=rows, note="", visible=False)

    def wrote(self, rows: int) -> None:
        """While it is being written."""
        if self._save is not None and time.monotonic() - self._began > output.PATIENCE:
            note = f"{rows:,} rows"
            self._progress.update(self._save, completed=rows, note=note, visible=True, refresh=True)

    def saved(self) -> None:
        """When it is complete."""
        if self._save is not None:
            self._progress.remove_task(self._save)
        self._save = None

    def pushed(self, pushed: Pushed) -> None:
        """At the end, what servers got, and who did not get everything."""
        servers = "1 server" if pushed.servers == 1 else f"{pushed.servers:,} servers"
        lines = [f"pushed {pushed.rows:,} rows to {servers}"]
        if not pushed.servers and not pushed.lagging:
            lines = [f"nothing was pushed: {self._run.config.train.publish} names no server of this model"]
        for target in pushed.lagging:
            lines.append(f"not everything was pushed: {target}")
        for line in lines:
            self._progress.console.print(line, markup=False)


def _summary(run: Run, rows: int, result: Evaluation | None, page: Path) -> Table:
    table = Table(show_header=False, box=None)
    if result is not None:
        table.add_row("AUC", f"{result.auc:.4f}", "of held-back data")
        table.add_row("log loss", f"{result.log_loss:.4f}", f"{result.samples:,} samples")
    table.add_row("rows", f"{rows:,}", f"in {len(run.model.embeddings.shards.configs)} tables")
    table.add_row("trained", f"{run.samples:,}", f"samples in {run.seconds:.1f} s")
    table.add_row("checkpoint", str(run.directory / "checkpoint"))
    table.add_row("report", str(page))
    return table
