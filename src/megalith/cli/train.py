"""megalith train: starts or resumes a run, as one process or as the ranks of a launcher."""

from __future__ import annotations

import glob
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn, Self

import torch
import torch.distributed as dist
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
from rich.text import Text
from typer.core import TyperCommand

from megalith import checkpoint
from megalith.cli import output
from megalith.cli.config_options import config_options
from megalith.cli.output import console, exit_on_error, plural, progress, skipped_lines
from megalith.data import DataUnavailableError
from megalith.data.table_reader import SUFFIXES
from megalith.distributed.launcher_environment import LaunchWarning, RankSetup, configure, init_process_group
from megalith.errors import CheckpointError, InputError
from megalith.reporting.report import write_report
from megalith.table import HostTierUse
from megalith.training import DataConfig, Evaluation, ModelConfig, Run, RunConfig, TrainConfig, Watcher
from megalith.training.config import KINDS
from megalith.training.directory import BEST, CHECKPOINT, find_checkpoint, run_of
from megalith.training.model import config_of, device_of
from megalith.training.publishing import Pushed


@contextmanager
def launched(run: Path, timeout: float) -> Iterator[RankSetup]:
    """Create the process group of the launcher's ranks. Without a launcher there is one rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no launcher", LaunchWarning)
        setup = configure(run, merge_checkpoints=True, device="cpu")
    init_process_group(setup, timeout=timeout)
    yield setup
    if setup.size > 1:
        # Not after an error: the state of the other ranks is unknown, and the process is about to exit.
        dist.destroy_process_group()


class TrainingBar(Watcher):
    """Shows the progress of a run and of a slow save, with numbers of the last line of its log."""

    def __init__(self, run: Run) -> None:
        rows = run.source.train.num_rows if run.config.data.split_time is None else None
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
        self._last: tuple[int, float] | None = None
        self._due = 0.0
        self._more = ""
        self._save: TaskID | None = None
        self._began = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._draw()
        self._progress.stop()

    def batch(self, step: int, samples: int, loss: float) -> None:
        self._last = samples, loss
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + 0.1  # drawing takes as long as some steps on a GPU
            self._draw()

    def _draw(self) -> None:
        if self._last is None:
            return
        samples, loss = self._last
        speed = samples / self._run.seconds if self._run.seconds else 0.0
        note = f"{samples:,} samples  {speed:,.0f}/s  loss {loss:.4f}{self._more}"
        self._progress.update(self._task, completed=samples, note=note)

    def logged(self, record: Mapping[str, Any]) -> None:
        auc = "" if record["auc"] is None else f"  AUC {record['auc']:.4f}"
        rows = sum(record["rows"].values())
        rates = [use["hit_rate"] for use in record.get("host_tier", {}).values()]
        hits = f"  GPU hits {min(rates):.1%}" if rates else ""
        self._more = f"{auc}  {rows:,} rows  {record['memory'] / 2**20:,.1f} MiB{hits}"

    def validated(self, record: Mapping[str, Any], best: bool) -> None:
        numbers = f"validation loss {record['loss']:.4f}"
        if record["auc"] is not None:
            numbers += f"  AUC {record['auc']:.4f}"
        self._progress.console.print(f"step {record['step']:,}: {numbers}{'  (best)' if best else ''}")

    def period(self, record: Mapping[str, Any]) -> None:
        def show(numbers: Mapping[str, Any]) -> str:
            auc = "none" if numbers["auc"] is None else f"{numbers['auc']:.4f}"
            return f"{auc} of {output.plural(numbers['samples'], 'row')}"

        line = f"{record['period']}: AUC before training {show(record)}"
        new = [f"new {name} {show(each)}" for name, each in record["new"].items() if each["samples"]]
        self._progress.console.print("; ".join([line, *new]))

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


INTERRUPTED = 130
STOPPING = b"stopping after this batch, then saving; press Ctrl-C again to stop without saving\n"


class TrainCommand(TyperCommand):
    """The `train` command, where `--comm-metrics` may be given without a value: all tables."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(
            ctx, ["--comm-metrics=*" if arg in ("--comm-metrics", "--comm_metrics") else arg for arg in args]
        )


PANELS = {
    "Data": ("on_error",),
    "Tables": (
        *("table_options", "initializer", "missing", "admission", "eviction", "evict_every"),
        *("precision", "rounding", "serving", "huge_pages", "device_bytes", "deterministic"),
    ),
    "Validation and early stopping": (
        *("validation_path", "split_time", "validate_every", "progressive", "metric", "patience"),
        "keep_best",
    ),
    "Logs and checkpoints": (
        *("log_every", "tracker", "save_every", "save_interval", "save_async", "keep_last", "keep_every"),
    ),
    "Several ranks (torchrun)": (
        *("micro_batches", "dist_type", "block_size", "wire", "comm_metrics", "timeout"),
    ),
    "Parameter servers": (*("servers", "workers", "server_mode", "staleness", "server_log", "ray_address"),),
    "Pushing rows to servers": (
        *("publish", "publish_interval", "publish_name", "publish_token_file", "publish_ca_file"),
    ),
}
"""Group in the help of the command -> its options. Those without a group come first."""


