"""Object stores behind five verbs: head, get, get_range, put, list. S3, a local directory, or memory.

Each call is one request with a time limit of its own; what goes wrong is a `Fault` whose status says
whether the object or the store is to blame. Retries are the caller's: `persist` repeats a request until it
succeeds or a deadline passes. obstore does the talking (`pip install megalith[remote]`); its own retries
are off, so that every request is ours.
"""

from __future__ import annotations

import asyncio
import importlib
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from megalith.errors import InputError, MissingDependencyError, StoreError
from megalith.gather.fields import as_utc
from megalith.gather.status import Fault, Status

T = TypeVar("T")

PIECE_BYTES = 1 << 18
"""Bytes that a download hands over at a time, at least."""
UPLOAD_PART_BYTES = 5 << 20
_UPLOADS_AT_ONCE = 2
_NO_LIMIT = timedelta(days=1)  # obstore's own limits must never be the shorter ones


@dataclass(frozen=True)
class ObjectInfo:
    """What a store says about an object."""

    key: str
    size: int
    etag: str | None
    last_modified: datetime


class Store(ABC):
    """An object store. Keys are paths with `/` between their parts; times are limits in seconds.

    Every verb raises Fault: NOT_FOUND, CHANGED (another etag than asked for), TIMEOUT, STORE_ERROR.
    """

    @abstractmethod
    async def head(self, key: str, *, timeout: float) -> ObjectInfo:
        """What the store knows about an object."""

    @abstractmethod
    async def get(
        self, key: str, sink: Callable[[memoryview], None], *, etag: str | None = None, timeout: float
    ) -> ObjectInfo:
        """Streams an object into `sink`, piece by piece. etag: the version it must be."""

    @abstractmethod
    async def get_range(
        self, key: str, start: int, length: int, *, etag: str | None = None, timeout: float
    ) -> bytes:
        """Bytes start to start + length; all of them, or STORE_ERROR."""

    @abstractmethod
    async def put(self, key: str, data: bytes | Path, *, create: bool = False, timeout: float) -> bool:
        """Writes an object, whole or not at all. create: only if there is none; returns whether it wrote."""

    @abstractmethod
    async def list(self, prefix: str, *, timeout: float) -> list[ObjectInfo]:
        """The objects below a prefix (whole path parts), by key."""


def memory_store() -> Store:
    """A store in this process's memory."""
    return _Obstore(_obstore("obstore.store").MemoryStore(), "memory")


def local_store(directory: str | Path) -> Store:
    """A store in a directory, which is made if it is not there."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    return _Obstore(_obstore("obstore.store").LocalStore(str(path)), str(path))


def s3_store(
    bucket: str,
    *,
    prefix: str = "",
    endpoint: str | None = None,
    region: str = "us-east-1",
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
    session_token: str | None = None,
    connect_timeout: float = 10.0,
) -> Store:
    """A bucket of S3 or of anything that speaks like it. Without keys, requests are not signed."""
    if (access_key_id is None) != (secret_access_key is None):
        raise InputError(f"bucket {bucket!r}: access_key_id and secret_access_key go together")
    config: dict[str, Any] = {"region": region, "virtual_hosted_style_request": False}
    client: dict[str, Any] = {"timeout": _NO_LIMIT, "connect_timeout": timedelta(seconds=connect_timeout)}
    if endpoint is not None:
        config["endpoint"] = endpoint
        client["allow_http"] = endpoint.startswith("http://")
    if access_key_id is None:
        config["skip_signature"] = True
    else:
        config |= {"access_key_id": access_key_id, "secret_access_key": secret_access_key}
    if session_token is not None:
        config["session_token"] = session_token
    backend = _obstore("obstore.store").S3Store(
        bucket,
        prefix=prefix or None,
        config=config,
        client_options=client,
        retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
    )
    return _Obstore(backend, f"s3://{bucket}")


def open_store(url: str, **options: Any) -> Store:
    """The store of a URL: memory://, file:///directory or s3://bucket/prefix (options as for `s3_store`)."""
    parts = urlsplit(url)
    if parts.scheme == "memory" and not options:
        return memory_store()
    if parts.scheme == "file" and parts.path and not options:
        return local_store(parts.path)
    if parts.scheme == "s3" and parts.netloc:
        return s3_store(parts.netloc, prefix=parts.path.strip("/"), **options)
    raise InputError(f"{url!r} is no store: use memory://, file:///directory or s3://bucket/prefix")


