"""Stores of peers' objects: S3, a local directory, or memory, through `storage.ObjectStore`.

Each call is one request with a time limit of its own; what goes wrong is a `Fault` whose status says
whether the object or the store is to blame. Retries are the caller's: `persist` repeats a request until it
succeeds or a deadline passes. obstore's own retries are off, so that every request is ours.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from megalith.errors import InputError
from megalith.gather.status import Fault, Status
from megalith.storage.object_store import ObjectStore, RequestFailure

T = TypeVar("T")

_NO_LIMIT = timedelta(days=1)  # obstore's own limits must never be the shorter ones
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


class Store(ObjectStore):
    """An object store whose asynchronous requests raise Fault: NOT_FOUND, CHANGED, TIMEOUT, STORE_ERROR."""

    def request_error(self, failure: RequestFailure, message: str) -> Fault:
        """See `ObjectStore.request_error`."""
        return Fault(Status(failure), message)


def memory_store() -> Store:
    """A store in this process's memory."""
    return Store("memory:///")


def local_store(directory: str | Path) -> Store:
    """A store in a directory, which is made if it is not there."""
    path = Path(directory).absolute()
    path.mkdir(parents=True, exist_ok=True)
    return Store(path.as_uri())


def s3_store(
    bucket: str,
    *,
    prefix: str = "",
    endpoint: str | None = None,
    region: str | None = None,
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
    session_token: str | None = None,
    anonymous: bool = False,
    connect_timeout: float = 10.0,
) -> Store:
    """A bucket of S3 or of anything that speaks like it.

    What is not given comes from the AWS_* environment variables, the region is us-east-1 without them.
    Without keys in either, or with `anonymous`, requests are not signed.
    """
    if (access_key_id is None) != (secret_access_key is None):
        raise InputError(f"bucket {bucket!r}: access_key_id and secret_access_key go together")
    given = {
        "endpoint": endpoint,
        "region": region,
        "access_key_id": access_key_id,
        "secret_access_key": secret_access_key,
        "session_token": session_token,
    }
    config: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    config["virtual_hosted_style_request"] = False
    if anonymous or (access_key_id is None and not any(map(os.environ.get, _CREDENTIALS))):
        config["skip_signature"] = True
    client: dict[str, Any] = dict.fromkeys(("timeout", "read_timeout"), _NO_LIMIT)
    client["connect_timeout"] = timedelta(seconds=connect_timeout)
    if endpoint is not None:
        client["allow_http"] = endpoint.startswith("http://")
    return Store(
        f"s3://{quote(bucket, safe='')}/{quote(prefix)}",
        config=config,
        client_options=client,
        retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
    )


def open_store(url: str, **options: Any) -> Store:
    """The store of a URL: memory://, file:///directory or s3://bucket/prefix (options as for `s3_store`)."""
    parts = urlsplit(url)
    if parts.scheme == "memory" and not options:
        return memory_store()
    if parts.scheme == "file" and parts.path and not options:
        return local_store(parts.path)
    if parts.scheme == "s3" and parts.netloc:
        return s3_store(parts.netloc, prefix=unquote(parts.path.strip("/")), **options)
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
