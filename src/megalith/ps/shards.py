"""ServerShards: tables on server processes, used by workers that come and go.

A training step takes one call per server for all tables to read rows, and one to send gradients:

    call     worker -> server                              server -> worker
    read     each distinct id once                         the rows
    write    ids with one summed gradient each, step,      nothing, or the error
             learning rates, time, worker, number

Ray starts the servers and connects them (`launch.py`). These two calls go over sockets, with arrays in
shared memory on one host (`channel_messages.py`); all others go through Ray. `table_space.py` defines the
order of calls and the modes, `link.py` what happens when a connection or a server is lost.

`ServerShards.resize` copies everything that servers hold to other servers, without a file: rows with their
optimizer state, counts of admission policies, touched ids, counters of rows, the number of pushes of each
worker and the highest step. The source keeps everything; no worker may write meanwhile.
"""

from __future__ import annotations

import logging
import random
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.library import span
from megalith.ops import checks
from megalith.ops.pooling import Pooling
from megalith.ps.launch import Servers, pass_ray
from megalith.ps.link import LinkGroup, PushWindow, ServerLink, run_all
from megalith.ps.lookup import ServerLookup, push_writes
from megalith.ps.messages import Array, ServerWrite, SpaceSpec, array_of, chunk_arrays, chunk_of, tensor_of
from megalith.ps.recovery import Recovery
from megalith.ps.shared_memory import SegmentPool
from megalith.ps.table_space import part_stats
from megalith.ps.writes import check_consumer, confirm, drain, pending_ids
from megalith.routing import Router
from megalith.shards.contract import (
    Ids,
    Result,
    Rows,
    Shards,
    ShardsPart,
    check_configs,
    check_function,
    described,
    row_shares,
)
from megalith.shards.lookup import Lookup, LookupSeries, PreparedIds
from megalith.shards.preparer import RoutedIds, RoutingPreparer, make_routers
from megalith.shards.row_encoding import check_wire, make_wire
from megalith.table import Chunk, MemoryUse, RowCounters, Table, TableConfig, TableStats
from megalith.table.engines import engine_class
from megalith.table.serving_precision import ServingView
from megalith.table.table_data import Update
from megalith.table.validation import InputChecks, check_flag, check_start

MODES = ("async", "sync")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")  # Names of tables on servers are also names of folders


@dataclass
class ServerOptions:
    """Options of `ServerShards`, which has the meaning of each."""

    name: str
    worker: int
    num_workers: int
    mode: str
    staleness: int | None
    window: int
    engine: str
    seed: int
    wire: str | dict[str, str]
    timeout: float
    recovery: Recovery | None
    observer: bool

    def __post_init__(self) -> None:
        self.mode = checks.one_of(self.mode, MODES, "ServerShards: mode")
        self.window = checks.integer(self.window, "ServerShards: window", 0)
        self.worker = checks.integer(self.worker, "ServerShards: worker", 0)
        self.num_workers = checks.integer(self.num_workers, "ServerShards: num_workers")
        self.name = checks.text(self.name, "ServerShards: name")
        if not _NAME.fullmatch(self.name):
            raise InputError(
                f"ServerShards: name must be letters, digits, '_', '-' and '.', got {self.name!r}"
            )
        self.timeout = checks.seconds(self.timeout, "ServerShards: timeout")
        if self.staleness is not None:
            self.staleness = checks.integer(self.staleness, "ServerShards: staleness", 0)
            if self.mode == "sync":
                raise InputError('ServerShards: staleness is for mode="async"')
        engine_class(self.engine)
        check_wire(self.wire)
        self.seed = checks.integer(self.seed, "ServerShards: seed", -(2**63))
        if self.recovery is not None:
            checks.instance(self.recovery, Recovery, "ServerShards: recovery")
        self.observer = checks.flag(self.observer, "ServerShards: observer")

    @property
    def wires(self) -> tuple[str, str]:
        return check_wire(self.wire)

    def spec(self, configs: Mapping[str, TableConfig], routers: Mapping[str, Router]) -> SpaceSpec:
        tables, owners, sync = dict(configs), dict(routers), self.mode == "sync"
        modes = self.mode, self.staleness, self.num_workers if sync else None
        return SpaceSpec(
            list(tables.values()),
            self.engine,
            self.seed,
            self.wires,
            sync,
            self.staleness,
            self.num_workers,
            self.timeout,
            described(tables, owners, self.engine, self.seed, self.wires, *modes),
            self.recovery,
            owners,
        )


logger = logging.getLogger(__name__)


SCAN_SECONDS = 60.0  # How long a server keeps rows in their places for the next part of a scan


