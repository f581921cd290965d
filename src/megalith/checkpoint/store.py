"""Store: where the files of a checkpoint lie. A local directory, or an object store behind the same calls.

A file is written whole or not at all: locally under a temporary name, flushed to the disk and renamed; an
object store does that by itself. Names are relative, with "/" between their parts.
"""

from __future__ import annotations

import os
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.manifest import FileEntry
from megalith.errors import CheckpointError, MissingDependencyError

_BLOCK = 1 << 22
_THREADS = 4


def open_store(path: str | os.PathLike[str] | Store) -> Store:
    """The store of a path: a directory, or "s3://bucket/prefix" and other addresses that obstore knows."""
    if isinstance(path, Store):
        return path
    text = os.fspath(path)
    if "://" in text and not text.startswith("file://"):
        return RemoteStore(text)
    return LocalStore(Path(text.removeprefix("file://")))


class Store(ABC):
    """Files by name. where: what messages call it. address: the same for the same place. is_near: whether
    reading a file again costs little."""

    where: str
    address: str
    is_near: bool = True

    @abstractmethod
    def write(self, name: str, parts: Sequence[Any]) -> FileEntry:
        """Writes a file out of buffers, one behind the other, and returns its entry for a manifest."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of a file. Raises FileNotFoundError."""

    @abstractmethod
    def read(self, name: str, size: int) -> Tensor:
        """The first `size` bytes of a file, uint8. Raises OSError if there are fewer."""

    @abstractmethod
    def folders(self) -> list[str]:
        """The names of the folders at the top."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Deletes a file, or a folder with all that is in it; none is no error."""

    @contextmanager
    def nearby(self, entries: Iterable[FileEntry]) -> Iterator[Store]:
        """A store with these files, verified, that is cheap to read more than once."""
        entries = list(entries)
        _each(lambda entry: verify(self, entry), entries)
        yield self


class LocalStore(Store):
    """A directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.where = str(root)
        self.address = os.path.realpath(root)

    def write(self, name: str, parts: Sequence[Any]) -> FileEntry:
        """See `Store.write`: temporary name, fsync, rename."""
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(target.name + ".tmp")
        size, crc = 0, 0
        with open(temporary, "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                crc = zlib.crc32(view, crc)
                size += len(view)
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_directory(target.parent)
        return FileEntry(path=name, bytes=size, checksum=_text(crc))

    def size(self, name: str) -> int:
        """See `Store.size`."""
        return (self.root / name).stat().st_size

    def read(self, name: str, size: int) -> Tensor:
        """See `Store.read`."""
        data = torch.empty(size, dtype=torch.uint8)
        view = view_of(data)
        with open(self.root / name, "rb", buffering=0) as file:
            while view:
                count = file.readinto(view)
                if not count:
                    raise OSError(f"the file ends {len(view)} bytes early")
                view = view[count:]
        return data

    def folders(self) -> list[str]:
        """See `Store.folders`."""
        if not self.root.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False))

    def remove(self, name: str) -> None:
        """See `Store.remove`."""
        path = self.root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class RemoteStore(Store):
    """A prefix of an object store, by obstore (the extra `remote`), with credentials where it finds them."""

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
        try:
            self._store: Any = from_url(url, **options)
        except Exception as error:  # obstore's own error types
            raise CheckpointError(f"{url} is no address of an object store: {error}") from None

    def write(self, name: str, parts: Sequence[Any]) -> FileEntry:
        """See `Store.write`."""
        data = b"".join(memoryview(part).cast("B") for part in parts)
        self._obstore.put(self._store, name, data)
        return FileEntry(path=name, bytes=len(data), checksum=_text(zlib.crc32(data)))

    def size(self, name: str) -> int:
        """See `Store.size`."""
        return int(self._obstore.head(self._store, name)["size"])

    def read(self, name: str, size: int) -> Tensor:
        """See `Store.read`."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        data = bytearray(self._obstore.get_range(self._store, name, start=0, length=size))
        if len(data) != size:
            raise OSError(f"the object ends {size - len(data)} bytes early")
        return torch.frombuffer(data, dtype=torch.uint8)

    def folders(self) -> list[str]:
        """See `Store.folders`."""
        found = self._obstore.list_with_delimiter(self._store)["common_prefixes"]
        return sorted(PurePosixPath(str(prefix)).name for prefix in found)

    def remove(self, name: str) -> None:
        """See `Store.remove`."""
        names = [entry["path"] for page in self._obstore.list(self._store, prefix=name) for entry in page]
        if names:
            self._obstore.delete(self._store, names)
        else:
            with suppress(FileNotFoundError):
                self._obstore.delete(self._store, name)

    @contextmanager
    def nearby(self, entries: Iterable[FileEntry]) -> Iterator[Store]:
        """Fetches each file once, into a temporary directory."""
        entries = list(entries)
        with TemporaryDirectory(prefix="megalith-") as folder:
            local = LocalStore(Path(folder))
            _each(lambda entry: self._fetch(entry, local), entries)
            yield local

    def _fetch(self, entry: FileEntry, local: LocalStore) -> None:
        data = read_verified(self, entry)
        target = local.root / checked_name(self, entry)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(view_of(data))


