"""ObjectStore: files in S3 and other object stores, through obstore (the extra `remote`).

It has two groups of methods. The methods of `Store` block; obstore retries each request until RETRY_SECONDS
after its first failure, because its own default of three minutes is too long for a save of many requests. The
asynchronous methods `head`, `get`, `get_range`, `put`, `list` and `delete` each make one request with a time
limit, for callers that schedule many requests and repeat them on their own (`storage/retries.py`);
`open_object_store` turns obstore's own retries off for them.

The environment variables AWS_ENDPOINT_URL, AWS_ALLOW_HTTP, AWS_REGION, AWS_DEFAULT_REGION, AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and the others that obstore knows apply; explicit options win.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO
from urllib.parse import quote

import torch
from torch import Tensor

from megalith.errors import InputError, MegalithError, MissingDependencyError, StoreError
from megalith.ops import checks
from megalith.storage.json_codec import ErrorFactory, as_utc
from megalith.storage.local_files import crc32
from megalith.storage.store import LocalStore, Store, StoredFile, checksum, for_each, view_of

CONNECT_SECONDS = 5.0
READ_SECONDS = 30.0
"""How long a connection may be silent."""
RETRY_SECONDS = 20.0
"""How long a request is retried, counted from its first failure."""
_REQUEST_SECONDS = 3600.0  # a large file over a slow line; READ_SECONDS limits silence
DOWNLOAD_PIECE_BYTES = 1 << 18
"""The smallest piece that `ObjectStore.get` passes to its sink, except for the last one."""
UPLOAD_PART_BYTES = 5 << 20
_CONCURRENT_UPLOADS = 2
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Environment variables of which one is set where obstore can find credentials."""


_Answers = list[Any]


class RequestFailure(StrEnum):
    """Why an asynchronous request failed."""

    NOT_FOUND = "NOT_FOUND"
    CHANGED = "CHANGED"
    """The object has another etag than the one asked for."""
    TIMEOUT = "TIMEOUT"
    SLOW = "SLOW"
    """The answer began, but did not end in time."""
    DENIED = "DENIED"
    """The store refused to answer: a status 401 or 403."""
    STORE_ERROR = "STORE_ERROR"
    """The store failed: a status such as 500 or 429, or no connection."""


