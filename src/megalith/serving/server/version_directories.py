"""Version directories: finds the directories of exported versions, whose names are numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

MAX_FOLDERS = 1000
"""Maximum number of folders searched at each level, in case the directory is the wrong one."""
DEPTH = 2
"""Levels below the given directory that are searched for versions."""


def version_roots(directory: Path, depth: int) -> Iterator[Path]:
    """Yield the directories that hold versions."""
    if versions_of(directory):
        yield directory
    elif depth:
        for child in _folders(directory)[:MAX_FOLDERS]:
            yield from version_roots(directory / child, depth - 1)


def versions_of(directory: Path) -> list[int]:
    """Return the version numbers in a directory; only names that are int64 numbers count."""
    names = [name for name in _folders(directory) if name.isascii() and name.isdecimal()]
    return [int(name) for name in names if str(int(name)) == name and int(name) < 2**63]


def _folders(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return []  # it may have been deleted meanwhile
    return sorted(names)
