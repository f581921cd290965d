"""TrainingWorker: one worker of a run on parameter servers, an actor of Ray.

It holds no state that could be lost: tables and dense weights are on the servers, and the run knows the
position of its share. Every step ends when the servers have answered its updates. A worker that replaces one
that has ended repeats the steps that were not reported; updates of those steps that a server has received
already are not applied again.

With mode "sync" the bits are those of a run without the failure: a server that has applied the step already
lets the repetition read the rows from before it (`rows_before.py`).
"""

from __future__ import annotations

import functools
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from megalith import checkpoint
from megalith.data import Batch
from megalith.data.batch import Position
from megalith.data.empty_batch import describe, make_empty_batch
from megalith.errors import MegalithError, WorkerFailedError
from megalith.nn import MicroBatches
from megalith.shards import Servers, ServerShards
from megalith.shards.servers.server_messages import Failure
from megalith.table import TableConfig
from megalith.training.data_source import open_source
from megalith.training.dense_weights import DenseWeights
from megalith.training.run_batches import WATCHED_BATCHES, StepBatch, features_with_lists
from megalith.training.run_config import RunConfig
from megalith.training.run_device import engine_of
from megalith.training.run_model import model_for, router_of
from megalith.training.steps import PartBatches, Steps, WholeBatches
from megalith.training.worker_messages import (
    Ahead,
    DataShare,
    StepOrder,
    StepResult,
    WorkerSetup,
    Written,
)

Method = TypeVar("Method", bound=Callable[..., Any])
TABLES, DENSE = "tables", "dense"
"""The names of the tables and of the dense weights on the servers."""


def returning_failures(method: Method) -> Method:
    """Make a method of a worker return errors as a Failure: Ray would wrap what it raises."""

    @functools.wraps(method)
    def guarded(self: TrainingWorker, *args: Any) -> Any:
        try:
            return method(self, *args)
        except (MegalithError, OSError) as error:
            return Failure(error.with_traceback(None))
        except Exception as error:
            return Failure(worker_failure(self.number, error, traceback.format_exc()))

    return cast(Method, guarded)


def worker_failure(number: int, error: Exception, trace: str) -> WorkerFailedError:
    """Return what a run raises for an error of a worker that is not an error of Megalith."""
    return WorkerFailedError(
        f"worker {number} failed with {type(error).__name__}: {error}. Its traceback shows where: correct "
        "the data, the model or the environment of that process, then continue from the last save with "
        "--resume.\n"
        f"{trace.rstrip()}"
    )


def server_shards(
    config: RunConfig,
    servers: Servers,
    log: str,
    name: str,
    tables: Sequence[TableConfig],
    *,
    worker: int,
    observer: bool = False,
    written: list[int] | None = None,
) -> ServerShards:
    """Place tables of a run on its servers."""
    train = config.train
    return ServerShards(
        tables,
        servers=servers,
        name=name,
        worker=worker,
        num_workers=train.workers,  # those that the first step waits for
        mode=train.server_mode,
        staleness=train.staleness,
        router=router_of(train, len(servers)) if name == TABLES else "roundrobin",
        engine=engine_of(train),
        seed=train.seed,
        wire=config.wire if name == TABLES else "float32",
        timeout=train.timeout,
        recovery=checkpoint.recovery(Path(log), log=train.server_log),
        observer=observer,
        written=written,
    )


