"""ServerLoop: the thread of a server in which everything that touches its tables runs.

It is an event loop of its own: calls that arrive through Ray are passed to it, and calls that arrive over
sockets begin there, so neither waits for Ray's event loop, and what runs in it runs one at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class ServerLoop:
    """See the module. The thread ends with the process."""

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop()
        threading.Thread(target=self._loop.run_forever, name="megalith server", daemon=True).start()

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))
