"""Files: from what a user names to a list of files."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from megalith.errors import InputError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def list_files(paths: Paths, suffixes: Sequence[str]) -> list[Path]:
    """The files named by paths, directories and patterns ("day_*.tsv.gz"), in the order given.

    A directory stands for its files that end in one of `suffixes`, a pattern for what it matches, both sorted
    by name; in a directory, names beginning with . or _ are left out.
    Raises InputError if something named gives no file.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    files: list[Path] = []
    for item in given:
        path = Path(item)
        if path.is_dir():
            inside = (x for x in path.rglob("*") if x.name.endswith(tuple(suffixes)) and x.is_file())
            found = sorted(x for x in inside if not _is_hidden(x.relative_to(path)))
        elif path.exists():
            found = [path]
        else:
            found = sorted(Path(x) for x in glob.glob(str(item), recursive=True))
        if not found:
            raise InputError(f"{item}: no such file, nor files ending in {', '.join(suffixes)} in or like it")
        files += found
    if not files:
        raise InputError("reader: no files are named")
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)
