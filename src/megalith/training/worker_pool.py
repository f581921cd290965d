"""WorkerPool: the workers of a run, processes that Ray starts. A worker that ends is replaced.

Each worker has a queue of calls, which it makes in their order. If its process ends, another one takes its
number, continues after its answered writes and gets the calls that were not answered:

    starts, opens the data ---> joins ---> idle <--> calls in its queue ---> leaves
              |                   |  ^                      |
              +--- given up <-----+  +--- process ends <----+

The others train while a worker starts and opens its data; only joining the servers is waited for. Both have a
time limit. A worker that is added to a run and does not join in time is given up, and the run continues
without it; the run raises if it is one of the first workers, or replaces one. Ray reports a process that
ends, but not one that hangs: the run raises if no worker answers for a time.
"""

from __future__ import annotations

import logging
import time as clock
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megalith.errors import MegalithError, RankTimeoutError, UsageError
from megalith.shards.servers.ray.ray_servers import ray_module
from megalith.shards.servers.server_messages import Failure
from megalith.shards.servers.worker.server_link import GRACE
from megalith.training.training_worker import TrainingWorker, worker_failure
from megalith.training.worker_messages import Call, WorkerSetup, Written

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
    """See the module."""

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
        """The number of workers whose process is starting."""
        return len(self._starting)

    def start(self, count: int) -> None:
        """Start processes."""
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
        """Add a call to the queue of a worker."""
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
        """Wait for the answer to the oldest call of one worker."""
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
        """End a worker without calls: it leaves, and its process ends."""
        self.call(worker, "leave")
        _, result = self.answer(worker)
        _raised(result)
        self.lost_writes += worker.lost
        del self.workers[worker.number]
        ray_module().kill(worker.actor)

    def close(self) -> None:
        """End all processes at once."""
        ray = ray_module()
        actors = [worker.actor for worker in self.workers.values()]
        actors += [each.actor for each in self._starting.values()]
        self.workers, self._starting = {}, {}
        if ray.is_initialized():
            for actor in actors:
                ray.kill(actor)


def _task_failure(worker: PoolWorker, error: Any) -> MegalithError:
    """The error of a call as Ray describes it."""
    return worker_failure(worker.number, error.cause, error.traceback_str)


def _raised(found: Any) -> Any:
    if isinstance(found, Failure):
        raise found.error
    return found
