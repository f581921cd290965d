"""Batcher: computes concurrent requests together.

Requests come from an event loop, and threads compute them. A thread takes the queued requests, computes them
as one batch and passes the results to the loop in one call. The queue is bounded by rows, and by the bytes
that the computation gathers. A request whose caller no longer waits is not computed.

With `inline`, a small request that is alone is computed by its caller in the event loop, which saves passing
it to a thread and back, if the last batch took less than INLINE_SECONDS.

    event                              effect
    the caller's deadline passes       DEADLINE_EXCEEDED; the request is skipped when its turn comes
    the caller is cancelled            the request is skipped when its turn comes
    `close`                            what is queued is computed; the thread that ends last calls `on_end`
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch

from megalith.errors import InputError
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.server_config import Batching

Work = TypeVar("Work")
Result = TypeVar("Result")

SETTLE_SECONDS, MAX_SETTLE_SECONDS = 0.0002, 0.004
"""Seconds without a further request after which a busy server computes; and the longest wait for it."""
INLINE_ROWS, INLINE_BYTES, INLINE_SECONDS = 16, 1 << 16, 0.002
"""Largest request, and longest time of the batch before it, that the event loop computes."""


class _QueuedRequest(Generic[Work, Result]):
    __slots__ = ("cost", "future", "rows", "since", "work")

    def __init__(self, work: Work, rows: int, cost: int) -> None:
        self.work = work
        self.rows = rows
        self.cost = cost
        self.since = time.monotonic()
        self.future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()


class Batcher(Generic[Work, Result]):
    """A queue of requests and the threads that compute them."""

    def __init__(
        self,
        compute: Callable[[Sequence[Work]], Sequence[Result | Exception]],
        settings: Batching,
        *,
        name: str,
        combines: bool = True,
        inline: bool = False,
        on_batch: Callable[[int], object] = lambda rows: None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._compute = compute
        self._settings = settings
        self._combines = combines
        self._inline = inline and not settings.max_wait
        self._on_batch = on_batch
        self._on_end = on_end
        self._queue: deque[_QueuedRequest[Work, Result]] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._rows = 0
        self._cost = 0
        self._last_size = 1
        """Number of requests of the last batch."""
        self._last_seconds = INLINE_SECONDS
        self._computing = 0
        """Number of batches that are being computed."""
        self._closed = False
        self._running = settings.workers
        """Number of threads that have not ended."""
        for k in range(settings.workers):
            # Daemons: a computation that never ends must not keep the process from exiting.
            threading.Thread(target=self._work, name=f"megalith-batch-{name}-{k}", daemon=True).start()

    @property
    def queued_rows(self) -> int:
        return self._rows

    def check(self, rows: int, cost: int) -> None:
        """Raise InputError for a request that is larger than the empty queue."""
        settings = self._settings
        if rows > settings.max_queue_rows or cost > settings.max_queue_bytes:
            raise InputError(
                f"a request of {rows} rows and {cost} bytes is too large: the limits are "
                f"{settings.max_queue_rows} rows and {settings.max_queue_bytes} bytes; send it in parts"
            )

    async def submit(self, work: Work, rows: int = 1, *, cost: int = 0, timeout: float) -> Result:
        """Wait for the result of a request."""
        queued: _QueuedRequest[Work, Result] = _QueuedRequest(work, rows, cost)
        settings, future = self._settings, queued.future
        with self._lock:
            if self._closed:
                raise RequestError(Code.UNAVAILABLE, "the server is shutting down")
            if self._rows + rows > settings.max_queue_rows or self._cost + cost > settings.max_queue_bytes:
                self.check(rows, cost)
                raise RequestError(
                    Code.RESOURCE_EXHAUSTED, f"{self._rows} rows are already queued; try again later"
                )
            alone = (
                self._inline
                and not self._queue
                and not self._computing
                and self._last_size == 1
                and self._last_seconds < INLINE_SECONDS < timeout
                and rows <= INLINE_ROWS
                and cost <= INLINE_BYTES
                and settings.threads in (None, torch.get_num_threads())
            )
            self._queue.append(queued)
            self._rows += rows
            self._cost += cost
            if not alone:
                self._changed.notify()
        if alone:
            try:
                await asyncio.sleep(0)  # further requests that have arrived are queued
            except asyncio.CancelledError:
                future.cancel()
                with self._lock, suppress(ValueError):  # a thread has taken it
                    self._queue.remove(queued)
                    self._rows -= rows
                    self._cost -= cost
                raise
            with self._lock:
                alone = len(self._queue) == 1 and self._queue[0] is queued and not self._computing
                if alone:
                    self._queue.popleft()
                    self._rows -= rows
                    self._cost -= cost
                    self._computing += 1
                else:
                    self._changed.notify()
            if alone:
                _, (result,) = self._fill([queued])
                if isinstance(result, Exception):
                    raise result
                return result
        # Cheaper than asyncio.timeout, which cancels the task.
        timer = future.get_loop().call_later(max(timeout, 0.0), _expire, future)
        try:
            return await future
        finally:
            timer.cancel()

    def close(self) -> None:
        """Accept no further requests, and end the threads once the queued ones are computed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        if self._settings.threads is not None:
            torch.set_num_threads(self._settings.threads)
        while batch := self._take():
            waiting, results = self._fill(batch)
            if waiting:
                waiting[0].future.get_loop().call_soon_threadsafe(_deliver, waiting, results)
        with self._lock:
            self._running -= 1
            is_last = not self._running
        if is_last:
            self._on_end()

    def _fill(
        self, batch: Sequence[_QueuedRequest[Work, Result]]
    ) -> tuple[Sequence[_QueuedRequest[Work, Result]], Sequence[Result | Exception]]:
        """Compute a batch; return the requests whose callers wait, and their results."""
        waiting = [queued for queued in batch if not queued.future.done()]
        results: Sequence[Result | Exception] = []
        started = time.monotonic()
        try:
            if waiting:
                self._on_batch(sum(queued.rows for queued in waiting))
                results = self._compute([queued.work for queued in waiting])
        except Exception as error:
            results = [error] * len(waiting)
        with self._lock:
            self._computing -= 1
            self._last_seconds = time.monotonic() - started
        return waiting, results

    def _take(self) -> list[_QueuedRequest[Work, Result]]:
        """Wait for the next batch; empty once the queue is closed and empty."""
        with self._changed:
            batch: list[_QueuedRequest[Work, Result]] = []
            while not batch:
                while not self._queue:
                    if self._closed:
                        return []
                    self._changed.wait()  # no limit: the next piece of work
                if self._settings.max_wait and self._combines:
                    self._wait_for_more()
                elif self._combines and max(self._last_size, len(self._queue)) > 1:
                    self._wait_for_arrivals()
                batch = self._cut()
            self._last_size = len(batch)
            self._computing += 1
            return batch

    def _cut(self) -> list[_QueuedRequest[Work, Result]]:
        """Take a batch from the front of the queue; empty if another thread took it."""
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


def _expire(future: asyncio.Future[Any]) -> None:
    if not future.done():
        late = RequestError(Code.DEADLINE_EXCEEDED, "the deadline passed before the request was computed")
        future.set_exception(late)


def _deliver(waiting: Sequence[_QueuedRequest[Work, Result]], results: Sequence[Result | Exception]) -> None:
    for queued, result in zip(waiting, results, strict=True):
        if queued.future.done():  # its caller no longer waits
            continue
        if isinstance(result, Exception):
            queued.future.set_exception(result)
        else:
            queued.future.set_result(result)


class WorkerThreads:
    """Daemon threads for calls that would block the event loop."""

    def __init__(self, count: int, name: str) -> None:
        self._settings, self._name = Batching(workers=count), name
        self._calls: Batcher[Callable[[], Any], Any] | None = None

    async def run(self, work: Callable[[], Result], timeout: float) -> Result:
        if self._calls is None:  # a server that is not started needs no threads
            self._calls = Batcher(
                lambda batch: [work() for work in batch], self._settings, name=self._name, combines=False
            )
        context = contextvars.copy_context()  # so that work can add to the line of the access log
        found: Result = await self._calls.submit(lambda: context.run(work), timeout=timeout)
        return found

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close()