@config_options(
    "data", DataConfig, flags={"kind": "--data"}, omit=("schema", "options"), panels=PANELS, only_given=True
)
@config_options(
    "model", ModelConfig, flags={"name": "--model"}, omit=("features", "tables", "options"), only_given=True
)
@config_options(
    "training",
    TrainConfig,
    flags={
        "save_async": "--save-async/--no-save-async",
        "keep_best": "--keep-best/--no-keep-best",
        "huge_pages": "--huge-pages/--no-huge-pages",
        "deterministic": "--deterministic/--fast",
        "publish_name": "--model-name",
        "server_mode": "--mode",
        "server_log": "--log",
    },
    omit=("engine",),
    panels=PANELS,
    only_given=True,
    metavars={"comm_metrics": "[=TABLE,...]"},
)
def train(
    # torchrun reads --run, even after the command, as an abbreviation of one of its own options.
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", "--run-dir", help="Directory of the run. Default: runs/run, or with --from that run."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file. Flags override its values.")
    ] = None,
    *,
    data: dict[str, Any],
    label: Annotated[str | None, typer.Option(help="Label column of parquet and csv files.")] = None,
    features: Annotated[
        str | None,
        typer.Option(help="Columns of ids: user,item, or with names of features user=user_id,item=item_id."),
    ] = None,
    dense: Annotated[str | None, typer.Option(help="Columns of numbers: price,age.")] = None,
    weight: Annotated[str | None, typer.Option(help="Column of row weights.", rich_help_panel="Data")] = None,
    time: Annotated[str | None, typer.Option(help="Column of event times.", rich_help_panel="Data")] = None,
    model: dict[str, Any],
    training: dict[str, Any],
    base: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Continue a run that has ended with other data (--path): its tables, dense weights, "
            "optimizers and step. With --resume, do nothing that is already done.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the checkpoint of the run. With --config, start the run if there is none.",
        ),
    ] = False,
    start_over: Annotated[
        bool, typer.Option("--start-over", help="Replace the existing run in the directory.")
    ] = False,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="Train on synthetic data if movielens is not available.")
    ] = False,
    comparison: Annotated[
        Path | None, typer.Option(help="JSON of a benchmark to show in the report.", hidden=True)
    ] = None,
) -> None:
    """Train a model, evaluate it on held-out data, save a checkpoint and write report.html.

    Ctrl-C saves the run and stops it; a second Ctrl-C stops it without saving. --resume continues exactly
    where it stopped.

    Example: megalith train --data movielens --run runs/demo

    Example: megalith train --path clicks.parquet --label clicked --features user,item,tags

    Example: megalith train --from runs/mine --path week49 --run runs/week49

    Example: megalith train --config run.toml --epochs 2 --run runs/mine

    Example: megalith train --config run.toml --save-every 1000 --keep-last 3 --keep-every 10000

    Example: megalith train --config run.toml --tracker wandb,prometheus:127.0.0.1:9464

    Example: megalith train --config run.toml --admission min_count=3 --eviction ttl=2592000,capacity=1000000

    Example: megalith train --config run.toml --run runs/live --publish static:localhost:8500

    Example: megalith train --config run.toml --servers 2 --workers 4 --log sync --run runs/servers

    Example: torchrun --nproc-per-node 4 -m megalith train --config run.toml --run-dir runs/big
    """
    sections = {"data": data, "model": model, "train": training}
    flags = {
        f"{section}_{key}": value for section, values in sections.items() for key, value in values.items()
    }
    columns = {"label": label, "features": features, "dense": dense, "weight": weight, "time": time}
    where = run or (Path("runs/run") if base is None else run_of(find_checkpoint(base)))
    with exit_on_error(), launched(where, training.get("timeout") or TrainConfig.timeout) as ranks:
        out = console() if ranks.rank == 0 else Console(quiet=True)
        wanted = None if config is None else RunConfig.from_toml(config)
        options: dict[str, Any] = {"resume": resume, "start_over": start_over}
        try:
            opened = _open(where, base, wanted, flags, columns, **options)
        except DataUnavailableError as error:
            if not fallback or resume or base is not None:
                raise
            out.print(f"[yellow]{error}[/]")
            out.print("Training on synthetic data instead.")
            opened = _open(where, base, wanted, {**flags, "data_kind": "synthetic"}, columns, **options)
        with opened:
            stopped = _train(opened, out)
            if not stopped:
                _conclude(opened, comparison, out)
    if stopped:
        raise typer.Exit(INTERRUPTED)


