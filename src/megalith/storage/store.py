"""Store: where the files of a checkpoint lie. A local directory here, an object store in `remote`.

A file is written whole or not at all: locally under a temporary name, flushed to the disk and renamed; an
object store does that by itself. Names are relative, with "/" between their parts.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.manifest import FileEntry
from megalith.errors import CheckpointError

_BLOCK = 1 << 22
_THREADS = 4


def open_store(path: str | os.PathLike[str] | Store) -> Store:
    """The store of a path: a directory, or "s3://bucket/prefix" and other addresses that obstore knows."""
    if isinstance(path, Store):
        return path
    text = os.fspath(path)
    if "://" in text and not text.startswith("file://"):
        from megalith.storage.object_store import RemoteStore

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
    def read(self, name: str, size: int, start: int = 0) -> Tensor:
        """`size` bytes of a file from `start` on, uint8. Raises OSError if there are fewer."""

    @abstractmethod
    def read_whole(self, name: str, limit: int) -> bytes:
        """All of a small file, one version of it whoever replaces it meanwhile.

        Raises FileNotFoundError, and OSError if it has more than `limit` bytes.
        """

    @abstractmethod
    def inside(self, folder: str) -> Store:
        """The store of a folder of this one."""

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
        each(lambda entry: verify(self, entry), entries)
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
        _make_directory(target.parent)
        temporary = target.with_name(target.name + ".tmp")
        # A new file: what lies there may be a link to somewhere else.
        temporary.unlink(missing_ok=True)
        size, crc = 0, 0
        with open(temporary, "xb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                crc = zlib.crc32(view, crc)
                size += len(view)
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_directory(target.parent)
        return FileEntry(path=name, bytes=size, checksum=checksum(crc))

    def size(self, name: str) -> int:
        """See `Store.size`."""
        return _file_size((self.root / name).stat())

    def read(self, name: str, size: int, start: int = 0) -> Tensor:
        """See `Store.read`."""
        data = torch.empty(size, dtype=torch.uint8)
        view = view_of(data)
        with open(self.root / name, "rb", buffering=0) as file:
            file.seek(start)
            while view:
                count = file.readinto(view)
                if not count:
                    raise OSError(f"the file ends {len(view)} bytes early")
                view = view[count:]
        return data

    def read_whole(self, name: str, limit: int) -> bytes:
        """See `Store.read_whole`."""
        self.size(name)  # opening a pipe would wait for its writer
        with open(self.root / name, "rb") as file:
            if _file_size(os.fstat(file.fileno())) > limit:
                raise OSError(f"it has more than {limit} bytes")
            return file.read(limit)

    def inside(self, folder: str) -> LocalStore:
        """See `Store.inside`."""
        return LocalStore(self.root / folder)

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


def read_verified(store: Store, entry: FileEntry) -> Tensor:
    """A file's bytes, uint8. Raises CheckpointError unless its length and checksum are those of its entry."""
    _check_size(store, entry)
    data = read_file(store, entry)
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
    return read_part(store, entry, entry.bytes)


def read_part(store: Store, entry: FileEntry, size: int, start: int = 0) -> Tensor:
    """Some bytes of a file, uint8. Raises CheckpointError if they cannot be read."""
    try:
        return store.read(entry.path, size, start)
    except OSError as error:
        raise _unreadable(store, entry, error) from None


def _check_size(store: Store, entry: FileEntry) -> None:
    try:
        size = store.size(entry.path)
    except OSError as error:
        raise _unreadable(store, entry, error) from None
    if size != entry.bytes:
        raise CheckpointError(f"{store.where}/{entry.path} has {size} bytes, its manifest says {entry.bytes}")


def _check_sum(store: Store, entry: FileEntry, crc: int) -> None:
    if checksum(crc) != entry.checksum:
        raise CheckpointError(
            f"{store.where}/{entry.path} is damaged: its checksum is {checksum(crc)}, not {entry.checksum}"
        )


def _unreadable(store: Store, entry: FileEntry, error: OSError) -> CheckpointError:
    return CheckpointError(f"{store.where}/{entry.path} cannot be read: {error.strerror or error}")


def each(work: Callable[[FileEntry], None], entries: list[FileEntry]) -> None:
    """Some work on every file, a few at a time."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(work, entries):
            pass


def view_of(data: Tensor) -> memoryview:
    """The bytes of a uint8 tensor, in the same memory."""
    array: Any = data.numpy()
    return memoryview(array)


def checksum(crc: int) -> str:
    """A file's crc32 as a manifest has it."""
    return f"crc32:{crc:08x}"


def _file_size(found: os.stat_result) -> int:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")  # a pipe or a device may never end
    return found.st_size


def _make_directory(directory: Path) -> None:
    """Makes a directory that lasts, and those above it."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    """Makes a rename in this directory last."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