class TrainingWorker:
    """See the module and `worker_messages.py`. Every method is a call of the run."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.number = 0
        self._setup = setup
        self._sync = setup.config.train.server_mode == "sync"
        if setup.config.train.threads is not None:
            torch.set_num_threads(setup.config.train.threads)
        self._batches: Iterator[Batch] = iter(())
        self._ahead: Batch | None = None
        self._last: Batch | None = None
        self._position: Position = {}
        self._counted: Counter[str] = Counter()  # bad rows of the share up to the last step
        self._skipped_ahead: Counter[str] = Counter()  # up to the end of the batch read ahead
        self._watched = 0
        self._resting = False
        self._part: tuple[int, int] | None = None

    @returning_failures
    def prepare(self, number: int) -> Any:
        """Open the data."""
        self.number = number
        self._reader = self._source = open_source(self._setup.config).train
        return os.getpid()

    @returning_failures
    def connect(self, written: Written | None) -> Any:
        """Build the model and join the workers."""
        config, servers = self._setup.config, self._setup.servers
        torch.manual_seed(config.train.seed + self.number)
        place = functools.partial(server_shards, config, servers, self._setup.log, worker=self.number)
        known = written or Written([], [])
        self._model = model_for(
            config,
            self._source.feature_names,
            self._source.num_dense,
            place=lambda tables: place(TABLES, tables, written=known.tables or None),
        ).train()
        self._tables = cast(ServerShards, self._model.embeddings.shards)
        self._dense = DenseWeights(
            self._model,
            config.train.lr,
            lambda tables: place(DENSE, tables, written=known.dense or None),
        )
        return self._written

    @property
    def _written(self) -> Written:
        return Written(self._tables.written, self._dense.shards.written)

    @returning_failures
    def read(self, share: DataShare, rows: int) -> Any:
        """Open a share."""
        self._reader = self._source.shard(share.index, share.count)
        self._reader.batch_size = rows
        self._reader.seek(share.position)
        self._counted = self._skipped_ahead = Counter()
        self._position = share.position
        self._batches = iter(self._reader)
        self._read_ahead()
        if self._ahead is None:
            return Ahead(0, None, self._last_skipped, self._reader.first_skipped)
        return Ahead(len(self._ahead), describe(self._ahead))

    def _read_ahead(self) -> None:
        self._ahead = next(self._batches, None)
        self._last = self._ahead or self._last
        if self._ahead is not None:
            self._skipped_ahead = Counter(self._reader.skipped_before)

    @property
    def _last_skipped(self) -> Counter[str] | None:
        """The bad rows after the last batch; None: there are more batches."""
        return None if self._ahead is not None else self._reader.skipped - self._counted

    @returning_failures
    def step(self, order: StepOrder) -> Any:
        """Train on the batch that was read ahead, and read the next one."""
        batch = self._ahead
        if batch is None and not self._sync:
            return self._result(0, 0.0, [], None, order, Counter())
        if batch is None:
            batch = self._empty_batch(order)
        else:
            self._position = batch.position
        skipped, self._counted = self._skipped_ahead - self._counted, self._skipped_ahead
        if self._resting:
            self._resting = False
            self._tables.join()
            self._dense.shards.join()
        loss, scored = self._train(StepBatch(batch, order.sizes), order)
        scores = [(each.batch.labels, each.batch.weights, each.logits) for each in scored]
        rows = sum(len(each.logits) for each in scored)
        self._read_ahead()
        return self._result(rows, loss, scores, batch, order, skipped)

    def _train(self, step: StepBatch, order: StepOrder) -> Any:
        weights = self._dense.request()
        self._model.embeddings.global_step = self._dense.at = order.step
        if self._part != order.part:
            self._part = order.part
            self._steps = self._make_steps(order.part)
        weights()
        done = self._steps.take(step)
        self._tables.flush()
        self._dense.shards.flush()
        return done

    def _make_steps(self, part: tuple[int, int]) -> Steps:
        if not self._sync:
            return WholeBatches(self._model, self._dense)
        self._tables.num_workers = part[1]
        num = self._setup.config.train.micro_batches or part[1]
        return PartBatches(self._model, self._dense, MicroBatches(self._model, num, part=part))

    def _empty_batch(self, order: StepOrder) -> Batch:
        if self._last is not None:
            return self._last.part(0, 0)
        assert order.columns is not None
        return make_empty_batch(order.columns, where="a worker")

    def _result(
        self,
        rows: int,
        loss: float,
        scores: list[Any],
        batch: Batch | None,
        order: StepOrder,
        skipped: Counter[str],
    ) -> StepResult:
        lists: frozenset[str] = frozenset()
        if batch is not None and self._watched < WATCHED_BATCHES:
            self._watched += 1
            lists = features_with_lists(batch)
        return StepResult(
            rows,
            loss,
            scores,
            self._position,
            0 if self._ahead is None else len(self._ahead),
            self._written,
            lost=self._tables.lost_writes + self._dense.shards.lost_writes,
            time=None if batch is None else batch.time,
            batch=batch if order.sample else None,
            skipped=skipped,
            last_skipped=self._last_skipped,
            first_skipped=self._reader.first_skipped,
            list_features=lists,
        )

    @returning_failures
    def rest(self) -> Any:
        """Leave the workers until the next step, so that nobody waits for this one."""
        if not self._resting:
            self._resting = True
            self._tables.leave()
            self._dense.shards.leave()

    @returning_failures
    def leave(self) -> Any:
        """Leave the workers for good."""
        return self.rest()