class StoreRequestError(StoreError):
    """An asynchronous request failed."""

    def __init__(self, failure: RequestFailure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


@dataclass(frozen=True)
class ObjectInfo:
    """What a store reports about an object. last_modified: UTC."""

    key: str
    size: int
    etag: str | None
    last_modified: datetime


class ObjectStore(Store):
    """A prefix of an object store.

    The asynchronous methods raise StoreRequestError if a request fails or ends early.

    Args:
        url: "s3://bucket/prefix", "memory:///", "file:///directory" or another URL that obstore knows.
        **options: obstore's `config` (endpoint, region, keys), `client_options` and `retry_config`.

    Raises:
        InputError: obstore does not know the URL.
        MissingDependencyError: obstore is not installed.
    """

    is_local = False

    def __init__(self, url: str, **options: Any) -> None:
        try:
            import obstore
            import obstore.exceptions
            from obstore.store import from_url
        except ImportError:
            raise MissingDependencyError.of_extra(f"{url}: object stores need obstore", "remote") from None
        self.where = self.address = checks.text(url, "object store: url").rstrip("/")
        self._obstore: Any = obstore
        self._prefix = ""
        if not url.startswith(("memory:", "file:")):
            options["client_options"] = _client_options() | options.get("client_options", {})
            options.setdefault("retry_config", _retry_config())
        try:
            self._store: Any = from_url(url, **options)
        except Exception as error:  # obstore's own error types
            raise InputError(f"{url} does not name an object store: {_first_line(error)}") from None

    def write(self, name: str, parts: Sequence[Any], *, flush: bool = True) -> StoredFile:
        # An object that was put is durable, with and without `flush`.
        try:
            data = b"".join(memoryview(part).cast("B") for part in parts)
        except TypeError:
            raise InputError(f"{self.where}/{name}: parts must be a list of bytes-like objects") from None
        with self._request(f"writing {name}"):
            self._obstore.put(self._store, self._key(name), data)
        return StoredFile(path=name, bytes=len(data), checksum=checksum(crc32(data)))

    def upload(self, name: str, file: Path) -> None:
        with self._request(f"writing {name}"):
            self._obstore.put(self._store, self._key(name), file)

    def size(self, name: str) -> int:
        with self._request(f"looking for {name}"):
            return int(self._obstore.head(self._store, self._key(name))["size"])

    def read(self, name: str, size: int, start: int = 0) -> Tensor:
        checks.integer(start, "read: start", least=0)
        if not checks.integer(size, "read: size", least=0):
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        with self._request(f"reading {name}"):
            found = self._obstore.get_range(self._store, self._key(name), start=start, length=size)
            data = bytearray(found)
        if len(data) != size:
            raise StoreError(f"{self.where}/{name} ends {size - len(data)} bytes early")
        return torch.frombuffer(data, dtype=torch.uint8)

    def read_whole(self, name: str, limit: int) -> bytes:
        with self._request(f"reading {name}"):
            found = self._obstore.get(self._store, self._key(name))
            if found.meta["size"] > limit:
                raise StoreError(f"{self.where}/{name} has more than {limit} bytes")
            return bytes(found.bytes())

    def inside(self, folder: str) -> ObjectStore:
        inner = copy.copy(self)
        inner._prefix = self._key(folder)
        inner.where = inner.address = f"{self.where}/{folder}"
        return inner

    def folders(self) -> list[str]:
        with self._request("listing folders"):
            found = self._obstore.list_with_delimiter(self._store, prefix=self._prefix or None)
        return sorted(PurePosixPath(str(prefix)).name for prefix in found["common_prefixes"])

    def remove(self, name: str) -> None:
        key = self._key(name)
        with suppress(FileNotFoundError), self._request(f"deleting {name}"):
            inside = [entry["path"] for page in self._obstore.list(self._store, prefix=key) for entry in page]
            self._obstore.delete(self._store, inside or key)

    @contextmanager
    def local_copy(self, files: Iterable[StoredFile], error: ErrorFactory) -> Iterator[Store]:
        # Fetches each file once into a temporary directory.
        with TemporaryDirectory(prefix="megalith-") as folder:
            local = LocalStore(Path(folder))
            local.where = self.where

            def fetch(file: StoredFile) -> None:
                data = self.read_verified(file, error)
                target = local.root / file.path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(view_of(data))

            for_each(fetch, list(files))
            yield local

    # ---- asynchronous requests, each with a time limit in seconds

    async def head(self, key: str, *, timeout: float) -> ObjectInfo:
        """Return what the store reports about an object.

        Args:
            key: The object's name.
            timeout: Seconds for the whole request.

        Returns:
            Size, etag and time of the last change.
        """
        async with self._limited("head", key, timeout):
            return self._info(await self._obstore.head_async(self._store, self._key(key)))

    async def get(
        self, key: str, sink: Callable[[memoryview], None], *, etag: str | None = None, timeout: float
    ) -> ObjectInfo:
        """Stream an object into `sink`.

        Args:
            key: The object's name.
            sink: Receives the bytes in order. Its errors are raised as they are.
            etag: If given, the version that the object must have.
            timeout: Seconds for the whole request.

        Returns:
            Size, etag and time of the version that was received.
        """
        checks.callback(sink, "get: sink", required=True)
        _check_etag(etag)
        async with self._limited("get", key, timeout) as begun:
            options = {} if etag is None else {"if_match": etag}
            answer = await self._obstore.get_async(self._store, self._key(key), options=options)
            begun.append(answer)
            info = self._info(answer.meta)
            done = 0
            async for piece in answer.stream(min_chunk_size=DOWNLOAD_PIECE_BYTES):
                view = memoryview(piece)
                done += len(view)
                if done > info.size:
                    break
                sink(view)
            if done != info.size:
                message = f"get of {key!r}: received {done} bytes, {info.size} were announced"
                raise StoreRequestError(RequestFailure.STORE_ERROR, message)
            return info

    async def get_range(
        self, key: str, start: int, length: int, *, etag: str | None = None, timeout: float
    ) -> bytes:
        """Return a range of an object's bytes.

        Args:
            key: The object's name.
            start: The first byte.
            length: The number of bytes; if there are fewer, the request fails with STORE_ERROR.
            etag: If given, the version that the object must have.
            timeout: Seconds for the whole request.

        Returns:
            Exactly `length` bytes.
        """
        checks.integer(start, "get_range: start", least=0)
        checks.integer(length, "get_range: length")
        _check_etag(etag)
        async with self._limited("get", key, timeout) as begun:
            options: dict[str, Any] = {"range": (start, start + length)}
            if etag is not None:
                options["if_match"] = etag
            answer = await self._obstore.get_async(self._store, self._key(key), options=options)
            begun.append(answer)
            data = bytes(await answer.bytes_async())
            if len(data) != length:
                message = f"get of {key!r}: received {len(data)} of {length} bytes at {start}"
                raise StoreRequestError(RequestFailure.STORE_ERROR, message)
            return data

    async def put(
        self, key: str, data: bytes | Path | BinaryIO, *, create: bool = False, timeout: float
    ) -> bool:
        """Write an object, completely or not at all.

        Args:
            key: The object's name.
            data: The content, or a local file that holds it: its path, or opened for reading.
            create: Write only if the object does not exist. Of several writers of bytes, one succeeds; an
                upload in parts, of a large file, checks first.
            timeout: Seconds for the whole request.

        Returns:
            Whether the object was written.
        """
        size = _upload_size(data)
        if size is None:
            raise InputError(f"put of {key!r}: data must be bytes, a file or its path, got {data!r:.100}")
        checks.flag(create, "put: create")
        small = size <= UPLOAD_PART_BYTES or isinstance(data, bytes)
        async with self._limited("put", key, timeout):
            if create and not small:
                # An upload in parts has no create-only mode: check first.
                try:
                    await self._obstore.head_async(self._store, self._key(key))
                    return False
                except FileNotFoundError:
                    pass
            mode = {"mode": "create", "use_multipart": False} if create and small else {}
            try:
                await self._obstore.put_async(
                    self._store,
                    self._key(key),
                    data,
                    chunk_size=UPLOAD_PART_BYTES,
                    max_concurrency=_CONCURRENT_UPLOADS,
                    **mode,
                )
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            return True

    async def list(self, prefix: str, *, timeout: float) -> list[ObjectInfo]:
        """Return the objects below a prefix, sorted by key.

        Args:
            prefix: The beginning of their names, up to a "/".
            timeout: Seconds for the whole request.

        Returns:
            An entry per object; none if nothing has this prefix.
        """
        async with self._limited("list", prefix, timeout):
            found: list[ObjectInfo] = []
            async for page in self._obstore.list(self._store, self._key(prefix)):
                found += [self._info(each) for each in page]
            return sorted(found, key=lambda info: info.key)

    async def delete(self, key: str, *, timeout: float) -> None:
        """Delete an object. Does nothing if there is none.

        Args:
            key: The object's name.
            timeout: Seconds for the whole request.
        """
        async with self._limited("delete", key, timeout):
            with suppress(FileNotFoundError):
                await self._obstore.delete_async(self._store, self._key(key))

    @asynccontextmanager
    async def _limited(self, verb: str, key: str, timeout: float) -> AsyncIterator[_Answers]:
        """Limit the time of a request and convert obstore's errors. The list takes an answer that begins."""
        checks.seconds(timeout, f"{verb}: timeout")
        self._key(key)
        known = self._obstore.exceptions
        where = f"{verb} of {key!r} in {self.where}"
        begun: _Answers = []
        try:
            async with asyncio.timeout(timeout):
                yield begun
        except TimeoutError:
            failure, problem = RequestFailure.TIMEOUT, f"no answer within {timeout:.3g} s"
            if begun:
                failure, problem = RequestFailure.SLOW, f"the answer did not end within {timeout:.3g} s"
        except FileNotFoundError:
            failure, problem = RequestFailure.NOT_FOUND, "the object does not exist"
        except known.PreconditionError:
            failure, problem = RequestFailure.CHANGED, "the object was replaced"
        except (known.PermissionDeniedError, known.UnauthenticatedError) as error:
            failure, problem = RequestFailure.DENIED, _first_line(error)
        except known.BaseError as error:
            failure, problem = RequestFailure.STORE_ERROR, _first_line(error)
        except MegalithError:
            raise
        except (ValueError, TypeError) as error:  # a key that is not a path
            raise StoreError(f"{where}: {_first_line(error)}") from None
        else:
            return
        raise StoreRequestError(failure, f"{where}: {problem}")

    def _info(self, meta: Any) -> ObjectInfo:
        key = str(meta["path"]).removeprefix(f"{self._prefix}/" if self._prefix else "")
        return ObjectInfo(key, int(meta["size"]), meta["e_tag"], as_utc(meta["last_modified"]))

    def _key(self, name: str) -> str:
        checks.text(name, "object store: name")
        return f"{self._prefix}/{name}" if self._prefix else name

    @contextmanager
    def _request(self, action: str) -> Iterator[None]:
        """Convert obstore's errors to StoreError; a missing object remains a FileNotFoundError."""
        try:
            yield
        except MegalithError:
            raise
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "the object does not exist", self.where) from None
        except Exception as error:  # obstore's own error types
            raise StoreError(f"{self.where}: {action} failed: {_first_line(error)}") from None


