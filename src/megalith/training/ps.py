"""RunServers: the parameter servers and workers of a run.

The process of the run computes no steps; workers do (`workers.py`). It starts the processes, assigns the data
to workers, writes the files of the run, saves and evaluates. It joins the servers as an observer, number 0.

    RUN/servers/SESSION/log/     logs of the servers while the run trains
    RUN/servers/SESSION/dense/   the dense weights of the last save, from which servers start again
"""

from __future__ import annotations

import logging
import shutil
import time as clock
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from megalith.data import Reader
from megalith.errors import InputError, ServerLostError, UsageError
from megalith.models import Model
from megalith.nn.collection import EvictionSchedule
from megalith.ops import checks
from megalith.ps import Servers, ServerShards
from megalith.storage.local_files import write_atomically
from megalith.table import TableConfig
from megalith.training.config import RunConfig
from megalith.training.directory import is_training
from megalith.training.model import has_gpu
from megalith.training.ps_weights import DENSE, TABLES, DenseWeights, server_shards
from megalith.training.worker_batches import AsyncBatches, DoneStep, DoneSteps, SyncBatches, WorkerBatches
from megalith.training.workers import WorkerSetup

logger = logging.getLogger(__name__)

SERVERS_FOLDER = "servers"
WORKERS_FILE = "workers"
"""The file in that folder with a new number of workers; see `ask_for_workers`."""
_ATTEMPTS = 5
"""How often a save is made if servers end during it."""
T = TypeVar("T")


class RunServers:
    def __init__(self, config: RunConfig, directory: Path) -> None:
        train = config.train
        self._folder = directory.absolute() / SERVERS_FOLDER / f"{clock.time_ns():019}"
        self._config = config
        gpus = 1 if train.engine == "cuda" and has_gpu() else 0
        self.servers = Servers(
            train.servers, gpus=gpus, restart=True, address=train.ray_address, timeout=train.timeout
        )
        self._eviction = None if config.evict_every is None else EvictionSchedule(config.evict_every)
        self._dense: DenseWeights | None = None
        self._batches: WorkerBatches | None = None

    # ---- opening

    def place(self, tables: list[TableConfig]) -> ServerShards:
        self._shards = self._placed(TABLES, tables)
        return self._shards

    def _placed(self, name: str, tables: list[TableConfig]) -> ServerShards:
        return server_shards(self._config, self.servers, self._log, name, tables, worker=0, observer=True)

    @property
    def _log(self) -> str:
        return str(self._folder / "log")

    def batches(
        self,
        config: RunConfig,
        reader: Reader,
        *,
        shares: bool,
        step: Callable[[], int],
        limit: Callable[[], int | None],
        epoch: Callable[[], int],
    ) -> WorkerBatches:
        setup = WorkerSetup(config, self.servers, self._log)
        if config.train.server_mode == "sync":
            shares = shares and 1 < config.train.workers <= reader.batch_size
            made: type[WorkerBatches] = SyncBatches
        else:
            shares, made = True, AsyncBatches
        self._batches = made(
            reader, setup, shares=shares, step=step, limit=limit, epoch=epoch, forget=self._forget_worker
        )
        return self._batches

    def _forget_worker(self, number: int) -> None:
        """Remove a worker that has not joined all servers: nobody waits for it."""
        assert self._dense is not None
        for shards in (self._shards, self._dense.shards):
            shards.leave(number)

    def steps(self, number: Callable[[], int]) -> DoneSteps:
        return DoneSteps(lambda step: self._after_step(step, number()))

    def _after_step(self, step: DoneStep, number: int) -> None:
        if self._eviction is not None:
            self._eviction.after_step(self._shards, step.time, number)
        self._poll_workers()  # a missing file costs microseconds

    def _poll_workers(self) -> None:
        path = self._folder.parent / WORKERS_FILE
        try:
            text = path.read_text()
            path.unlink()
        except OSError:
            return
        assert self._batches is not None
        try:
            self._batches.set_workers(checks.integer(int(text), "workers"))
        except (ValueError, InputError) as error:
            logger.warning("the number of workers stays %d: %s", self._batches.wanted, error)

    def begin(self, model: Model, optimizer: torch.optim.Optimizer) -> None:
        """Send the dense weights to the servers, before the first step. A second call has no effect."""
        if self._dense is not None:
            return
        for other in self._folder.parent.iterdir():  # of runs that were killed
            if other.is_dir() and other != self._folder:
                shutil.rmtree(other, ignore_errors=True)
        (self._folder.parent / WORKERS_FILE).unlink(missing_ok=True)
        self._dense = DenseWeights(model, self._config.train.lr, lambda x: self._placed(DENSE, x))
        self._dense.load(optimizer)

    # ---- the weights

    def fetch(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Write the dense weights of the servers into the model, if training has begun."""
        dense = self._dense
        if dense is not None:
            self.repeat(lambda: dense.fetch(optimizer, step))

    def read_dense(self) -> None:
        """Write the dense weights of the servers into the model, without the state of their optimizer."""
        if self._dense is not None:
            self._dense.request()()

    def save(self) -> None:
        """Save what servers need of the dense weights to start again."""
        if self._dense is not None:
            self._dense.save(self._folder / "dense")

    def repeat(self, work: Callable[[], T]) -> T:
        """Do something again if a server ended during it."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return work()
            except ServerLostError as error:
                logger.warning("%s", error)
        return work()

    def close(self) -> None:
        """End workers and servers. A second call has no effect."""
        if self._batches is not None:
            self._batches.close()
        self._remove_folder()  # first, because Ray may end this process if it has ended itself
        try:
            with suppress(OSError):  # of a log, which nobody needs now
                self.servers.close()
        finally:
            self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):  # another session uses it
            self._folder.parent.rmdir()


def ask_for_workers(run: Path, count: int) -> None:
    directory = checks.path(run, "workers: run")
    checks.integer(count, "workers: count")
    folder = directory / SERVERS_FOLDER  # a run that was killed leaves it
    if not is_training(directory) or not folder.is_dir() or not any(x.is_dir() for x in folder.iterdir()):
        raise UsageError(f"{run} does not train on parameter servers now: start it with --servers")
    write_atomically(folder / WORKERS_FILE, [str(count).encode()])
