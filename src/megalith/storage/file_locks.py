"""File locks of the system, with a time limit. The system releases a lock when its process ends."""

from __future__ import annotations

import fcntl
import time
from contextlib import suppress

_PAUSE = 0.01


def take_lock(file: int, seconds: float) -> bool:
    """Take the exclusive lock of an open file; return whether other processes have released it in time."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE)
