"""The workers of a run on parameter servers: their processes, and what they and the run send each other.

`TrainingWorker` is an actor of Ray. Each of its methods is a call of the run:

    call                                   the worker
    prepare(number)                        opens the data; this takes time while the others train
    connect(written)                       builds the model and joins the workers of the servers
    read(share, rows)                      opens a share at its position and reads its first batch ahead
    step(order)                            trains on the batch read ahead, then reads the next one
    rest()                                 leaves the workers of the servers until the next step
    leave()                                ends its work

It holds no state that could be lost: tables and dense weights are on the servers, and the run knows the
position of its share. Every step ends when the servers have answered its updates. An error of a worker is
returned as a Failure, so that the run raises it unchanged. One that is not an error of Megalith becomes a
WorkerFailedError, with its type, message and traceback.

`WorkerPool` is the run's side. Each worker has a queue of calls, which it makes in their order. If its
process ends, another one takes its number, continues after its answered writes and gets the calls that were
not answered. It repeats the steps that were not reported; updates of those steps that a server has received
already are not applied again. With mode "sync" the bits are those of a run without the failure: a server that
has applied the step already lets the repetition read the rows from before it.

    starts, opens the data ---> joins ---> idle <--> calls in its queue ---> leaves
              |                   |  ^                      |
              +--- given up <-----+  +--- process ends <----+

The others train while a worker starts and opens its data; they wait only while it joins the servers. Both
have a time limit. A worker that is added to a run and does not join in time is given up, and the run
continues without it; the run raises if it is one of the first workers, or replaces one. Ray reports a process
that ends, but not one that hangs: the run raises if no worker answers for a time.
"""

from __future__ import annotations

import functools
import logging
import os
import time as clock
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from megalith.data import Batch
from megalith.data.batch import Position
from megalith.data.equal_batches import describe_columns, make_empty_batch
from megalith.errors import MegalithError, RankTimeoutError, UsageError, WorkerFailedError
from megalith.nn import MicroBatches
from megalith.ps import Servers, ServerShards
from megalith.ps.launch import ray_module
from megalith.ps.link import GRACE
from megalith.ps.messages import Failure
from megalith.training.batches import WATCHED_BATCHES, StepBatch, features_with_lists
from megalith.training.config import RunConfig
from megalith.training.data_source import open_source
from megalith.training.model import model_for
from megalith.training.ps_weights import DENSE, TABLES, DenseWeights, server_shards
from megalith.training.steps import PartBatches, Steps, WholeBatches


@dataclass(frozen=True)
class WorkerSetup:
    config: RunConfig  # The config of the run, with the fitted schema
    servers: Servers
    log: str  # The directory of their logs


@dataclass(frozen=True)
class Written:
    """The numbers of a worker's writes that were answered, by server."""

    tables: list[int]  # Those to the tables
    dense: list[int]  # Those to the dense weights


@dataclass(frozen=True)
class DataShare:
    index: int  # Its number
    count: int  # The number of shares
    position: Position  # Where to begin


@dataclass(frozen=True)
class Ahead:
    """The batch that a worker has read ahead."""

    rows: int  # Its number of rows; 0: the share has ended
    # Its columns, for workers without a batch; see `megalith.data.equal_batches.describe_columns`.
    columns: bytes | None = None
    last_skipped: Counter[str] | None = None  # If the share has ended, the bad rows at its end, by reason
    first_skipped: dict[str, str] = field(default_factory=dict)  # See `Reader.first_skipped`.


@dataclass(frozen=True)
class StepOrder:
    """A step of one worker."""

    step: int  # The global step
    part: tuple[int, int] = (0, 1)  # The number of this worker in the step, and the number of workers
    # The rows of all workers, if each has read its own. None: all have read the same batch.
    sizes: list[int] | None = None
    columns: bytes | None = None  # The columns of a batch, for a worker that has none
    sample: bool = False  # Whether to return the batch


@dataclass(frozen=True)
class StepResult:
    rows: int  # The number of rows that it computed; 0 in mode "async": the share has ended
    loss: float  # Its share of the mean loss of the step
    scores: list[tuple[Tensor, Tensor | None, Tensor]]  # Labels, weights and logits of its rows
    position: Position  # The position of its share after the step
    ahead: int  # The rows of its next batch; 0: the share has ended
    written: Written  # Its answered writes
    lost: int = 0  # Number of answered writes that were lost with a server
    time: int | None = None  # The time of the newest row
    batch: Batch | None = None  # The batch, if it was asked for
    # Bad rows between the positions before and after the step, by reason
    skipped: Counter[str] = field(default_factory=Counter)
    last_skipped: Counter[str] | None = None  # If the share has ended, the bad rows after that position
    first_skipped: dict[str, str] = field(default_factory=dict)  # See `Reader.first_skipped`.
    list_features: frozenset[str] = frozenset()  # Features of which a row with several ids was seen


Call = tuple[str, tuple[Any, ...]]
"""The name of a method of a worker, and its arguments."""


Method = TypeVar("Method", bound=Callable[..., Any])


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


