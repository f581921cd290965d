"""Waiters: coroutines of a server that wait for a condition of its state, each with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megalith.errors import RankTimeoutError


class Waiters:
    """Conditions that coroutines wait for. Everything runs in one event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    async def until(self, condition: Callable[[], bool], timeout: float, what: Callable[[], str]) -> None:
        """Wait until a condition holds."""
        if condition():
            return
        entry = condition, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            await asyncio.wait_for(entry[1], timeout)
        except TimeoutError:
            raise RankTimeoutError(f"{what()}, after {timeout:g} s") from None
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def changed(self) -> None:
        """Wake the coroutines whose condition holds now, in the order in which they began to wait."""
        ready = [entry for entry in self._waiting if entry[0]()]
        for entry in ready:
            self._waiting.remove(entry)
            if not entry[1].done():
                entry[1].set_result(None)

    def __len__(self) -> int:
        return len(self._waiting)
