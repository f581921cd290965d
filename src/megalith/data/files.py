"""list_files, data_root: the files that paths, directories and patterns name, and the root of their names."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from megalith.errors import InputError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def list_files(paths: Paths, suffixes: Sequence[str]) -> list[Path]:
    """Lists the files that paths, directories and patterns name, in the given order."""
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