def _open(
    where: Path,
    base: Path | None,
    config: RunConfig | None,
    flags: dict[str, Any],
    columns: dict[str, str | None],
    *,
    resume: bool,
    start_over: bool,
) -> Run:
    """Resume the run, continue another one with other data, or start one."""
    if resume and ((where / CHECKPOINT / "manifest.json").exists() or (config is None and base is None)):
        saved = config_of(checkpoint.read_manifest(where / CHECKPOINT), where)
        asked = (saved if config is None else config).changed(**flags)
        in_place = base is not None and run_of(find_checkpoint(base)).resolve() == where.resolve()
        if not in_place or asked.data.path == saved.data.path:
            return Run.resume(where, saved.changes_to(asked))
    if base is not None:
        saved = config_of(checkpoint.read_manifest(find_checkpoint(base)), base)
        flags = {**flags, **_schema_flag(saved if config is None else config, columns)}
        return Run.continue_from(base, where, config=config, start_over=start_over, **flags)
    chosen = RunConfig() if config is None else config
    if config is None and "data_path" in flags and "data_kind" not in flags:
        flags = {**flags, "data_kind": _kind_of(flags["data_path"])}
    return Run(chosen.changed(**flags, **_schema_flag(chosen, columns)), where, start_over=start_over)


def _kind_of(path: str | list[str]) -> str:
    """Return the kind of data of files or directories by their names."""
    first = path if isinstance(path, str) else path[0]
    found = [Path(name) for name in ([first] if "://" in first else glob.glob(first, recursive=True))]
    if not found:
        raise InputError(f"{first}: no such file or directory")
    files = found[0].rglob("*") if found[0].is_dir() else [found[0]]
    names = {file.name for file in files}
    suffixes = {suffix for name in names for suffix in Path(name).suffixes}
    kinds = {suffix: kind for kind, each in SUFFIXES.items() for suffix in each if suffix != ".txt"}
    kinds[".inter"] = "movielens"
    kind = next((kind for suffix, kind in kinds.items() if suffix in suffixes), None)
    if kind is None and "ratings.dat" in names:
        kind = "movielens"
    if kind is None:
        raise InputError(
            f"{first}: the kind of data cannot be told from the names of its files: add --data, "
            f"one of {', '.join(KINDS)}"
        )
    return kind


def _schema_flag(config: RunConfig, columns: Mapping[str, str | None]) -> dict[str, Any]:
    """Return data_schema with the columns that flags name, if there are any; other settings stay."""
    schema = dict(config.data.schema)
    for key, given in columns.items():
        if given is None:
            continue
        names = [name.strip() for name in given.split(",") if name.strip()]
        if key == "features":
            pairs = [name.partition("=") for name in names]
            named = {name.strip(): column.strip() or name.strip() for name, _, column in pairs}
            before = schema.get("features", {})
            before = before if isinstance(before, Mapping) else {}
            schema[key] = {name: _column(before.get(name), column) for name, column in named.items()}
        elif key == "dense":
            before = schema.get("dense", [])
            before = before if len(before) == len(names) else [None] * len(names)
            schema[key] = [_column(old, name) for old, name in zip(before, names, strict=True)]
        else:
            schema[key] = given
    return {} if schema == config.data.schema else {"data_schema": schema}


def _column(before: Any, name: str) -> Any:
    return {**before, "column": name} if isinstance(before, Mapping) else name


def _train(run: Run, out: Console) -> bool:
    """Train, and return whether the run was stopped."""
    if run.finished:
        if run.stopped_early:
            out.print(_stopped_early(run))
            return False
        out.print(
            f"nothing was left to do: the run ended at step {run.step:,}; raise --epochs or --max-steps to "
            "continue it, or train on other data with --from"
        )
        return False
    train = run.config.train
    ranks = f", {run.ranks.size} ranks" if run.ranks.size > 1 else ""
    if train.servers:
        ranks = f", {plural(train.servers, 'server')}, {plural(train.workers, 'worker')}, {train.server_mode}"
    out.print(f"[bold]{run.config.model.name}[/] on {run.source.title}{ranks}")
    for note in run.notes:
        out.print(Text(note))
    if device_of(train).type == "cuda":
        device = torch.cuda.get_device_name()
        out.print(f"on {device}; the first run on a machine compiles kernels for about 20 seconds")
    if run.config.train.comm_metrics is not None and run.ranks.size == 1:
        out.print(
            "--comm-metrics has no effect: one process has no exchange to measure; start it with torchrun"
        )
    with _stop_on_signal(run):
        try:
            with TrainingBar(run) if run.ranks.rank == 0 else nullcontext(Watcher()) as watcher:
                run.train(watcher)
        except KeyboardInterrupt:
            _stop_without_saving(run, out)
    for line in skipped_lines(run.batches.skipped(), first=run.source.train.first_skipped):
        out.print(line, markup=False)
    lost = run.batches.lost_writes
    if lost:
        out.print(f"{lost:,} updates were lost with parameter servers that ended; --log sync loses none")
    if run.stopped_early:
        out.print(_stopped_early(run))
    if run.stopped:
        out.print(f"stopped after step {run.step:,}; continue with `{_resume_flags(run)}`")
    return run.stopped


