"""TableServer: one server process. It holds a part of the tables of one or several `ServerShards`.

Ray runs an instance as an asynchronous actor: workers join and leave, and save, load and change rows
through it. Lookups and pushes arrive over sockets (`channel_listener.py`). Errors of Megalith are returned
as `Failure`, so that a worker raises them as they are.

All calls run in one thread with its own event loop (`ServerLoop`): calls that arrive through Ray are passed
to it, and calls that arrive over sockets begin there, so neither waits for Ray's event loop. Calls that
wait for other workers do not hold up the others, and calls that touch tables run one at a time, except
functions in the background and the writing of a save, which have threads of their own.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time as clock
from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import Any, TypeVar

from megalith.errors import InputError, MegalithError, ServerRestartedError, UsageError
from megalith.ps.channel_listener import ChannelServer
from megalith.ps.channel_messages import PushRequest, ReadRequest
from megalith.ps.messages import Array, Failure, ServerWrite, SpaceSpec
from megalith.ps.recovery import claim_folder
from megalith.ps.table_space import TableSpace
from megalith.ps.update_log import FLUSH_SECONDS

T = TypeVar("T")


class ServerLoop:
    """The thread of all calls; it ends with the process."""

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop()
        threading.Thread(target=self._loop.run_forever, name="megalith server", daemon=True).start()

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))


_REPORT_SECONDS = 5.0


class TableServer:
    """Every method is a call of a worker."""

    def __init__(self, index: int, num_servers: int, ray_metrics: bool = False) -> None:
        self._index = index
        self._count = num_servers
        self._spaces: dict[str, TableSpace] = {}
        self._moved: set[str] = set()
        self._began = clock.monotonic()
        self._loop = ServerLoop()
        self._channel: ChannelServer | None = None
        self._flusher: asyncio.Task[None] | None = None
        self._reporter: asyncio.Task[None] | None = None
        self._ray_metrics: Any = None
        if ray_metrics:  # imported here: only servers on Ray report to it
            from megalith.ps.status import RayMetrics

            self._ray_metrics = RayMetrics(index)

    async def open(self, name: str, spec: SpaceSpec) -> Any:
        """Create the tables of a `ServerShards`, or check that they are those that exist."""
        return await self._guarded(lambda: self._open(name, spec))

    def _open(self, name: str, spec: SpaceSpec) -> None:
        self._moved.discard(name)
        if name not in self._spaces:
            space = TableSpace(spec, self._index, self._count)
            if spec.recovery is not None:
                space.recover(claim_folder(spec.recovery, name, self._index, self._count))
                if spec.recovery.log != "sync" and self._flusher is None:
                    self._flusher = asyncio.get_running_loop().create_task(self._flush_forever())
            self._spaces[name] = space
            if self._ray_metrics is not None and self._reporter is None:
                self._reporter = asyncio.get_running_loop().create_task(self._report_forever())
        elif self._spaces[name].spec.described != spec.described:
            raise InputError(
                f"ServerShards {name!r}: server {self._index} has other tables or options under this name: "
                f"{self._spaces[name].spec.described}, not {spec.described}"
            )

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            for space in self._spaces.values():
                space.flush_log()

    async def _report_forever(self) -> None:
        while True:
            for name in list(self._spaces):
                self._ray_metrics.set(self._numbers(name))
            await asyncio.sleep(_REPORT_SECONDS)

    async def close(self, name: str | None = None, *, moved: bool = False) -> Any:
        """Drop the tables of a `ServerShards`; its log keeps what was not written to it yet."""

        def close() -> None:
            for each in list(self._spaces) if name is None else [name]:
                space = self._spaces.pop(each, None)
                if space is not None:
                    space.close(moved=moved)
                if moved:
                    self._moved.add(each)

        return await self._guarded(close)

    async def join(
        self, name: str, worker: int, session: str, unacknowledged: int | None, observer: bool
    ) -> Any:
        return await self._guarded(
            lambda: self._space(name).join(worker, session, unacknowledged, observer=observer)
        )

    async def leave(self, name: str, worker: int, session: str, after: int) -> Any:
        return await self._guarded(lambda: self._space(name).leave(worker, session, after))

    async def remove(self, name: str, worker: int) -> Any:
        return await self._guarded(lambda: self._space(name).remove(worker))

    async def channel(self, node: str) -> Any:
        """Listen for lookups and pushes, which do not go through Ray."""

        def listen() -> Any:
            if self._channel is None:
                self._channel = ChannelServer(self._serve, *_own_node())
            return self._channel.address(node)

        return await self._guarded(listen)

    async def _serve(self, request: ReadRequest | PushRequest) -> Array | None:
        space = self._space(request.name)
        space.calls.add()
        if isinstance(request, PushRequest):
            await space.write(request.worker, request.session, request.number, request.write)
            return None
        began = clock.monotonic()
        rows = await space.read(
            request.worker,
            request.session,
            request.after,
            request.ids,
            request.counts,
            request.step,
            request.out,
        )
        seconds = clock.monotonic() - began
        space.calls.add_lookup(seconds)
        if self._ray_metrics is not None:
            self._ray_metrics.add_lookup(request.name, seconds)
        return rows if request.out is None else None

    async def write(self, name: str, worker: int, session: str, number: int, write: ServerWrite) -> Any:
        # Pushes arrive over a socket.

        def apply() -> Coroutine[Any, Any, Any]:
            self._space(name).calls.add()
            return self._space(name).write(worker, session, number, write)

        return await self._guarded(apply)

    async def run(
        self,
        name: str,
        worker: int,
        session: str,
        after: int,
        function: Callable[..., Any],
        *args: Any,
        background: bool,
    ) -> Any:
        return await self._guarded(
            lambda: self._space(name).run(worker, session, after, function, *args, background=background)
        )

    async def describe(self, name: str) -> Any:
        return await self._guarded(lambda: self._numbers(name))

    async def spec_of(self, name: str) -> Any:
        """Return the tables of a `ServerShards`, for a process that only reads."""

        return await self._guarded(lambda: self._spaces[name].spec if name in self._spaces else None)

    async def describe_all(self) -> list[dict[str, Any]]:
        """Return numbers about this server for all tables, without joining them."""
        found: list[dict[str, Any]] = await self._guarded(lambda: [*map(self._numbers, sorted(self._spaces))])
        return found

    def _numbers(self, name: str) -> dict[str, Any]:
        space = self._space(name)
        members = {w: m for w, m in space.members.items() if m.trains}
        pushes = [member.pushes for member in members.values()]
        memory = space.part.shards.memory()
        return {
            "name": name,
            "server": self._index,
            "pid": os.getpid(),
            "seconds": clock.monotonic() - self._began,
            "rows": {t: len(table) for t, table in space.part.shards.local.items()},
            "bytes": {t: use.total for t, use in memory.items()},
            "reads": space.reads,
            "writes": space.writes,
            **space.calls.numbers(),
            "waiting": space.waiting,
            "step": space.step,
            "workers": sorted(members),
            "staleness": max(pushes) - min(pushes) if pushes else 0,
            "pushes": {w: member.pushes for w, member in members.items()},
            "complete": space.complete,
            "consumers": space.state()["consumers"],
            "last_checkpoint": space.part.saved_at,
        }

    def _space(self, name: str) -> TableSpace:
        if name in self._moved:
            raise UsageError(
                f"ServerShards {name!r}: the tables of server {self._index} were moved to other servers: "
                "call reconnect with the Servers that resize returned"
            )
        if name not in self._spaces:
            raise ServerRestartedError(
                f"ServerShards {name!r}: server {self._index} does not have these tables: it was started "
                "again, or they were closed"
            )
        return self._spaces[name]

    async def _guarded(self, call: Callable[[], Any]) -> Any:
        """Run a call in the thread of the tables; return its error, if it is one of Megalith."""

        async def guarded() -> Any:
            try:
                result = call()
                return await result if isinstance(result, Coroutine) else result
            except (MegalithError, OSError) as error:
                return Failure(error.with_traceback(None))

        return await self._loop.run(guarded())


def _own_node() -> tuple[str, str]:
    """Return the id of Ray's node of this process, and its address."""
    ray: Any = import_module("ray")  # here, because only servers on Ray have a node
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