async def persist(
    call: Callable[[float], Awaitable[T]],
    *,
    deadline: float,
    request_timeout: float = 30.0,
    rng: random.Random | None = None,
) -> T:
    """Repeats a request until it succeeds: again after TIMEOUT and STORE_ERROR, with growing, jittered
    pauses.

    call: takes the limit of one request. deadline: seconds for all of it. Raises the last Fault when time
    is up.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline
    pauses = backoff(rng or random.Random())
    while True:
        try:
            return await call(max(0.0, min(request_timeout, end - loop.time())))
        except Fault as fault:
            pause = next(pauses)
            if fault.status not in (Status.TIMEOUT, Status.STORE_ERROR) or loop.time() + pause >= end:
                raise
            await asyncio.sleep(pause)


def backoff(rng: random.Random, first: float = 0.1, most: float = 5.0) -> Iterator[float]:
    """Pauses between tries, without end: doubling from `first` to `most`, each times 0.5 to 1.5."""
    pause = first
    while True:
        yield pause * (0.5 + rng.random())
        pause = min(most, 2 * pause)


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, also where an event loop is running already (a notebook)."""
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


class _Obstore(Store):
    """A store of obstore's."""

    def __init__(self, backend: Any, name: str) -> None:
        self._backend = backend
        self._name = name
        self._api = _obstore("obstore")

    def __repr__(self) -> str:
        return f"<Store {self._name}>"

    async def head(self, key: str, *, timeout: float) -> ObjectInfo:
        async with self._request("head", key, timeout):
            return _info(await self._api.head_async(self._backend, key))

    async def get(
        self, key: str, sink: Callable[[memoryview], None], *, etag: str | None = None, timeout: float
    ) -> ObjectInfo:
        async with self._request("get", key, timeout):
            options = {} if etag is None else {"if_match": etag}
            answer = await self._api.get_async(self._backend, key, options=options)
            info = _info(answer.meta)
            done = 0
            async for piece in answer.stream(min_chunk_size=PIECE_BYTES):
                view = memoryview(piece)
                done += len(view)
                if done > info.size:
                    break
                sink(view)
            if done != info.size:
                raise Fault(
                    Status.STORE_ERROR, f"get of {key!r}: {done} bytes came, {info.size} were announced"
                )
            return info

    async def get_range(
        self, key: str, start: int, length: int, *, etag: str | None = None, timeout: float
    ) -> bytes:
        async with self._request("get", key, timeout):
            options: dict[str, Any] = {"range": (start, start + length)}
            if etag is not None:
                options["if_match"] = etag
            answer = await self._api.get_async(self._backend, key, options=options)
            data = bytes(await answer.bytes_async())
            if len(data) != length:
                raise Fault(Status.STORE_ERROR, f"get of {key!r}: {len(data)} of {length} bytes at {start}")
            return data

    async def put(self, key: str, data: bytes | Path, *, create: bool = False, timeout: float) -> bool:
        small = isinstance(data, bytes) or data.stat().st_size <= UPLOAD_PART_BYTES
        async with self._request("put", key, timeout):
            if create and not small:
                # An upload in parts has no create-only mode: look first.
                try:
                    await self._api.head_async(self._backend, key)
                    return False
                except FileNotFoundError:
                    pass
            mode = {"mode": "create", "use_multipart": False} if create and small else {}
            try:
                await self._api.put_async(
                    self._backend,
                    key,
                    data,
                    chunk_size=UPLOAD_PART_BYTES,
                    max_concurrency=_UPLOADS_AT_ONCE,
                    **mode,
                )
            except _obstore("obstore.exceptions").AlreadyExistsError:
                return False
            return True

    async def list(self, prefix: str, *, timeout: float) -> list[ObjectInfo]:
        async with self._request("list", prefix, timeout):
            found: list[ObjectInfo] = []
            async for page in self._api.list(self._backend, prefix):
                found += [_info(each) for each in page]
            return sorted(found, key=lambda each: each.key)

    @asynccontextmanager
    async def _request(self, verb: str, key: str, timeout: float) -> AsyncIterator[None]:
        """Limits a request and turns its errors into faults."""
        known = _obstore("obstore.exceptions")
        where = f"{verb} of {key!r} in {self._name}"
        try:
            async with asyncio.timeout(timeout):
                yield
        except Fault:
            raise
        except TimeoutError:
            raise Fault(Status.TIMEOUT, f"{where}: no answer within {timeout:.3g} s") from None
        except FileNotFoundError:
            raise Fault(Status.NOT_FOUND, f"{where}: there is no such object") from None
        except known.PreconditionError:
            raise Fault(Status.CHANGED, f"{where}: the object was replaced") from None
        except known.BaseError as error:
            raise Fault(Status.STORE_ERROR, f"{where}: {_first_line(error)}") from None
        except ValueError as error:  # a key that is no path
            raise StoreError(f"{where}: {_first_line(error)}") from None


def _obstore(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{module} is needed for stores: pip install megalith[remote]"
        ) from error


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(meta["path"], int(meta["size"]), meta["e_tag"], as_utc(meta["last_modified"]))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
