"""Batcher: computes concurrent requests together.

Each caller waits for its own result. A worker takes the queued requests, computes them as one batch and wakes
the callers. While requests come one at a time, a caller computes its request itself, which saves waking two
threads; once several are waiting, batches of them are faster, and a worker takes them when no further one
arrives. The queue is bounded by rows, and by the bytes that the computation gathers. A request whose caller
no longer waits is not computed.

Invariant: at most `workers` batches are computed at a time, by workers and callers together.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from megalith.errors import InputError
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.server_config import Batching

Work = TypeVar("Work")
Result = TypeVar("Result")
Alive = Callable[[], bool]

SETTLE_SECONDS, MAX_SETTLE_SECONDS = 0.0002, 0.004
"""Seconds without a further request after which a busy server computes; and the longest wait for it."""


class _QueuedRequest(Generic[Work, Result]):
    __slots__ = ("alive", "cost", "deadline", "error", "result", "rows", "since", "wake", "work")

    def __init__(self, work: Work, rows: int, cost: int, timeout: float, alive: Alive | None) -> None:
        self.work = work
        self.rows = rows
        self.cost = cost
        self.since = time.monotonic()
        self.deadline = self.since + timeout
        self.alive = alive
        self.wake = threading.Lock()
        self.wake.acquire()  # no limit: it is free
        self.result: Result | None = None
        self.error: Exception | None = None


class Batcher(Generic[Work, Result]):
    """A queue of requests and the threads that compute them."""

    def __init__(
        self,
        compute: Callable[[Sequence[Work]], Sequence[Result | Exception]],
        settings: Batching,
        *,
        name: str,
        combines: bool = True,
        on_batch: Callable[[int], object] = lambda rows: None,
    ) -> None:
        self._compute = compute
        self._settings = settings
        self._combines = combines
        self._on_batch = on_batch
        self._queue: deque[_QueuedRequest[Work, Result]] = deque()
        self._changed = threading.Condition()
        self._rows = 0
        self._cost = 0
        self._busy = 0
        """Number of batches that are being computed."""
        self._last_size = 1
        """Number of requests of the last batch."""
        self._own = threading.local()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"megalith-batch-{name}-{k}", daemon=True)
            for k in range(settings.workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued_rows(self) -> int:
        return self._rows

    def check(self, rows: int, cost: int = 0) -> None:
        """Raise InputError for a request that is larger than the empty queue."""
        settings = self._settings
        if rows > settings.max_queue_rows or cost > settings.max_queue_bytes:
            raise InputError(
                f"a request of {rows} rows and {cost} bytes is too large: the limits are "
                f"{settings.max_queue_rows} rows and {settings.max_queue_bytes} bytes; send it in parts"
            )

    def submit(
        self, work: Work, rows: int, *, cost: int = 0, timeout: float, alive: Alive | None = None
    ) -> Result:
        self.check(rows, cost)
        queued: _QueuedRequest[Work, Result] = _QueuedRequest(work, rows, cost, timeout, alive)
        with self._changed:
            if self._closed:
                raise RequestError(Code.UNAVAILABLE, "the server is shutting down")
            settings = self._settings
            if self._rows + rows > settings.max_queue_rows or self._cost + cost > settings.max_queue_bytes:
                raise RequestError(
                    Code.RESOURCE_EXHAUSTED, f"{self._rows} rows are already queued; try again later"
                )
            idle = not self._queue and self._busy < settings.workers
            inline = idle and self._last_size == 1 and not settings.max_wait
            if inline:
                self._busy += 1
            else:
                self._queue.append(queued)
                self._rows += rows
                self._cost += cost
                self._changed.notify()
        if inline:
            self._compute_batch([queued])
        if not queued.wake.acquire(timeout=max(timeout, 0.0)):
            raise _too_late()
        if queued.error is not None:
            raise queued.error
        return queued.result  # type: ignore[return-value]

    def close(self, timeout: float) -> bool:
        """Compute the queued requests, then end the threads; return whether they ended in time."""
        end = time.monotonic() + timeout
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._changed:
            idle = self._changed.wait_for(lambda: not self._busy, max(0.0, end - time.monotonic()))
        return idle and not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while batch := self._take():
            self._compute_batch(batch)

    def _compute_batch(self, batch: Sequence[_QueuedRequest[Work, Result]]) -> None:
        """Compute a batch, which is counted in `_busy`, and wake its callers."""
        try:
            self._set_threads()
            waiting = [queued for queued in batch if _awaited(queued)]
            if waiting:
                self._fill(waiting)
        finally:
            with self._changed:
                self._busy -= 1
                if self._queue or self._closed:
                    self._changed.notify_all()

    def _set_threads(self) -> None:
        """Set the number of torch threads of this thread, once."""
        if self._settings.threads is not None and not hasattr(self._own, "threads"):
            self._own.threads = self._settings.threads
            torch.set_num_threads(self._settings.threads)

    def _fill(self, waiting: Sequence[_QueuedRequest[Work, Result]]) -> None:
        results: Sequence[Result | Exception]
        try:
            self._on_batch(sum(queued.rows for queued in waiting))
            results = self._compute([queued.work for queued in waiting])
        except Exception as error:
            results = [error] * len(waiting)
        for queued, result in zip(waiting, results, strict=True):
            if isinstance(result, Exception):
                queued.error = result
            else:
                queued.result = result
            queued.wake.release()

    def _take(self) -> list[_QueuedRequest[Work, Result]]:
        """Wait for the next batch, and count it in `_busy`; empty once the queue is closed and empty."""
        with self._changed:
            batch: list[_QueuedRequest[Work, Result]] = []
            while not batch:
                while not self._queue or self._busy >= self._settings.workers:
                    if self._closed and not self._queue:
                        return []
                    self._changed.wait()  # no limit: the next batch
                if self._settings.max_wait and self._combines:
                    self._wait_for_more()
                elif self._combines and max(self._last_size, len(self._queue)) > 1:
                    self._wait_for_arrivals()
                if self._busy < self._settings.workers:
                    batch = self._cut()
            self._busy += 1
            self._last_size = len(batch)
            return batch

    def _cut(self) -> list[_QueuedRequest[Work, Result]]:
        """Take a batch from the front of the queue; empty if another worker took it."""
        batch: list[_QueuedRequest[Work, Result]] = []
        rows = cost = 0
        while self._queue:
            queued = self._queue[0]
            rows, cost = rows + queued.rows, cost + queued.cost
            full = rows > self._settings.max_rows or cost > self._settings.max_bytes
            if batch and (full or not self._combines):
                break
            batch.append(self._queue.popleft())
            self._rows -= queued.rows
            self._cost -= queued.cost
        return batch

    def _wait_for_arrivals(self) -> None:
        """Wait while requests keep arriving: a busy process receives one after the other."""
        end = time.monotonic() + MAX_SETTLE_SECONDS
        size = 0
        while size < len(self._queue) and self._rows < self._settings.max_rows and not self._closed:
            size = len(self._queue)
            self._changed.release()
            try:
                time.sleep(SETTLE_SECONDS)
            finally:
                self._changed.acquire()  # no limit: held for one call
            if time.monotonic() > end:
                return

    def _wait_for_more(self) -> None:
        settings = self._settings
        while self._queue and not self._closed:
            if self._rows >= settings.max_rows or self._cost >= settings.max_bytes:
                return
            left = self._queue[0].since + settings.max_wait - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                return


def _awaited(queued: _QueuedRequest[Work, Result]) -> bool:
    """Return whether a caller still waits; otherwise set the error of its request."""
    if queued.deadline <= time.monotonic():
        queued.error = _too_late()
    elif queued.alive is not None and not queued.alive():
        queued.error = RequestError(Code.CANCELLED, "the client no longer waits")
    else:
        return True
    queued.wake.release()
    return False


def _too_late() -> RequestError:
    return RequestError(Code.DEADLINE_EXCEEDED, "the deadline passed before the request was computed")