def read_verified(store: Store, entry: FileEntry) -> Tensor:
    """A file's bytes, uint8. Raises CheckpointError unless its length and checksum are those of its entry."""
    _check_size(store, entry)
    data = _read(store, entry)
    _check_sum(store, entry, zlib.crc32(view_of(data)))
    return data


def verify(store: Store, entry: FileEntry) -> None:
    """Raises CheckpointError unless the file is there with the length and checksum of its entry."""
    if not isinstance(store, LocalStore):
        read_verified(store, entry)
        return
    _check_size(store, entry)
    crc = 0
    block = memoryview(bytearray(_BLOCK))
    try:
        with open(store.root / entry.path, "rb", buffering=0) as file:
            while count := file.readinto(block):
                crc = zlib.crc32(block[:count], crc)
    except OSError as error:
        raise _unreadable(store, entry, error) from None
    _check_sum(store, entry, crc)


def read_file(store: Store, entry: FileEntry) -> Tensor:
    """A file's bytes, uint8, of the length its entry states; the checksum is not computed again."""
    checked_name(store, entry)
    return _read(store, entry)


def checked_name(store: Store, entry: FileEntry) -> str:
    """An entry's path, which never leads out of the checkpoint."""
    path = PurePosixPath(entry.path)
    bad = (
        path.is_absolute() or ".." in path.parts or not path.parts or "\\" in entry.path or "\0" in entry.path
    )
    if bad:
        raise CheckpointError(f"{store.where}: file path {entry.path!r} leads out of the checkpoint")
    return entry.path


def _check_size(store: Store, entry: FileEntry) -> None:
    name = checked_name(store, entry)
    try:
        size = store.size(name)
    except OSError as error:
        raise _unreadable(store, entry, error) from None
    if size != entry.bytes:
        raise CheckpointError(f"{store.where}/{name} has {size} bytes, its manifest says {entry.bytes}")


def _check_sum(store: Store, entry: FileEntry, crc: int) -> None:
    if _text(crc) != entry.checksum:
        raise CheckpointError(
            f"{store.where}/{entry.path} is damaged: its checksum is {_text(crc)}, not {entry.checksum}"
        )


def _read(store: Store, entry: FileEntry) -> Tensor:
    try:
        return store.read(entry.path, entry.bytes)
    except OSError as error:
        raise _unreadable(store, entry, error) from None


def _unreadable(store: Store, entry: FileEntry, error: OSError) -> CheckpointError:
    return CheckpointError(f"{store.where}/{entry.path} cannot be read: {error.strerror or error}")


def _each(work: Any, entries: list[FileEntry]) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(work, entries):
            pass


def view_of(data: Tensor) -> memoryview:
    """The bytes of a uint8 tensor, in the same memory."""
    array: Any = data.numpy()
    return memoryview(array)


def _text(crc: int) -> str:
    return f"crc32:{crc:08x}"


def _sync_directory(directory: Path) -> None:
    """Makes a rename in this directory last."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
