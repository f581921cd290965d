"""ServerShards: tables on server processes, used by workers that come and go.

A training step takes one call per server for all tables to read rows, and one to send gradients:

    call     worker -> server                              server -> worker
    read     each distinct id once                         the rows
    write    ids with one summed gradient each, step,      nothing, or the error
             learning rates, time, worker, number

Ray starts the servers, connects them and passes arrays, through shared memory on one host. `table_space.py`
defines the order of calls and the modes.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.library import span
from megalith.ops import checks, scatter_pieces
from megalith.ops.pooling import Pooling
from megalith.routing import Router
from megalith.shards.contract import Ids, Result, Rows, Shards, check_configs, check_function, missing_status
from megalith.shards.lookup import Lookup, PreparedIds, check_lookup_step
from megalith.shards.lookup_series import LookupSeries
from megalith.shards.owner_rows import blocks_by_table
from megalith.shards.part import ShardsPart
from megalith.shards.preparer import RoutedIds, RoutingPreparer, make_routers
from megalith.shards.routed_gradients import step_numbers, sum_routed
from megalith.shards.servers.ray_servers import Servers
from megalith.shards.servers.recovery import Recovery
from megalith.shards.servers.server_link import PendingCall, ServerLink
from megalith.shards.servers.server_lookup import ServerLookup
from megalith.shards.servers.server_messages import (
    Array,
    ServerWrite,
    SpaceSpec,
    array_of,
    chunk_arrays,
    chunk_of,
    tensor_of,
)
from megalith.shards.wire import check_wire, make_wire
from megalith.table import Chunk, MemoryUse, RowCounters, Table, TableConfig, TableStats
from megalith.table.engines.registry import engine_class
from megalith.table.serving_view import ServingView
from megalith.table.validation import InputChecks, check_by_table, check_flag, check_step

logger = logging.getLogger(__name__)

MODES = ("async", "sync")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
"""Names of tables on servers are also names of folders."""


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
    ) -> None:
        self.configs = MappingProxyType(check_configs(configs))
        self.local: Mapping[str, Table] = MappingProxyType({})
        self.checks = MappingProxyType({name: InputChecks(config) for name, config in self.configs.items()})
        self.mode = checks.one_of(mode, MODES, "ServerShards: mode")
        self.window = checks.integer(window, "ServerShards: window", 0)
        self.worker = checks.integer(worker, "ServerShards: worker", 0)
        self.num_workers = checks.integer(num_workers, "ServerShards: num_workers")
        self.name = checks.text(name, "ServerShards: name")
        if not _NAME.fullmatch(self.name):
            raise InputError(f"ServerShards: name must be letters, digits, '_', '-' and '.', got {name!r}")
        self._timeout = checks.seconds(timeout, "ServerShards: timeout")
        if staleness is not None:
            staleness = checks.integer(staleness, "ServerShards: staleness", 0)
            if mode == "sync":
                raise InputError('ServerShards: staleness is for mode="async"')
        self._staleness = staleness
        engine_class(engine)
        wires = check_wire(wire)
        self.rows_wire, self._grads_wire = make_wire(wires[0]), make_wire(wires[1])
        seed = checks.integer(seed, "ServerShards: seed", -(2**63))
        count = self._server_count(num_servers, servers)
        if recovery is not None:
            checks.instance(recovery, Recovery, "ServerShards: recovery")
            if servers is not None and not servers.restart:
                raise InputError("ServerShards: recovery needs Servers(..., restart=True)")
        self.routers = MappingProxyType(make_routers(self.configs, router, count))
        self.preparer = RoutingPreparer(self.configs, self.routers)
        views = {name: ServingView.of(config) for name, config in self.configs.items()}
        self._stepwise = [name for name, view in views.items() if view is not None and view.depends_on_step]
        self._dims = [config.dim for config in self.configs.values()]
        self._widths = torch.tensor(self._dims, dtype=torch.int64)
        self._pushed: deque[list[tuple[ServerLink, PendingCall]]] = deque()
        options = (repr(dict(self.configs)), repr(dict(self.routers)), engine, seed, wires, mode, staleness)
        spec = SpaceSpec(
            list(self.configs.values()),
            engine,
            seed,
            wires,
            mode == "sync",
            staleness,
            self.num_workers,
            self._timeout,
            _ADDRESS.sub("", repr(options)),
            recovery,
        )
        self._owns_servers = servers is None
        self.servers = Servers(count, restart=recovery is not None) if servers is None else servers
        self._links = [
            ServerLink(actor, index, self.name, self.worker, spec)
            for index, actor in enumerate(self.servers.actors)
        ]
        self.seen_step = self._join()

    def _join(self) -> int:
        """Join all servers; return the highest step. If one refuses, leave those that were joined."""
        steps: list[int] = []
        try:
            self._results([(link, link.open()) for link in self._links])
            for link in self._links:
                steps.append(link.join().step)
        except BaseException:
            with suppress(
                Exception
            ):  # also the server whose answer is missing leaves, but nobody waits for it
                calls = [(link, link.leave()) for link in self._links[: len(steps) + 1]]
                self._results(calls[: len(steps)])
            if self._owns_servers:
                self.servers.close()
            raise
        return max(steps)

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
        return f"ServerShards(worker {self.worker}, {len(self._links)} servers, tables {tables})"

    def router(self, table: str) -> Router:
        """See `Shards.router`."""
        self.check_name(table)
        return self.routers[table]

    @property
    def sources(self) -> int:
        """See `Shards.sources`."""
        return self.num_workers if self.mode == "sync" else 1

    @property
    def holds_rows(self) -> bool:
        """See `Shards.holds_rows`: they are on the servers."""
        return False

    @property
    def lost_writes(self) -> int:
        """Number of answered writes of this worker that were lost with a server; 0 with log="sync"."""
        return sum(link.lost for link in self._links)

    def leave(self, worker: int | None = None) -> None:
        """Remove a worker: the others no longer wait for it, and its next update raises.

        Args:
            worker: The number of a worker that has ended; None: this one, after its updates (see `flush`).
        """
        if worker is None:
            _run_all(self.flush, lambda: self._results([(link, link.leave()) for link in self._links]))
        else:
            self._remove(checks.integer(worker, "leave: worker", 0))

    def _remove(self, worker: int) -> None:
        self._results([(link, link.remove(worker)) for link in self._links])

    def close(self) -> None:
        """Wait for all updates, then leave the workers; end the servers if they were started by this object.

        Raises:
            MegalithError: An update failed. This object is closed all the same.
        """
        if not self.servers.actors:
            return
        if self._owns_servers:
            _run_all(self.flush, self.servers.close)
        else:
            self.leave()

    def __enter__(self) -> ServerShards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self.servers.actors:  # not `close`, which would wait for other workers
            try:
                self.servers.close() if self._owns_servers else self._remove(self.worker)
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
        """See `Shards.lookup`. Rows are requested by the first use or by `Lookup.fetch`."""
        self._raise_errors()
        step = None if step is None else check_step(step, "lookup")
        routed = ids if isinstance(ids, PreparedIds) else self.prepare(ids, missing_ok=missing_ok)
        if not isinstance(routed, RoutedIds):
            raise InputError("these ids were prepared by other Shards: prepare them with these")
        return ServerLookup(self, self._links, routed, step)

    def fail(
        self,
        error: Exception,
        call: str = "lookup",
        *,
        series: LookupSeries | None = None,
        leave: bool = False,
    ) -> NoReturn:
        """See `Shards.fail`. Only updates with mode="sync" have other workers that wait."""
        if call == "apply_gradients":
            self.report_failure(error)
        raise error

    def report_failure(self, error: Exception) -> None:
        """With mode="sync", make the other workers raise RankFailedError in the step that waits.

        If that fails too, it is logged: the caller raises `error`.

        Args:
            error: Why this worker has no gradients.
        """
        self._report_failure(error, self._links)

    def _report_failure(self, error: Exception, links: Sequence[ServerLink]) -> None:
        if self.mode != "sync":
            return
        write = ServerWrite("fail", {"error": f"{type(error).__name__}: {error}"})
        try:
            self._results([(link, link.write(write)) for link in links])
        except Exception as failed:
            logger.warning("the other workers may not know of %r: %s", error, failed)

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
        """See `Shards.apply_gradients`. It returns when the gradients are sent; see `window`.

        An error on a server is raised by the next call, or by `flush`. With mode="sync", step, scale and
        clip_norm must be equal on all workers.
        """
        try:
            check_flag(wait, "wait")
            if not isinstance(lookup, Lookup):
                lookup = self.lookup(lookup, step=step)
            if not isinstance(lookup, ServerLookup) or lookup.shards is not self:
                raise InputError("this Lookup belongs to another Shards object")
            self._raise_errors()
            with span("megalith.gradients"):
                writes = self._gradient_writes(
                    lookup, grads, pooling, occurrences, step, time, scale, clip_norm
                )
        except Exception as error:
            if isinstance(lookup, ServerLookup) and lookup.shards is self:
                lookup.used = True  # it does not report a second time
            self.fail(error, "apply_gradients")
        self._send(writes)
        while len(self._pushed) > self.window:
            self._results(self._pushed.popleft())

    def _send(self, writes: Sequence[ServerWrite | None]) -> None:
        """Send updates; if one cannot be sent, those before it are in progress all the same."""
        sent: list[tuple[ServerLink, PendingCall]] = []
        self._pushed.append(sent)
        for server, (link, write) in enumerate(zip(self._links, writes, strict=True)):
            try:
                if write is not None:
                    sent.append((link, link.write(write)))
            except Exception as error:
                self._report_failure(error, self._links[server:])
                raise

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
        lookup.check_unchanged()
        check_lookup_step(lookup, self._stepwise)
        if pooling is None and isinstance(grads, Mapping):
            self.known(grads, missing_ok=False)
        routed = lookup.routed
        summed = sum_routed(self.checks, lookup, grads, pooling)
        numbers = step_numbers(self.configs, self.checks, summed.names, step, time, scale, clip_norm)
        seen = summed.seen(self.configs, routed, self.check_occurrences(lookup.ids, occurrences, pooling))
        lookup.use()
        if numbers is None:  # there is no table that could have gradients
            return [None] * len(self._links)
        # Evaluated now: a callable without an argument may return something else later.
        rates = {name: self.checks[name].rates(numbers.step) for name in summed.names}
        header = {
            "step": numbers.step,
            "time": None if time is None else numbers.time,
            "scale": numbers.scale,
            "clip_norm": numbers.clip_norm,
            "rates": rates,
        }
        ids, flat, counts, seen = _selected(routed, summed.flat, summed.mask(routed), seen, self._widths)
        own_ids = ids.split_with_sizes(counts.sum(1).tolist())
        own_flat = flat.split_with_sizes((counts @ self._widths).tolist())
        own_seen = None if seen is None else seen.split_with_sizes(counts.sum(1).tolist())
        everyone = self.mode == "sync" or self._staleness is not None  # servers count the steps
        writes: list[ServerWrite | None] = []
        for server in range(len(self._links)):
            if not own_ids[server].numel() and not everyone:
                writes.append(None)
                continue
            row = counts[server : server + 1]
            arrays = {
                "ids": array_of(own_ids[server]),
                "grads": array_of(self._grads_wire.encode(own_flat[server], row, self._dims)),
            }
            if own_seen is not None:
                arrays["seen"] = array_of(own_seen[server])
            writes.append(ServerWrite("push", header | {"counts": row[0].tolist()}, arrays))
        return writes

    def flush(self) -> None:
        """See `Shards.flush`."""
        pushed, self._pushed = self._pushed, deque()
        self._results([call for calls in pushed for call in calls])

    def _raise_errors(self) -> None:
        """Take the results of the oldest updates that have ended, and raise their errors."""
        while self._pushed and all(link.is_done(call) for link, call in self._pushed[0]):
            self._results(self._pushed.popleft())

    def _results(self, calls: Sequence[tuple[ServerLink, PendingCall]]) -> list[Any]:
        """Wait for all calls, then raise the first error."""
        results: list[Any] = []
        errors: list[Exception] = []
        for link, call in calls:
            try:
                results.append(link.result(call))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results

    def _write_everywhere(self, kind: str, header: dict[str, Any]) -> list[Any]:
        write = ServerWrite(kind, header)
        return self._results([(link, link.write(write)) for link in self._links])

    # ---- rows

    def assign(self, rows: Rows, *, time: float | None = None) -> None:
        """See `Shards.assign`."""
        self._write_rows("assign", rows, time)

    def assign_add(self, rows: Rows, *, time: float | None = None) -> None:
        """See `Shards.assign_add`."""
        self._write_rows("assign_add", rows, time)

    def _write_rows(self, kind: str, rows: Rows, time: float | None) -> None:
        check_by_table(rows, "rows", "{'user': (ids, rows)}")
        checked = {name: self.checks[name].ids_and_rows(rows[name]) for name in self.known(rows, False)}
        seconds = self._check_time(time)
        routed = self.preparer.route({name: ids for name, (ids, _) in checked.items()}, distinct=False)
        floats = routed.deduped.counts @ self._widths
        flat = scatter_pieces(
            [values for _, values in checked.values()],
            [routed.offsets(name) for name in checked],
            int(floats.sum()),
        )
        pieces = flat.split_with_sizes(floats.tolist())
        self._write_ids(kind, {"time": seconds}, routed, {"rows": list(pieces)})

    def _write_ids(
        self,
        kind: str,
        header: dict[str, Any],
        routed: RoutedIds,
        arrays: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> list[Any]:
        """Send ids to their owners; return the result of each server, None for servers without ids."""
        counts = routed.deduped.counts
        pieces = routed.deduped.ids.split_with_sizes(counts.sum(1).tolist())
        calls: list[tuple[ServerLink, PendingCall]] = []
        for server, ids in enumerate(pieces):
            if ids.numel():
                own = {name: array_of(parts[server]) for name, parts in (arrays or {}).items()}
                write = ServerWrite(
                    kind, header | {"counts": counts[server].tolist()}, {"ids": array_of(ids), **own}
                )
                calls.append((self._links[server], self._links[server].write(write)))
        results = iter(self._results(calls))
        return [next(results) if ids.numel() else None for ids in pieces]

    def _check_time(self, time: float | None) -> int | None:
        return None if time is None else self.latest_time(time)

    def reinitialize(
        self, ids: Ids, *, time: float | None = None, missing_ok: bool = False
    ) -> dict[str, Tensor]:
        """See `Shards.reinitialize`."""
        routed = self.preparer(ids, missing_ok=missing_ok, distinct=False)
        found = self._write_ids("reinitialize", {"time": self._check_time(time)}, routed)
        parts = [tensor_of(_known(part, "reinitialize")) for part in found if part is not None]
        status = torch.cat([torch.empty(0, dtype=torch.int32), *parts])[routed.deduped.inverse]
        return {
            name: status[routed.occurrences(name)] if name in routed.ids else missing_status(column)
            for name, column in ids.items()
        }

    def remove(self, ids: Ids) -> dict[str, int]:
        """See `Shards.remove`."""
        found = [part for part in self._write_ids("remove", {}, self.preparer(ids)) if part is not None]
        return {name: sum(part.get(name, 0) for part in found) for name in ids}

    def evict(self, now: float | None = None) -> dict[str, Tensor]:
        """See `Shards.evict`; the ids are those of all servers."""
        return self._evicted(self._write_everywhere("evict", {"time": self.latest_time(now)}))

    def evict_part(self, now: float, *, parts: int, start: float | None = None) -> dict[str, Tensor]:
        """See `Shards.evict_part`; a call visits a part of the rows of every server."""
        good = isinstance(start, int | float) and not isinstance(start, bool) and 0 <= start <= 1
        if start is not None and not good:
            raise InputError(f"evict_part: start must be a number from 0 to 1, got {start!r}")
        header = {
            "time": self.latest_time(now),
            "parts": checks.integer(parts, "evict_part: parts"),
            "start": start,
        }
        return self._evicted(self._write_everywhere("evict_part", header))

    def _evicted(self, found: Sequence[Mapping[str, Array]]) -> dict[str, Tensor]:
        return {name: torch.cat([tensor_of(part[name]) for part in found]) for name in self.configs}

    def scan(self, table: str, chunk_size: int = 65536) -> Iterator[Chunk]:
        """See `Shards.scan`, for the rows of all servers, server by server."""
        self.check_name(table)
        size = checks.integer(chunk_size, "scan: chunk_size")
        self.flush()
        return self._scan(table, size)

    def _scan(self, table: str, size: int) -> Iterator[Chunk]:
        for link in self._links:
            at = 0
            while at >= 0:
                arrays, at = link.result(link.run(_scan_part, table, at, size, background=False))
                chunk = chunk_of(arrays)
                if chunk.ids.numel():
                    yield chunk

    def restore(self, table: str, chunk: Chunk) -> None:
        """See `Shards.restore`."""
        owner = self.router(table)
        checked = self.checks[table].chunk(chunk)
        owners = owner.owner(checked.ids)
        calls = []
        for server, link in enumerate(self._links):
            own = checked.select(owners == server)
            if own.ids.numel():
                write = ServerWrite("restore", {"table": table}, chunk_arrays(own))
                calls.append((link, link.write(write)))
        self._results(calls)

    def clear(self) -> None:
        """See `Shards.clear`."""
        self._write_everywhere("clear", {"tables": list(self.configs)})

    def reserve(self, rows: Mapping[str, int]) -> None:
        """See `Shards.reserve`; `rows` counts the rows of all servers, and each reserves its share."""
        check_by_table(rows, "rows", "{'user': 1000}")
        counts = {name: self.checks[name].row_count(rows[name]) for name in self.known(rows, False)}
        share = {name: -(-n // len(self._links)) for name, n in counts.items()}
        self.each_part(_reserve, share)

    def each_part(
        self, function: Callable[..., Result], *args: Any, background: bool = False
    ) -> list[Result]:
        """See `Shards.each_part`: the function runs on every server, and is sent there."""
        check_function(function)
        check_flag(background, "background")
        return self._results(
            [(link, link.run(function, *args, background=background)) for link in self._links]
        )

    # ---- touched rows, stats: of all servers

    def track(self, consumer: str) -> None:
        """See `Shards.track`."""
        self._write_everywhere("track", {"consumer": checks.text(consumer, "track: consumer")})

    def untrack(self, consumer: str) -> None:
        """See `Shards.untrack`."""
        self._write_everywhere("untrack", {"consumer": checks.text(consumer, "untrack: consumer")})

    def drain_touched(self, consumer: str) -> dict[str, tuple[Tensor, Tensor]]:
        """See `Shards.drain_touched`."""
        parts = self.each_part(_drain_touched, checks.text(consumer, "drain_touched: consumer"))
        found = {}
        for name in self.configs:
            updated, removed = (torch.cat([tensor_of(part[name][i]) for part in parts]) for i in (0, 1))
            found[name] = updated, removed
        return found

    def mark_touched(self, consumer: str, ids: Ids) -> None:
        """See `Shards.mark_touched`."""
        header = {"consumer": checks.text(consumer, "mark_touched: consumer")}
        self.each_part(_check_consumer, header["consumer"])
        self._write_ids("mark", header, self.preparer(ids))

    def stats(self) -> dict[str, TableStats]:
        """See `Shards.stats`; numbers are summed over the servers."""
        parts = self.each_part(_stats)
        return {name: _joint_stats([part[name] for part in parts]) for name in self.configs}

    def memory(self) -> dict[str, MemoryUse]:
        """See `Shards.memory`; bytes are summed over the servers."""
        parts = self.each_part(_memory)
        fields = MemoryUse.__dataclass_fields__
        return {
            name: MemoryUse(*(sum(getattr(part[name], field) for part in parts) for field in fields))
            for name in self.configs
        }

    def describe_servers(self) -> list[dict[str, Any]]:
        """Return numbers about each server.

        Returns:
            Per server: its number, process id, seconds since its start, rows and bytes per table, numbers of
            reads and writes, calls that wait, the highest step, its workers, and the staleness: by how many
            steps the fastest worker is ahead of the slowest.
        """
        return self._results([(link, link.describe()) for link in self._links])


def _selected(
    routed: RoutedIds, flat: Tensor, mask: Tensor | None, seen: Tensor | None, widths: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return ids, gradients, counts and occurrences of the distinct ids that have a gradient."""
    ids, counts = routed.deduped.ids, routed.deduped.counts
    if mask is None:
        return ids, flat, counts, seen
    blocks = blocks_by_table(flat, counts * widths)
    masks = blocks_by_table(mask, counts)
    kept = torch.zeros_like(counts)
    pieces: list[Tensor] = []
    for server in range(counts.shape[0]):
        for t, dim in enumerate(widths.tolist()):
            own = masks[t][server]
            pieces.append(blocks[t][server].view(-1, dim)[own].view(-1))
            kept[server, t] = own.sum()
    return ids[mask], torch.cat(pieces), kept, None if seen is None else seen[mask]


