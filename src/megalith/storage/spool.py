"""Bodies: the bytes of one object on this machine, in memory or in a spool file, read by range.

A spool file has no name: it is deleted from its directory when it is created, so that nothing remains after a
process was killed. A body is written once and then read by any number of threads; whoever opens it closes it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, cast

from megalith.errors import StoreError


class Body(ABC):
    """Bytes that can be read by range.

    Attributes:
        size: The number of bytes.
    """

    size: int

    @abstractmethod
    def read_into(self, offset: int, view: memoryview) -> None:
        """Copy bytes into a buffer.

        Args:
            offset: The first byte.
            view: The buffer; as many bytes are read as it has.

        Raises:
            StoreError: The body ends before.
        """

    @abstractmethod
    def source(self) -> bytes | BinaryIO:
        """Return all of it as an upload takes it: bytes, or an open file, which the caller closes."""

    @abstractmethod
    def close(self) -> None:
        """Release the bytes. A second call does nothing."""

    def read(self, offset: int, length: int) -> bytearray:
        """Return a copy of some bytes.

        Args:
            offset: The first byte.
            length: The number of bytes.

        Returns:
            The bytes.

        Raises:
            StoreError: The body ends before.
        """
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return data


class MemoryBody(Body):
    """Bytes in memory.

    Args:
        data: The bytes.
        on_close: Called once, when the bytes are released.
    """

    def __init__(
        self, data: bytes | bytearray | memoryview, on_close: Callable[[], None] | None = None
    ) -> None:
        self._data = memoryview(data).cast("B")
        self._on_close = on_close
        self.size = len(self._data)

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `Body.read_into`."""
        if offset < 0 or offset + len(view) > self.size:
            raise StoreError(f"cannot read {len(view)} bytes at {offset} of a body of {self.size} bytes")
        view[:] = self._data[offset : offset + len(view)]

    def source(self) -> bytes | BinaryIO:
        """See `Body.source`: a copy of all bytes."""
        return bytes(self._data)

    def close(self) -> None:
        """See `Body.close`."""
        self._data = memoryview(b"")
        self.size = 0
        if self._on_close is not None:
            self._on_close()
            self._on_close = None


class FileBody(Body):
    """Bytes in a file.

    Args:
        file: The open file; it is closed with the body.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `Body.read_into`."""
        done = 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            if count <= 0:
                raise StoreError(f"a file of {self.size} bytes ends before byte {offset + len(view)}")
            done += count

    def source(self) -> bytes | BinaryIO:
        """See `Body.source`: the file, from its beginning."""
        copy = os.fdopen(os.dup(self._file.fileno()), "rb")
        copy.seek(0)
        return copy

    def close(self) -> None:
        """See `Body.close`. A spool file is gone then."""
        self._file.close()


class SpoolWriter:
    """A new spool file.

    Args:
        directory: Where it is stored; None: the system's directory for temporary files.
    """

    def __init__(self, directory: Path | None = None) -> None:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        self.file: BinaryIO = cast(BinaryIO, TemporaryFile(dir=directory))  # noqa: SIM115

    def write(self, data: bytes | memoryview, offset: int | None = None) -> None:
        """Write bytes.

        Args:
            data: The bytes.
            offset: Where they go; None: after the last ones.

        Raises:
            OSError: The disk is full or fails.
        """
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
