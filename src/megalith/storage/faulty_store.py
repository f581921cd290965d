"""A directory as an object store with latency and faults, for simulations."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from megalith.storage.object_store import ObjectInfo, ObjectStore, RequestFailure, StoreRequestError


class FaultyStore(ObjectStore):
    """A directory with latency and faults."""

    def __init__(
        self, directory: Path, *, latency: float = 0.0, faults: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(directory.absolute().as_uri())
        self._latency = latency
        self._faults = dict(faults or {})
        self.downloads: Counter[str] = Counter()

    async def head(self, key: str, *, timeout: float) -> ObjectInfo:
        await self._answer(key, "flaky", timeout)
        return await super().head(key, timeout=timeout)

    async def get(
        self, key: str, sink: Callable[[memoryview], None], *, etag: str | None = None, timeout: float
    ) -> ObjectInfo:
        await self._answer(key, "cut", timeout)
        info = await super().get(key, sink, etag=etag, timeout=timeout)
        self.downloads[key] += 1
        return info

    async def _answer(self, key: str, once: str, timeout: float) -> None:
        await asyncio.sleep(min(self._latency, timeout))
        fault = self._faults.get(key)
        if fault == once:
            del self._faults[key]
        if fault in (once, "down") or self._latency > timeout:
            failure = RequestFailure.TIMEOUT if self._latency > timeout else RequestFailure.STORE_ERROR
            raise StoreRequestError(failure, f"request of {key!r}: injected fault {fault}")
