"""Store: named files in one place. A local directory is here, an object store is in `object_store`.

A write replaces a file completely or not at all. Names are relative paths with "/" between their parts.

A store raises OSError like Python's own files: FileNotFoundError, or StoreError from an object store. Methods
that read a file of a manifest (`verify`, `read_file`, ...) raise what `error` makes of a message.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.library import MessageBuffers
from megalith.storage.json_codec import ErrorFactory, Natural
from megalith.storage.local_files import crc32, sync_path, write_atomically

_BLOCK = 1 << 22
_THREADS = 4
_AHEAD = 2
"""The number of results of `read_ahead` that wait in memory."""
_File = TypeVar("_File")
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class StoredFile:
    """An entry of a manifest: a file's name in its store, its length in bytes and its checksum."""

    path: str
    bytes: Natural
    checksum: str


def checksum(crc: int) -> str:
    """Format a CRC-32 the way manifests store it: "crc32:0123abcd"."""
    return f"crc32:{crc:08x}"


def open_store(path: str | os.PathLike[str] | Store) -> Store:
    """Open the store at a path."""
    if isinstance(path, Store):
        return path
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InputError(f"expected a path, a URL or a store, got {type(path).__name__}")
    if "://" in text and not text.startswith("file://"):
        from megalith.storage.object_store import ObjectStore

        return ObjectStore(text)
    return LocalStore(Path(text.removeprefix("file://")))


class Store(ABC):
    """Files by name.

    Attributes:
        where: The store's name in messages.
        address: Equal for two stores exactly if they are the same place.
        is_local: Whether reading a file twice is cheap.
    """

    where: str
    address: str
    is_local: bool = True

    @abstractmethod
    def write(self, name: str, parts: Sequence[Any], *, flush: bool = True) -> StoredFile:
        """Write the concatenated `parts`, completely or not at all; the folder is created if it is missing.

        flush=False allows the store to return before the file would survive a power failure; `flush` then
        waits for that. Write what refers to the file after `flush` only.
        """

    def flush(self, names: Sequence[str]) -> None:  # noqa: B027
        """Wait until files written with flush=False would survive a power failure."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the number of bytes of a file."""

    @abstractmethod
    def read(self, name: str, size: int, start: int = 0) -> Tensor:
        """Read `size` bytes from byte `start`: uint8 [size]. Raise OSError if the file ends before."""

    @abstractmethod
    def read_whole(self, name: str, limit: int) -> bytes:
        """Return all of a small file: one version of it, even if it is replaced at the same time."""

    @abstractmethod
    def upload(self, name: str, file: Path) -> None:
        """Write a copy of a local file, without reading all of it into memory."""

    @abstractmethod
    def inside(self, folder: str) -> Store:
        """Return the store of a folder, which need not exist yet."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the names of the folders at the top level, sorted."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a file, or a folder with its content. Does nothing if there is none."""

    @contextmanager
    def local_copy(self, files: Iterable[StoredFile], error: ErrorFactory) -> Iterator[Store]:
        """Verify some files and yield a store that holds them and is cheap to read more than once.

        It is this store if that is local, otherwise a temporary directory until the end of the block.
        """
        for_each(lambda file: self.verify(file, error), list(files))
        yield self

    # ---- files of a manifest

    def read_file(self, file: StoredFile, error: ErrorFactory) -> Tensor:
        """Read a file of a manifest without computing its checksum: uint8 [file.bytes]."""
        return self.read_part(file, file.bytes, error=error)

    def read_part(self, file: StoredFile, size: int, start: int = 0, *, error: ErrorFactory) -> Tensor:
        """Read a part of a file of a manifest: uint8 [size]."""
        try:
            return self.read(file.path, size, start)
        except OSError as problem:
            raise self._unreadable(file, problem, error) from None

    def read_verified(self, file: StoredFile, error: ErrorFactory) -> Tensor:
        """Read a file of a manifest; its length and checksum must be those of its entry."""
        self._check_size(file, error)
        data = self.read_file(file, error)
        self._check_sum(file, crc32(view_of(data)), error)
        return data

    def verify(self, file: StoredFile, error: ErrorFactory) -> None:
        """Raise unless a file exists with the length and checksum of its entry."""
        self._check_size(file, error)
        try:
            crc = self._crc32(file)
        except OSError as problem:
            raise self._unreadable(file, problem, error) from None
        self._check_sum(file, crc, error)

    def _crc32(self, file: StoredFile) -> int:
        return crc32(view_of(self.read(file.path, file.bytes)))

    def _check_size(self, file: StoredFile, error: ErrorFactory) -> None:
        try:
            size = self.size(file.path)
        except OSError as problem:
            raise self._unreadable(file, problem, error) from None
        if size != file.bytes:
            raise error(f"{self.where}/{file.path} has {size} bytes, but its manifest states {file.bytes}")

    def _check_sum(self, file: StoredFile, crc: int, error: ErrorFactory) -> None:
        if checksum(crc) != file.checksum:
            raise error(
                f"{self.where}/{file.path} is damaged: its checksum is {checksum(crc)}, not {file.checksum}"
            )

    def _unreadable(self, file: StoredFile, problem: OSError, error: ErrorFactory) -> Exception:
        return error(f"{self.where}/{file.path} cannot be read: {problem.strerror or problem}")


