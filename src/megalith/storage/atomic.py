"""Atomic writes to a local disk: a file is replaced completely or not at all, and survives a power failure.

A write goes to a temporary name, is flushed to the disk, and is renamed; then the directory is flushed.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_atomically(target: Path, parts: Iterable[Any]) -> tuple[int, int]:
    """Write buffers to a file, which keeps its old content until all of them are on the disk.

    Args:
        target: The file; its directory is created if it is missing.
        parts: Buffers, written one after the other.

    Returns:
        The length of the file in bytes and its CRC-32.
    """
    _make_directory(target.parent)
    temporary = target.with_name(target.name + ".tmp")
    # Always a new file: what is there may be a link to another place.
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
    sync_path(target.parent)
    return size, crc


def sync_path(path: Path) -> None:
    """Flush a file or a directory to the disk; a rename lasts once its directory is flushed.

    Args:
        path: The file or directory, which must exist.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make_directory(directory: Path) -> None:
    """Create a directory and its parents, and flush each parent."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_path(directory.parent)
