"""Retries: requests of an ObjectStore repeated until they succeed or a deadline passes.

The asynchronous methods of `ObjectStore` make one request each. All code that repeats them does so with
`repeat`: `persist` for a single request, the gather for all requests of one peer. The blocking methods are
repeated by obstore itself, which resumes an upload at the part that failed. `run_async` calls asynchronous
code from ordinary code.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from megalith.errors import StoreError
from megalith.storage.object_store import RequestFailure as Failure
from megalith.storage.object_store import StoreRequestError

T = TypeVar("T")
F = TypeVar("F", bound=Exception)
GRACE_SECONDS = 600.0
"""How much longer than the deadlines of its requests `run_async` waits: for checks and writes in between."""


async def persist(
    call: Callable[[float], Awaitable[T]],
    *,
    deadline: float,
    request_timeout: float = 30.0,
    rng: random.Random | None = None,
) -> T:
    """Repeat a request after TIMEOUT, SLOW and STORE_ERROR, with growing, jittered pauses."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline
    pauses = backoff(rng or random.Random())

    def pause_after(error: StoreRequestError) -> float | None:
        again = error.failure in (Failure.TIMEOUT, Failure.SLOW, Failure.STORE_ERROR)
        return next(pauses) if again else None

    def attempt() -> Awaitable[T]:
        return call(max(0.001, min(request_timeout, end - loop.time())))

    return await repeat(attempt, StoreRequestError, pause_after, end)


async def repeat(
    attempt: Callable[[], Awaitable[T]],
    failure: type[F],
    pause_after: Callable[[F], float | None],
    end: float,
) -> T:
    """Repeat an attempt after `failure`, until `pause_after` returns None or the pause would reach `end`."""
    # end: on the clock of the event loop.
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await attempt()
        except failure as error:
            pause = pause_after(error)
            if pause is None or loop.time() + pause >= end:
                raise
        await asyncio.sleep(pause)


def backoff(rng: random.Random, first: float = 0.1, most: float = 5.0) -> Iterator[float]:
    """Iterate without end over the pauses between tries."""
    pause = first
    while True:
        yield pause * (0.5 + rng.random())
        pause = min(most, 2 * pause)


def run_async(
    work: Coroutine[Any, Any, T], what: str = "requests to an object store", *, deadline: float = 0.0
) -> T:
    """Run a coroutine to its end, also where an event loop is running already (a notebook)."""
    # deadline: that of the requests themselves; the limit here is for what they do not cover.
    limit = deadline + GRACE_SECONDS

    def late() -> StoreError:
        return StoreError(f"{what}: not finished after {limit:g} s")

    async def limited() -> T:
        timer = asyncio.timeout(limit)
        try:
            async with timer:
                return await work
        except TimeoutError:
            if timer.expired():
                raise late() from None
            raise

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(limited())
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(asyncio.run(limited()))
        except BaseException as error:
            future.set_exception(error)

    # A daemon thread: the interpreter must not wait for it at its exit.
    threading.Thread(target=run, name="megalith requests", daemon=True).start()
    wait([future], limit + 1)
    if not future.done():
        raise late()
    return future.result()  # no limit: it is done
