"""Statistics of a version: how many requests it answered, and where their time went.

    success      the whole request, from the choice of the version to its outputs
    fail         the same, for requests that raised an error
    input        reading the inputs
    queue        waiting for a batch and for other requests of it
    infer        the computation of its batch

They are sums since the version was loaded, as Triton reports them.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass


@dataclass
class StatisticSums:
    """Counts, and sums of nanoseconds."""

    successes: int = 0
    success_ns: int = 0
    failures: int = 0
    fail_ns: int = 0
    input_ns: int = 0
    waited_ns: int = 0
    """Time in which successful requests were queued or computed."""
    infer_ns: int = 0
    """Time of batches, counted for each of their requests."""
    rows: int = 0
    batches: int = 0
    last_ms: int = 0
    """When the last successful request ended, in milliseconds since 1970."""

    @property
    def queue_ns(self) -> int:
        """Time in which requests were not computed yet, or waited for others."""
        return max(0, self.waited_ns - self.infer_ns)


class VersionStatistics:
    """The statistics of one version. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = StatisticSums()

    def succeeded(self, rows: int, started: int, read: int, ended: int) -> None:
        """Count a request that was answered; times are those of `time.perf_counter_ns`."""
        with self._lock:
            sums = self._sums
            sums.successes += 1
            sums.rows += rows
            sums.success_ns += ended - started
            sums.input_ns += read - started
            sums.waited_ns += ended - read
            sums.last_ms = time.time_ns() // 1_000_000

    def failed(self, started: int) -> None:
        """Count a request that raised an error."""
        with self._lock:
            self._sums.failures += 1
            self._sums.fail_ns += time.perf_counter_ns() - started

    def computed(self, requests: int, nanoseconds: int) -> None:
        """Count a batch."""
        with self._lock:
            self._sums.batches += 1
            self._sums.infer_ns += requests * nanoseconds

    def sums(self) -> StatisticSums:
        """Return a copy of the sums."""
        with self._lock:
            return StatisticSums(**vars(self._sums))
