"""The files of a reader: what paths, directories and patterns name, and positions in them.

A path is local, or the URI of an object store that pyarrow opens ("s3://bucket/clicks/*.parquet"). A position
names its file relative to the root of the data, so that the data may move, and holds the size of the file and
a checksum of the names and sizes of all files before it (`FilePositions`). Files may be added after it.
"""

from __future__ import annotations

import glob
import io
import logging
import os
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from megalith.data.batch import Position
from megalith.errors import InputError
from megalith.ragged import arrow

logger = logging.getLogger(__name__)
_Part = tuple[str, Any, int]
"""Name and size of a file, and number of a part of it."""
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class ObjectFile:
    """A file of an object store, with the methods of a Path that readers use."""

    def __init__(self, uri: str, filesystem: Any, key: str, size: int) -> None:
        self.uri, self.filesystem, self.key, self.size = uri, filesystem, key, size
        self.name = key.rpartition("/")[2]
        self.suffix = Path(self.name).suffix

    def open(self, mode: str = "rb") -> BinaryIO:
        opened: BinaryIO = io.BufferedReader(self.filesystem.open_input_file(self.key))
        return opened

    def stat(self) -> Any:
        return SimpleNamespace(st_size=self.size)

    def exists(self) -> bool:
        return True

    def __str__(self) -> str:
        return self.uri


File = Path | ObjectFile


def list_files(paths: Paths, suffixes: Sequence[str]) -> list[Any]:
    """List the files that paths, directories and patterns name, in the given order."""
    # The files of a directory and the matches of a pattern are sorted by name. Files of a directory whose
    # names start with . or _ are left out.
    files: list[File] = []
    for item in _as_list(paths):
        if _is_uri(item):
            files += _list_objects(str(item), suffixes)
            continue
        path = Path(item)
        found: list[Path] = []
        if path.is_dir():
            inside = (x for x in path.rglob("*") if x.name.endswith(tuple(suffixes)) and x.is_file())
            found = sorted(x for x in inside if not _is_hidden(x.relative_to(path).as_posix()))
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


def data_root(paths: Paths) -> str:
    """Return the directory to which the names of files are relative in positions."""
    # It is the given directory, the directory of the given file, or the part of a pattern before its first
    # wildcard. For several paths it is that of the first one, so that it stays the same if paths are
    # appended.
    first = _as_list(paths)[0]
    if _is_uri(first):
        return _split_pattern(str(first))[0]
    return _root(Path(first).absolute()).as_posix()


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


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


# ---- object stores


def _is_uri(item: Any) -> bool:
    return isinstance(item, str) and "://" in item


def _split_pattern(uri: str) -> tuple[str, str, str]:
    """The directory before the first wildcard, the rest, and the options after "?"."""
    plain, mark, options = uri.partition("?")
    fixed = re.split(r"[*\[]", plain, maxsplit=1)[0]
    base = plain if fixed == plain else fixed.rpartition("/")[0]
    return base.rstrip("/"), plain[len(base) :].strip("/"), mark + options


def _list_objects(uri: str, suffixes: Sequence[str]) -> list[File]:
    fs, pa = arrow("pyarrow.fs"), arrow()
    base, pattern, options = _split_pattern(uri)
    try:
        filesystem, key = fs.FileSystem.from_uri(base + options)
        found = filesystem.get_file_info(key)
        if found.type == fs.FileType.Directory:
            inside = filesystem.get_file_info(fs.FileSelector(key, recursive=True))
        else:
            inside = [found]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{uri}: cannot be listed: {error}") from None
    match = re.compile(_as_regex(pattern)) if pattern else None
    files: list[File] = []
    for each in sorted(inside, key=lambda each: str(each.path)):
        name = str(each.path)[len(key) :].strip("/")
        fits = name == "" or (match.fullmatch(name) if match else name.endswith(tuple(suffixes)))
        if each.type == fs.FileType.File and fits and not _is_hidden(name):
            files.append(ObjectFile(f"{base}/{name}".rstrip("/"), filesystem, each.path, each.size))
    if not files:
        raise InputError(f"{uri}: no such object, and no match that ends in {', '.join(suffixes)}")
    return files


def _as_regex(pattern: str) -> str:
    """The regular expression of a pattern with *, ** and [ ]; "?" begins the options of a URI."""
    parts = re.split(r"(\*\*/?|\*|\[[^\]]*\])", pattern)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    return "".join(known.get(x, x if x.startswith("[") else re.escape(x)) for x in parts)


# ---- positions


class FilePositions:
    """The parts of files that a shard reads, in order: whole files, or row groups."""

    def __init__(self, key: str, parts: Sequence[tuple[Any, int]], root: str) -> None:
        self.key = key
        self._parts: list[_Part] = []
        sizes: dict[Any, int] = {}
        names: dict[Any, str] = {}
        for path, number in parts:
            if path not in sizes:
                sizes[path] = path.stat().st_size if path.exists() else -1
                names[path] = relative_name(path, root)
            self._parts.append((names[path], sizes[path], number))
        self._before = _checksums(self._parts)

    @classmethod
    def of_files(cls, key: str, files: Sequence[Any], paths: Paths) -> FilePositions:
        return cls(key, [(file, 0) for file in files], data_root(paths))

    @property
    def checksum(self) -> int:
        """Checksum of all parts."""
        return self._before[-1]

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

    def check(self, position: Position, same_rows: Callable[[], bool] = lambda: False) -> None:
        """Check that the parts up to a position are those that it was taken from.

        The file of the position itself may have been corrected, if `same_rows` says that the rows before the
        position are as many as they were.
        """
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
        size = position.get("size")
        if size != found["size"] and same_rows():
            parts = [(each, size if each == name else found, n) for each, found, n in self._parts[:index]]
            if position["before"] == _checksums(parts)[-1]:
                logger.warning(
                    "reader: file %r has changed since the position was saved; reading continues in it at "
                    "the same row",
                    name,
                )
                return
        if size != found["size"]:
            raise InputError(
                f"reader: file {name!r} of the position had {size} bytes and now has "
                f"{found['size']}; {remedy}"
            )
        if any(position.get(key) != found[key] for key in ("part", "before")):
            raise InputError(f"reader: the files before {name!r} of the position have changed; {remedy}")


def _checksums(parts: Sequence[_Part]) -> list[int]:
    """The checksum before each part, and that of all."""
    found = [0]
    for part in parts:
        found.append(zlib.crc32(repr(part).encode(), found[-1]))
    return found


def relative_name(path: Any, root: str) -> str:
    if isinstance(path, ObjectFile):
        return path.uri.removeprefix(root).strip("/") or path.name
    try:
        return Path(os.path.relpath(path.absolute(), root)).as_posix()
    except ValueError:  # on another drive
        return str(path.name)


def position_integer(position: Position, key: str, most: int | None = None) -> int:
    value = position.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError(f"reader: {key!r} of a position must be an integer of 0 or more, got {value!r}")
    if most is not None and value > most:
        raise InputError(f"reader: {key!r} of the position is {value}, above {most}; the data has changed")
    return value