class ServerShards(Shards):
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

    preparer: RoutingPreparer

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
        self.stepwise = [name for name, view in views.items() if view is not None and view.depends_on_step]
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
        self.seen_step = self.links.join()  # no limit: calls of servers have one

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
                    cancel_move(self)
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

    # ---- rows

    def router(self, table: str) -> Router:
        self.check_name(table)
        return self.routers[table]

    @property
    def holds_rows(self) -> bool:
        # They are on the servers.
        return False

    def assign(self, rows: Rows, *, time: float | None = None) -> None:
        self._write_rows("assign", rows, time)

    def assign_add(self, rows: Rows, *, time: float | None = None) -> None:
        self._write_rows("assign_add", rows, time)

    def _write_rows(self, kind: str, rows: Rows, time: float | None) -> None:
        header = {"time": self._check_time(time)}
        routed, flat = self.preparer.rows(rows)
        dims = torch.tensor([config.dim for config in self.configs.values()], dtype=torch.int64, device="cpu")
        pieces = flat.split_with_sizes((routed.deduped.counts @ dims).tolist())
        self.links.write_ids(kind, header, routed, {"rows": pieces})

    def _check_time(self, time: float | None) -> int | None:
        return None if time is None else self.latest_time(time)

    def reinitialize(
        self, ids: Ids, *, time: float | None = None, missing_ok: bool = False
    ) -> dict[str, Tensor]:
        routed = self.preparer(ids, missing_ok=missing_ok, distinct=False)
        found = self.links.write_ids("reinitialize", {"time": self._check_time(time)}, routed)
        sizes = routed.deduped.counts.sum(1).tolist()
        if any(part is None and size for part, size in zip(found, sizes, strict=True)):
            raise UsageError("reinitialize: a server applied it, but its result was lost with the server")
        parts = [tensor_of(part) for part in found if part is not None]
        return routed.status(torch.cat([torch.empty(0, dtype=torch.int32, device="cpu"), *parts]), ids)

    def remove(self, ids: Ids) -> dict[str, int]:
        found = [part for part in self.links.write_ids("remove", {}, self.preparer(ids)) if part is not None]
        return {name: sum(part.get(name, 0) for part in found) for name in ids}

    def evict(self, now: float | None = None) -> dict[str, Tensor]:
        # The ids are those of all servers.
        return self._evicted(self.links.write_everywhere("evict", {"time": self.latest_time(now)}))

    def evict_part(self, now: float, *, parts: int, start: float | None = None) -> dict[str, Tensor]:
        # A call visits a part of the rows of every server.
        check_start(start, "evict_part")
        count = checks.integer(parts, "evict_part: parts")
        header = {"time": self.latest_time(now), "parts": count, "start": start}
        return self._evicted(self.links.write_everywhere("evict_part", header))

    def _evicted(self, found: Sequence[Mapping[str, Array]]) -> dict[str, Tensor]:
        return {name: torch.cat([tensor_of(part[name]) for part in found]) for name in self.configs}

    def scan(self, table: str, chunk_size: int = 65536) -> Iterator[Chunk]:
        # For the rows of all servers, server by server.
        #
        # Servers keep rows in their places for `SCAN_SECONDS` after each chunk; a caller that takes longer
        # for a chunk may miss rows that moved meanwhile.
        self.check_name(table)
        size = checks.integer(chunk_size, "scan: chunk_size")
        self.flush()
        return self._scan(table, size)

    def _scan(self, table: str, size: int) -> Iterator[Chunk]:
        scan = random.getrandbits(62)
        for link in self.links:
            at = 0
            while at >= 0:
                arrays, at = link.result(link.run(_scan_part, table, at, size, scan, background=False))
                chunk = chunk_of(arrays)
                try:
                    if chunk.ids.numel():
                        yield chunk
                except GeneratorExit:
                    if at >= 0:
                        link.result(link.run(_end_scan, table, scan, background=False))
                    raise

    def restore(self, table: str, chunk: Chunk) -> None:
        owner = self.router(table)
        checked = self.checks[table].chunk(chunk)
        owners = owner.owner(checked.ids)
        calls = []
        for server, link in enumerate(self.links):
            own = checked.select(owners == server)
            if own.ids.numel():
                write = ServerWrite("restore", {"table": table}, chunk_arrays(own))
                calls.append((link, link.write(write)))
        self.links.results(calls)

    def clear(self) -> None:
        self.links.write_everywhere("clear", {"tables": list(self.configs)})

    def reserve(self, rows: Mapping[str, int]) -> None:
        # `rows` counts the rows of all servers, and each reserves its share.
        self.each_part(_reserve_part, row_shares(self, rows, len(self.links)))

    def each_part(
        self, function: Callable[..., Result], *args: Any, background: bool = False
    ) -> list[Result]:
        # The function runs on every server, and is sent there.
        check_function(function)
        check_flag(background, "background")
        return self.links.everywhere(lambda link: link.run(function, *args, background=background))

    # ---- touched rows, stats

    def track(self, consumer: str) -> None:
        self.links.write_everywhere("track", {"consumer": checks.text(consumer, "track: consumer")})

    def untrack(self, consumer: str) -> None:
        self.links.write_everywhere("untrack", {"consumer": checks.text(consumer, "untrack: consumer")})

    def drain_touched(self, consumer: str) -> dict[str, tuple[Tensor, Tensor]]:
        # If a server fails, no id is lost: the next drain returns all.
        parts = self.each_part(drain, checks.text(consumer, "drain_touched: consumer"))
        try:
            self.each_part(confirm, consumer)
        except Exception as error:  # other servers have forgotten their ids, so they must be returned
            logger.warning("drain_touched: the next call returns some ids again: %s", error)
        found = {}
        for name in self.configs:
            updated, removed = (torch.cat([tensor_of(part[name][i]) for part in parts]) for i in (0, 1))
            found[name] = updated, removed
        return found

    def mark_touched(self, consumer: str, ids: Ids) -> None:
        name = checks.text(consumer, "mark_touched: consumer")
        self.each_part(check_consumer, name)
        self.links.write_ids("mark", {"consumer": name}, self.preparer(ids))

    def stats(self) -> dict[str, TableStats]:
        # Numbers are summed over the servers.
        parts = self.links.ask(part_stats)
        return {name: _joint_stats([part[name] for part in parts]) for name in self.configs}

    def memory(self) -> dict[str, MemoryUse]:
        # Bytes are summed over the servers.
        parts = self.links.ask(_memory_of_part)
        fields = MemoryUse.__dataclass_fields__
        return {
            name: MemoryUse(*(sum(getattr(part[name], field) for part in parts) for field in fields))
            for name in self.configs
        }

    # ---- a batch

    def _prepared(self, ids: Ids | PreparedIds, missing_ok: bool) -> RoutedIds:
        return self.preparer.routed(ids, missing_ok=missing_ok)

    def _lookup(
        self, prepared: PreparedIds, *, series: LookupSeries | None = None, step: int | None = None
    ) -> ServerLookup:
        # Rows are requested by the first use or by `Lookup.fetch`.
        assert isinstance(prepared, RoutedIds)
        self._pushes.raise_errors()
        return ServerLookup(self, self.links, prepared, step)

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

    def _look_up_to_update(self, ids: Ids, step: int) -> Lookup:
        self._check_trains()
        try:
            return self.lookup(ids, step=step)
        except Exception as error:
            self.fail(error, "apply_gradients")

    def _fail_update(self, lookup: Lookup | None, error: Exception) -> NoReturn:
        self._check_trains()
        if lookup is not None:
            lookup.used = True  # it does not report a second time
        self.fail(error, "apply_gradients")

    def _check_trains(self) -> None:
        if self.observer:
            raise UsageError("ServerShards: an observer does not train: make it without observer=True")

    def _update(
        self,
        lookup: Lookup,
        gradients: Mapping[str, list[Tensor]],
        pooling: Pooling | None,
        update: Update,
        wait: bool,
    ) -> None:
        # It returns when the gradients are sent; see `window`.
        #
        # An error on a server is raised by the next call, or by `flush`. With mode="sync", step, scale and
        # clip_norm must be equal on all workers.
        assert isinstance(lookup, ServerLookup)
        self._check_trains()
        try:
            lookup.check_place()
            self._pushes.raise_errors()
            with span("megalith.gradients"):
                summed = lookup._sum_gradients(gradients, pooling, update.occurrences)
                # Evaluated now: a callable without an argument may return something else later.
                rates = self._rates(gradients.keys(), update.step)
                update = update._replace(rates={name: rates[name] for name in gradients})
                lookup.use()
                everyone = self.mode == "sync" or self._options.staleness is not None
                writes = push_writes(
                    lookup.routed,
                    summed,
                    update,
                    [c.dim for c in self.configs.values()],
                    self._grads_wire,
                    everyone,
                )
        except Exception as error:
            self._fail_update(lookup, error)
        self._pushes.send(writes)

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


