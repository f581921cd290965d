"""Read deadlines: ends gRPC calls whose message does not arrive.

A call that sends its headers and then nothing would occupy a thread forever. All calls have the same number
of seconds, so they expire in the order in which they began: one thread looks at the oldest. A call that has
waited for PATIENCE_SECONDS is ended before that if another one needs its place.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

PATIENCE_SECONDS = 0.1
"""Seconds for which a call without its message keeps its place from others; messages follow the headers."""


class _Wait:
    """A call that waits for its message; `context` is None once it has arrived."""

    __slots__ = ("began", "context", "expired", "gave_way", "group")

    def __init__(self, context: Any, group: object) -> None:
        self.context: Any = context
        self.group = group
        self.began = time.monotonic()
        self.gave_way = False
        self.expired = False
        """Whether the call was cancelled because its message did not arrive."""


class ReadDeadlines:
    """Cancels calls that wait too long; `close` it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: deque[_Wait] = deque()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megalith-read-deadlines", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """Seconds in which the message of a call must arrive."""
        return self._seconds

    def begin(self, context: Any, group: object = None) -> _Wait:
        """Start the deadline of a call."""
        wait = _Wait(context, group)
        self._waiting.append(wait)
        return wait

    def end(self, wait: _Wait) -> bool:
        """End the deadline of a call whose message has arrived, or which was cancelled."""
        with self._lock:
            wait.context = None
            return wait.gave_way

    def give_way(self, group: object) -> bool:
        """End the call of a group that has waited longest for its message."""
        latest = time.monotonic() - PATIENCE_SECONDS
        with self._lock:
            for wait in list(self._waiting):  # a copy: calls begin meanwhile
                if wait.began > latest:
                    return False
                context = wait.context
                if wait.group is group and context is not None and not wait.gave_way:
                    wait.gave_way = True
                    break
            else:
                return False
        context.cancel()
        return True

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(min(0.5, self._seconds / 2)):
            now = time.monotonic()
            oldest = now - self._seconds
            while self._waiting and (self._waiting[0].context is None or self._waiting[0].began <= oldest):
                wait = self._waiting.popleft()
                context = wait.context
                if context is not None:
                    wait.expired = True
                    context.cancel()
