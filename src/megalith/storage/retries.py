"""Retries: requests of an ObjectStore repeated until they succeed or a deadline passes.

The asynchronous methods of `ObjectStore` make one request each; what is repeated, and how often, is decided
here, on one clock. `run_async` makes the way from ordinary code into them.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from megalith.storage.object_store import DOWNLOAD_PIECE_BYTES, ObjectInfo, ObjectStore, StoreRequestError
from megalith.storage.object_store import RequestFailure as Failure

T = TypeVar("T")
RANGE_BYTES = 8 * DOWNLOAD_PIECE_BYTES
"""The length of a ranged request of `download_ranges`."""


async def persist(
    call: Callable[[float], Awaitable[T]],
    *,
    deadline: float,
    request_timeout: float = 30.0,
    rng: random.Random | None = None,
) -> T:
    """Repeat a request after TIMEOUT and STORE_ERROR, with growing, jittered pauses."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline
    pauses = backoff(rng or random.Random())
    while True:
        try:
            return await call(max(0.001, min(request_timeout, end - loop.time())))
        except StoreRequestError as error:
            pause = next(pauses)
            if error.failure not in (Failure.TIMEOUT, Failure.STORE_ERROR) or loop.time() + pause >= end:
                raise
            await asyncio.sleep(pause)


async def download_ranges(
    store: ObjectStore,
    info: ObjectInfo,
    write: Callable[[memoryview, int], None],
    *,
    deadline: float,
    request_timeout: float = 30.0,
    at_once: int = 4,
) -> None:
    """Download a large object by parallel ranged requests. A failed range is repeated alone."""
    # Memory is `at_once` ranges of RANGE_BYTES, twice while they arrive.
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline
    starts = iter(range(0, info.size, RANGE_BYTES))

    async def work() -> None:
        for start in starts:
            length = min(RANGE_BYTES, info.size - start)

            def call(limit: float, start: int = start, length: int = length) -> Coroutine[Any, Any, bytes]:
                return store.get_range(info.key, start, length, etag=info.etag, timeout=limit)

            data = await persist(call, deadline=end - loop.time(), request_timeout=request_timeout)
            write(memoryview(data), start)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, at_once)):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def backoff(rng: random.Random, first: float = 0.1, most: float = 5.0) -> Iterator[float]:
    """Iterate without end over the pauses between tries."""
    pause = first
    while True:
        yield pause * (0.5 + rng.random())
        pause = min(most, 2 * pause)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where an event loop is running already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(work))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
