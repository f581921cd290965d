"""Read deadlines: ends gRPC calls whose message does not arrive.

A call that sends its headers and then nothing would occupy a thread forever. All calls have the same number
of seconds, so they expire in the order in which they began: one thread looks at the oldest.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any


class _Wait:
    """A call that waits for its message; `context` is None once it has arrived."""

    __slots__ = ("context", "deadline")

    def __init__(self, context: Any, deadline: float) -> None:
        self.context: Any = context
        self.deadline = deadline


class ReadDeadlines:
    """Cancels calls that wait too long; `close` it.

    Args:
        seconds: Seconds in which the message of a call must arrive.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: deque[_Wait] = deque()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megalith-read-deadlines", daemon=True)
        self._thread.start()

    def begin(self, context: Any) -> _Wait:
        """Start the deadline of a call.

        Args:
            context: The `grpc.ServicerContext` of the call.

        Returns:
            What `end` takes.
        """
        wait = _Wait(context, time.monotonic() + self._seconds)
        self._waiting.append(wait)
        return wait

    @staticmethod
    def end(wait: _Wait) -> None:
        """End the deadline of a call whose message has arrived.

        Args:
            wait: The result of `begin`.
        """
        wait.context = None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(min(0.5, self._seconds / 2)):
            now = time.monotonic()
            while self._waiting and (self._waiting[0].context is None or self._waiting[0].deadline <= now):
                context = self._waiting.popleft().context
                if context is not None:
                    context.cancel()
