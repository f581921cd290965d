"""Numbers formatted for people: counts, bytes, durations and times."""

from __future__ import annotations

import math
from datetime import UTC, datetime

MINUTE, HOUR, DAY = 60, 3600, 86_400
WEEK, MONTH, YEAR = 7 * DAY, 30 * DAY, 365 * DAY

_SPANS = ((YEAR, "year"), (MONTH, "month"), (DAY, "day"), (HOUR, "hour"), (MINUTE, "minute"))


def show_bytes(count: float) -> str:
    """Format bytes: 1536 -> "1.5 KiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def byte_unit(largest: float) -> tuple[str, int]:
    """Choose the unit for a series of byte counts, such as the axis of a chart."""
    units = [("bytes", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)]
    return [unit for unit in units if unit[1] <= max(largest, 1)][-1]


def show_span(seconds: float) -> str:
    """Format a duration: 5400 -> "1.5 hours"."""
    for size, name in _SPANS:
        if abs(seconds) >= size:
            return _plural(seconds / size, name)
    return _plural(seconds, "second")


def show_number(value: float) -> str:
    """Format a number with four significant digits: 12345.678 -> "12,346", 0.00012345 -> "0.0001234"."""
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def show_short(value: float) -> str:
    """Format a number for an axis: 1200000 -> "1.2M", 0.25 -> "0.25", 1e-9 -> "1e-9"."""
    if value == 0:
        return "0"
    size = abs(value)
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= 1e15:
            break
        if size >= unit:
            return f"{value / unit:.4g}{suffix}"
    if 1e-4 <= size < 1e3:
        return f"{value:.4g}"
    digits, power = f"{value:.3e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def show_time(seconds: int) -> str:
    """Format a time in UTC: 0 -> "1970-01-01 00:00:00 UTC"."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"{seconds} s"


def _plural(value: float, name: str) -> str:
    text = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {name}" if text == "1" else f"{text} {name}s"
