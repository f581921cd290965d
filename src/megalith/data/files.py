"""The files of a reader: what paths, directories and patterns name, and positions in them.

A position names its file relative to the root of the data, so that the data may move, and holds the size of
the file and a checksum of the names and sizes of all files before it (`FilePositions`). Files may be added
after it.
"""

from __future__ import annotations

import glob
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from megalith.data.batch import Position
from megalith.data.reader import position_integer
from megalith.errors import InputError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def list_files(paths: Paths, suffixes: Sequence[str]) -> list[Path]:
    """List the files that paths, directories and patterns name, in the given order."""
    # The files of a directory and the matches of a pattern are sorted by name. Files of a directory whose
    # names start with . or _ are left out.
    files: list[Path] = []
    for item in _as_list(paths):
        path = Path(item)
        if path.is_dir():
            inside = (x for x in path.rglob("*") if x.name.endswith(tuple(suffixes)) and x.is_file())
            found = sorted(x for x in inside if not _is_hidden(x.relative_to(path)))
        elif path.exists():
            found = [path]
        else:
            found = sorted(Path(x) for x in glob.glob(str(item), recursive=True))
        if not found and path.is_dir():
            others = sorted({x.suffix for x in path.rglob("*") if x.suffix and x.is_file()})[:5]
            held = f"; it holds {', '.join(others)}: use the reader (--data) of that format" if others else ""
            raise InputError(f"{item}: no file in this directory ends in {', '.join(suffixes)}{held}")
        if not found:
            raise InputError(
                f"{item}: no such file or directory, and no match that ends in {', '.join(suffixes)}"
            )
        files += found
    if not files:
        raise InputError("reader: no file is given")
    return files


def data_root(paths: Paths) -> Path:
    """Return the directory to which the names of files are relative in positions."""
    # It is the given directory, the directory of the given file, or the part of a pattern before its first
    # wildcard. For several paths it is that of the first one, so that it stays the same if paths are
    # appended.
    return _root(Path(_as_list(paths)[0]).absolute())


def _as_list(paths: Paths) -> list[str | os.PathLike[str]]:
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(given, list | tuple) or not all(
        isinstance(item, str | os.PathLike) and isinstance(os.fspath(item), str) for item in given
    ):
        raise InputError(f"reader: paths must be a path or a list of paths, got {paths!r}")
    if any("\0" in os.fspath(item) for item in given):
        raise InputError("reader: a path cannot contain a null character")
    return list(given)


def _root(path: Path) -> Path:
    if path.is_dir():
        return path
    while not path.exists() and any(glob.has_magic(part) for part in path.parent.parts):
        path = path.parent
    return path.parent


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


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
        """Check that the parts up to a position are those that it was taken from."""
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
