"""Canonical JSON of gather's files: one way to write data, and its digest. `storage.strict_json` reads it."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from typing import Any

from megalith.storage.strict_json import as_utc


def canonical(data: Any) -> bytes:
    """The one way to write this data: ASCII JSON, sorted keys, no blanks, no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest(data: Any) -> str:
    """SHA-256 of the canonical writing, in hexadecimal."""
    return hashlib.sha256(canonical(data)).hexdigest()


def show_time(moment: datetime) -> str:
    """A moment as all our files write it: UTC, microseconds."""
    return as_utc(moment).isoformat(timespec="microseconds")
