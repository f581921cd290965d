"""Run: a model in training. One directory holds its config, metrics, checkpoint and evaluation.

    config.json  metrics.jsonl  evaluation.json  frequencies.json  checkpoint/  tensorboard/  report.html

A run that is stopped and resumed computes what an uninterrupted one would, bit by bit, on one rank.
"""

from __future__ import annotations

import json
import math
import time as clock
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megalith import checkpoint
from megalith.data import Batch
from megalith.errors import CheckpointError, InputError, UsageError
from megalith.metrics import BinnedAUC
from megalith.models import EmbeddingConfig, Model, build_model, forward_batch
from megalith.training.config import RunConfig
from megalith.training.evaluation import Evaluation, evaluate
from megalith.training.source import Source, open_source
from megalith.training.tracking import Frequencies, Log, ScalarWriter

CHECKPOINT = "checkpoint"
MAY_CHANGE = ("epochs", "max_steps", "threads", "log_every", "save_every")
"""Keys of [train] that a resumed run may set anew."""


class Watcher:
    """Is told how a run gets on; the command line draws it."""

    def batch(self, step: int, samples: int, loss: float) -> None:
        """After every batch."""

    def logged(self, record: Mapping[str, Any]) -> None:
        """After every line of metrics.jsonl."""

    def saving(self) -> None:
        """Before a checkpoint."""


class Run:
    """A model, its data and where it stands.

    directory: made if it is not there; a run that is there must be resumed or started over (`Run.resume`,
    start_over=True). Raises UsageError otherwise.
    """

    def __init__(self, config: RunConfig, directory: str | Path, *, start_over: bool = False) -> None:
        self.directory = Path(directory)
        if (self.directory / CHECKPOINT / "manifest.json").exists() and not start_over:
            raise UsageError(
                f"{self.directory} holds a run already: resume it (--resume), start over (--start-over), "
                "or choose another directory"
            )
        self._open(config)
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "config.json").write_text(json.dumps(self.config.to_dict(), indent=1))
        self.log = Log(self.directory / "metrics.jsonl", keep_steps=0)

    @classmethod
    def resume(cls, directory: str | Path, changes: Mapping[str, Any] | None = None) -> Run:
        """Goes on from a run's checkpoint. changes: keys of [train] to set anew, some of MAY_CHANGE."""
        self = cls.__new__(cls)
        self.directory = Path(directory)
        manifest = checkpoint.read_manifest(self.directory / CHECKPOINT)
        config = config_of(manifest, self.directory)
        for key in changes or {}:
            if key not in MAY_CHANGE:
                raise InputError(
                    f"train.{key} cannot change when a run is resumed; may: {', '.join(MAY_CHANGE)}"
                )
        self._open(config.changed(**{f"train_{k}": v for k, v in (changes or {}).items()}))
        report = checkpoint.load(self.model, self.directory / CHECKPOINT, optimizer=self.optimizer)
        saved = report.progress
        self.step, self.epoch, self.samples = saved["step"], saved["epoch"], saved["samples"]
        self.seconds = saved["seconds"]
        self.source.train.seek(saved["position"])
        checkpoint.set_rng_state(saved["rng"])
        self.log = Log(self.directory / "metrics.jsonl", keep_steps=self.step)
        return self

    def _open(self, config: RunConfig) -> None:
        if config.train.threads is not None:
            torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.train.seed)
        self.source = open_source(config)
        self.config = config.changed(data_schema=self.source.config.schema)
        self.model = make_model(self.config, self.source)
        self.optimizer = torch.optim.Adam(self.model.parameters(), config.train.lr)
        self.step = self.epoch = self.samples = 0
        self.seconds = 0.0
        self.stopped = False
        self.frequencies = Frequencies()

    # ---- training

    def train(self, watcher: Watcher | None = None) -> None:
        """Trains to the end of the last epoch, to max_steps, or until `stop`; then saves."""
        watcher = watcher or Watcher()
        self.model.train()
        window = _Window()
        scalars = ScalarWriter(self.directory / "tensorboard", self.step)
        started = clock.perf_counter() - self.seconds
        while not self._done():
            for batch in self.source.train:
                loss = self._train_batch(batch, window)
                self.seconds = clock.perf_counter() - started
                watcher.batch(self.step, self.samples, loss)
                if self.step % self.config.train.log_every == 0:
                    record = self._record(window)
                    self.log.write(record)
                    scalars.write(record)
                    watcher.logged(record)
                    window = _Window()
                if self.config.train.save_every and self.step % self.config.train.save_every == 0:
                    watcher.saving()
                    self.save()
                if self._done():
                    break
            else:
                self.epoch += 1
        watcher.saving()
        self.save()
        self.frequencies.write(self.directory / "frequencies.json")
        scalars.close()

    def _done(self) -> bool:
        limit = self.config.train.max_steps
        return (
            self.stopped
            or self.epoch >= self.config.train.epochs
            or (limit is not None and self.step >= limit)
        )

    def stop(self) -> None:
        """Ends training after the batch under way."""
        self.stopped = True

    def _train_batch(self, batch: Batch, window: _Window) -> float:
        self.optimizer.zero_grad()
        logits = forward_batch(self.model, batch)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        loss = losses.mean() if batch.weights is None else (losses * batch.weights).mean()
        if not bool(loss.isfinite()):
            raise InputError(
                f"the loss of step {self.step} is {float(loss)}: check the labels and dense columns of the "
                "data, or lower the learning rates"
            )
        loss.backward()
        self.optimizer.step()
        self.step += 1
        self.samples += len(batch)
        self.frequencies.update(batch.features)
        value = float(loss.detach())
        window.add(logits.detach(), batch, value)
        return value

    def _record(self, window: _Window) -> dict[str, Any]:
        shards = self.model.embeddings.shards
        auc = window.auc.compute()
        return {
            "kind": "train",
            "step": self.step,
            "samples": self.samples,
            "seconds": round(self.seconds, 3),
            "loss": window.total / max(1, window.samples),
            "auc": None if math.isnan(auc) else auc,
            "rows": {name: stats.rows for name, stats in shards.stats().items()},
            "memory": sum(use.total for use in shards.memory().values()),
        }

    # ---- saving, evaluating

    def save(self) -> None:
        """Writes the run's checkpoint."""
        progress = {
            "config": self.config.to_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "samples": self.samples,
            "seconds": self.seconds,
            "position": self.source.train.position,
            "features": self.source.features,
            "num_dense": self.source.num_dense,
            "rng": checkpoint.rng_state(),
        }
        checkpoint.save(self.model, self.directory / CHECKPOINT, optimizer=self.optimizer, progress=progress)

    def evaluate(self, on_batch: Any = None) -> Evaluation | None:
        """Evaluates on the held-back data, if there are any, and keeps the result in evaluation.json."""
        if self.source.test is None:
            return None
        result = evaluate(self.model, self.source.test, on_batch)
        (self.directory / "evaluation.json").write_text(json.dumps(result.to_dict(), indent=1))
        return result