def _stopped_early(run: Run) -> str:
    train = run.config.train
    return (
        f"stopped early at step {run.step:,}: {plural(run.best.since, 'validation')} without a better "
        f"{train.metric} than at step {run.best.step:,} (--patience {train.patience})"
    )


def _conclude(run: Run, comparison: Path | None, out: Console) -> None:
    result = None
    if run.source.test is not None:
        first = run.ranks.rank == 0
        with progress("evaluating", run.source.test.num_rows) if first else nullcontext() as on_batch:
            result = run.evaluate(on_batch)
        first_skipped = run.source.test.first_skipped
        for line in skipped_lines(result.skipped if result else {}, of="test data", first=first_skipped):
            out.print(line, markup=False)
    rows = sum(run.rows().values())
    counters, tiers = run.counters(), run.host_tier()
    if run.ranks.rank == 0:
        page = write_report(run.directory, comparison=comparison)
        out.print(_summary(run, rows, counters, tiers, result, page))


def _resume_flags(run: Run) -> str:
    # torchrun reads --run as an abbreviation of one of its own options.
    return f"--resume {'--run' if run.ranks.size == 1 else '--run-dir'} {run.directory}"


def _stop_without_saving(run: Run, out: Console) -> NoReturn:
    try:
        saved = checkpoint.read_manifest(run.directory / CHECKPOINT).progress["step"]
    except CheckpointError:
        out.print(f"stopped at once; steps 1 to {run.step:,} are not saved: there is no checkpoint")
    else:
        lost = f"steps {saved + 1:,} to {run.step:,} are not saved" if saved < run.step else "all is saved"
        out.print(f"stopped at once; {lost}; continue from step {saved:,} with `{_resume_flags(run)}`")
    if run.is_saving:
        # The thread that writes the checkpoint cannot be interrupted. Incomplete checkpoints are ignored.
        sys.stdout.flush()
        os._exit(INTERRUPTED)
    raise typer.Exit(INTERRUPTED)


@contextmanager
def _stop_on_signal(run: Run) -> Iterator[None]:
    """Stop the run after the current batch on Ctrl-C and SIGTERM, and at once on a second signal."""
    # With several ranks a second signal has no effect: no rank may stop alone, and launchers repeat signals.

    def handle(number: int, frame: FrameType | None) -> None:
        if run.stop_requested and run.ranks.size == 1:
            raise KeyboardInterrupt
        if run.ranks.size == 1 and not run.stop_requested:
            os.write(2, STOPPING)  # a signal may arrive while another line is printed
        run.stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _summary(
    run: Run,
    rows: int,
    counters: dict[str, dict[str, int]],
    tiers: dict[str, HostTierUse],
    result: Evaluation | None,
    page: Path,
) -> Table:
    table = Table(show_header=False, box=None)
    if result is not None:
        data = run.config.data
        paths = [data.test_path] if isinstance(data.test_path, str) else data.test_path or []
        since = f"rows since {data.split_time}" if data.split_time else "held-out data"
        table.add_row("AUC", f"{result.auc:.4f}", f"on {', '.join(paths) or since}")
        table.add_row("log loss", f"{result.log_loss:.4f}", f"{result.samples:,} samples")
    table.add_row("rows", f"{rows:,}", f"in {len(run.model.embeddings.shards.configs)} tables")
    for kind, unit in {"evicted": "rows", "refused": "ids, once per batch"}.items():
        if total := sum(counts[kind] for counts in counters.values()):
            table.add_row(kind, f"{total:,}", unit)
    if tiers:
        all_tiers = HostTierUse(*map(sum, zip(*tiers.values(), strict=True)))
        hits = f"of the rows in use were in GPU memory; {all_tiers.host_rows:,} rows are in host memory"
        table.add_row("hit rate", f"{all_tiers.hit_rate:.1%}", hits)
    table.add_row("trained", f"{run.samples:,}", f"samples in {run.seconds:.1f} s")
    table.add_row("checkpoint", str(run.directory / "checkpoint"))
    if run.config.train.keep_best and run.best.value is not None:
        table.add_row("best", str(run.directory / BEST), f"validation at step {run.best.step:,}")
    table.add_row("report", str(page))
    return table


command = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
command.command(cls=TrainCommand)(train)
