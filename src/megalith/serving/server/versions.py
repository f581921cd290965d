"""The versions of a model in a directory: their numbers and their labels.

A version is a directory whose name is a number. Labels are names of versions, in a file in the directory of
the versions, which the server reads at every poll:

    labels.json    {"stable": 3, "canary": 4}

Labelled versions are loaded in addition to the newest ones. The labels in a `traffic.json` of an earlier
Megalith are read if there is no labels.json; its split of the requests between versions is not applied.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalith.errors import InputError
from megalith.ops import checks
from megalith.storage.json_codec import parse_json
from megalith.storage.local_files import write_atomically

logger = logging.getLogger(__name__)

MAX_FOLDERS = 1000
"""Maximum number of folders searched at each level, in case the directory is the wrong one."""
DEPTH = 2
"""Levels below the given directory that are searched for versions."""
LABELS, TRAFFIC = "labels.json", "traffic.json"
MAX_FILE_BYTES = 1 << 20
MAX_LABEL = 100
MAX_LABELS = 1000


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
        return []  # it may have been deleted since
    return sorted(names)


def read_labels(directory: str | Path) -> dict[str, int]:
    """Read the labels of a model's versions.

    Args:
        directory: The directory of the versions.

    Returns:
        Label -> number of a version; empty without a file.

    Raises:
        InputError: The file is malformed, or cannot be read.
    """
    path = checks.path(directory, "labels: directory") / LABELS
    before = path.with_name(TRAFFIC)
    if not path.exists() and before.exists():
        path = before
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    data = parse_json(text, lambda problem: InputError(f"{path} {problem}"), max_bytes=MAX_FILE_BYTES)
    if path is before and isinstance(data, dict):
        if data.get("traffic"):
            _warn_of_split(path)
        data = data.get("labels", {})
    try:
        return _check(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def write_labels(directory: str | Path, labels: Mapping[str, int]) -> None:
    """Write the labels of a model's versions, which its servers use from their next poll on.

    Args:
        directory: The directory of the versions.
        labels: Label -> number of a version.

    Raises:
        InputError: A label or a number is invalid.
    """
    path = checks.path(directory, "labels: directory") / LABELS
    write_atomically(path, [f"{json.dumps(_check(labels), indent=1)}\n".encode()])


def _check(labels: Any) -> dict[str, int]:
    for name, number in checks.mapping(labels, "labels", '{"stable": 3}').items():
        valid = 1 <= len(name) <= MAX_LABEL and name.isprintable()
        if not valid or any(char in "/: " for char in name) or name.isdecimal():
            raise InputError(
                f"label {name[:100]!r} must be 1 to {MAX_LABEL} printable characters without '/', ':' and "
                "spaces, and not a number"
            )
        checks.integer(number, f"labels: version of {name!r}", least=0)
    if len(labels) > MAX_LABELS:
        raise InputError(f"labels: there are more than {MAX_LABELS}")
    return dict(labels)


@functools.cache
def _warn_of_split(path: Path) -> None:
    logger.warning(
        "%s: requests are not split between versions any more: use a load balancer, and `megalith versions` "
        "to write the labels to %s",
        path,
        LABELS,
    )
