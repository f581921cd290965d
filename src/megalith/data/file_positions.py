"""FilePositions: the file of a reader's position, and whether the files have changed since.

A position names its file relative to the root of the data, so that the data may move, and holds the size of
the file and a checksum of the names and sizes of all files before it. Files may be added after it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from megalith.data.batch import Position
from megalith.data.files import Paths, data_root
from megalith.data.reader import position_integer
from megalith.errors import InputError


class FilePositions:
    """The parts of files that a shard reads, in order: whole files, or row groups."""

    def __init__(self, key: str, parts: Sequence[tuple[Path, int]], root: Path) -> None:
        self.key = key
        self._parts: list[tuple[str, int, int]] = []
        self._before = [0]
        sizes: dict[Path, int] = {}
        names: dict[Path, str] = {}
        for path, number in parts:
            if path not in sizes:
                sizes[path] = path.stat().st_size if path.exists() else -1
                names[path] = _relative(path, root)
            part = (names[path], sizes[path], number)
            self._parts.append(part)
            self._before.append(zlib.crc32(repr(part).encode(), self._before[-1]))

    @classmethod
    def of_files(cls, key: str, files: Sequence[Path], paths: Paths) -> FilePositions:
        """Creates the positions of whole files."""
        return cls(key, [(file, 0) for file in files], data_root(paths))

    def at(self, index: int) -> Position:
        """Return the entries of a position in a part."""
        name, size, number = self._parts[index] if self._parts else ("", 0, 0)
        return {
            self.key: index,
            "name": name,
            "size": size,
            "part": number,
            "before": self._before[min(index, len(self._parts))],
        }

    def check(self, position: Position) -> None:
        """Checks that the parts up to a position are those that it was taken from."""
        index = position_integer(position, self.key, max(len(self._parts) - 1, 0))
        if (index, position.get("name"), position.get("before")) == (0, "", 0):
            return  # it was taken when there was no part
        found = self.at(index)
        remedy = "read the same files in the same order, or start over"
        name, was = found["name"], position.get("name")
        if was != name:
            raise InputError(
                f"reader: the position is in file {was!r}, but that file is now {name!r}; {remedy}"
            )
        if "before" not in position:
            raise InputError(
                f"reader: the position in file {name!r} was saved by an earlier version, without "
                "a record of the files before it; start over"
            )
        if position.get("size") != found["size"]:
            raise InputError(
                f"reader: file {name!r} of the position had {position.get('size')} bytes and now has "
                f"{found['size']}; {remedy}"
            )
        if any(position.get(key) != found[key] for key in ("part", "before")):
            raise InputError(f"reader: the files before {name!r} of the position have changed; {remedy}")


def _relative(path: Path, root: Path) -> str:
    try:
        return Path(os.path.relpath(path.absolute(), root)).as_posix()
    except ValueError:  # on another drive
        return path.name
