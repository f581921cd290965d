"""Batching: concurrent requests computed together.

Each caller waits for its own result; a worker takes what is queued, computes it in one go and wakes them.
The queue is bounded, in rows and in the bytes that computing them takes. What nobody waits for any more is
not computed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from megalith.errors import InputError
from megalith.serving.proto.limits import MAX_BYTES
from megalith.serving.server.request_errors import Code, RequestError

Work = TypeVar("Work")
Result = TypeVar("Result")
Alive = Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How requests are put together. Raises InputError for numbers that make no sense."""

    max_rows: int = 1024
    """Rows computed at once; a request of more is cut."""
    max_bytes: int = MAX_BYTES
    """Bytes of embedding rows and dense values gathered at once; a request of more is computed alone."""
    max_wait_us: int = 0
    """Microseconds to wait for a batch to fill up; 0 takes what is queued."""
    max_queue_rows: int = 16384
    """Rows that may wait; requests beyond are refused."""
    max_queue_bytes: int = 4 * MAX_BYTES
    """Bytes that those which wait may gather."""
    workers: int = 1
    """Threads that compute, for each version of a model."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_bytes", "max_wait_us", "max_queue_rows", "max_queue_bytes", "workers"):
            value, low = getattr(self, name), 0 if name == "max_wait_us" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise InputError(f"batching: {name} must be a whole number from {low}, got {value!r}")


class _Ticket(Generic[Work, Result]):
    """A request in the queue."""

    __slots__ = ("alive", "cost", "deadline", "error", "result", "rows", "since", "wake", "work")

    def __init__(self, work: Work, rows: int, cost: int, timeout: float, alive: Alive | None) -> None:
        self.work = work
        self.rows = rows
        self.cost = cost
        self.since = time.monotonic()
        self.deadline = self.since + timeout
        self.alive = alive
        self.wake = threading.Lock()
        self.wake.acquire()
        self.result: Result | None = None
        self.error: Exception | None = None


class Batcher(Generic[Work, Result]):
    """A queue of requests and the threads that compute them.

    compute: a batch of work -> a result or an error for each. joins: whether work may be put together at all.
    on_batch: told the rows of each batch.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Work]], Sequence[Result | Exception]],
        settings: Batching,
        *,
        name: str,
        joins: bool = True,
        on_batch: Callable[[int], object] = lambda rows: None,
    ) -> None:
        self._compute = compute
        self._settings = settings
        self._joins = joins
        self._on_batch = on_batch
        self._queue: deque[_Ticket[Work, Result]] = deque()
        self._changed = threading.Condition()
        self._rows = 0
        self._cost = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"megalith-batch-{name}-{k}", daemon=True)
            for k in range(settings.workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued_rows(self) -> int:
        """Rows that wait."""
        return self._rows

    def check(self, rows: int, cost: int = 0) -> None:
        """Raises InputError for work that no queue has room for, however empty."""
        settings = self._settings
        if rows > settings.max_queue_rows or cost > settings.max_queue_bytes:
            raise InputError(
                f"a request of {rows} rows that takes {cost} bytes is too large: there is room for "
                f"{settings.max_queue_rows} rows and {settings.max_queue_bytes} bytes; send it in parts"
            )

    def submit(
        self, work: Work, rows: int, *, cost: int = 0, timeout: float, alive: Alive | None = None
    ) -> Result:
        """Waits for the result; at most `timeout` seconds.

        cost: bytes that computing it takes. alive: whether somebody still waits for it. Raises InputError
        for what is too large, RequestError if the queue is full or the time is over, and what computing it
        raised.
        """
        self.check(rows, cost)
        ticket: _Ticket[Work, Result] = _Ticket(work, rows, cost, timeout, alive)
        with self._changed:
            if self._closed:
                raise RequestError(Code.UNAVAILABLE, "the server is shutting down")
            settings = self._settings
            if self._rows + rows > settings.max_queue_rows or self._cost + cost > settings.max_queue_bytes:
                raise RequestError(
                    Code.RESOURCE_EXHAUSTED, f"{self._rows} rows are waiting already; try again later"
                )
            self._queue.append(ticket)
            self._rows += rows
            self._cost += cost
            self._changed.notify()
        if not ticket.wake.acquire(timeout=max(timeout, 0.0)):
            raise _too_late()
        if ticket.error is not None:
            raise ticket.error
        return ticket.result  # type: ignore[return-value]

    def close(self) -> None:
        """Computes what is queued, then ends; closing again is harmless."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while batch := self._take():
            waiting = [ticket for ticket in batch if _awaited(ticket)]
            if not waiting:
                continue
            results: Sequence[Result | Exception]
            try:
                self._on_batch(sum(ticket.rows for ticket in waiting))
                results = self._compute([ticket.work for ticket in waiting])
            except Exception as error:
                results = [error] * len(waiting)
            for ticket, result in zip(waiting, results, strict=True):
                if isinstance(result, Exception):
                    ticket.error = result
                else:
                    ticket.result = result
                ticket.wake.release()

    def _take(self) -> list[_Ticket[Work, Result]]:
        """The next batch; empty at the end."""
        with self._changed:
            batch: list[_Ticket[Work, Result]] = []
            while not batch:
                while not self._queue:
                    if self._closed:
                        return []
                    self._changed.wait()
                if self._settings.max_wait_us and self._joins:
                    self._wait_for_more()
                batch = self._cut()
            return batch

    def _cut(self) -> list[_Ticket[Work, Result]]:
        """The front of the queue; empty if another worker took it."""
        batch: list[_Ticket[Work, Result]] = []
        rows = cost = 0
        while self._queue:
            ticket = self._queue[0]
            rows, cost = rows + ticket.rows, cost + ticket.cost
            full = rows > self._settings.max_rows or cost > self._settings.max_bytes
            if batch and (full or not self._joins):
                break
            batch.append(self._queue.popleft())
            self._rows -= ticket.rows
            self._cost -= ticket.cost
        return batch

    def _wait_for_more(self) -> None:
        settings = self._settings
        while self._queue and not self._closed:
            if self._rows >= settings.max_rows or self._cost >= settings.max_bytes:
                return
            left = self._queue[0].since + settings.max_wait_us / 1e6 - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                return


def _awaited(ticket: _Ticket[Work, Result]) -> bool:
    """Whether a ticket is worth computing; one that is not gets its error."""
    if ticket.deadline <= time.monotonic():
        ticket.error = _too_late()
    elif ticket.alive is not None and not ticket.alive():
        ticket.error = RequestError(Code.CANCELLED, "the client does not wait any more")
    else:
        return True
    ticket.wake.release()
    return False


def _too_late() -> RequestError:
    return RequestError(Code.DEADLINE_EXCEEDED, "the deadline passed before the request was computed")