class TrainingWorker:
    """The calls of the run, which the module lists."""

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
        self.number = number
        self._reader = self._source = open_source(self._setup.config).train
        return os.getpid()

    @returning_failures
    def connect(self, written: Written | None) -> Any:
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
        self._reader = self._source.shard(share.index, share.count)
        self._reader.batch_size = rows
        self._reader.seek(share.position)
        self._counted = self._skipped_ahead = Counter()
        self._position = share.position
        self._batches = iter(self._reader)
        self._read_ahead()
        if self._ahead is None:
            return Ahead(0, None, self._last_skipped, self._reader.first_skipped)
        return Ahead(len(self._ahead), describe_columns(self._ahead))

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
            self._tables.join()  # no limit: calls of servers have one
            self._dense.shards.join()  # no limit: calls of servers have one
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
        if not self._resting:
            self._resting = True
            self._tables.leave()
            self._dense.shards.leave()

    @returning_failures
    def leave(self) -> Any:
        return self.rest()


logger = logging.getLogger(__name__)
_ATTEMPTS = 3
"""How often the process of a worker may end while it starts."""


class _Starting(NamedTuple):
    """A process that starts: its actor, Ray's reference to the result of `prepare`, when it was started."""

    actor: Any
    prepared: Any
    since: float


@dataclass
class PoolWorker:
    """A worker as the run sees it."""

    number: int  # Its number; those of workers that have left are used again
    actor: Any  # Its process
    pid: int = 0  # The id of its process
    # Calls in progress with Ray's reference to their result, the oldest first
    calls: deque[tuple[Call, Any]] = field(default_factory=deque)
    written: Written | None = None  # Its writes that belong to steps with a result; None: it has not joined
    share: int | None = None  # The number of the share that it reads; None: none
    ahead: int = 0  # The rows of the batch that it has read ahead
    resting: bool = False  # Whether it has left the workers of the servers for want of data
    leaving: bool = False  # Whether it leaves when its calls are answered
    lost: int = 0  # Number of its writes that servers have lost