class _Window:
    """What happened since the last line of the log."""

    def __init__(self) -> None:
        self.auc = BinnedAUC()
        self.total = 0.0
        self.samples = 0

    def add(self, logits: Tensor, batch: Batch, loss: float) -> None:
        self.auc.update(logits, batch.labels, batch.weights)
        self.total += loss * len(batch)
        self.samples += len(batch)


def make_model(config: RunConfig, source: Source) -> Model:
    """The model of a config for these data."""
    return model_for(config, source.features, source.num_dense)


def model_for(config: RunConfig, available: list[str], num_dense: int) -> Model:
    """The model of a config for data with these features. Raises InputError naming a feature there is not."""
    options = dict(config.model.options)
    names = config.model.features or available
    if config.model.name == "din":
        options = {"history": "history", **options}
        names = [name for name in names if name != options["history"]]
        if config.data.kind == "movielens":
            options = {"target": "movie", **options}
    for name in names:
        if name not in available:
            raise InputError(
                f"config: model.features: the data have no {name!r} (they have {', '.join(available)})"
            )
    embeddings = EmbeddingConfig(
        names,
        dim=config.model.dim,
        optimizer=config.table_optimizer,
        tables=config.model.tables,
        engine=config.train.engine,
        seed=config.train.seed,
    )
    try:
        return build_model(config.model.name, embeddings, num_dense=num_dense, **options)
    except TypeError as error:
        raise InputError(f"config: model.options: {error}") from None


def config_of(manifest: checkpoint.Manifest, where: Path) -> RunConfig:
    """The config a checkpoint was trained with. Raises CheckpointError if it was not made by a run."""
    if "config" not in manifest.progress:
        raise CheckpointError(f"{where} was not saved by `megalith train`: it holds no config")
    return RunConfig.from_dict(manifest.progress["config"])


def load_trained(path: str | Path) -> tuple[Model, RunConfig]:
    """The model of a run's directory, or of its checkpoint, ready to evaluate and predict."""
    root = Path(path)
    root = root / CHECKPOINT if (root / CHECKPOINT / "manifest.json").exists() else root
    manifest = checkpoint.read_manifest(root)
    config = config_of(manifest, root)
    model = model_for(config, manifest.progress["features"], manifest.progress["num_dense"])
    checkpoint.load(model, root)
    return model.eval(), config
