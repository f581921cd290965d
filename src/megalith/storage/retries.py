"""Retries: requests of an ObjectStore repeated until they succeed or a deadline passes.

The asynchronous methods of `ObjectStore` make one request each; what is repeated, and how often, is decided
here, on one clock. `run_async` makes the way from ordinary code into them. `ObjectBody` reads an object by
ranges, each requested when it is read.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from megalith.storage.object_store import DOWNLOAD_PIECE_BYTES, ObjectInfo, ObjectStore, StoreRequestError
from megalith.storage.object_store import RequestFailure as Failure
from megalith.storage.spool import Body

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
    """Repeat a request after TIMEOUT and STORE_ERROR, with growing, jittered pauses.

    Args:
        call: Makes the request; it takes the time limit of one request in seconds.
        deadline: Seconds for all tries together.
        request_timeout: Seconds for one try.
        rng: The source of the jitter.

    Returns:
        What the request returns.

    Raises:
        StoreRequestError: The last failure, when the time is up, or any other failure at once.
    """
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


async def put_body(
    store: ObjectStore,
    key: str,
    body: Body,
    *,
    create: bool = False,
    deadline: float,
    request_timeout: float = 30.0,
) -> bool:
    """Write a body to a store, repeated like any request.

    Args:
        store: The store.
        key: The object's name.
        body: Its bytes.
        create: Write only if the object does not exist.
        deadline: Seconds for all tries together.
        request_timeout: Seconds for one try.

    Returns:
        Whether the object was written.

    Raises:
        StoreRequestError: The last failure.
    """

    async def put(limit: float) -> bool:
        source = body.source()
        try:
            return await store.put(key, source, create=create, timeout=limit)
        finally:
            if not isinstance(source, bytes):
                source.close()

    return await persist(put, deadline=deadline, request_timeout=request_timeout)


async def download_ranges(
    store: ObjectStore,
    info: ObjectInfo,
    write: Callable[[memoryview, int], None],
    *,
    deadline: float,
    request_timeout: float = 30.0,
    at_once: int = 4,
) -> None:
    """Download a large object by parallel ranged requests. A failed range is repeated, the others are kept.

    Memory is `at_once` ranges of RANGE_BYTES, twice while they arrive.

    Args:
        store: The store.
        info: The object, as `head` reported it; every range must be of this version.
        write: Takes the bytes of a range and their offset.
        deadline: Seconds for the whole download.
        request_timeout: Seconds for one range.
        at_once: Ranges in flight.

    Raises:
        StoreRequestError: A range cannot be read in time, or the object was replaced.
    """
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
    """Iterate without end over the pauses between tries.

    Args:
        rng: The source of the jitter.
        first: The first pause in seconds, before jitter.
        most: The longest pause, before jitter.

    Yields:
        Seconds: doubled from `first` to `most`, each times a random factor from 0.5 to 1.5.
    """
    pause = first
    while True:
        yield pause * (0.5 + rng.random())
        pause = min(most, 2 * pause)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where an event loop is running already (a notebook).

    Args:
        work: The coroutine.

    Returns:
        Its result.
    """
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


class ObjectBody(Body):
    """An object of a store, of which one version is read by ranges.

    Args:
        store: The store.
        key: The object's name.
        deadline: Seconds for each request, repetitions included.

    Raises:
        StoreRequestError: The object does not exist, or the store fails; here and whenever it is read.
    """

    def __init__(self, store: ObjectStore, key: str, *, deadline: float = 60.0) -> None:
        self._store = store
        self._deadline = deadline
        self._key = key
        info = run_async(persist(lambda limit: store.head(key, timeout=limit), deadline=deadline))
        self._etag = info.etag
        self.size = info.size

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `Body.read_into`."""

        def get(limit: float) -> Coroutine[Any, Any, bytes]:
            return self._store.get_range(self._key, offset, len(view), etag=self._etag, timeout=limit)

        if len(view):
            view[:] = run_async(persist(get, deadline=self._deadline))

    def source(self) -> bytes:
        """See `Body.source`."""
        return bytes(self.read(0, self.size))

    def close(self) -> None:
        """See `Body.close`: nothing is held."""
