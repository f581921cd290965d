"""ServerShards: tables on server processes, used by workers that come and go.

A training step takes one call per server for all tables to read rows, and one to send gradients:

    call     worker -> server                              server -> worker
    read     each distinct id once                         the rows
    write    ids with one summed gradient each, step,      nothing, or the error
             learning rates, time, worker, number

Ray starts the servers and connects them. These two calls go over sockets, with arrays in shared memory on one
host (`channel_server.py`); all others go through Ray. `table_space.py` defines the order of calls and the
modes.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn

from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.library import span
from megalith.ops import checks
from megalith.ops.pooling import Pooling
from megalith.routing import Router
from megalith.shards.contract import Ids, check_configs
from megalith.shards.lookup import Lookup, PreparedIds, check_lookup_step
from megalith.shards.lookup_series import LookupSeries
from megalith.shards.preparer import RoutingPreparer, make_routers
from megalith.shards.routed_gradients import checked_update
from megalith.shards.servers.channel.shared_segments import SegmentPool
from megalith.shards.servers.log.recovery import Recovery
from megalith.shards.servers.ray.ray_servers import Servers, pass_ray
from megalith.shards.servers.server_messages import ServerWrite
from megalith.shards.servers.worker.link_group import LinkGroup, run_all
from megalith.shards.servers.worker.push_window import PushWindow
from megalith.shards.servers.worker.push_writes import push_writes
from megalith.shards.servers.worker.server_link import ServerLink
from megalith.shards.servers.worker.server_lookup import ServerLookup
from megalith.shards.servers.worker.server_move import check_empty, move_tables, stay
from megalith.shards.servers.worker.server_options import ServerOptions
from megalith.shards.servers.worker.server_rows import ServerRows
from megalith.shards.wire import make_wire
from megalith.table import Table, TableConfig
from megalith.table.serving_precision import ServingView
from megalith.table.validation import InputChecks, check_flag, check_step

logger = logging.getLogger(__name__)


class ServerShards(ServerRows):
    """Tables by name, with their rows spread over server processes. See `Shards`.

    Rows are read and written from here; `local` is empty. `stats`, `memory`, `scan` and `drain_touched`
    concern the rows of all servers. A worker reads its own updates.

    Args:
        configs: One TableConfig per table.
        num_servers: Number of servers to start; None: those of `servers`.
        servers: Running servers to use. Without it, servers are started and end with `close`.
        name: The name of the tables on the servers. Workers that pass the same name, tables and options
            share the tables.
        worker: The number of this worker; each worker has its own.
        num_workers: The number of workers. With mode="sync" the first step waits for them.
        mode: "async": a push is applied when it arrives. "sync": a step waits for the gradients of all
            workers, which are summed in the order of their numbers.
        staleness: With mode="async", how many steps a worker may be ahead of the slowest; it waits in its
            next lookup. None: any number.
        window: How many updates may be in progress; `apply_gradients` waits for the oldest when there are
            more. 0: it waits for its own.
        router: As for `SyncShards`.
        engine: As for `Table`.
        seed: As for `Table`.
        wire: As for `SyncShards`.
        timeout: Seconds that each wait for servers or other workers may take.
        recovery: How a server that ended gets its rows back; see `checkpoint.recovery`. None: the next call
            raises ServerLostError.
        observer: Whether this is not one of the workers that train: no step and no worker waits for it. It
            reads, saves, loads and evicts.
        written: `written` of a worker that has ended, whose work this one repeats from there on: updates
            that the servers have received from it after that are not applied again. None: a new worker.

    Attributes:
        servers: The server processes.
        rows_wire: The precision of rows.

    Raises:
        InputError: A table or option is wrong, or differs from those that the servers have.
        MissingDependencyError: Ray is not installed.
    """

    def __init__(
        self,
        configs: Sequence[TableConfig],
        *,
        num_servers: int | None = None,
        servers: Servers | None = None,
        name: str = "tables",
        worker: int = 0,
        num_workers: int = 1,
        mode: str = "async",
        staleness: int | None = None,
        window: int = 4,
        router: str | Router | Mapping[str, str | Router] = "roundrobin",
        engine: str = "cpu",
        seed: int = 0,
        wire: str | dict[str, str] = "float32",
        timeout: float = 600.0,
        recovery: Recovery | None = None,
        observer: bool = False,
        written: Sequence[int] | None = None,
    ) -> None:
        self.configs = MappingProxyType(check_configs(configs))
        self.local: Mapping[str, Table] = MappingProxyType({})
        self.checks = MappingProxyType({name: InputChecks(config) for name, config in self.configs.items()})
        options = ServerOptions(
            name,
            worker,
            num_workers,
            mode,
            staleness,
            window,
            engine,
            seed,
            wire,
            timeout,
            recovery,
            observer,
        )
        self._options = options
        self.name, self.worker, self.num_workers = options.name, options.worker, options.num_workers
        self.mode, self.window, self.observer = options.mode, options.window, options.observer
        self.rows_wire, self._grads_wire = map(make_wire, options.wires)
        count = self._server_count(num_servers, servers)
        if recovery is not None and servers is not None and not servers.restart:
            raise InputError("ServerShards: recovery needs Servers(..., restart=True)")
        numbers = _check_written(written, count)
        self.routers: Mapping[str, Router] = MappingProxyType(make_routers(self.configs, router, count))
        self.preparer = RoutingPreparer(self.configs, self.routers)
        views = {name: ServingView.of(config) for name, config in self.configs.items()}
        self._stepwise = [name for name, view in views.items() if view is not None and view.depends_on_step]
        spec = options.spec(self.configs, self.routers)
        self._closed = False
        self._owns_servers = servers is None
        self.servers = Servers(count, restart=recovery is not None) if servers is None else servers
        pool = SegmentPool()
        self.links = LinkGroup(
            [
                ServerLink(actor, index, self.name, self.worker, spec, pool, observer=self.observer)
                for index, actor in enumerate(self.servers.actors)
            ],
            pool,
        )
        self._pushes = PushWindow(self.links, self.window, sync=self.mode == "sync")
        try:
            self.seen_step = self.links.join(numbers)
        except BaseException:
            if self._owns_servers:
                self.servers.close()
            raise

    def _server_count(self, num_servers: int | None, servers: Servers | None) -> int:
        if servers is None:
            return checks.integer(1 if num_servers is None else num_servers, "ServerShards: num_servers")
        count = len(checks.instance(servers, Servers, "ServerShards: servers"))
        if not count:
            raise UsageError("ServerShards: these servers are closed")
        if num_servers is not None and checks.integer(num_servers, "ServerShards: num_servers") != count:
            raise InputError(f"ServerShards: num_servers is {num_servers}, but there are {count} servers")
        return count

    def __repr__(self) -> str:
        tables = ", ".join(map(repr, self.configs))
        return f"ServerShards(worker {self.worker}, {len(self.links)} servers, tables {tables})"

    @property
    def sources(self) -> int:
        return self.num_workers if self.mode == "sync" else 1

    @property
    def lost_writes(self) -> int:
        """Number of answered writes of this worker that were lost with a server; 0 with log="sync"."""
        return sum(link.lost for link in self.links)

    def join(self) -> None:
        """Join the workers again, after `leave`; `seen_step` becomes the highest step of the servers."""
        self.seen_step = self.links.join()

    @property
    def written(self) -> list[int]:
        """The number of writes of this worker, by server. After `flush` all are answered."""
        return [link.written for link in self.links]

    def leave(self, worker: int | None = None) -> None:
        """Remove a worker: the others no longer wait for it, and its next update raises.

        Args:
            worker: The number of a worker that has ended; None: this one, after its updates (see `flush`).
        """
        if worker is None:
            run_all(self.flush, self.links.leave)
        else:
            self.links.remove(checks.integer(worker, "leave: worker", 0))

    def resize(
        self, servers: int | Servers, *, router: str | Router | Mapping[str, str | Router] | None = None
    ) -> Servers:
        """Move all tables to another number of servers, without a file. No worker may train meanwhile.

        Rows with their optimizer state, counts of admission policies, touched ids, counters and steps stay
        the same, bit for bit. The rows are copied, so both sets of servers need the memory until it returns;
        if it fails, or this process ends, the tables are where they were. The other workers flush before and
        call `reconnect` afterwards.
        With a recovery, the new servers have logs of their own; save a checkpoint soon, so that these logs,
        which begin with all rows, become short.

        Args:
            servers: The number of servers to start, which end with `close`; or running servers without tables
                of this name.
            router: As for `ServerShards`; None: the modes and parameters of the tables.

        Returns:
            The servers with the tables, for `reconnect`. The old ones are closed if this object has started
            them. Servers that have started Ray end it when they are closed: close them last.

        Raises:
            UsageError: The servers have tables of this name.
        """
        self.flush()
        target = self._elsewhere(servers, router, move=uuid.uuid4().hex)
        empty = False
        try:
            check_empty(target)
            empty = True
            target.seen_step = max(self.seen_step, move_tables(self, target))
        except BaseException:
            with suppress(Exception):  # tables that were there before stay
                target.links.close(moved=True) if empty else target.links.leave()
            if target._owns_servers:
                target.servers.close()
            if self._options.recovery is not None:
                try:
                    stay(self)
                except Exception as error:
                    logger.warning("resize: the old servers: %s", error)
            raise
        for link in target.links:
            link.end_move(self._options.recovery)
        old, links, owned = self.servers, self.links, self._owns_servers
        self._take(target)
        try:
            links.close(moved=True)
        except Exception as error:  # the tables have moved all the same
            logger.warning("resize: the old servers: %s", error)
        if owned:
            pass_ray(old, self.servers)
            old.close()
        return self.servers

    def reconnect(
        self, servers: Servers, *, router: str | Router | Mapping[str, str | Router] | None = None
    ) -> None:
        """Use the servers to which another worker has moved the tables with `resize`.

        Args:
            servers: What `resize` returned.
            router: What `resize` was called with.
        """
        self.flush()
        self._take(self._elsewhere(checks.instance(servers, Servers, "reconnect: servers"), router))

    def _elsewhere(self, servers: int | Servers, router: Any, move: str | None = None) -> ServerShards:
        """Return the same tables on other servers, joined as the same worker; `move` is the id of a move."""
        recovery = self._options.recovery
        options = replace(self._options, recovery=None if recovery is None else replace(recovery, move=move))
        owned = not isinstance(servers, Servers)
        if isinstance(servers, Servers):
            chosen = servers
        else:
            count = checks.integer(servers, "resize: servers")
            old = self.servers
            chosen = Servers(count, gpus=old.gpus, restart=old.restart, ray_metrics=old.ray_metrics)
        if router is None:
            router = {
                name: Router(old.mode, len(chosen) or 1, block_size=old.block_size, skip_first=old.skip_first)
                for name, old in self.routers.items()
            }
        try:
            if chosen is self.servers or not len(chosen):
                raise UsageError("resize: pass other servers, which are running")
            made = ServerShards(list(self.configs.values()), servers=chosen, router=router, **vars(options))
        except BaseException:
            if owned:
                chosen.close()
            raise
        made._owns_servers = owned
        return made

    def _take(self, other: ServerShards) -> None:
        self.links.disconnect()
        self.servers, self._owns_servers = other.servers, other._owns_servers
        self.routers, self.preparer = other.routers, other.preparer
        self.links, self._pushes, self.seen_step = other.links, other._pushes, other.seen_step

    def close(self, *, drop: bool = False) -> None:
        """Wait for all updates, then leave the workers; end the servers if they were started by this object.

        A second call has no effect.

        Args:
            drop: Whether to remove the tables from servers that continue to run. Other workers lose them.

        Raises:
            MegalithError: An update failed. This object is closed all the same.
        """
        check_flag(drop, "close: drop")
        if self._closed or not self.servers.actors:
            return
        self._closed = True
        if self._owns_servers:
            run_all(self.flush, self.servers.close, self.links.disconnect)
        else:
            run_all(self.leave, *([self.links.close] if drop else []), self.links.disconnect)

    def __enter__(self) -> ServerShards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self.servers.actors:  # not `close`, which would wait for other workers
            try:
                self.servers.close() if self._owns_servers else self.links.remove(self.worker)
                self.links.disconnect()
            except Exception as failed:
                logger.warning("ServerShards: %s", failed)

    # ---- a batch

    def lookup(
        self,
        ids: Ids | PreparedIds,
        *,
        missing_ok: bool = False,
        series: LookupSeries | None = None,
        step: int | None = None,
    ) -> ServerLookup:
        # Rows are requested by the first use or by `Lookup.fetch`.
        self._pushes.raise_errors()
        step = None if step is None else check_step(step, "lookup")
        return ServerLookup(self, self.links, self.preparer.routed(ids, missing_ok=missing_ok), step)

    def fail(
        self,
        error: Exception,
        call: str = "lookup",
        *,
        series: LookupSeries | None = None,
        leave: bool = False,
    ) -> NoReturn:
        # Only updates with mode="sync" have other workers that wait.
        if call == "apply_gradients":
            self.report_failure(error)
        raise error

    def report_failure(self, error: Exception) -> None:
        """With mode="sync", make the other workers raise RankFailedError in the step that waits.

        Args:
            error: Why this worker has no gradients.
        """
        self._pushes.report_failure(error)

    def apply_gradients(
        self,
        lookup: Lookup | Ids,
        grads: Mapping[str, Tensor] | Sequence[Tensor],
        *,
        step: int,
        time: float | None = None,
        scale: float = 1.0,
        clip_norm: float | None = None,
        pooling: Pooling | None = None,
        occurrences: Mapping[str, Tensor] | None = None,
        wait: bool = True,
    ) -> None:
        # It returns when the gradients are sent; see `window`.
        #
        # An error on a server is raised by the next call, or by `flush`. With mode="sync", step, scale and
        # clip_norm must be equal on all workers.
        if self.observer:
            raise UsageError("ServerShards: an observer does not train: make it without observer=True")
        try:
            check_flag(wait, "wait")
            if not isinstance(lookup, Lookup):
                lookup = self.lookup(lookup, step=step)
            if not isinstance(lookup, ServerLookup) or lookup.shards is not self:
                raise InputError("this Lookup belongs to another Shards object")
            lookup.check_place()
            self._pushes.raise_errors()
            with span("megalith.gradients"):
                writes = self._gradient_writes(
                    lookup, grads, pooling, occurrences, step, time, scale, clip_norm
                )
        except Exception as error:
            if isinstance(lookup, ServerLookup) and lookup.shards is self:
                lookup.used = True  # it does not report a second time
            self.fail(error, "apply_gradients")
        self._pushes.send(writes)

    def _gradient_writes(
        self,
        lookup: ServerLookup,
        grads: Mapping[str, Tensor] | Sequence[Tensor],
        pooling: Pooling | None,
        occurrences: Mapping[str, Tensor] | None,
        step: int,
        time: float | None,
        scale: float,
        clip_norm: float | None,
    ) -> list[ServerWrite | None]:
        """Return what to send to each server; None: nothing."""
        check_lookup_step(lookup, self._stepwise)
        summed, numbers, seen = checked_update(
            self, lookup, grads, pooling, occurrences, step, time, scale, clip_norm
        )
        lookup.use()
        if numbers is None:  # there is no table that could have gradients
            return [None] * len(self.links)
        return push_writes(
            self,
            lookup.routed,
            summed,
            numbers,
            seen,
            timed=time is not None,
            wire=self._grads_wire,
            everyone=self.mode == "sync" or self._options.staleness is not None,
        )

    def flush(self) -> None:
        self._pushes.flush()

    def describe_servers(self) -> list[dict[str, Any]]:
        """Return numbers about each server.

        Returns:
            Per server: the name of the tables, its number, process id, seconds since its start, rows and
            bytes per table, numbers of reads and writes, calls per second, a histogram of the time of
            lookups, calls that wait, the highest step, its workers and their pushes, the staleness (by how
            many steps the fastest worker is ahead of the slowest), and when the last checkpoint was saved.
        """
        return self.links.everywhere(ServerLink.describe)


def _check_written(written: Sequence[int] | None, count: int) -> list[int] | None:
    if written is None:
        return None
    if not isinstance(written, list | tuple) or len(written) != count:
        raise InputError(f"ServerShards: written must be one number for each of {count} servers")
    return [checks.integer(number, "ServerShards: written", 0) for number in written]
