"""A ledger of bytes: every buffer of a phase is taken from it, so its peak is known and its budget holds.

It counts what the code declares, exactly and on every machine alike; it allocates nothing itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from megalith.errors import BudgetError
from megalith.units import show_bytes


class Ledger:
    """Bytes in use now and at most, against a budget. May be shared by threads."""

    def __init__(self, budget: int, phase: str) -> None:
        self.budget = budget
        self.phase = phase
        self.used = 0
        self.peak = 0
        self._lock = threading.Lock()

    def take(self, count: int, purpose: str) -> None:
        """Notes `count` bytes as used. Raises BudgetError, and notes nothing, if they exceed the budget."""
        with self._lock:
            if self.used + count > self.budget:
                raise BudgetError(
                    f"{self.phase}: {purpose} takes {show_bytes(count)}, but {show_bytes(self.used)} of the "
                    f"budget of {show_bytes(self.budget)} are in use: raise memory_budget"
                )
            self.used += count
            self.peak = max(self.peak, self.used)

    def give(self, count: int) -> None:
        """Notes `count` bytes as free again."""
        with self._lock:
            self.used -= count

    @contextmanager
    def hold(self, count: int, purpose: str) -> Iterator[None]:
        """Takes bytes for the length of a `with`."""
        self.take(count, purpose)
        try:
            yield
        finally:
            self.give(count)