def _run_all(*calls: Callable[[], object]) -> None:
    """Make all calls, then raise the first error."""
    errors: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _known(result: Any, call: str) -> Any:
    if result is None:
        raise UsageError(f"{call}: a server applied it, but its result was lost with the server")
    return result


# ---- what runs on servers


def _scan_part(part: ShardsPart, table: str, at: int, size: int) -> tuple[dict[str, Array], int]:
    chunk, following = part.shards.local[table].engine_impl.scan_part(at, size)
    return chunk_arrays(chunk), following


def _reserve(part: ShardsPart, rows: Mapping[str, int]) -> None:
    part.shards.reserve(rows)


def _check_consumer(part: ShardsPart, consumer: str) -> None:
    part.shards.consumer_numbers(consumer)


def _drain_touched(part: ShardsPart, consumer: str) -> dict[str, tuple[Array, Array]]:
    found = part.shards.drain_touched(consumer)
    return {name: (array_of(updated), array_of(removed)) for name, (updated, removed) in found.items()}


def _stats(part: ShardsPart) -> dict[str, TableStats]:
    return part.shards.stats()


def _memory(part: ShardsPart) -> dict[str, MemoryUse]:
    return part.shards.memory()


def _joint_stats(parts: Sequence[TableStats]) -> TableStats:
    """Return the numbers of a table that is spread over servers."""
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
