"""Run: a model in training. Its directory holds config, metrics, checkpoints and evaluation.

    config.json  metrics.jsonl  evaluation.json  frequencies.json  report.html
    checkpoint/  best/  checkpoints/  frequencies/  tensorboard/

checkpoint/ is the newest checkpoint, best/ that of the best validation; `RunCheckpoints` keeps earlier ones
in checkpoints/. A run that is stopped and resumed computes the same bits as an uninterrupted one: on one
rank, and with a fixed number of micro-batches on any number of ranks. All ranks make the same calls; only
rank 0 writes files, except for checkpoints.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megalith import checkpoint
from megalith.data import DataUnavailableError
from megalith.data.reader_registry import FILE_READERS
from megalith.distributed.dense_parameters import broadcast_dense, dense_parameters
from megalith.distributed.exchange import Exchange
from megalith.distributed.ranks import Ranks, world_size
from megalith.errors import InputError, UsageError
from megalith.models import Model
from megalith.nn import MicroBatches
from megalith.ops import checks
from megalith.shards import CommMetrics, SyncShards
from megalith.table import HostTierUse
from megalith.training.batches import RunBatches, StepBatch
from megalith.training.config import RunConfig, TrainConfig
from megalith.training.data_source import DataSource, open_source
from megalith.training.directory import (
    BEST,
    CHECKPOINT,
    KEPT_CHECKPOINTS,
    RunCheckpoints,
    RunLock,
    find_checkpoint,
    keep_best,
    run_of,
)
from megalith.training.evaluation import BestValidation, Evaluation, evaluate, evaluate_batches
from megalith.training.id_frequencies import FREQUENCIES, IdFrequencies, keep_only
from megalith.training.log import LogWindow, MetricsLog, Periods, TableNumbers, Watcher
from megalith.training.model import (
    config_of,
    device_of,
    model_for,
    threads_of,
    updates_in_step,
    use_device,
    using_threads,
)
from megalith.training.ps import RunServers
from megalith.training.publishing import Publishing, check_publishing
from megalith.training.steps import PartBatches, Steps, WholeBatches
from megalith.training.trackers import TRACKER_RUNS, RunTrackers, Tracker, metrics_of, open_trackers
from megalith.training.worker_batches import DoneStep, WorkerBatches

T = TypeVar("T")


class Run:
    """A model, its data and its progress.

    If a process group has several ranks, the run is distributed over them: all ranks make the same calls with
    the same arguments and share the directory. With train.servers the tables are on parameter servers, and
    workers train: close such a run, or use it as a context manager.

    Args:
        config: The config of the run.
        directory: Directory of the run. It is created if it does not exist.
        start_over: Whether to replace a run that is in the directory.

    Attributes:
        notes: How a resumed run differs from the saved one, such as other policies of a table.

    Raises:
        UsageError: The directory holds a run and start_over is False.
        InputError: The config or the data is wrong.
    """

    model: Model
    optimizer: torch.optim.Adam
    batches: RunBatches | WorkerBatches
    ranks: Ranks
    step: int
    first_step: int
    epoch: int
    samples: int
    seconds: float
    stop_requested: bool
    _saved: tuple[str, int] | None
    _numbers: TableNumbers

    def __init__(self, config: RunConfig, directory: str | Path, *, start_over: bool = False) -> None:
        checks.instance(config, RunConfig, "run: config")
        checks.flag(start_over, "run: start_over")
        self.directory = checks.path(directory, "run: directory")
        self.notes: list[str] = []
        self._join_ranks(config.train.timeout)
        self._on_rank_0(lambda: None if start_over else self._check_free())
        with self._closed_on_error():
            self._open(config)
            self._on_rank_0(self._begin)

    def _join_ranks(self, timeout: float) -> None:
        """Set the ranks of the default process group, or this process alone. A collective call."""
        self._group: Any = None  # for dense weights: a group with that timeout
        self.ranks = Ranks()
        if world_size() > 1:
            self._group = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")
            self.ranks = Exchange(self._group, timeout=timeout)
        self.ranks.timeout = timeout

    def _on_rank_0(self, work: Callable[[], T]) -> T | None:
        """Run a function on rank 0; other ranks return None. An error raises on every rank."""
        return self._agreed(work if self.ranks.rank == 0 else lambda: None)

    def _agreed(self, work: Callable[[], T]) -> T:
        """Run a function on every rank. An error on one rank raises on every rank."""
        # Callers fall back to other data when the data is unavailable, and must do so on every rank.
        return self.ranks.agree(work, keep=(DataUnavailableError,))

    def _sum_on_rank_0(self, sums: Tensor) -> None:
        """Add the tensors of all ranks on rank 0 in place. On other ranks the tensor is unchanged."""
        size, rest = sums.nbytes, [0] * (self.ranks.size - 1)
        got = [size * (self.ranks.rank == 0)] * self.ranks.size
        data = sums.contiguous().view(-1).view(torch.uint8)
        received = self.ranks.all_to_all(data, [size, *rest], got, "exchange of sums")
        if self.ranks.rank == 0:
            sums.copy_(received.view(sums.dtype).view(self.ranks.size, *sums.shape).sum(0))

    def _check_free(self) -> None:
        there = (self.directory / CHECKPOINT / "manifest.json", self.directory / KEPT_CHECKPOINTS)
        if any(path.exists() for path in there):
            raise UsageError(
                f"{self.directory} already holds a run: resume it (--resume), start over (--start-over), "
                "or choose another directory"
            )

    def _begin(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write_config()
        self.log = MetricsLog(self.directory / "metrics.jsonl", keep_steps=0)
        # Of the replaced run:
        for name in ("evaluation.json", "frequencies.json", "report.html", TRACKER_RUNS):
            (self.directory / name).unlink(missing_ok=True)
        for folder in (BEST, KEPT_CHECKPOINTS, FREQUENCIES, "tensorboard"):
            shutil.rmtree(self.directory / folder, ignore_errors=True)

    def _write_config(self) -> None:
        (self.directory / "config.json").write_text(json.dumps(self.config.to_dict(), indent=1))

    @classmethod
    def resume(cls, directory: str | Path, changes: Mapping[str, Any] | None = None) -> Run:
        """Continue a run from its checkpoint, on any number of ranks.

        Args:
            directory: Directory of the run.
            changes: New values of keys of [train]; see `RunConfig.resumed`.

        Returns:
            The run, at the batch after its last save.

        Raises:
            CheckpointError: There is no complete checkpoint.
            InputError: A key cannot change.
        """
        self = cls.__new__(cls)
        self.directory = checks.path(directory, "run: directory")
        manifest = checkpoint.read_manifest(self.directory / CHECKPOINT)
        config = config_of(manifest, self.directory).resumed({} if changes is None else changes)
        self._join_ranks(config.train.timeout)
        with self._closed_on_error():
            self._open(config)
            saved = self._load(self.directory / CHECKPOINT)
            self.first_step, self.epoch = saved.get("first_step", 0), saved["epoch"]
            self._saved = (manifest.tip, self.step)
            self.best = BestValidation(**saved.get("best", {}))
            self._agreed(lambda: self.batches.seek(saved["position"]))
            self._on_rank_0(self._continue_logs)
        return self

    @classmethod
    def continue_from(
        cls,
        base: str | Path,
        directory: str | Path | None = None,
        *,
        config: RunConfig | None = None,
        start_over: bool = False,
        **changes: Any,
    ) -> Run:
        """Train the model of a run on other data: tables, dense weights, optimizers and the step continue.

        The result has the same bits as one run over the data of both in this order, if the number of rows of
        the first data is a multiple of the batch size. Epochs, `max_steps` and the best validation begin
        again. Fitted means and kinds of ids are those of the base.

        Args:
            base: Directory of a run that has ended, or one of its checkpoints, which need not be its last.
            directory: Directory of the new run. None: the run continues in its own directory.
            config: The wanted config; see `RunConfig.continued`. None: that of the base.
            start_over: Whether to replace another run that is in the directory.
            **changes: Further values as for `RunConfig.changed`, such as data_path="week49".

        Returns:
            The run, at the start of the new data.

        Raises:
            CheckpointError: There is no complete checkpoint.
            UsageError: The base has not ended, or the directory holds another run.
            InputError: No data is named, a value cannot change, or the data does not have the columns of the
                base.
        """
        base = checks.path(base, "run: base")
        checks.flag(start_over, "run: start_over")
        root = find_checkpoint(base)
        manifest = checkpoint.read_manifest(root)
        saved = config_of(manifest, base)
        # The split time is a time of the old data.
        same = replace(saved, data=replace(saved.data, split_time=None))
        wanted = same if config is None else checks.instance(config, RunConfig, "run: config")
        if config is None and not {"data_path", "data_kind", "data_options"} & changes.keys():
            raise InputError(
                f"{base} was trained on {saved.data.title}: name the new data (--path); to train on the same "
                "data again, resume the run with more epochs (--resume --epochs)"
            )
        if root != base and not _has_ended(saved.train, manifest.progress):
            raise UsageError(
                f"{base} has not ended: finish it first (--resume), or continue from what it has saved with "
                f"the path of the checkpoint, {root}"
            )
        self = cls.__new__(cls)
        home = run_of(root)
        self.directory = home if directory is None else checks.path(directory, "run: directory")
        in_place = self.directory.resolve() == home.resolve()
        if in_place and root.name != CHECKPOINT:
            raise UsageError(
                f"{root} is not the newest checkpoint of {home}: choose a directory for the new run (--run)"
            )
        chosen = saved.continued(wanted.changed(**changes))
        self._join_ranks(chosen.train.timeout)
        self._on_rank_0(lambda: None if in_place or start_over else self._check_free())
        with self._closed_on_error():
            self._open(chosen)
            self._load(root)
            self.first_step = self.step
            self.notes.insert(0, f"continues {base} at step {self.step:,}")
            for group in self.optimizer.param_groups:
                group["lr"] = chosen.train.lr
            self._on_rank_0(self._continue_logs if in_place else self._begin)
            if self.ranks.rank == 0:
                self._write_config()
                self.frequencies = IdFrequencies.load(home / FREQUENCIES, self.step)
        return self

    def _load(self, root: Path) -> dict[str, Any]:
        """Load a checkpoint into the model; return the progress of its run."""
        report = checkpoint.load(self.model, root, optimizer=self.optimizer)
        self._use_device()
        saved = report.progress
        self.notes = report.notes
        self.step, self.samples, self.seconds = saved["step"], saved["samples"], saved["seconds"]
        self._numbers.continue_from(saved.get("counters"))
        self.batches.list_features.update(saved.get("list_features", self.source.train.feature_names))
        checkpoint.set_rng_state(saved["rng"])
        return saved

    def _use_device(self) -> None:
        """Let the optimizer run as on this device, whichever the checkpoint comes from."""
        for group in self.optimizer.param_groups:
            group["fused"] = self._fused
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                if "step" in state:  # fused: next to the weights, otherwise on the CPU
                    state["step"] = state["step"].to(parameter.device if self._fused else "cpu")

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        self._servers: RunServers | None = None
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers and parameter servers of a run that has some. It can still be evaluated before."""
        if self._servers is not None:
            self._servers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _continue_logs(self) -> None:
        self.log = MetricsLog(self.directory / "metrics.jsonl", keep_steps=self.step)
        self.frequencies = IdFrequencies.load(self.directory / FREQUENCIES, self.step)
        if self._is_best:
            keep_best(self.directory)  # in case the run was killed between its save and this

    def _open(self, config: RunConfig) -> None:
        check_publishing(config)
        use_device(config.train)
        if config.train.threads is not None:
            torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.train.seed)
        random.seed(config.train.seed)  # checkpoints hold the state of both generators
        self.source = self._open_source(config)
        self.config = config.changed(data_schema=self.source.config.schema)
        self.step = self.first_step = self.epoch = self.samples = 0
        self.best = BestValidation()
        self._validation: RunBatches | None = None
        if config.train.validate_every is not None:
            if self.source.validation is None:
                raise InputError(
                    "config: train.validate_every needs data: set data.validation_path or data.test_path"
                )
            self._validation = RunBatches(self.source.validation, self.ranks, shards=self._reads_shards)
        place = None
        if config.train.servers:
            self._servers = RunServers(self.config, self.directory)
            place = self._servers.place
        self.batches = self._make_batches()
        self.model = model_for(
            self.config, self.source.train.feature_names, self.source.train.num_dense, place=place
        )
        dense = [parameter for _, parameter in dense_parameters(self.model)]
        self._fused = device_of(config.train).type == "cuda"  # one launch: a third of the time on the host
        self.optimizer = torch.optim.Adam(dense, config.train.lr, fused=self._fused)
        if self.ranks.size > 1:
            broadcast_dense(self.model, self._group, optimizer=self.optimizer)
        self._steps = self._make_steps()
        self._periods = None if config.period is None else Periods(self.model, self.ranks, *config.period)
        self.seconds = 0.0
        self.stop_requested = False
        self.frequencies = IdFrequencies()
        self._comm: CommMetrics | None = None
        shards = self.model.embeddings.shards
        if config.train.comm_metrics is not None and isinstance(shards, SyncShards):
            self._comm = CommMetrics(shards, tables=config.measured_tables)
        self._kept = RunCheckpoints.of(self.config.train, self.directory)
        self._save: checkpoint.SaveHandle | None = None
        self._saved = None
        self._last_save = clock.monotonic()
        self._publishing: Publishing | None = None
        self._trackers: RunTrackers | None = None  # None: this rank does not train, or is not rank 0
        self._numbers = TableNumbers(shards, self.ranks)

    def _open_source(self, config: RunConfig) -> DataSource:
        """Rank 0 downloads the data and fits the schema; the others use both."""
        first = self._on_rank_0(lambda: open_source(config))
        schema = self.ranks.gather(None if first is None else first.config.schema)[0]
        fitted = config.changed(data_schema=schema)
        return self._agreed(lambda: open_source(fitted) if first is None else first)

    @property
    def _reads_shards(self) -> bool:
        """Whether each rank reads its own shard of the data. With micro-batches the order must not change."""
        return self.config.data.kind in FILE_READERS and self.config.train.micro_batches is None

    def _make_batches(self) -> RunBatches | WorkerBatches:
        if self._servers is None:
            device, train = device_of(self.config.train), self.source.train
            on_gpu = device.type == "cuda"
            whole = on_gpu and not updates_in_step(self.config)
            return RunBatches(
                train,
                self.ranks,
                shards=self._reads_shards,
                ahead=on_gpu,
                copy_to=device if whole else None,
            )
        return self._servers.batches(
            self.config,
            self.source.train,
            shares=self._reads_shards,
            step=lambda: self.step,
            limit=self._steps_until_save,
            epoch=lambda: self.epoch,
        )

    def _steps_until_save(self) -> int | None:
        """Number of steps before the run saves or ends; None: it is not known."""
        train, most = self.config.train, self.config.train.max_steps
        limits = [n - self.step % n for n in (train.save_every, train.validate_every) if n is not None]
        return min(limits if most is None else [*limits, self.first_step + most - self.step], default=None)

    def _make_steps(self) -> Steps:
        if self._servers is not None:
            return self._servers.steps(lambda: self.step)
        if not updates_in_step(self.config):
            return WholeBatches(self.model, self.optimizer)
        num, ranks = self.config.train.micro_batches, self.ranks
        micro = MicroBatches(self.model, num or ranks.size, group=self._group, timeout=ranks.timeout)
        return PartBatches(self.model, self.optimizer, micro)

    def set_workers(self, count: int) -> None:
        """Set the number of workers of a run on parameter servers; they join and leave while it trains.

        Args:
            count: The number of workers.

        Raises:
            UsageError: The run has no parameter servers.
            InputError: The number is below 1, or does not divide train.micro_batches.
        """
        checks.integer(count, "run: workers")
        if not isinstance(self.batches, WorkerBatches):
            raise UsageError("this run has no workers: start it with train.servers (--servers)")
        self.batches.set_workers(count)

    # ---- training

    def train(self, watcher: Watcher | None = None, *, trackers: Sequence[Tracker] = ()) -> None:
        """Train until the last epoch ends, max_steps is reached or `stop` is called, then save.

        Args:
            watcher: Receives the events of the run.
            trackers: Receive its metrics, on rank 0, besides those of train.tracker.

        Raises:
            InputError: A row or the loss is bad, or the data has no valid row.
            UsageError: Another process trains in the directory of the run, or the package of a tracker is
                not installed.
        """
        watcher = _watcher(watcher)
        given = [checks.instance(t, Tracker, "run: a tracker") for t in checks.as_list(trackers, "trackers")]
        with ExitStack() as stack:
            lock = self._on_rank_0(lambda: stack.enter_context(RunLock(self.directory)))
            stack.enter_context(using_threads(self.threads))
            config = self.config
            self._trackers = self._on_rank_0(
                lambda: RunTrackers(
                    [
                        *open_trackers(config.train.tracker, self.directory, config.to_dict(), self.step),
                        *given,
                    ]
                )
            )
            if self._trackers is not None:
                stack.callback(self._trackers.close)
            if self._servers is not None:
                self._servers.begin(self.model, self.optimizer)
            self._train_and_publish(watcher, lock)

    @property
    def threads(self) -> int:
        """The number of threads of torch while this run trains and evaluates."""
        return threads_of(self.config, self.source.train.feature_names, self.ranks.size)

    def _train_and_publish(self, watcher: Watcher, lock: RunLock | None) -> None:
        if not self.config.train.publish:
            self._train(watcher)
            return
        if self._saved is None or self._saved[1] != self.step:
            self.save(watcher)  # the servers start from this save
        assert self._saved is not None
        with Publishing.begin(
            self.model,
            self.config,
            self.ranks,
            base=self._saved[0],
            next_session=None if lock is None else lock.next_session,
            servers=self._servers,
        ) as self._publishing:
            try:
                self._train(watcher)
                watcher.pushed(self._publishing.finish())
            finally:
                self._publishing = None

    def _train(self, watcher: Watcher) -> None:
        self.model.train()
        window = LogWindow()
        started = clock.perf_counter() - self.seconds
        while not self._done():
            for batch in self.batches:
                loss = self._train_batch(batch, window)
                self.seconds = clock.perf_counter() - started
                watcher.batch(self.step, self.samples, loss)
                if self._publishing is not None:
                    self._publishing.step()
                logged = self.step % self.config.train.log_every == 0
                if logged:
                    self._log_window(window, watcher)
                    window = LogWindow()
                every = self.config.train.validate_every
                if every is not None and self.step % every == 0 and self.batches.settle():
                    started += self._validate(watcher)
                if self._save_is_due(logged) and self.batches.settle():
                    self.save(watcher, wait=not self.config.train.save_async)
                if self._done():
                    break
            else:
                self.epoch += 1
                self._log_periods(watcher, everything=True)
                self._check_not_empty()
        if self._validation is not None and self.best.last != self.step and not self.stopped:
            started += self._validate(watcher)
        if window.samples:  # the batches since the last line: the log covers every sample
            self._log_window(window, watcher)
        self._log_periods(watcher, everything=True)
        self.save(watcher)
        if self._trackers is not None:
            self.frequencies.write(self.directory / "frequencies.json", self.samples)

    def _validate(self, watcher: Watcher) -> float:
        """Validate, and save if this is the best validation; return the seconds that it took."""
        assert self._validation is not None
        began = clock.perf_counter()
        self._fetch_dense()
        result = evaluate_batches(self.model, self._validation, None, self.ranks)
        best = self.best.update(result, self.config.train.metric, self.step)
        if self._trackers is not None:
            finite = result.to_dict()
            numbers = {"loss": finite["log_loss"], "auc": finite["auc"]}
            record = {"kind": "eval", "step": self.step, "samples": result.samples, **numbers}
            self.log.write(record)
            self._trackers.log({f"validation/{name}": x for name, x in numbers.items()}, self.step)
            watcher.validated(record, best)
        if best and self.config.train.keep_best:
            self.save(watcher, wait=not self.config.train.save_async)
        return clock.perf_counter() - began

    def _check_not_empty(self) -> None:
        """Raise InputError after an epoch without a row. All ranks have the same number of samples."""
        if self.samples:
            return
        first = self.source.train.first_skipped
        skipped = [
            f"; skipped {number:,} rows: {reason}" + (f" (first: {first[reason]})" if reason in first else "")
            for reason, number in self.batches.skipped().items()
        ]
        raise InputError(f"the training data has no valid row{''.join(skipped)}")

    def _save_is_due(self, logged: bool) -> bool:
        """Whether to save now. The clocks of ranks differ: rank 0 decides, when a line is logged."""
        every = self.config.train.save_every
        if every is not None:
            return self.step % every == 0 and (self._saved is None or self._saved[1] != self.step)
        due = clock.monotonic() - self._last_save >= self.config.train.save_interval
        if self.ranks.size == 1:
            return due
        return logged and bool(self.ranks.gather(due)[0])

    @property
    def finished(self) -> bool:
        """Whether all epochs and steps of the config are done."""
        return self._done() and not self.stopped

    def _done(self) -> bool:
        progress = {"step": self.step, "first_step": self.first_step, "epoch": self.epoch}
        return self.stopped or self.stopped_early or _has_ended(self.config.train, progress)

    @property
    def stopped_early(self) -> bool:
        """Whether the last train.patience validations were not better than the best one."""
        patience = self.config.train.patience
        return patience is not None and self.best.since >= patience

    def stop(self) -> None:
        """End training after the current batch, or with several ranks after the next one on all ranks."""
        self.stop_requested = True

    @property
    def stopped(self) -> bool:
        """Whether the run was stopped early, the same on every rank at the same step."""
        if self.ranks.size > 1:
            return self._steps.stopped
        return self.stop_requested and self.batches.settle()

    def _train_batch(self, step: StepBatch | DoneStep, window: LogWindow) -> float:
        periods = self._periods if self.epoch == 0 else None  # later epochs have seen the rows
        before = None if periods is None else periods.before(self.step, step)
        try:
            loss, scored = self._steps.take(step, stop=self.stop_requested)
        except InputError as error:
            raise InputError(f"step {self.step}: {error}") from error
        if periods is not None and before is not None:
            periods.add(before, scored)
        self.step += 1
        self.samples += step.rows
        if self.ranks.rank == 0 and step.batch is not None:
            self.frequencies.update(step.batch)
        window.add(scored, loss, step.rows)
        return loss

    def _log_window(self, window: LogWindow, watcher: Watcher) -> None:
        self._log_periods(watcher)
        record = self._record(window)
        report = None if self._comm is None else self._comm.collect(self.step)
        if self._trackers is None:
            return
        self.log.write(record if report is None else {**record, "comm": report.scalars()})
        self._trackers.log(metrics_of(record), self.step)
        watcher.logged(record)
        if report is not None:
            self._trackers.log(report.scalars(), self.step)
            self._trackers.log_histograms(report.histograms(), self.step)
            watcher.communicated(report)

    def _log_periods(self, watcher: Watcher, *, everything: bool = False) -> None:
        if self._periods is None:
            return
        for numbers in self._periods.ended(everything=everything):
            if self._trackers is not None:
                record = {"kind": "period", "step": self.step, **numbers}
                self.log.write(record)
                aucs = {
                    "": numbers["auc"],
                    **{f"/new/{name}": x["auc"] for name, x in numbers["new"].items()},
                }
                shown = {f"period/auc{name}": auc for name, auc in aucs.items() if auc is not None}
                self._trackers.log(shown, self.step)
                watcher.period(record)

    def rows(self) -> dict[str, int]:
        """Return the number of rows of each table on all ranks together. A collective call."""
        return self._numbers.rows()

    def counters(self) -> dict[str, dict[str, int]]:
        """Return what happened to the rows of each table since the run began. A collective call.

        Returns:
            By table, on all ranks together: rows "created", "removed" and "evicted", ids "refused" (all since
            the run began), and ids that are "pending" now; see `megalith.table.RowCounters`.
        """
        return self._numbers.counters()

    def host_tier(self) -> dict[str, HostTierUse]:
        """Return how often updates found rows in GPU memory since this process began. A collective call.

        Returns:
            By table with `TableConfig.device_bytes` on a GPU, on all ranks together; empty without such
            tables.
        """
        return self._numbers.host_tier()

    def memory(self) -> dict[str, int]:
        """Return the bytes of all tables on all ranks, by purpose; see `megalith.table.MemoryUse`."""
        return self._numbers.memory()

    def _record(self, window: LogWindow) -> dict[str, Any]:
        self._sum_on_rank_0(window.auc.sums)
        auc = window.auc.compute()
        memory, tiers = self.memory(), self._numbers.host_tier_since()
        return {
            "kind": "train",
            "step": self.step,
            "samples": self.samples,
            "seconds": round(self.seconds, 3),
            "loss": window.total / max(1, window.samples),
            "auc": None if math.isnan(auc) else auc,
            "rows": self.rows(),
            "counters": self.counters(),
            "memory": sum(memory.values()),
            "memory_parts": memory,
            **({"host_tier": tiers} if tiers else {}),
        }

    # ---- saving, evaluating

    def save(self, watcher: Watcher | None = None, *, wait: bool = True) -> None:
        """Write the checkpoint of the run, after an earlier save is complete.

        Args:
            watcher: Receives the events of the save.
            wait: Whether to wait until it is complete. False: training continues while it is written.

        Raises:
            UsageError: Asynchronous workers compute steps that the run does not know of yet.
        """
        checks.flag(wait, "run: wait")
        if isinstance(self.batches, WorkerBatches) and self.batches.steps_in_progress:
            raise UsageError(
                "run: asynchronous workers are mid-step, so a save would not be of one moment: "
                "use train.save_every or train.save_interval, which wait for them"
            )
        watcher = _watcher(watcher)
        if self._servers is None:
            self._save_once(watcher, wait)
        else:
            self._servers.repeat(lambda: self._save_once(watcher, wait))

    def _save_once(self, watcher: Watcher, wait: bool) -> None:
        self._finish_save()
        self._fetch_dense()
        if self._servers is not None:
            self._servers.save()
        step = self.step
        is_best = self._is_best

        def keep() -> None:
            if self.ranks.rank == 0:
                if is_best:
                    keep_best(self.directory)
                keep_only(self.directory / FREQUENCIES, step)
                if self._kept is not None:
                    self._kept.add(self.directory / CHECKPOINT, step)
            watcher.saved()

        if self.ranks.rank == 0:
            self.frequencies.save(self.directory / FREQUENCIES, step)

        watcher.saving(sum(stats.rows for stats in self.model.embeddings.shards.stats().values()))
        self._save = checkpoint.async_save(
            self.model,
            self.directory / CHECKPOINT,
            optimizer=self.optimizer,
            progress=self._progress(),
            on_rows=watcher.wrote,
            on_complete=keep,
        )
        self._saved = (self._save.id, step)
        self._last_save = clock.monotonic()
        if self._publishing is not None:
            self._publishing.saved(self._save.id)
        if wait:
            self._finish_save()

    @property
    def _is_best(self) -> bool:
        best = self.best
        return self.config.train.keep_best and best.value is not None and best.step == self.step

    def _fetch_dense(self) -> None:
        """Copy the dense weights of parameter servers into the model."""
        if self._servers is not None:
            self.model.embeddings.global_step = self.step
            self._servers.fetch(self.optimizer, self.step)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._save is not None

    def _finish_save(self) -> None:
        if self._save is not None:
            try:
                self._save.wait()  # no limit: writes of this process, and exchanges that have one
            except Exception:
                self._save = None
                raise
        self._save = None

    def _progress(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "step": self.step,
            "first_step": self.first_step,
            "epoch": self.epoch,
            "samples": self.samples,
            "seconds": self.seconds,
            "position": self.batches.position(),
            "features": self.source.train.feature_names,
            "num_dense": self.source.train.num_dense,
            "list_features": sorted(self.batches.list_features),
            "counters": self.counters(),
            "best": asdict(self.best),
            "rng": checkpoint.rng_state(),
        }

    def evaluate(self, on_batch: Any = None) -> Evaluation | None:
        """Evaluate on the test data, if there is any, and write evaluation.json with the step.

        Args:
            on_batch: Called after each batch with the number of samples so far.

        Returns:
            The result, the same on all ranks; None if there is no test data.
        """
        checks.callback(on_batch, "run: on_batch")
        if self.source.test is None:
            return None
        self._fetch_dense()
        with using_threads(self.threads):
            result = evaluate(
                self.model, self.source.test, on_batch, ranks=self.ranks, shards=self._reads_shards
            )
        if self.ranks.rank == 0:
            written = {"step": self.step, **result.to_dict()}
            (self.directory / "evaluation.json").write_text(json.dumps(written, indent=1))
        return result


def _has_ended(train: TrainConfig, progress: Mapping[str, Any]) -> bool:
    """Whether all epochs and steps of a run are done, or its validations have stopped it."""
    steps = progress["step"] - progress.get("first_step", 0)
    since = progress.get("best", {}).get("since", 0)
    return (
        progress["epoch"] >= train.epochs
        or (train.max_steps is not None and steps >= train.max_steps)
        or (train.patience is not None and since >= train.patience)
    )


def _watcher(given: Watcher | None) -> Watcher:
    return Watcher() if given is None else checks.instance(given, Watcher, "run: watcher")
