"""CallCounts: how many calls a server gets, and how long lookups take there."""

from __future__ import annotations

import time as clock
from bisect import bisect_left
from collections import deque
from typing import Any

BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of latencies in seconds."""
RATE_SECONDS = 10
"""The time over which calls per second are counted."""


class CallCounts:
    """Counts calls of the tables of one `ServerShards` on one server."""

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque()  # [second, calls], the last RATE_SECONDS of them
        self._began = clock.monotonic()
        self._latencies = [0] * (len(BOUNDS) + 1)
        self._latency_sum = 0.0

    def add(self, now: float | None = None) -> None:
        second = int(clock.monotonic() if now is None else now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0])
            self._forget(second)
        self._seconds[-1][1] += 1

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - RATE_SECONDS:
            self._seconds.popleft()

    def add_lookup(self, seconds: float) -> None:
        """Count the time of a lookup."""
        self._latencies[bisect_left(BOUNDS, seconds)] += 1
        self._latency_sum += seconds

    def numbers(self, now: float | None = None) -> dict[str, Any]:
        """Return what was counted."""
        at = clock.monotonic() if now is None else now
        self._forget(int(at))
        span = max(1.0, min(RATE_SECONDS, at - self._began))
        histogram = {"bounds": list(BOUNDS), "counts": list(self._latencies), "sum": self._latency_sum}
        return {
            "requests_per_second": sum(count for _, count in self._seconds) / span,
            "lookup_seconds": histogram,
        }


def quantile(histogram: dict[str, Any], part: float) -> float | None:
    """Return a bound below which a part of the lookups ended."""
    total, seen = sum(histogram["counts"]), 0
    for bound, count in zip([*histogram["bounds"], float("inf")], histogram["counts"], strict=True):
        seen += count
        if total and seen >= part * total:
            return float(bound)
    return None