# ---- what runs on servers


def _scan_part(part: ShardsPart, table: str, at: int, size: int, scan: int) -> tuple[dict[str, Array], int]:
    engine = part.shards.local[table].engine_impl
    engine.keep_places(scan, SCAN_SECONDS)
    chunk, following = engine.scan_part(at, size)
    if following < 0:
        _end_scan(part, table, scan)
    return chunk_arrays(chunk), following


def _end_scan(part: ShardsPart, table: str, scan: int) -> None:
    part.shards.local[table].engine_impl.keep_places(scan, 0.0)


def _reserve_part(part: ShardsPart, rows: Mapping[str, int]) -> None:
    part.shards.reserve(rows)


def _memory_of_part(part: ShardsPart) -> dict[str, MemoryUse]:
    return part.shards.memory()


def _joint_stats(parts: Sequence[TableStats]) -> TableStats:
    first = parts[0]
    return TableStats(
        first.name,
        first.engine,
        sum(part.rows for part in parts),
        sum(part.capacity for part in parts),
        any(part.growing for part in parts),
        max(part.epoch for part in parts),
        tuple(dict.fromkeys(name for part in parts for name in part.consumers)),
        RowCounters(*(sum(numbers) for numbers in zip(*(part.counters for part in parts), strict=True))),
    )


