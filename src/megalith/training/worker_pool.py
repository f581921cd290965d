"""WorkerPool: the workers of a run, processes that Ray starts. A worker that ends is replaced.

Each worker has a queue of calls, which it makes in their order. If its process ends, another one takes its
number, continues after its answered writes and gets the calls that were not answered:

    worker starts ---> connected ---> idle <--> calls in its queue ---> leaves
                           ^                          |
                           +------ process ends <-----+
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megalith.errors import UsageError
from megalith.shards.servers.ray.ray_servers import ray_module
from megalith.shards.servers.server_messages import Failure
from megalith.training.training_worker import TrainingWorker
from megalith.training.worker_messages import Call, WorkerSetup, Written

logger = logging.getLogger(__name__)
_ATTEMPTS = 3
"""How often the process of a worker may end while it starts."""


@dataclass
class PoolWorker:
    """A worker as the run sees it.

    Attributes:
        number: Its number; those of workers that have left are used again.
        actor: Its process.
        pid: The id of its process.
        calls: Calls in progress with Ray's reference to their result, the oldest first.
        written: Its writes that belong to steps with a result; None: it has not joined.
        share: The number of the share that it reads; None: none.
        ahead: The rows of the batch that it has read ahead.
        resting: Whether it has left the workers of the servers for want of data.
        leaving: Whether it leaves when its calls are answered.
        lost: Number of its writes that servers have lost.
    """

    number: int
    actor: Any
    pid: int = 0
    calls: deque[tuple[Call, Any]] = field(default_factory=deque)
    written: Written | None = None
    share: int | None = None
    ahead: int = 0
    resting: bool = False
    leaving: bool = False
    lost: int = 0


class WorkerPool:
    """See the module.

    Args:
        setup: What workers are given.
        count: The number of workers.
        calls_again: Returns the calls that the replacement of a worker gets.

    Attributes:
        workers: The connected workers, by number.
        replaced: Number of workers that were replaced.
        lost_writes: Number of answered writes that were lost with a server, of workers that are gone.
    """

    def __init__(
        self, setup: WorkerSetup, count: int, calls_again: Callable[[PoolWorker], list[Call]]
    ) -> None:
        self._setup = setup
        self._calls_again = calls_again
        self._timeout = setup.config.train.timeout
        self.workers: dict[int, PoolWorker] = {}
        self.replaced = 0
        self.lost_writes = 0
        self._last = 0  # the worker whose answer `wait` returned last
        self._starting: dict[int, tuple[Any, Any]] = {}
        self.start(count)

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def starting(self) -> int:
        """The number of workers whose process is starting."""
        return len(self._starting)

    def start(self, count: int) -> None:
        """Start processes.

        Args:
            count: How many; `connect` makes them workers.
        """
        number = 1  # 0 is the run itself
        for _ in range(count):
            while number in self.workers or number in self._starting:
                number += 1
            actor = self._process()
            self._starting[number] = actor, actor.__ray_ready__.remote()

    def _process(self) -> Any:
        ray = ray_module()
        # As for servers: no reserved CPU, so that any number fits on a small machine; spread over a cluster.
        remote = ray.remote(TrainingWorker).options(num_cpus=0, scheduling_strategy="SPREAD")
        return remote.remote(self._setup)

    def connect(self, *, wait: bool = False) -> list[PoolWorker]:
        """Connect the workers whose processes have started.

        Args:
            wait: Whether to wait for all of them.

        Returns:
            The new workers.

        Raises:
            UsageError: They did not start in time.
        """
        if not self._starting:
            return []
        ray = ray_module()
        waiting = {ready: number for number, (_, ready) in self._starting.items()}
        count = len(waiting) if wait else 1
        done, missing = ray.wait(
            list(waiting), num_returns=count, timeout=self._timeout if wait else 0, fetch_local=False
        )
        if wait and missing:
            raise UsageError(f"{len(missing)} workers did not start within {self._timeout:g} s")
        joined = [PoolWorker(waiting[ready], self._starting.pop(waiting[ready])[0]) for ready in done]
        calls = [worker.actor.connect.remote(worker.number, None) for worker in joined]
        for worker, call in zip(joined, calls, strict=True):
            self.workers[worker.number] = worker
            try:
                worker.pid, worker.written = _result(ray.get(call))
            except ray.exceptions.RayActorError:
                self._replace(worker)
        return joined

    def call(self, worker: PoolWorker, name: str, *args: Any) -> None:
        """Add a call to the queue of a worker.

        Args:
            worker: The worker.
            name: The method.
            args: Its arguments.
        """
        worker.calls.append(((name, args), getattr(worker.actor, name).remote(*args)))

    def wait(self) -> tuple[PoolWorker, Call, Any]:
        """Wait until some worker has answered the oldest call of its queue; if several have, they take turns.

        Returns:
            The worker, the call and its result, which may be a Failure.
        """
        ray = ray_module()
        while True:
            busy = [worker for worker in self.workers.values() if worker.calls]
            turns = sorted(busy, key=lambda worker: (worker.number <= self._last, worker.number))
            oldest = {worker.calls[0][1]: worker for worker in turns}
            done, _ = ray.wait(list(oldest), num_returns=1)  # the first of those that are done
            worker = oldest[done[0]]
            self._last = worker.number
            found = self._answer(worker)
            if found is not None:
                return worker, *found

    def answer(self, worker: PoolWorker) -> tuple[Call, Any]:
        """Wait for the answer to the oldest call of one worker.

        Args:
            worker: The worker.

        Returns:
            The call and its result, which may be a Failure.
        """
        while True:
            found = self._answer(worker)
            if found is not None:
                return found

    def _answer(self, worker: PoolWorker) -> tuple[Call, Any] | None:
        """Return the oldest call of a worker and its result; None: the worker was replaced."""
        ray = ray_module()
        call, reference = worker.calls[0]
        try:
            result = ray.get(reference)
        except ray.exceptions.RayActorError:
            self._replace(worker)
            return None
        worker.calls.popleft()
        return call, result

    def _replace(self, worker: PoolWorker) -> None:
        ray = ray_module()
        logger.warning("worker %d has ended and is replaced", worker.number)
        self.lost_writes += worker.lost
        worker.lost = 0
        for attempt in range(_ATTEMPTS):
            self.replaced += 1
            ray.kill(worker.actor)  # it may only be unreachable
            worker.actor = self._process()
            try:
                call = worker.actor.connect.remote(worker.number, worker.written)
                worker.pid, written = _result(ray.get(call))
                worker.written = worker.written or written
                break
            except ray.exceptions.RayActorError as error:
                if attempt == _ATTEMPTS - 1:
                    raise UsageError(
                        f"worker {worker.number} ended {_ATTEMPTS} times while it started: {error}"
                    ) from None
        again, worker.calls, worker.resting = self._calls_again(worker), deque(), False
        for name, args in again:
            self.call(worker, name, *args)

    def remove(self, worker: PoolWorker) -> None:
        """End a worker without calls: it leaves, and its process ends.

        Args:
            worker: The worker.
        """
        self.call(worker, "leave")
        _, result = self.answer(worker)
        _result(result)
        self.lost_writes += worker.lost
        del self.workers[worker.number]
        ray_module().kill(worker.actor)

    def close(self) -> None:
        """End all processes at once."""
        ray = ray_module()
        actors = [worker.actor for worker in self.workers.values()]
        actors += [actor for actor, _ in self._starting.values()]
        self.workers, self._starting = {}, {}
        if ray.is_initialized():
            for actor in actors:
                ray.kill(actor)


def _result(found: Any) -> Any:
    if isinstance(found, Failure):
        raise found.error
    return found
