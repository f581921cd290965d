"""ForkSafeLock: a lock that is free in a forked child, whatever threads of the parent hold it."""

from __future__ import annotations

import os
import threading


class ForkSafeLock:
    """A lock that one thread may take several times. A forked child starts with a free one: the thread that
    held it does not exist there."""

    def __init__(self) -> None:
        self._lock, self._process = threading.RLock(), os.getpid()

    def __enter__(self) -> None:
        if self._process != os.getpid():
            self._lock, self._process = threading.RLock(), os.getpid()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
