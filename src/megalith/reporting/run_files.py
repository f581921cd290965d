"""RunFiles: the files of a run, read for its report. A missing or damaged file is `Absent`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megalith.units import show_number

_MAX_BYTES = 1 << 28


class Absent(Exception):
    """The input of a section is missing; the message names it."""


class RunFiles:
    """The files of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = _optional(lambda: read_object(directory / "config.json"))
        self.evaluation = _optional(lambda: read_object(directory / "evaluation.json"))
        self.records, self.unread = _records(directory / "metrics.jsonl")

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of a kind."""
        return [r for r in self.records if r.get("kind") == kind]

    def points(self, kind: str, field: str) -> list[tuple[float, float]]:
        """Return the values of a field by step."""
        pairs = [(finite_number(r.get("step")), finite_number(r.get(field))) for r in self.of_kind(kind)]
        return [(step, value) for step, value in pairs if step is not None and value is not None]

    @property
    def evaluated_before(self) -> str:
        """Which step the evaluation is of, if the run has continued since then. Otherwise empty."""
        step, newest = finite_number((self.evaluation or {}).get("step")), self.last("step")
        if step is None or newest is None or step == newest:
            return ""
        return f"step {show_number(step)} of {show_number(newest)}"

    def last(self, field: str) -> float | None:
        """Return the newest value of a field."""
        found = [finite_number(r.get(field)) for r in self.of_kind("train") or self.records]
        return next((value for value in reversed(found) if value is not None), None)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise Absent(f"{path.name} is too large to show")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Absent(f"{path.name} is missing") from None
    except (OSError, UnicodeDecodeError):
        raise Absent(f"{path.name} cannot be read") from None


def read_object(path: Path) -> dict[str, Any]:
    """Reads a file with a JSON object."""
    try:
        data = json.loads(_text(path))
    except (ValueError, RecursionError):
        raise Absent(f"{path.name} is not valid JSON") from None
    if not isinstance(data, dict):
        raise Absent(f"{path.name} is not a JSON object")
    return data


def _records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines that are JSON objects, and the number of other lines."""
    try:
        lines = [line for line in _text(path).splitlines() if line.strip()]
    except Absent:
        return [], 0
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records, len(lines) - len(records)


def _optional(read: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    try:
        return read()
    except Absent:
        return None


def finite_number(value: Any) -> float | None:
    """Return a value of a JSON file as a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        return float(value) if is_number and math.isfinite(value) else None
    except OverflowError:
        return None
