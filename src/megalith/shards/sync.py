"""SyncShards: tables spread over the ranks of torch.distributed, with all-to-all exchanges of ids and rows.

A training step takes four exchanges, whatever the number of tables:

    exchange     from -> to        content
    sizes        asker -> owner    the call and the number of ids per table
    ids          asker -> owner    each distinct id once
    rows         owner -> asker    the rows of those ids
    gradients    asker -> owner    one summed gradient per distinct id

The owner of a row sums the gradients of all ranks and makes one optimizer step. All ranks make the same
calls in the same order; a rank without data makes them with empty tensors. `rank_messages.py` holds the
messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NoReturn

from torch import Tensor

from megalith.distributed.exchange import Exchange
from megalith.errors import InputError
from megalith.library import span
from megalith.ops.pooling import Pooling
from megalith.routing import Router
from megalith.shards.contract import (
    Ids,
    Recorder,
    Result,
    Rows,
    Shards,
    ShardsPart,
    check_function,
    described,
    row_shares,
)
from megalith.shards.local import LocalShards
from megalith.shards.lookup import Lookup, LookupSeries, PreparedIds
from megalith.shards.preparer import RoutedIds, RoutingPreparer, make_routers
from megalith.shards.rank_messages import RankMessages, RequestedIds
from megalith.shards.routed_lookup import RoutedLookup
from megalith.shards.row_encoding import check_wire
from megalith.table import Chunk, MemoryUse, Table, TableConfig, TableStats
from megalith.table.table_data import Update
from megalith.table.validation import check_flag


class SyncLookup(RoutedLookup):
    """A lookup over ranks: ids are sent at once, rows are fetched by the first use or by `fetch`.

    Args:
        shards: The shards that make it.
        messages: The exchanges of the shards.
        routed: See `RoutedLookup`.
        call: "lookup", or "apply_gradients" for an update without a lookup.
        series: The series of the lookup, if it has one.
        step: See `Lookup`.
        out_of_data: Whether this rank has no more data.

    Attributes:
        requested: The ids that other ranks request from this one, when they have arrived.
        failed: Whether this rank has reported that it has no gradients.
    """

    shards: SyncShards

    def __init__(
        self,
        shards: SyncShards,
        messages: RankMessages,
        routed: RoutedIds,
        call: str,
        series: LookupSeries | None,
        step: int | None,
        out_of_data: bool,
    ) -> None:
        super().__init__(shards, routed, step)
        self.failed = False
        self._messages = messages
        self.requested: Future[RequestedIds] = shards.exchange.submit(
            lambda: messages.request(call, routed, out_of_data=out_of_data, series=series), routed.deduped.ids
        )
        self._rows: Future[Tensor] | None = None

    def wait_ids(self) -> None:
        self.requested.result()

    def fail(self, error: Exception, *, leave: bool = False) -> NoReturn:
        if not (self.used or self.failed or self.requested.exception()):
            self.shards._fail_update(self, error, leave=leave)
        raise error

    def fetch(self) -> None:
        if self._rows is None:
            requested, routed, messages, step = self.requested, self.routed, self._messages, self.step
            self._rows = self.shards.exchange.submit(
                lambda: messages.send_rows(requested.result(0), routed, step)
            )

    @property
    def source(self) -> Tensor:
        """The received rows, float32 [size], in the order of the distinct ids."""
        self.requested.result()
        self.fetch()
        assert self._rows is not None
        return self.shards.exchange.take(self._rows.result())

    @property
    def out_of_data(self) -> list[int]:
        """The ranks that made this lookup with out_of_data=True; the same on all ranks."""
        return self.requested.result().out_of_data


class SyncShards(Shards):
    """Tables by name, with their rows spread over ranks. Construction is a collective call. See `Shards`.

    `scan`, `local`, `evict_part`, `drain_touched`, `stats` and `memory` concern the rows of this rank;
    `restore` and `mark_touched` take those that this rank owns. An input error on one rank raises on all
    ranks, before anything is written.

    Args:
        configs: One TableConfig per table.
        router: A mode, a Router, or one of either for each table. The dist_type of a table takes precedence
            over a mode for all tables.
        group: A process group or a device mesh with one dimension; None: the default group.
        engine: As for `Table`.
        seed: As for `Table`.
        wire: The precision of exchanged numbers, one for all or {"rows": ..., "grads": ...}: "float32"
            (exact), "float16", "bfloat16", for rows also "int8".
        timeout: Seconds that each wait for other ranks may take.
        transport: See `Exchange`.
        push: Whether `apply_gradients` always returns while gradients are sent and applied, as with
            wait=False; `flush` waits for them.
    """

    preparer: RoutingPreparer
    wire: tuple[str, str]

    def __init__(
        self,
        configs: Sequence[TableConfig],
        *,
        router: str | Router | Mapping[str, str | Router] = "roundrobin",
        group: Any = None,
        engine: str = "cpu",
        seed: int = 0,
        wire: str | dict[str, str] = "float32",
        timeout: float = 600.0,
        transport: str = "auto",
        push: bool = False,
    ) -> None:
        self.exchange = Exchange(group, timeout=timeout, transport=transport)
        self.ranks = self.exchange

        def build() -> tuple[LocalShards, tuple[str, str], dict[str, Router]]:
            check_flag(push, "SyncShards: push")
            own = LocalShards(configs, engine=engine, seed=seed, num_shards=self.exchange.size)
            return own, check_wire(wire), make_routers(own.configs, router, self.exchange.size)

        self._own, self.wire, routers = self.exchange.agree(build)
        self.configs = self._own.configs
        self.device = self._own.device
        self.exchange.use_device(self.device)
        self.local: Mapping[str, Table] = self._own.local
        self.checks = self._own.checks
        self.stepwise = self._own.stepwise
        self._part = ShardsPart(self._own, self.exchange.rank, self.exchange.size)
        self.routers = MappingProxyType(routers)
        self.push = push
        self.preparer = RoutingPreparer(self.configs, self.routers, self.device)
        self._messages = RankMessages(self.exchange, self._own, self.wire)
        self._pushed: list[Future[None]] = []
        self._check_equal(seed)

    def _check_equal(self, seed: int) -> None:
        mine = described(dict(self.configs), dict(self.routers), seed, self.wire)
        for rank, theirs in enumerate(self.exchange.gather(mine)):
            if theirs != mine:
                raise InputError(
                    f"SyncShards: tables, routers, seed and wire must be equal on all ranks, but rank {rank} "
                    f"has {theirs} and rank {self.rank} has {mine}"
                )

    def __repr__(self) -> str:
        tables = ", ".join(f"{name}: {len(table)} rows on this rank" for name, table in self.local.items())
        return f"SyncShards(rank {self.rank} of {self.world_size}, {tables})"

    def router(self, table: str) -> Router:
        self.check_name(table)
        return self.routers[table]

    def add_recorder(self, recorder: Recorder) -> None:
        # It takes effect between two calls.
        self.exchange.run(lambda: self._messages.add_recorder(recorder))

    def remove_recorder(self, recorder: Recorder) -> None:
        self.exchange.run(lambda: self._messages.remove_recorder(recorder))

    # ---- a batch

    def lookup(
        self,
        ids: Ids | PreparedIds,
        *,
        missing_ok: bool = False,
        series: LookupSeries | None = None,
        step: int | None = None,
        out_of_data: bool = False,
    ) -> SyncLookup:
        """Send the ids to their owners. Rows are fetched by the first use, or by `Lookup.fetch`.

        Args:
            ids: int64 or int32 [n] per table, or the result of `prepare`.
            missing_ok: Skip unknown tables instead of raising.
            series: See `Shards.lookup`.
            step: See `Shards.lookup`; equal on all ranks.
            out_of_data: Whether this rank has no more data; `SyncLookup.out_of_data` lists such ranks.

        Returns:
            The lookup, in progress. An error on any rank is raised when it is used.
        """
        try:
            if series is not None and not isinstance(series, LookupSeries):
                raise InputError(f"series must be a LookupSeries, got {type(series).__name__}")
            step, prepared = self._check_step(step), self._prepared(ids, missing_ok)
        except Exception as error:
            self.fail(error, series=series if isinstance(series, LookupSeries) else None)
        return self._lookup(prepared, series=series, step=step, out_of_data=out_of_data)

    def _prepared(self, ids: Ids | PreparedIds, missing_ok: bool) -> RoutedIds:
        return self.preparer.routed(ids, missing_ok=missing_ok)

    def _lookup(
        self,
        prepared: PreparedIds,
        *,
        series: LookupSeries | None = None,
        step: int | None = None,
        call: str = "lookup",
        out_of_data: bool = False,
    ) -> SyncLookup:
        assert isinstance(prepared, RoutedIds)
        routed = prepared.to(self.device)
        return SyncLookup(self, self._messages, routed, call, series, step, out_of_data)

    def fail(
        self,
        error: Exception,
        call: str = "lookup",
        *,
        series: LookupSeries | None = None,
        leave: bool = False,
    ) -> NoReturn:
        self.exchange.run(lambda: self._messages.request(call, None, error, series=series, leave=leave))
        raise error

    def _fail_update(self, lookup: Lookup | None, error: Exception, *, leave: bool = False) -> NoReturn:
        # It takes part in the exchange of gradients, to report the error.
        if isinstance(lookup, SyncLookup):
            lookup.failed = True
            requested, routed, messages = lookup.requested, lookup.routed, self._messages
            self.exchange.run(lambda: messages.push(requested.result(0), routed, None, error, leave))
        raise error

    def _look_up_to_update(self, ids: Ids, step: int) -> SyncLookup:
        try:
            prepared = self._prepared(ids, False)
            return self._lookup(prepared, step=self._check_step(step), call="apply_gradients")
        except Exception as error:
            self.fail(error, "apply_gradients")

    def _update(
        self,
        lookup: Lookup,
        gradients: Mapping[str, list[Tensor]],
        pooling: Pooling | None,
        update: Update,
        wait: bool,
    ) -> None:
        # Sums over ranks.
        #
        # step, scale and clip_norm must be equal on all ranks. With wait=False it waits for the gradients of
        # the previous such call instead, so at most one update is in progress.
        assert isinstance(lookup, SyncLookup)
        requested, routed = lookup.requested, lookup.routed
        try:
            with span("megalith.gradients"):
                summed = lookup._sum_gradients(gradients, pooling, update.occurrences)
            # Evaluated now: a callable without an argument may return something else by the time gradients
            # arrive. Only rows that ranks have requested from this one can be updated here.
            wanted = requested.result().ids
            trained = {name for name, own in wanted.items() if own.numel() and self.configs[name].trainable}
            update = update._replace(rates=self._rates(trained, update.step))
            lookup.use()
        except Exception as error:
            self._fail_update(lookup, error)
        sent = self.exchange.submit(
            lambda: self._messages.push(requested.result(0), routed, (summed, update)),
            summed.values,
            summed.mask,
            summed.counts,
        )
        if wait and not self.push:
            return sent.result()
        self._pushed.append(sent)
        if len(self._pushed) > 1:
            self._pushed.pop(0).result()

    def flush(self) -> None:
        """Wait for all exchanges in progress and raise the errors of gradients that were not waited for."""
        self.exchange.settle()
        pushed, self._pushed = self._pushed, []
        for sent in pushed:
            sent.result()

    # ---- rows

    def assign(self, rows: Rows, *, time: float | None = None) -> None:
        # If several ranks assign one id, the highest rank wins; time is the latest.
        self._write(rows, add=False, time=time)

    def assign_add(self, rows: Rows, *, time: float | None = None) -> None:
        self._write(rows, add=True, time=time)

    def _write(self, rows: Rows, *, add: bool, time: float | None) -> None:
        try:
            time = self._check_time(time)
            routed, flat = self.preparer.rows(rows)
            routed = routed.to(self.device)
        except Exception as error:
            self.fail(error, "assign_add" if add else "assign")
        self.exchange.run(
            lambda: self._messages.write(routed, flat, add=add, time=time), routed.deduped.ids, flat
        )

    def reinitialize(
        self, ids: Ids, *, time: float | None = None, missing_ok: bool = False
    ) -> dict[str, Tensor]:
        # The lowest rank creates an id that several ranks pass.
        try:
            routed = self.preparer(ids, missing_ok=missing_ok, distinct=False).to(self.device)
            time = self._check_time(time)
        except Exception as error:
            self.fail(error, "reinitialize")
        return routed.status(self.exchange.run(lambda: self._messages.reinitialize(routed, time)), ids)

    def _check_time(self, time: float | None) -> float | None:
        for table in self.local.values():
            checked = table.checks.time(time)
            time = None if time is None else checked
        return time

    def remove(self, ids: Ids) -> dict[str, int]:
        # The counts are those of all ranks together.
        try:
            routed = self.preparer(ids).to(self.device)
        except Exception as error:
            self.fail(error, "remove")
        mine = self.exchange.run(lambda: self._messages.remove(routed))
        everywhere = self.exchange.gather(mine)
        return {name: sum(part.get(name, 0) for part in everywhere) for name in ids}

    def latest_time(self, time: float | None) -> int:
        own = self.exchange.agree(lambda: Shards.latest_time(self, time))
        return max(int(time) for time in self.exchange.gather(own))

    def evict_part(self, now: float, *, parts: int, start: float | None = None) -> dict[str, Tensor]:
        # It runs after the updates in progress.
        return self.exchange.run(lambda: Shards.evict_part(self, now, parts=parts, start=start))

    def scan(self, table: str, chunk_size: int = 65536) -> Iterator[Chunk]:
        # For the rows of this rank.
        return self._own.scan(table, chunk_size)

    def restore(self, table: str, chunk: Chunk) -> None:
        # Writes the rows that this rank owns; every rank may pass all rows.
        router = self.router(table)
        self.checks[table].chunk(chunk)
        owned = router.owner(chunk.ids) == self.rank
        self._own.restore(table, chunk if bool(owned.all()) else chunk.select(owned))

    def clear(self) -> None:
        """Remove all rows of this rank; every rank must call it."""
        self.flush()
        self._own.clear()

    def reserve(self, rows: Mapping[str, int]) -> None:
        # `rows` counts the rows of all ranks, and each rank reserves its share.
        self._own.reserve(row_shares(self, rows, self.world_size))

    def each_part(
        self, function: Callable[..., Result], *args: Any, background: bool = False
    ) -> list[Result]:
        # The part of this rank. Not a collective call.
        check_function(function)
        return [function(self._part, *args)]

    # ---- touched rows, stats: of this rank

    def track(self, consumer: str) -> None:
        self._own.track(consumer)

    def untrack(self, consumer: str) -> None:
        self._own.untrack(consumer)

    def drain_touched(self, consumer: str) -> dict[str, tuple[Tensor, Tensor]]:
        return self._own.drain_touched(consumer)

    def mark_touched(self, consumer: str, ids: Ids) -> None:
        numbers = self._own.consumer_numbers(consumer)
        for name, x in self.preparer.checked(ids).items():
            owned = x[self.router(name).owner(x) == self.rank]
            self._own.engines[name].mark(numbers[name], owned)

    def stats(self) -> dict[str, TableStats]:
        return self._own.stats()

    def memory(self) -> dict[str, MemoryUse]:
        return self._own.memory()
