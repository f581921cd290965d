"""The bytes of one object on this machine: in memory, or in a spool file. Read by range.

Whoever opens a body closes it; a spool file is deleted then. A body is written once, from start to end, and
read by any number of threads afterwards.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp
from typing import BinaryIO

from megalith.errors import StoreError


class Body(ABC):
    """Bytes that can be read by range."""

    size: int

    @abstractmethod
    def read(self, offset: int, length: int) -> bytearray:
        """These bytes, copied. Raises StoreError if they are not all there."""

    @abstractmethod
    def source(self) -> bytes | Path:
        """All of it, as an upload takes it: bytes, or the file they are in."""

    @abstractmethod
    def close(self) -> None:
        """Gives the bytes up."""


class MemoryBody(Body):
    """Bytes in memory. on_close: called once, when they are given up."""

    def __init__(
        self, data: bytes | bytearray | memoryview, on_close: Callable[[], None] | None = None
    ) -> None:
        self._data = memoryview(data).cast("B")
        self._on_close = on_close
        self.size = len(self._data)

    def read(self, offset: int, length: int) -> bytearray:
        """These bytes, copied. Raises StoreError if they are not all there."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise StoreError(f"{length} bytes at {offset} asked of a body of {self.size}")
        return bytearray(self._data[offset : offset + length])

    def source(self) -> bytes | Path:
        """All bytes, copied."""
        return bytes(self._data)

    def close(self) -> None:
        """Gives the bytes up."""
        self._data = memoryview(b"")
        self.size = 0
        if self._on_close is not None:
            self._on_close()
            self._on_close = None


class FileBody(Body):
    """Bytes in a file. A temporary one is deleted by `close`."""

    def __init__(self, path: Path, *, temporary: bool = False) -> None:
        self.path = path
        self.temporary = temporary
        self._file = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._file).st_size

    def read(self, offset: int, length: int) -> bytearray:
        """These bytes, copied. Raises StoreError if they are not all there."""
        data = bytearray(length)
        view, done = memoryview(data), 0
        while done < length:
            count = os.preadv(self._file, [view[done:]], offset + done)
            if count <= 0:
                raise StoreError(f"{self.path} ends before byte {offset + length}: was the spool changed?")
            done += count
        return data

    def source(self) -> bytes | Path:
        """The file."""
        return self.path

    def close(self) -> None:
        """Closes the file; deletes it if it is temporary."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            if self.temporary:
                self.path.unlink(missing_ok=True)


class SpoolWriter:
    """A new spool file, written from start to end; `finish` makes a body of it, `discard` deletes it."""

    def __init__(self, directory: Path | None) -> None:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        number, name = mkstemp(".spool", "gather-", directory)
        self.path = Path(name)
        self.file: BinaryIO = os.fdopen(number, "w+b")

    def write(self, data: bytes | memoryview) -> None:
        """Appends."""
        self.file.write(data)

    def finish(self) -> FileBody:
        """The written bytes as a body that deletes its file when closed."""
        try:
            self.file.close()
        except OSError:
            self.discard()
            raise
        return FileBody(self.path, temporary=True)

    def discard(self) -> None:
        """Deletes what was written."""
        with suppress(OSError):  # what was buffered may not fit on the disk any more
            self.file.close()
        self.path.unlink(missing_ok=True)
