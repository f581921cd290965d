"""Run: a model in training. Its directory holds config, metrics, checkpoints and evaluation.

    config.json  metrics.jsonl  evaluation.json  frequencies.json  report.html
    checkpoint/  checkpoints/  frequencies/  tensorboard/

checkpoint/ is the newest checkpoint; `run_checkpoints.py` keeps earlier ones in checkpoints/. A run that is
stopped and resumed computes the same bits as an uninterrupted one: on one rank, and with a fixed number of
micro-batches on any number of ranks. All ranks make the same calls; see `run_ranks.py`.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import time as clock
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from megalith import checkpoint
from megalith.data.reader_registry import FILE_READERS
from megalith.distributed.dense_broadcast import broadcast_dense
from megalith.errors import InputError, UsageError
from megalith.metrics import BinnedAUC
from megalith.ops import checks
from megalith.shards import CommMetrics, CommReport, SyncShards
from megalith.table import MemoryUse
from megalith.training.data_source import DataSource, open_source
from megalith.training.evaluation import Evaluation, evaluate
from megalith.training.id_frequencies import FOLDER as FREQUENCIES
from megalith.training.id_frequencies import IdFrequencies, keep_only
from megalith.training.publishing import Publishing, Pushed, check_publishing
from megalith.training.run_batches import RunBatches, StepBatch
from megalith.training.run_checkpoints import FOLDER as KEPT
from megalith.training.run_checkpoints import RunCheckpoints
from megalith.training.run_config import RunConfig
from megalith.training.run_device import use_device
from megalith.training.run_lock import RunLock
from megalith.training.run_log import MetricsLog, ScalarWriter
from megalith.training.run_model import CHECKPOINT, config_of, model_for, updates_in_step
from megalith.training.run_ranks import RunRanks
from megalith.training.steps import BatchScores, PartBatches, Steps, WholeBatches
from megalith.training.threads import threads_of, using_threads

_TOTALS = ("created", "removed", "evicted", "refused")
"""The counters of rows that only increase."""


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


class Run:
    """A model, its data and its progress.

    If a process group has several ranks, the run is distributed over them: all ranks make the same calls with
    the same arguments and share the directory.

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

    def __init__(self, config: RunConfig, directory: str | Path, *, start_over: bool = False) -> None:
        checks.instance(config, RunConfig, "run: config")
        checks.flag(start_over, "run: start_over")
        self.directory = checks.path(directory, "run: directory")
        self.notes: list[str] = []
        self.ranks = RunRanks(config.train.timeout)
        self.ranks.on_rank_0(lambda: None if start_over else self._check_free())
        self._open(config)
        self.ranks.on_rank_0(self._begin)

    def _check_free(self) -> None:
        there = (self.directory / CHECKPOINT / "manifest.json", self.directory / KEPT)
        if any(path.exists() for path in there):
            raise UsageError(
                f"{self.directory} already holds a run: resume it (--resume), start over (--start-over), "
                "or choose another directory"
            )

    def _begin(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "config.json").write_text(json.dumps(self.config.to_dict(), indent=1))
        self.log = MetricsLog(self.directory / "metrics.jsonl", keep_steps=0)
        for name in ("evaluation.json", "frequencies.json", "report.html"):  # of the replaced run
            (self.directory / name).unlink(missing_ok=True)
        for folder in (KEPT, FREQUENCIES, "tensorboard"):
            shutil.rmtree(self.directory / folder, ignore_errors=True)

    @classmethod
    def resume(cls, directory: str | Path, changes: Mapping[str, Any] | None = None) -> Run:
        """Continues a run from its checkpoint, on any number of ranks.

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
        self.ranks = RunRanks(config.train.timeout)
        self._open(config)
        report = checkpoint.load(self.model, self.directory / CHECKPOINT, optimizer=self.optimizer)
        saved, self.notes = report.progress, report.notes
        self.step, self.epoch, self.samples = saved["step"], saved["epoch"], saved["samples"]
        self.seconds = saved["seconds"]
        self._saved = (manifest.tip, self.step)
        self._continue_counters(saved.get("counters"))
        self.ranks.agreed(lambda: self.batches.seek(saved["position"]))
        self.batches.list_features.update(saved.get("list_features", self.source.train.feature_names))
        checkpoint.set_rng_state(saved["rng"])
        self.ranks.on_rank_0(self._continue_logs)
        return self

    def _continue_counters(self, saved: Mapping[str, Mapping[str, int]] | None) -> None:
        """Continues the counters of the saved run: rows that were loaded are not created again."""
        loaded = self.counters()
        for name, counts in loaded.items():
            before = counts if saved is None else saved.get(name, counts)
            self._counted_before[name] = {key: before.get(key, 0) - counts[key] for key in _TOTALS}

    def _continue_logs(self) -> None:
        self.log = MetricsLog(self.directory / "metrics.jsonl", keep_steps=self.step)
        self.frequencies = IdFrequencies.load(self.directory / FREQUENCIES, self.step)

    def _open(self, config: RunConfig) -> None:
        check_publishing(config)
        use_device(config.train)
        if config.train.threads is not None:
            torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.train.seed)
        random.seed(config.train.seed)  # checkpoints hold the state of both generators
        self.source = self._open_source(config)
        self.config = config.changed(data_schema=self.source.config.schema)
        self.batches = RunBatches(self.source.train, self.ranks, shards=self._reads_shards)
        self.model = model_for(self.config, self.source.train.feature_names, self.source.train.num_dense)
        self.optimizer = torch.optim.Adam(self.model.parameters(), config.train.lr)
        if self.ranks.size > 1:
            broadcast_dense(self.model, self.ranks.group, optimizer=self.optimizer)
        self._steps = self._make_steps()
        self.step = self.epoch = self.samples = 0
        self.seconds = 0.0
        self.stop_requested = False
        self.frequencies = IdFrequencies()
        self._comm: CommMetrics | None = None
        shards = self.model.embeddings.shards
        if config.train.comm_metrics is not None and isinstance(shards, SyncShards):
            self._comm = CommMetrics(shards, tables=config.measured_tables)
        self._kept = RunCheckpoints.of(self.config.train, self.directory)
        self._save: checkpoint.SaveHandle | None = None
        self._saved: tuple[str, int] | None = None
        self._last_save = clock.monotonic()
        self._publishing: Publishing | None = None
        self._counted_before: dict[str, dict[str, int]] = {}

    def _open_source(self, config: RunConfig) -> DataSource:
        """Rank 0 downloads the data and fits the schema; the others use both."""
        first = self.ranks.on_rank_0(lambda: open_source(config))
        schema = self.ranks.gather(None if first is None else first.config.schema)[0]
        fitted = config.changed(data_schema=schema)
        return self.ranks.agreed(lambda: open_source(fitted) if first is None else first)

    @property
    def _reads_shards(self) -> bool:
        """Whether each rank reads its own shard of the data. With micro-batches the order must not change."""
        return self.config.data.kind in FILE_READERS and self.config.train.micro_batches is None

    def _make_steps(self) -> Steps:
        if not updates_in_step(self.config):
            return WholeBatches(self.model, self.optimizer)
        return PartBatches(self.model, self.optimizer, self.ranks, self.config.train.micro_batches)

    # ---- training

    def train(self, watcher: Watcher | None = None) -> None:
        """Trains until the last epoch ends, max_steps is reached or `stop` is called, then saves.

        Args:
            watcher: Receives the events of the run.

        Raises:
            InputError: A row or the loss is bad, or the data has no valid row.
            UsageError: Another process trains in the directory of the run.
        """
        watcher = _watcher(watcher)
        with ExitStack() as stack:
            lock = self.ranks.on_rank_0(lambda: stack.enter_context(RunLock(self.directory)))
            stack.enter_context(using_threads(self.threads))
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
        number = None if lock is None else lock.next_session()
        base = self._saved[0]
        with Publishing.begin(
            self.model, self.config, self.ranks, base=base, number=number
        ) as self._publishing:
            try:
                self._train(watcher)
                watcher.pushed(self._publishing.finish())
            finally:
                self._publishing = None

    def _train(self, watcher: Watcher) -> None:
        self.model.train()
        window = _Window()
        scalars = ScalarWriter(self.directory / "tensorboard", self.step) if self.ranks.is_first else None
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
                    self._log_window(window, scalars, watcher)
                    window = _Window()
                if self._save_is_due(logged):
                    self.save(watcher, wait=not self.config.train.save_async)
                if self._done():
                    break
            else:
                self.epoch += 1
                self._check_not_empty()
        if window.samples:  # the batches since the last line: the log covers every sample
            self._log_window(window, scalars, watcher)
        self.save(watcher)
        if scalars is not None:
            self.frequencies.write(self.directory / "frequencies.json", self.samples)
            scalars.close()

    def _check_not_empty(self) -> None:
        """Raises InputError after an epoch without a row. All ranks have the same number of samples."""
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
            return self.step % every == 0
        due = clock.monotonic() - self._last_save >= self.config.train.save_interval
        if self.ranks.size == 1:
            return due
        return logged and bool(self.ranks.gather(due)[0])

    @property
    def finished(self) -> bool:
        """Whether all epochs and steps of the config are done."""
        return self._done() and not self.stopped

    def _done(self) -> bool:
        limit = self.config.train.max_steps
        return (
            self.stopped
            or self.epoch >= self.config.train.epochs
            or (limit is not None and self.step >= limit)
        )

    def stop(self) -> None:
        """Ends training after the current batch, or with several ranks after the next one on all ranks."""
        self.stop_requested = True

    @property
    def stopped(self) -> bool:
        """Whether the run was stopped early, the same on every rank at the same step."""
        return self._steps.stopped if self.ranks.size > 1 else self.stop_requested

    def _train_batch(self, step: StepBatch, window: _Window) -> float:
        try:
            loss, scored = self._steps.take(step, stop=self.stop_requested)
        except InputError as error:
            raise InputError(f"step {self.step}: {error}") from error
        self.step += 1
        self.samples += step.rows
        if self.ranks.is_first:
            self.frequencies.update(step.batch)
        window.add(scored, loss, step.rows)
        return loss

    def _log_window(self, window: _Window, scalars: ScalarWriter | None, watcher: Watcher) -> None:
        record = self._record(window)
        report = None if self._comm is None else self._comm.collect(self.step)
        if scalars is None:
            return
        self.log.write(record if report is None else {**record, "comm": report.scalars()})
        scalars.write(record)
        watcher.logged(record)
        if report is not None:
            scalars.add(report.scalars(), self.step)
            scalars.add_histograms(report.histograms(), self.step)
            watcher.communicated(report)

    def rows(self) -> dict[str, int]:
        """Returns the number of rows of each table on all ranks together. A collective call."""
        own = {name: stats.rows for name, stats in self.model.embeddings.shards.stats().items()}
        everywhere = self.ranks.gather(own)
        return {name: sum(rows[name] for rows in everywhere) for name in own}

    def counters(self) -> dict[str, dict[str, int]]:
        """Returns what happened to the rows of each table since the run began. A collective call.

        Returns:
            By table, on all ranks together: rows "created", "removed" and "evicted", ids "refused" (all since
            the run began), and ids that are "pending" now; see `megalith.table.RowCounters`.
        """
        stats = self.model.embeddings.shards.stats()
        own = {
            name: {key: getattr(each.counters, key) for key in (*_TOTALS, "pending")}
            for name, each in stats.items()
        }
        everywhere = self.ranks.gather(own)
        return {
            name: {
                key: sum(rank[name][key] for rank in everywhere)
                + self._counted_before.get(name, {}).get(key, 0)
                for key in counts
            }
            for name, counts in own.items()
        }

    def memory(self) -> dict[str, int]:
        """Returns the bytes of all tables on all ranks, by purpose; see `megalith.table.MemoryUse`."""
        uses = [asdict(use) for use in self.model.embeddings.shards.memory().values()]
        own = {part.name: sum(use[part.name] for use in uses) for part in fields(MemoryUse)}
        everywhere = self.ranks.gather(own)
        return {part: sum(rank[part] for rank in everywhere) for part in own}

    def _record(self, window: _Window) -> dict[str, Any]:
        self.ranks.sum_on_first(window.auc.sums)
        auc = window.auc.compute()
        memory = self.memory()
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
        }

    # ---- saving, evaluating

    def save(self, watcher: Watcher | None = None, *, wait: bool = True) -> None:
        """Writes the checkpoint of the run, after an earlier save is complete.

        Args:
            watcher: Receives the events of the save.
            wait: Whether to wait until it is complete. False: training continues while it is written.
        """
        checks.flag(wait, "run: wait")
        watcher = _watcher(watcher)
        self._finish_save()
        step = self.step

        def keep() -> None:
            if self.ranks.is_first:
                keep_only(self.directory / FREQUENCIES, step)
                if self._kept is not None:
                    self._kept.add(self.directory / CHECKPOINT, step)
            watcher.saved()

        if self.ranks.is_first:
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
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._save is not None

    def _finish_save(self) -> None:
        if self._save is not None:
            try:
                self._save.wait()
            except Exception:
                self._save = None
                raise
        self._save = None

    def _progress(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "samples": self.samples,
            "seconds": self.seconds,
            "position": self.batches.position(),
            "features": self.source.train.feature_names,
            "num_dense": self.source.train.num_dense,
            "list_features": sorted(self.batches.list_features),
            "counters": self.counters(),
            "rng": checkpoint.rng_state(),
        }

    def evaluate(self, on_batch: Any = None) -> Evaluation | None:
        """Evaluates on the test data, if there is any, and writes evaluation.json with the step.

        Args:
            on_batch: Called after each batch with the number of samples so far.

        Returns:
            The result, the same on all ranks; None if there is no test data.
        """
        checks.callback(on_batch, "run: on_batch")
        if self.source.test is None:
            return None
        with using_threads(self.threads):
            result = evaluate(
                self.model, self.source.test, on_batch, ranks=self.ranks, shards=self._reads_shards
            )
        if self.ranks.is_first:
            written = {"step": self.step, **result.to_dict()}
            (self.directory / "evaluation.json").write_text(json.dumps(written, indent=1))
        return result


def _watcher(given: Watcher | None) -> Watcher:
    return Watcher() if given is None else checks.instance(given, Watcher, "run: watcher")


class _Window:
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