def check_empty(target: ServerShards) -> None:
    found = target.links.everywhere(ServerLink.describe)
    if any(sum(server["rows"].values()) or server["step"] >= 0 for server in found):
        raise UsageError("resize: the new servers have tables under this name already: pass new servers")


def move_tables(source: ServerShards, target: ServerShards) -> int:
    """Copy tables to other servers. With a recovery they are in the logs of those servers, on the disk."""
    numbers = source.links.everywhere(ServerLink.describe)
    for name in source.configs:
        for chunk in source.scan(name):
            target.restore(name, chunk)
        _move_counts(source, target, name)
    for consumer in dict.fromkeys(name for server in numbers for name in server["consumers"]):
        target.track(consumer)
        for part in source.each_part(_touched_of_part, consumer):
            target.mark_touched(consumer, {name: tensor_of(ids) for name, ids in part.items()})
    pushes: dict[str, int] = {}
    for server in numbers:
        for worker, count in server["pushes"].items():
            pushes[str(worker)] = max(count, pushes.get(str(worker), 0))
    step = max(server["step"] for server in numbers)
    adopted = {"pushes": pushes, "step": step, "complete": all(server["complete"] for server in numbers)}
    first, *others = target.links
    target.links.results([(link, link.write(ServerWrite("adopt", adopted))) for link in others])
    adopted["counters"] = _moved_counters(source, target)
    target.links.results([(first, first.write(ServerWrite("adopt", adopted)))])  # it ends the move
    return int(step)


def _moved_counters(source: ServerShards, target: ServerShards) -> dict[str, list[int]]:
    """Return what server 0 counts, so that the counters of all servers together do not change."""
    before, now, (first, *_) = source.stats(), target.stats(), target.each_part(_counters_of_part)
    return {
        name: [a - b + c for a, b, c in zip(stats.counters, now[name].counters, first[name], strict=True)]
        for name, stats in before.items()
    }


def cancel_move(source: ServerShards) -> None:
    """Record that tables are still on their servers, after a move that failed."""
    first, *_ = source.links
    adopted = {"pushes": {}, "step": -1, "complete": False}
    source.links.results([(first, first.write(ServerWrite("adopt", adopted)))])


def _move_counts(source: ServerShards, target: ServerShards, table: str) -> None:
    """Copy how often an admission policy has seen ids without a row."""
    parts = [part for part in source.each_part(_counts_of_part, table) if part is not None]
    if not parts:
        return
    ids, counts = (torch.cat([tensor_of(part[i]) for part in parts]) for i in (0, 1))
    owners = target.routers[table].owner(ids)
    calls: list[Any] = []
    for server, link in enumerate(target.links):
        own = owners == server
        arrays = {"ids": array_of(ids[own]), "counts": array_of(counts[own])}
        calls.append((link, link.write(ServerWrite("restore_pending", {"table": table}, arrays))))
    target.links.results(calls)


def _counters_of_part(part: ShardsPart) -> dict[str, list[int]]:
    return {name: list(stats.counters) for name, stats in part_stats(part).items()}


def _counts_of_part(part: ShardsPart, table: str) -> tuple[Array, Array] | None:
    if part.shards.configs[table].admission is None:
        return None
    ids, counts = part.shards.local[table].pending()
    return array_of(ids), array_of(counts)


def _touched_of_part(part: ShardsPart, consumer: str) -> dict[str, Array]:
    return {name: array_of(ids) for name, ids in pending_ids(part, consumer).items()}
