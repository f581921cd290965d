"""Bodies: the bytes of one object, in memory, in a spool file or in an object store, read by range.

A spool file has no name: it is deleted from its directory when it is created, so that nothing remains after a
process was killed. A body is written once and then read by any number of threads; whoever opens it closes it.
A `Ledger` counts the bytes that are held in memory against a budget.

Bodies are downloaded from and uploaded to an `ObjectStore` here; `retries` repeats the requests.
"""

from __future__ import annotations

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, cast

from megalith.errors import BudgetError, StoreError
from megalith.library import return_freed_memory
from megalith.storage.object_store import DOWNLOAD_PIECE_BYTES, ObjectInfo, ObjectStore, StoreRequestError
from megalith.storage.object_store import RequestFailure as Failure
from megalith.storage.retries import persist, run_async
from megalith.units import show_bytes


class Ledger:
    """Bytes in use now and at most, against a budget. Threads may share it.

    It counts what the code declares; tests compare it with the memory that the operating system counts. The
    C library may keep freed memory in pieces that are too small for the next buffer. Bytes that were given
    back therefore count as well, until they would exceed the budget: then they are returned to the operating
    system.
    """

    def __init__(self, budget: int, phase: str, *, freed: int = 0) -> None:
        self.budget = budget
        self.phase = phase
        self.used = 0
        self.peak = 0
        self._freed = freed
        self._lock = threading.Lock()

    def take(self, count: int, purpose: str) -> None:
        """Record bytes as used."""
        with self._lock:
            if self.used + count > self.budget:
                raise BudgetError(
                    f"{self.phase}: {purpose} takes {show_bytes(count)}, but {show_bytes(self.used)} of the "
                    f"budget of {show_bytes(self.budget)} are in use: raise memory_budget"
                )
            if self.used + self._freed + count > self.budget:
                return_freed_memory()
                self._freed = 0
            self.used += count
            self.peak = max(self.peak, self.used)

    def give(self, count: int) -> None:
        """Record bytes as free again."""
        with self._lock:
            self.used -= count
            self._freed += count

    @contextmanager
    def hold(self, count: int, purpose: str) -> Iterator[None]:
        """Take bytes for the duration of a `with` block."""
        self.take(count, purpose)
        try:
            yield
        finally:
            self.give(count)


