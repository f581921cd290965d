"""Freed memory: returns the memory of a burst of large requests to the operating system.

The allocator keeps what was freed for later, so a server would keep the memory of its largest burst forever.
"""

from __future__ import annotations

import threading

from megalith.library import return_freed_memory

BURST_BYTES = 256 << 20
"""Bytes of large requests after which freed memory is returned."""
LARGE_BYTES = 1 << 20
KEPT_BYTES = 64 << 20
"""Freed memory that stays for the next requests."""


class FreedMemory:
    """Counts the bytes of large requests, and returns memory after many of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received = 0

    def received(self, size: int) -> None:
        """Count a request."""
        if size >= LARGE_BYTES:
            with self._lock:
                self._received += size

    def release(self) -> bool:
        """Return freed memory if there was a burst since the last call; return whether there was."""
        with self._lock:
            if self._received < BURST_BYTES:
                return False
            self._received = 0
        return_freed_memory(KEPT_BYTES)
        return True