class LocalStore(Store):
    """A local directory. Writes are atomic and flushed to the disk."""

    def __init__(self, root: Path, buffers: MessageBuffers | None = None) -> None:
        self.root = root
        self._buffers = buffers
        self.where = str(root)
        self.address = os.path.realpath(root)

    def write(self, name: str, parts: Sequence[Any], *, flush: bool = True) -> StoredFile:
        size, crc = write_atomically(self.root / name, parts, flush=flush)
        return StoredFile(path=name, bytes=size, checksum=checksum(crc))

    def flush(self, names: Sequence[str]) -> None:
        paths = [self.root / name for name in names]
        for_each(sync_path, paths)
        for folder in sorted({path.parent for path in paths}):
            sync_path(folder)

    def size(self, name: str) -> int:
        return _file_size((self.root / name).stat())

    def read(self, name: str, size: int, start: int = 0) -> Tensor:
        data = (
            torch.empty(size, dtype=torch.uint8, device="cpu")
            if self._buffers is None
            else self._buffers.new(size)
        )
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
        self.size(name)  # opening a pipe would wait for its writer
        with open(self.root / name, "rb") as file:
            if _file_size(os.fstat(file.fileno())) > limit:
                raise OSError(f"the file has more than {limit} bytes")
            return file.read(limit)

    def upload(self, name: str, file: Path) -> None:
        with open(file, "rb") as source:
            write_atomically(self.root / name, iter(lambda: source.read(_BLOCK), b""))

    def inside(self, folder: str) -> LocalStore:
        return LocalStore(self.root / folder)

    def folders(self) -> list[str]:
        if not self.root.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False))

    def remove(self, name: str) -> None:
        path = self.root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    @contextmanager
    def local_copy(self, files: Iterable[StoredFile], error: ErrorFactory) -> Iterator[Store]:
        # What is read in the block shares its memory.
        with super().local_copy(files, error):
            yield LocalStore(self.root, MessageBuffers(huge_pages=False))

    def _crc32(self, file: StoredFile) -> int:
        crc = 0
        block = memoryview(bytearray(_BLOCK))
        with open(self.root / file.path, "rb", buffering=0) as opened:
            while count := opened.readinto(block):
                crc = crc32(block[:count], crc)
        return crc


def for_each(work: Callable[[_File], None], files: list[_File]) -> None:
    """Call a function for every file, from a few threads."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(work, files):
            pass


def read_ahead(read: Callable[[_File], _Read], files: Iterable[_File]) -> Iterator[_Read]:
    """Read files in another thread while the caller uses those before."""
    with ThreadPoolExecutor(1, "megalith read ahead") as thread:
        waiting: deque[Future[_Read]] = deque()
        try:
            for file in files:
                waiting.append(thread.submit(read, file))
                if len(waiting) > _AHEAD:
                    yield waiting.popleft().result()  # no limit: the store has one for its requests
            while waiting:
                yield waiting.popleft().result()  # no limit: the same
        finally:
            for future in waiting:
                future.cancel()


def view_of(data: Tensor) -> memoryview:
    """Return the bytes of a tensor, in the same memory."""
    # data: uint8 [n], contiguous, on the CPU.
    array: Any = data.numpy()
    return memoryview(array)


def _file_size(found: os.stat_result) -> int:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")  # a pipe or a device may never end
    return found.st_size