class Body(ABC):
    """Bytes that can be read by range."""

    size: int  # The number of bytes

    @abstractmethod
    def read_into(self, offset: int, view: memoryview) -> None:
        """Copy bytes into a buffer."""

    @abstractmethod
    def source(self) -> bytes | BinaryIO:
        """Return all of it as an upload takes it: bytes, or an open file, which the caller closes."""

    @abstractmethod
    def close(self) -> None:
        """Release the bytes. A second call does nothing."""

    def read(self, offset: int, length: int) -> bytearray:
        """Return a copy of some bytes."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return data


class MemoryBody(Body):
    """Bytes in memory."""

    def __init__(
        self, data: bytes | bytearray | memoryview, on_close: Callable[[], None] | None = None
    ) -> None:
        self._data = memoryview(data).cast("B")
        self._on_close = on_close
        self.size = len(self._data)

    def read_into(self, offset: int, view: memoryview) -> None:
        if offset < 0 or offset + len(view) > self.size:
            raise StoreError(f"cannot read {len(view)} bytes at {offset} of a body of {self.size} bytes")
        view[:] = self._data[offset : offset + len(view)]

    def source(self) -> bytes | BinaryIO:
        # A copy of all bytes.
        return bytes(self._data)

    def close(self) -> None:
        self._data = memoryview(b"")
        self.size = 0
        if self._on_close is not None:
            self._on_close()
            self._on_close = None


class FileBody(Body):
    """Bytes in a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size

    def read_into(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            if count <= 0:
                raise StoreError(f"a file of {self.size} bytes ends before byte {offset + len(view)}")
            done += count

    def source(self) -> bytes | BinaryIO:
        # The file, from its beginning.
        copy = os.fdopen(os.dup(self._file.fileno()), "rb")
        copy.seek(0)
        return copy

    def close(self) -> None:
        # A spool file is gone then.
        self._file.close()


class SpoolWriter:
    """A new spool file."""

    def __init__(self, directory: Path | None = None) -> None:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        self.file: BinaryIO = cast(BinaryIO, TemporaryFile(dir=directory))  # noqa: SIM115

    def write(self, data: bytes | memoryview, offset: int | None = None) -> None:
        if offset is None:
            self.file.write(data)
            return
        view = memoryview(data)
        while view:
            count = os.pwrite(self.file.fileno(), view, offset)
            view, offset = view[count:], offset + count

    def finish(self) -> FileBody:
        """Return the written bytes as a body."""
        try:
            self.file.flush()
        except OSError:
            self.discard()
            raise
        return FileBody(self.file)

    def discard(self) -> None:
        """Delete what was written."""
        with suppress(OSError):  # buffered bytes may not fit on the disk any more
            self.file.close()


class MemoryWriter:
    """A new body in memory, of known size, counted by a ledger until it is closed."""

    def __init__(self, size: int, ledger: Ledger) -> None:
        ledger.take(size, "a body in memory")
        self._ledger = ledger
        self._data = bytearray(size)
        self._done = 0

    def write(self, data: bytes | memoryview) -> None:
        """Write bytes after the last ones."""
        self._data[self._done : self._done + len(data)] = data
        self._done += len(data)

    def finish(self) -> MemoryBody:
        """Return the written bytes as a body."""
        size = len(self._data)
        return MemoryBody(self._data, on_close=lambda: self._ledger.give(size))

    def discard(self) -> None:
        """Release the bytes."""
        self._ledger.give(len(self._data))
        self._data = bytearray()


async def download_body(
    store: ObjectStore,
    info: ObjectInfo,
    writer: SpoolWriter | MemoryWriter,
    *,
    deadline: float,
    request_timeout: float = 30.0,
    ranges: int = 1,
) -> Body:
    """Download one version of an object."""
    left = info.size

    def take(piece: memoryview) -> None:
        nonlocal left
        left -= len(piece)
        if left < 0:
            raise StoreRequestError(Failure.CHANGED, f"more than the announced {info.size} bytes arrived")
        writer.write(piece)

    try:
        if ranges > 1 and isinstance(writer, SpoolWriter):
            await download_ranges(
                store,
                info,
                writer.write,
                deadline=deadline,
                request_timeout=request_timeout,
                at_once=ranges,
            )
        else:
            got = await store.get(info.key, take, etag=info.etag, timeout=deadline)
            if (got.size, got.etag) != (info.size, info.etag):
                raise StoreRequestError(Failure.CHANGED, f"{info.key!r} was replaced between two requests")
        return writer.finish()
    except BaseException:
        writer.discard()
        raise


async def put_body(
    store: ObjectStore,
    key: str,
    body: Body,
    *,
    create: bool = False,
    deadline: float,
    request_timeout: float = 30.0,
) -> bool:
    """Write a body to a store, repeated like any request."""

    async def put(limit: float) -> bool:
        source = body.source()
        try:
            return await store.put(key, source, create=create, timeout=limit)
        finally:
            if not isinstance(source, bytes):
                source.close()

    return await persist(put, deadline=deadline, request_timeout=request_timeout)


async def put_bodies(
    store: ObjectStore, bodies: Mapping[str, Body], *, create: bool = False, deadline: float, at_once: int = 4
) -> None:
    """Write bodies to a store, some at a time."""
    places = asyncio.Semaphore(at_once)

    async def write(key: str, body: Body) -> None:
        async with places:
            await put_body(store, key, body, create=create, deadline=deadline, request_timeout=deadline)

    await asyncio.gather(*(write(key, body) for key, body in bodies.items()))


class ObjectBody(Body):
    """An object of a store, of which one version is read by ranges."""

    def __init__(self, store: ObjectStore, key: str, *, deadline: float = 60.0) -> None:
        self._store = store
        self._deadline = deadline
        self._key = key
        head = persist(lambda limit: store.head(key, timeout=limit), deadline=deadline)
        info = run_async(head, f"the size of {key!r}", deadline=deadline)
        self._etag = info.etag
        self.size = info.size

    def read_into(self, offset: int, view: memoryview) -> None:
        def get(limit: float) -> Coroutine[Any, Any, bytes]:
            return self._store.get_range(self._key, offset, len(view), etag=self._etag, timeout=limit)

        if len(view):
            what = f"{len(view)} bytes of {self._key!r} at {offset}"
            view[:] = run_async(persist(get, deadline=self._deadline), what, deadline=self._deadline)

    def source(self) -> bytes:
        return bytes(self.read(0, self.size))

    def close(self) -> None:
        # Nothing is held.
        ...


RANGE_BYTES = 8 * DOWNLOAD_PIECE_BYTES
"""The length of a ranged request of `download_ranges`."""


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
