"""RemoteStore: checkpoints in an object store, by obstore (the extra `remote`).

A store that is away is given up after RETRY_SECONDS; obstore's own default is three minutes a request, and a
save is many of them.
"""

from __future__ import annotations

import copy
import errno
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.manifest import FileEntry
from megalith.errors import CheckpointError, MissingDependencyError, StoreError
from megalith.storage.store import LocalStore, Store, checksum, each, read_verified, view_of

CONNECT_SECONDS = 5.0
READ_SECONDS = 30.0
"""How long a connection may be silent."""
RETRY_SECONDS = 20.0
"""How long a request is tried again, from its first failure on."""
_REQUEST_SECONDS = 3600.0  # a large file over a slow line; silence is what READ_SECONDS is for


class RemoteStore(Store):
    """A prefix of an object store: "s3://bucket/prefix" and other addresses that obstore knows.

    options: obstore's own `config` (endpoint, region, keys), `client_options` and `retry_config`; they come
    before environment variables (AWS_ENDPOINT_URL, AWS_ALLOW_HTTP, AWS_ACCESS_KEY_ID and so on), which
    obstore reads by itself. Raises StoreError where the store does not answer or refuses.
    """

    is_near = False

    def __init__(self, url: str, **options: Any) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise MissingDependencyError(
                f"{url}: object stores need obstore: pip install 'megalith[remote]'"
            ) from None
        self.where = self.address = url.rstrip("/")
        self._obstore: Any = obstore
        self._prefix = ""
        if not url.startswith("memory:"):
            options["client_options"] = _client_options() | options.get("client_options", {})
            options.setdefault("retry_config", _retry_config())
        try:
            self._store: Any = from_url(url, **options)
        except Exception as error:  # obstore's own error types
            raise CheckpointError(f"{url} is no address of an object store: {_short(error)}") from None

    def write(self, name: str, parts: Sequence[Any]) -> FileEntry:
        """See `Store.write`."""
        data = b"".join(memoryview(part).cast("B") for part in parts)
        with self._request(f"writing {name}"):
            self._obstore.put(self._store, self._key(name), data)
        return FileEntry(path=name, bytes=len(data), checksum=checksum(zlib.crc32(data)))

    def upload(self, name: str, file: Path) -> None:
        """Writes a file of this machine's, in parts, so that it is never in memory as a whole."""
        with self._request(f"writing {name}"):
            self._obstore.put(self._store, self._key(name), file)

    def size(self, name: str) -> int:
        """See `Store.size`."""
        with self._request(f"looking for {name}"):
            return int(self._obstore.head(self._store, self._key(name))["size"])

    def read(self, name: str, size: int, start: int = 0) -> Tensor:
        """See `Store.read`."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        with self._request(f"reading {name}"):
            found = self._obstore.get_range(self._store, self._key(name), start=start, length=size)
            data = bytearray(found)
        if len(data) != size:
            raise StoreError(f"{self.where}/{name} ends {size - len(data)} bytes early")
        return torch.frombuffer(data, dtype=torch.uint8)

    def read_whole(self, name: str, limit: int) -> bytes:
        """See `Store.read_whole`."""
        with self._request(f"reading {name}"):
            found = self._obstore.get(self._store, self._key(name))
            if found.meta["size"] > limit:
                raise StoreError(f"{self.where}/{name} has more than {limit} bytes")
            return bytes(found.bytes())

    def inside(self, folder: str) -> RemoteStore:
        """See `Store.inside`."""
        inner = copy.copy(self)
        inner._prefix = self._key(folder)
        inner.where = inner.address = f"{self.where}/{folder}"
        return inner

    def folders(self) -> list[str]:
        """See `Store.folders`."""
        with self._request("listing folders"):
            found = self._obstore.list_with_delimiter(self._store, prefix=self._prefix or None)
        return sorted(PurePosixPath(str(prefix)).name for prefix in found["common_prefixes"])

    def remove(self, name: str) -> None:
        """See `Store.remove`."""
        key = self._key(name)
        with suppress(FileNotFoundError), self._request(f"deleting {name}"):
            inside = [entry["path"] for page in self._obstore.list(self._store, prefix=key) for entry in page]
            self._obstore.delete(self._store, inside or key)

    @contextmanager
    def nearby(self, entries: Iterable[FileEntry]) -> Iterator[Store]:
        """Fetches each file once, into a temporary directory."""
        with TemporaryDirectory(prefix="megalith-") as folder:
            local = LocalStore(Path(folder))
            local.where = self.where
            each(lambda entry: self._fetch(entry, local), list(entries))
            yield local

    def _fetch(self, entry: FileEntry, local: LocalStore) -> None:
        data = read_verified(self, entry)
        target = local.root / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(view_of(data))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    @contextmanager
    def _request(self, doing: str) -> Iterator[None]:
        """Turns obstore's errors into ours; what is not there stays a FileNotFoundError."""
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", self.where) from None
        except Exception as error:  # obstore's own error types
            raise StoreError(f"{self.where}: {doing} failed: {_short(error)}") from None


def _client_options() -> dict[str, Any]:
    return {
        # Given any of these options, obstore no longer reads this one from the environment.
        "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=READ_SECONDS),
        "timeout": timedelta(seconds=_REQUEST_SECONDS),
    }


def _retry_config() -> dict[str, Any]:
    """Bounded by time alone: ten tries, obstore's default, may be over within two seconds."""
    pauses = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=3), "base": 2}
    return {"max_retries": 1000, "retry_timeout": timedelta(seconds=RETRY_SECONDS), "backoff": pauses}


def _short(error: Exception) -> str:
    """The first line; obstore adds pages of its insides."""
    return str(error).partition("\n")[0]