def open_object_store(
    place: str | os.PathLike[str],
    *,
    endpoint: str | None = None,
    region: str | None = None,
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
    session_token: str | None = None,
    anonymous: bool = False,
) -> ObjectStore:
    """Open a store for asynchronous requests, each of which is made once.

    For S3, options that are not given come from the AWS_* environment variables; the region is us-east-1
    without them. Requests are not signed if there are no keys, or with `anonymous`.

    Args:
        place: "s3://bucket/prefix", "memory://", "file:///directory", or a directory, which is created if it
            is missing.
        endpoint: The URL of an S3 server that is not Amazon's.
        region: The region of the bucket.
        access_key_id: The public part of the credentials.
        secret_access_key: The secret part.
        session_token: The token of temporary credentials.
        anonymous: Do not sign requests.

    Returns:
        The store.

    Raises:
        InputError: `place` is not a store, or an option does not belong to it.
        MissingDependencyError: obstore is not installed.
    """
    text = os.fspath(place) if isinstance(place, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise InputError(f"expected a directory or the URL of a store, got {place!r:.100}")
    keys = {
        "endpoint": endpoint,
        "region": region,
        "access_key_id": access_key_id,
        "secret_access_key": secret_access_key,
        "session_token": session_token,
    }
    given: dict[str, Any] = {name: value for name, value in keys.items() if value is not None}
    for name, value in given.items():
        checks.text(value, f"{text}: {name}")
    scheme, _, rest = text.partition("://") if "://" in text else ("file", "", text)
    if scheme != "s3":
        if given or checks.flag(anonymous, "anonymous"):
            raise InputError(f"{text}: endpoint, region and credentials belong to a store s3://bucket/prefix")
        if scheme == "memory":
            return ObjectStore("memory:///")
        if scheme != "file" or not rest:
            raise InputError(f"{text!r} is not a store: use a directory, memory:// or s3://bucket/prefix")
        directory = Path(rest).absolute()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{text!r} is not a store: {error}") from None
        return ObjectStore(directory.as_uri())
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise InputError(f"{text!r} is not a store: use s3://bucket/prefix")
    if (access_key_id is None) != (secret_access_key is None):
        raise InputError(f"{text}: access_key_id and secret_access_key must be given together")
    given["virtual_hosted_style_request"] = False
    if checks.flag(anonymous, "anonymous") or (
        access_key_id is None and not any(map(os.environ.get, _CREDENTIALS))
    ):
        given["skip_signature"] = True
    # Each request has a time limit of its own: obstore's must never be the shorter ones.
    client: dict[str, Any] = dict.fromkeys(("timeout", "read_timeout"), timedelta(days=1))
    client["connect_timeout"] = timedelta(seconds=10)
    if endpoint is not None:
        client["allow_http"] = endpoint.startswith("http://")
    return ObjectStore(
        f"s3://{quote(bucket, safe='')}/{quote(prefix.strip('/'))}",
        config=given,
        client_options=client,
        retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
    )


def _upload_size(data: Any) -> int | None:
    """The number of bytes of what `put` takes; None if it is something else."""
    if isinstance(data, bytes):
        return len(data)
    if isinstance(data, Path):
        return data.stat().st_size if data.is_file() else None
    try:
        return os.fstat(data.fileno()).st_size
    except (AttributeError, OSError, ValueError, TypeError):
        return None


def _check_etag(etag: Any) -> None:
    if etag is not None:
        checks.text(etag, "etag")


def _client_options() -> dict[str, Any]:
    return {
        # Given any of these options, obstore no longer reads this one from the environment.
        "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=READ_SECONDS),
        "timeout": timedelta(seconds=_REQUEST_SECONDS),
    }


def _retry_config() -> dict[str, Any]:
    """Limited by time only: obstore's default of ten tries may be over within two seconds."""
    pauses = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=3), "base": 2}
    return {"max_retries": 1000, "retry_timeout": timedelta(seconds=RETRY_SECONDS), "backoff": pauses}


def _first_line(error: BaseException) -> str:
    """The first line of a message; obstore appends pages of internal details."""
    return str(error).partition("\n")[0][:300]
