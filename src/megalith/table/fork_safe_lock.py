"""ForkSafeLock: a lock that is free in a forked child, whatever threads of the parent hold it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ForkSafeLock:
    """A lock that one thread may take several times. A forked child starts with a free one: the thread that
    held it does not exist there."""

    def __init__(self) -> None:
        self._lock, self._process = threading.RLock(), os.getpid()

    def __enter__(self) -> None:
        self._renew()
        self._lock.acquire()

    def _renew(self) -> None:
        if self._process != os.getpid():
            self._lock, self._process = threading.RLock(), os.getpid()

    @contextmanager
    def without_waiting(self) -> Iterator[bool]:
        """Take the lock if no other thread holds it."""
        self._renew()
        taken = self._lock.acquire(blocking=False)
        try:
            yield taken
        finally:
            if taken:
                self._lock.release()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
