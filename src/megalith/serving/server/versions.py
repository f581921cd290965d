"""The versions of a model in a directory: their numbers, their labels, and the split of requests among them.

A version is a directory whose name is a number. Labels and the split are a file in the directory of the
versions, TRAFFIC, which the server reads at every poll:

    {"labels": {"stable": 3, "canary": 4}, "traffic": {"stable": 90, "canary": 10}}

`labels` are names of versions. `traffic` has the percentages of the requests that name no version, by label
or number; without it the newest version gets all of them. Versions that the file names are loaded in addition
to the newest ones, and a version without a share is loaded but answers only requests that name it.

A request with a key always gets the same version, on every server: the key and the name of the model are
hashed to a point from 0 to 100, and versions take intervals of their percentages, the highest number first.
So if the share of a new version grows, keys move only to that version. Requests without a key are spread
evenly.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalith.errors import InputError
from megalith.ops import checks
from megalith.storage.json_codec import parse_json
from megalith.storage.local_files import write_atomically

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


TRAFFIC = "traffic.json"
MAX_FILE_BYTES = 1 << 20
MAX_LABEL = 100
MAX_LABELS = 1000
TOTAL = 100.0
# Multiples of the golden ratio spread evenly, however many requests there are.
_GOLDEN = TOTAL * (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class VersionRules:
    """Labels and shares of the versions of a model.

    Args:
        labels: Label -> number of a version.
        traffic: Label, or number as text, -> percentage of the requests that name no version; together 100.
            Empty: the newest version gets all.

    Raises:
        InputError: A label, a version or a percentage is invalid.
    """

    labels: Mapping[str, int] = field(default_factory=dict)
    traffic: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, number in checks.mapping(self.labels, "labels", '{"stable": 3}').items():
            _check_label(name)
            checks.integer(number, f"labels: version of {name!r}", least=0)
        if len(self.labels) > MAX_LABELS:
            raise InputError(f"labels: there are more than {MAX_LABELS}")
        for name, percent in checks.mapping(self.traffic, "traffic", '{"stable": 90, "canary": 10}').items():
            self._number_of(name)
            if isinstance(percent, bool) or not isinstance(percent, int | float) or not 0 <= percent <= TOTAL:
                raise InputError(f"traffic of {name!r} must be a percentage from 0 to 100, got {percent!r}")
        if self.traffic and not math.isclose(sum(self.traffic.values()), TOTAL, abs_tol=1e-6):
            raise InputError(f"traffic must add up to 100 percent, not {sum(self.traffic.values()):g}")
        shares: dict[int, float] = {}
        for name, percent in self.traffic.items():
            number = self._number_of(name)
            shares[number] = shares.get(number, 0.0) + percent
        object.__setattr__(self, "_shares", tuple(sorted(shares.items(), reverse=True)))

    @classmethod
    def read(cls, directory: Path) -> VersionRules:
        """Read the rules of a model.

        Args:
            directory: The directory of the versions.

        Returns:
            The rules; without a file there are none.

        Raises:
            InputError: The file is malformed, or cannot be read.
        """
        path = checks.path(directory, "version rules: directory") / TRAFFIC
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        data = parse_json(text, lambda problem: InputError(f"{path} {problem}"), max_bytes=MAX_FILE_BYTES)
        if not isinstance(data, dict) or not data.keys() <= {"labels", "traffic"}:
            raise InputError(f'{path} must be an object with "labels" and "traffic"')
        try:
            return cls(data.get("labels", {}), data.get("traffic", {}))
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def write(self, directory: Path) -> None:
        """Write the rules of a model, which its servers use from their next poll on.

        Args:
            directory: The directory of the versions.
        """
        data = {"labels": dict(self.labels), "traffic": dict(self.traffic)}
        path = checks.path(directory, "version rules: directory") / TRAFFIC
        write_atomically(path, [f"{json.dumps(data, indent=1)}\n".encode()])

    @property
    def shares(self) -> tuple[tuple[int, float], ...]:
        """Version and percentage of each version in the split, the highest number first."""
        found: tuple[tuple[int, float], ...] = self._shares  # type: ignore[attr-defined]
        return found

    def _number_of(self, name: Any) -> int:
        if isinstance(name, str) and name in self.labels:
            return self.labels[name]
        if isinstance(name, str) and name.isascii() and name.isdecimal() and int(name) < 2**63:
            return int(name)
        known = ", ".join(self.labels) or "none"
        raise InputError(f"traffic of {name!r}: it is neither a label nor a version; labels: {known}")


def is_named(rules: VersionRules, number: int) -> bool:
    return number in rules.labels.values() or any(number == each for each, _ in rules.shares)


def choose_version(rules: VersionRules, available: Container[int], point: float | None) -> int | None:
    """Choose the version of a request that names none."""
    shares = [(number, percent) for number, percent in rules.shares if percent and number in available]
    if not shares:
        return None
    if point is None:
        return max(shares, key=lambda share: share[1])[0]
    left = point / TOTAL * sum(percent for _, percent in shares)
    for number, percent in shares:
        left -= percent
        if left < 0:
            return number
    return shares[-1][0]


def point_of_key(model: str, key: str) -> float:
    """Return where a request with a key falls in the split of a model."""
    text = f"{model}\0{key}".encode("utf-8", "surrogateescape")
    hashed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return hashed / 2**64 * TOTAL


def point_of_request(number: int) -> float:
    """Return where a request without a key falls in a split."""
    return number * _GOLDEN % TOTAL


def _check_label(name: Any) -> None:
    valid = isinstance(name, str) and 1 <= len(name) <= MAX_LABEL and name.isprintable()
    if not valid or any(char in "/: " for char in name) or name.isdecimal():
        raise InputError(
            f"label {repr(name)[:100]} must be 1 to {MAX_LABEL} printable characters without '/', ':' and "
            "spaces, and not a number"
        )
