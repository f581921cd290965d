"""Bodies and objects of stores: one version of an object, downloaded or read by ranges; bodies uploaded."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from megalith.storage.object_store import ObjectInfo, ObjectStore, StoreRequestError
from megalith.storage.object_store import RequestFailure as Failure
from megalith.storage.retries import download_ranges, persist, run_async
from megalith.storage.spool import Body, MemoryWriter, SpoolWriter


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
    store: ObjectStore, bodies: Mapping[str, Body], *, deadline: float, at_once: int = 4
) -> None:
    """Write bodies to a store, some at a time."""
    places = asyncio.Semaphore(at_once)

    async def write(key: str, body: Body) -> None:
        async with places:
            await put_body(store, key, body, deadline=deadline, request_timeout=deadline)

    await asyncio.gather(*(write(key, body) for key, body in bodies.items()))


class ObjectBody(Body):
    """An object of a store, of which one version is read by ranges."""

    def __init__(self, store: ObjectStore, key: str, *, deadline: float = 60.0) -> None:
        self._store = store
        self._deadline = deadline
        self._key = key
        info = run_async(persist(lambda limit: store.head(key, timeout=limit), deadline=deadline))
        self._etag = info.etag
        self.size = info.size

    def read_into(self, offset: int, view: memoryview) -> None:
        def get(limit: float) -> Coroutine[Any, Any, bytes]:
            return self._store.get_range(self._key, offset, len(view), etag=self._etag, timeout=limit)

        if len(view):
            view[:] = run_async(persist(get, deadline=self._deadline))

    def source(self) -> bytes:
        return bytes(self.read(0, self.size))

    def close(self) -> None:
        # Nothing is held.
        ...