class WorkerPool:
    def __init__(
        self,
        setup: WorkerSetup,
        count: int,
        calls_again: Callable[[PoolWorker], list[Call]],
        forget: Callable[[int], None],
    ) -> None:
        self._setup = setup
        self._calls_again, self._forget = calls_again, forget
        self._timeout = setup.config.train.timeout
        # Longer than the wait of a worker for a server, so that the worker reports which server is silent.
        self._silence = 2 * (self._timeout + GRACE)
        self.workers: dict[int, PoolWorker] = {}
        self.replaced = self.given_up = 0
        self.lost_writes = 0
        self._last = 0  # the worker whose answer `wait` returned last
        self._starting: dict[int, _Starting] = {}
        self.start(count)

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def starting(self) -> int:
        return len(self._starting)

    def start(self, count: int) -> None:
        number = 1  # 0 is the run itself
        for _ in range(count):
            while number in self.workers or number in self._starting:
                number += 1
            self._starting[number] = self._process(number)

    def _process(self, number: int) -> _Starting:
        ray = ray_module()
        # As for servers: no reserved CPU, so that any number fits on a small machine; spread over a cluster.
        remote = ray.remote(TrainingWorker).options(num_cpus=0, scheduling_strategy="SPREAD")
        actor = remote.remote(self._setup)
        return _Starting(actor, actor.prepare.remote(number), clock.monotonic())

    def connect(self, *, wait: bool = False) -> list[PoolWorker]:
        """Let the workers join that have opened their data."""
        if not self._starting:
            return []
        ray = ray_module()
        waiting = {each.prepared: number for number, each in self._starting.items()}
        limit = self._timeout if wait else 0
        done, missing = ray.wait(list(waiting), num_returns=len(waiting), timeout=limit, fetch_local=False)
        now = clock.monotonic()
        for number in (waiting[reference] for reference in missing):
            if wait or now - self._starting[number].since > self._timeout:
                self._give_up(number, self._late(number, "started and opened its data"), fatal=wait)
        joining = [
            PoolWorker(number, self._starting[number].actor) for number in (waiting[each] for each in done)
        ]
        calls = [worker.actor.connect.remote(None) for worker in joining]  # all at the same time
        joined = []
        for worker, call in zip(joining, calls, strict=True):
            try:
                self._join(worker, self._starting[worker.number], call)
            except (MegalithError, OSError) as error:
                self._give_up(worker.number, error, fatal=wait)
                continue
            del self._starting[worker.number]
            self.workers[worker.number] = worker
            joined.append(worker)
        return joined

    def _join(self, worker: PoolWorker, process: _Starting, call: Any = None) -> None:
        """Wait until a worker has joined; start its process again if it ends meanwhile."""
        ray = ray_module()
        for attempt in range(_ATTEMPTS):
            try:
                worker.actor = process.actor
                worker.pid = self._result(worker, process.prepared, "started and opened its data")
                joining = worker.actor.connect.remote(worker.written) if call is None else call
                written = self._result(worker, joining, "joined the parameter servers")
                worker.written = worker.written or written
                return
            except ray.exceptions.RayActorError as error:
                if attempt == _ATTEMPTS - 1:
                    raise UsageError(
                        f"worker {worker.number} ended {_ATTEMPTS} times while it started: {error}"
                    ) from None
            logger.warning("worker %d has ended while it started and is replaced", worker.number)
            process, call = self._replacement(worker), None
            if worker.number in self._starting:
                self._starting[worker.number] = process

    def _replacement(self, worker: PoolWorker) -> _Starting:
        self.replaced += 1
        ray_module().kill(worker.actor)  # it may only be unreachable
        return self._process(worker.number)

    def _result(self, worker: PoolWorker, reference: Any, what: str) -> Any:
        """Return the result of a call of a worker that starts."""
        ray = ray_module()
        try:
            return _raised(ray.get(reference, timeout=self._timeout))
        except ray.exceptions.GetTimeoutError:
            raise self._late(worker.number, what) from None
        except ray.exceptions.RayTaskError as error:
            raise _task_failure(worker, error) from None

    def _late(self, number: int, what: str) -> RankTimeoutError:
        return RankTimeoutError(
            f"worker {number} has not {what} within {self._timeout:g} s: its process may be stopped, or its "
            "machine or data out of reach. Ray's logs of that process (session_latest/logs) show more; set "
            "train.timeout higher if it needs more time"
        )

    def _give_up(self, number: int, error: Exception, *, fatal: bool) -> None:
        """End a worker that does not join."""
        ray_module().kill(self._starting.pop(number).actor)
        if fatal:
            raise error
        self._forget(number)  # nobody waits for it if some servers know it
        logger.warning("%s. The run continues with %d workers.", error, len(self.workers))
        self.given_up += 1

    def call(self, worker: PoolWorker, name: str, *args: Any) -> None:
        worker.calls.append(((name, args), getattr(worker.actor, name).remote(*args)))

    def wait(self) -> tuple[PoolWorker, Call, Any]:
        """Wait until some worker has answered the oldest call of its queue; if several have, they take
        turns."""
        ray = ray_module()
        while True:
            busy = [worker for worker in self.workers.values() if worker.calls]
            turns = sorted(busy, key=lambda worker: (worker.number <= self._last, worker.number))
            oldest = {worker.calls[0][1]: worker for worker in turns}
            # The first of those that are done.
            done, _ = ray.wait(list(oldest), num_returns=1, timeout=self._silence)
            if not done:
                raise self._silent(turns)
            worker = oldest[done[0]]
            self._last = worker.number
            found = self._answer(worker)
            if found is not None:
                return worker, *found

    def answer(self, worker: PoolWorker) -> tuple[Call, Any]:
        while True:
            found = self._answer(worker)
            if found is not None:
                return found

    def _answer(self, worker: PoolWorker) -> tuple[Call, Any] | None:
        """Return the oldest call of a worker and its result; None: the worker was replaced."""
        ray = ray_module()
        call, reference = worker.calls[0]
        try:
            result = ray.get(reference, timeout=self._silence)
        except ray.exceptions.GetTimeoutError:
            raise self._silent([worker]) from None
        except ray.exceptions.RayActorError:
            self._replace(worker)
            return None
        except ray.exceptions.RayTaskError as error:  # for instance a result that cannot be sent
            result = Failure(_task_failure(worker, error))
        worker.calls.popleft()
        return call, result

    def _silent(self, waiting: list[PoolWorker]) -> RankTimeoutError:
        calls = ", ".join(
            f"{each.calls[0][0][0]} of worker {each.number} (pid {each.pid})" for each in waiting
        )
        return RankTimeoutError(
            f"no answer within {self._silence:g} s to {calls}: the process hangs, is stopped, or waits for "
            "its data. `py-spy dump --pid` on its machine and Ray's logs of it (session_latest/logs) show "
            "where; continue from the last save with --resume. Set train.timeout higher if steps take longer"
        )

    def _replace(self, worker: PoolWorker) -> None:
        logger.warning("worker %d has ended and is replaced", worker.number)
        self.lost_writes += worker.lost
        worker.lost = 0
        self._join(worker, self._replacement(worker))
        again, worker.calls, worker.resting = self._calls_again(worker), deque(), False
        for name, args in again:
            self.call(worker, name, *args)

    def remove(self, worker: PoolWorker) -> None:
        self.call(worker, "leave")
        _, result = self.answer(worker)
        _raised(result)
        self.lost_writes += worker.lost
        del self.workers[worker.number]
        ray_module().kill(worker.actor)

    def close(self) -> None:
        ray = ray_module()
        actors = [worker.actor for worker in self.workers.values()]
        actors += [each.actor for each in self._starting.values()]
        self.workers, self._starting = {}, {}
        if ray.is_initialized():
            for actor in actors:
                ray.kill(actor)


def _task_failure(worker: PoolWorker, error: Any) -> MegalithError:
    return worker_failure(worker.number, error.cause, error.traceback_str)


def _raised(found: Any) -> Any:
    if isinstance(found, Failure):
        raise found.error
    return found
