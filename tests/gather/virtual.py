"""An event loop whose clock jumps to the next timer, and a store whose answers are scripted on that clock."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, TypeVar

from megalith.gather.plan import Status
from megalith.storage.object_store import ObjectInfo, ObjectStore, RequestFailure, StoreRequestError

T = TypeVar("T")
START = datetime(2026, 1, 1, tzinfo=UTC)


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout > 0:
            self.loop.now += timeout
            timeout = 0
        return super().select(timeout)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Waits take no time; work given to threads runs at once."""

    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        self.now = 1000.0
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:
            future.set_exception(error)
        return future


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class ScriptedStore(ObjectStore):
    """Objects by key, and for some keys what the next requests meet: (seconds, a status or None for
    success).
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.script: dict[str, list[tuple[float, Status | None]]] = {}
        self.delay = 0.0
        self.log: list[tuple[float, str, str]] = []
        self.open = 0
        self.most_open = 0

    async def _meet(self, verb: str, key: str, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        self.log.append((round(loop.time() - 1000.0, 6), verb, key))
        steps = self.script.get(key, [])
        seconds, status = steps.pop(0) if steps else (self.delay, None)
        if seconds >= timeout:
            await asyncio.sleep(timeout)
            raise StoreRequestError(RequestFailure.TIMEOUT, "scripted")
        await asyncio.sleep(seconds)
        if status is not None:
            raise StoreRequestError(RequestFailure(status), "scripted")
        if key not in self.objects:
            raise StoreRequestError(RequestFailure.NOT_FOUND, "scripted")

    def _info(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, len(self.objects[key]), "tag", START)

    async def head(self, key: str, *, timeout: float) -> ObjectInfo:
        await self._meet("head", key, timeout)
        return self._info(key)

    async def get(
        self, key: str, sink: Callable[[memoryview], None], *, etag: str | None = None, timeout: float
    ) -> ObjectInfo:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._meet("get", key, timeout)
        finally:
            self.open -= 1
        sink(memoryview(self.objects[key]))
        return self._info(key)

    async def get_range(
        self, key: str, start: int, length: int, *, etag: str | None = None, timeout: float
    ) -> bytes:
        await self._meet("get", key, timeout)
        return self.objects[key][start : start + length]

    async def put(self, key: str, data: Any, *, create: bool = False, timeout: float) -> bool:
        raise NotImplementedError

    async def list(self, prefix: str, *, timeout: float) -> list[ObjectInfo]:
        raise NotImplementedError
