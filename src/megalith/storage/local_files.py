"""Files of the local disk: atomic writes, the checksum of manifests, and locks between processes.

A write goes to a temporary name, is flushed to the disk, and is renamed; then the directory is flushed. So a
file is replaced completely or not at all, and survives a power failure. Files that nothing refers to yet can
be flushed together later: each flush waits for the disk.

The checksum is a CRC-32: zlib's, or a native one if this CPU has the instructions. The system releases a lock
when its process ends.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megalith.library import native_module

_crc32: Any = getattr(native_module(), "crc32", zlib.crc32)


def crc32(data: Any, value: int = 0) -> int:
    """Compute the CRC-32 of bytes."""
    crc: int = _crc32(data, value)
    return crc


_BLOCK = 1 << 20
"""Bytes that are written at a time: they are still in the cache after their checksum was computed."""


def write_atomically(target: Path, parts: Iterable[Any], *, flush: bool = True) -> tuple[int, int]:
    """Write buffers to a file, which keeps its old content until all of them are on the disk."""
    _make_directory(target.parent)
    temporary = target.with_name(target.name + ".tmp")
    # Always a new file: what is there may be a link to another place.
    temporary.unlink(missing_ok=True)
    size, crc = 0, 0
    with open(temporary, "xb", buffering=0) as file:
        for block in _blocks(parts):
            crc = crc32(block, crc)
            size += len(block)
            while block:
                block = block[file.write(block) :]
        if flush:
            os.fsync(file.fileno())
        else:
            _start_writeback(file.fileno())
    os.replace(temporary, target)
    if flush:
        sync_path(target.parent)
    return size, crc


def sync_path(path: Path) -> None:
    """Flush a file or a directory to the disk; a rename lasts once its directory is flushed."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _blocks(parts: Iterable[Any]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part).cast("B")
        for at in range(0, len(view), _BLOCK):
            yield view[at : at + _BLOCK]


def _start_writeback(handle: int) -> None:
    """Ask the system to write a file to the disk, without waiting for the end, where it offers that."""
    start = getattr(native_module(), "start_writeback", None)
    if start is not None:
        start(handle)


def _make_directory(directory: Path) -> None:
    """Create a directory and its parents, and flush each parent."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_path(directory.parent)


_LOCK_PAUSE = 0.01


def take_lock(file: int, seconds: float) -> bool:
    """Take the exclusive lock of an open file; return whether other processes have released it in time."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOCK_PAUSE)
