"""JSON from outside, field by field: one canonical writing, a bounded parser, checks that name the field.

Headers, plans, partials and manifests are all read through it. What is raised is the caller's choice: a
damaged header is a peer's fault, a damaged manifest is not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn

MAX_INT = (1 << 63) - 1
_HEX64 = re.compile(r"[0-9a-f]{64}")


def canonical(data: Any) -> bytes:
    """The one way to write this data: ASCII JSON, sorted keys, no blanks, no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest(data: Any) -> str:
    """SHA-256 of the canonical writing, in hexadecimal."""
    return hashlib.sha256(canonical(data)).hexdigest()


def parse(text: bytes, error: Callable[[str], Exception]) -> Fields:
    """The object that JSON text holds. Raises what `error` makes of a sentence."""
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as problem:  # UnicodeDecodeError is a ValueError
        raise error(f"is no JSON: {problem}") from None
    if not isinstance(data, dict):
        raise error("is no JSON object")
    return Fields(data, error)


def show_time(moment: datetime) -> str:
    """A moment as all our files write it: UTC, microseconds."""
    return as_utc(moment).isoformat(timespec="microseconds")


def as_utc(moment: datetime) -> datetime:
    """The same moment in UTC; a moment without a zone is taken to be UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


class Fields:
    """An object of JSON whose fields are taken by name and type; errors name the field."""

    def __init__(self, data: dict[str, Any], error: Callable[[str], Exception], inside: str = "") -> None:
        self.data = data
        self._error = error
        self._inside = inside

    def wrong(self, key: str, problem: str) -> NoReturn:
        """Raises: this field is wrong in this way."""
        raise self._error(f"field {self._inside}{key} {problem}")

    def only(self, *names: str) -> None:
        """Raises if there are other fields than these."""
        extra = sorted(set(self.data) - set(names))
        if extra:
            self.wrong(extra[0][:64], "is not known")

    def text(self, key: str, longest: int = 1024) -> str:
        """A text of bounded length."""
        value = str(self._typed(key, str, "a text"))
        if len(value) > longest:
            self.wrong(key, f"is longer than {longest} characters")
        return value

    def sha(self, key: str) -> str:
        """64 hexadecimal digits."""
        value = self._typed(key, str, "a text")
        if not _HEX64.fullmatch(value):
            self.wrong(key, "must be 64 hexadecimal digits")
        return str(value)

    def number(self, key: str, least: int = 0, most: int = MAX_INT) -> int:
        """A whole number in a range."""
        value = int(self._typed(key, int, "a whole number"))
        if not least <= value <= most:
            self.wrong(key, f"must be from {least} to {most}")
        return value

    def real(self, key: str) -> float:
        """A finite number."""
        value = self.data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.wrong(key, "must be a number" if key in self.data else "is missing")
        if abs(value) > 1e300:
            self.wrong(key, "is too large")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.data.get(key)
        if not isinstance(value, bool):
            self.wrong(key, "must be true or false" if key in self.data else "is missing")
        return value

    def moment(self, key: str) -> datetime | None:
        """A moment, or None where null stands."""
        if key in self.data and self.data[key] is None:
            return None
        text = self.text(key, 40)
        try:
            return as_utc(datetime.fromisoformat(text))
        except (ValueError, OverflowError):
            self.wrong(key, "must be a time like 2026-01-02T03:04:05.000000+00:00")

    def listing(self, key: str) -> list[Any]:
        """A list of anything."""
        return list(self._typed(key, list, "a list"))

    def numbers(self, key: str, least: int = 0, most: int = MAX_INT) -> list[int]:
        """A list of whole numbers in a range."""
        values = self.listing(key)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                self.wrong(key, f"must hold whole numbers from {least} to {most}")
        return values

    def object(self, key: str) -> Fields:
        """An object inside."""
        return Fields(self._typed(key, dict, "an object"), self._error, f"{self._inside}{key}.")

    def objects(self, key: str) -> list[Fields]:
        """A list of objects."""
        found = []
        for number, each in enumerate(self.listing(key)):
            if not isinstance(each, dict):
                self.wrong(f"{key}[{number}]", "must be an object")
            found.append(Fields(each, self._error, f"{self._inside}{key}[{number}]."))
        return found

    def _typed(self, key: str, kind: type, name: str) -> Any:
        value = self.data.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            self.wrong(key, f"must be {name}" if key in self.data else "is missing")
        return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not allowed")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a field stands twice in one object")
    return data
