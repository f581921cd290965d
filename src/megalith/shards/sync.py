"""SyncShards: tables spread over the ranks of torch.distributed, ids and rows exchanged all to all.

A training step takes four exchanges whatever the number of tables: sizes, ids, rows, gradients. Ids travel
once each, gradients are summed per distinct id before they travel and across ranks where the row lies, and
each row gets one optimizer step. All ranks make the same calls in the same order; a rank without data makes
them with empty tensors. What goes over the wire is in `messages.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megalith.distributed.exchange import Exchange
from megalith.errors import InputError, RankFailedError
from megalith.ops import gather_pieces, scatter_pieces
from megalith.ops.pooling import Pooling
from megalith.routing import Router
from megalith.shards.contract import Ids, Lookup, Prepared, Rows, Shards, missing_status
from megalith.shards.joint_pooling import JointPooling, reached_mask
from megalith.shards.local import LocalShards
from megalith.shards.preparer import Preparer, SyncPrepared, make_routers
from megalith.shards.rank_messages import Asked, GradientPush, Messages, Recorder
from megalith.shards.wire import check_wire
from megalith.table import Chunk, MemoryUse, Table, TableConfig, TableStats
from megalith.table.validation import plain

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Where an object lies, as its repr tells: no two ranks agree on that."""


class SyncShards(Shards):
    """Tables by name, their rows spread over ranks. Making one is a collective call. See `Shards`.

    router: a mode, a Router, or one of either for each table; a table's own dist_type wins over a mode given
    for all. group: a process group or one-dimensional device mesh (None: the default group). wire: precision
    of what travels, one for all or {"rows": ..., "grads": ...}: "float32" (exact), "float16", "bfloat16", for
    rows also "int8". timeout: seconds of every wait. transport: see `Exchange`. push: gradients are sent and
    applied while the caller goes on; `flush` waits for them. engine, seed: as for `Table`.

    `scan`, `local`, `evict`, `drain_touched`, `stats` and `memory` concern the rows of this rank; `restore`
    and `mark_touched` take those that this rank owns. An input error on one rank raises on all, before
    anything is written.
    """

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
        try:
            self._own = LocalShards(configs, engine=engine, seed=seed)
            self.wire = check_wire(wire)
            routers = make_routers(self._own.configs, router, self.exchange.size)
        except Exception as error:
            self.exchange.gather(f"{type(error).__name__}: {error}")  # the others wait in _check_alike
            raise
        self.configs = self._own.configs
        self.local: Mapping[str, Table] = self._own.local
        self.routers = MappingProxyType(routers)
        self.push = push
        self.out_of_data = False
        """Set it when this rank has run out of data: the other ranks learn it with the next look-up."""
        self._preparer = Preparer(self.configs, self.routers)
        self._messages = Messages(self.exchange, self.local, self.wire)
        self._pushed: list[Future[None]] = []
        self._check_alike(seed)

    def _check_alike(self, seed: int) -> None:
        described = _ADDRESS.sub("", repr(dict(self.configs)))
        mine = (described, repr(dict(self.routers)), seed, self.wire)
        for rank, theirs in enumerate(self.exchange.gather(mine)):
            if isinstance(theirs, str):
                raise RankFailedError(f"SyncShards: rank {rank} could not be made: {theirs}")
            if theirs != mine:
                raise InputError(
                    f"SyncShards: rank {rank} has other tables, routers, seed or wire than rank "
                    f"{self.rank}: {theirs} and {mine}"
                )

    def __repr__(self) -> str:
        tables = ", ".join(f"{name}: {len(table)} rows here" for name, table in self.local.items())
        return f"SyncShards(rank {self.rank} of {self.world_size}, {tables})"

    def router(self, table: str) -> Router:
        """How a table's ids are spread over ranks."""
        self.check_name(table)
        return self.routers[table]

    @property
    def ranks_done(self) -> list[int]:
        """The ranks whose `out_of_data` was set when they made the last call; the same on all."""
        return self._messages.done

    @property
    def recorder(self) -> Recorder | None:
        """Is told what travels, if set: see `CommMetrics`."""
        return self._messages.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        def change() -> None:
            self._messages.recorder = recorder

        self.exchange.run(change)  # between calls, never in the midst of one

    # ---- a batch

    @property
    def preparer(self) -> Preparer:
        """See `Shards.preparer`."""
        return self._preparer

    def prepare(self, ids: Ids, *, missing_ok: bool = False) -> SyncPrepared:
        """Keeps ids once and sorts them by owner; pure. `self.preparer` does it in another process."""
        return self.preparer(ids, missing_ok=missing_ok)

    def lookup(self, ids: Ids | Prepared, *, missing_ok: bool = False) -> SyncLookup:
        """Sends ids off. Rows are fetched with the first use, or with `fetch`."""
        return self._ask("lookup", ids, missing_ok)

    def _ask(self, call: str, ids: Ids | Prepared, missing_ok: bool) -> SyncLookup:
        try:
            prepared = ids if isinstance(ids, Prepared) else self.prepare(ids, missing_ok=missing_ok)
            if not isinstance(prepared, SyncPrepared):
                raise InputError("these ids were prepared by other Shards")
        except Exception as error:
            self.abort(error, call)
            raise
        return SyncLookup(self, prepared, call)

    def abort(self, error: Exception, call: str = "lookup") -> None:
        """Tells the other ranks, at their next call, that this one failed; then raises the error."""
        done = self.out_of_data
        self.exchange.run(lambda: self._messages.ask(call, None, error, done))

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
    ) -> None:
        """See `Shards.apply_gradients`; sums over ranks. step, scale and clip_norm must be alike on all."""
        if not isinstance(lookup, Lookup):
            lookup = self._ask("apply_gradients", lookup, False)
        if not isinstance(lookup, SyncLookup) or lookup.shards is not self:
            raise InputError("this Lookup was made by other Shards")
        asked = lookup.asked
        try:
            push = self._summed(lookup, grads, pooling, step, time, scale, clip_norm)
        except Exception as error:
            lookup.refuse(error)
            raise
        prepared = lookup.prepared
        sent = self.exchange.submit(lambda: self._messages.push(asked.result(), prepared, push, None))
        if not self.push:
            return sent.result()
        self._pushed.append(sent)
        if len(self._pushed) > 1:  # one step behind, not more
            self._pushed.pop(0).result()

    def _summed(
        self,
        lookup: SyncLookup,
        grads: Mapping[str, Tensor] | Sequence[Tensor],
        pooling: Pooling | None,
        step: int,
        time: float | None,
        scale: float,
        clip_norm: float | None,
    ) -> GradientPush:
        """What to send: gradients summed per distinct id, and which ids take part."""
        lookup.check_unchanged()
        prepared = lookup.prepared
        size = int(self._messages.floats(prepared.deduped.counts).sum())
        if pooling is None:
            if not isinstance(grads, Mapping):
                raise InputError("without pooling, grads must map tables to tensors")
            pieces = []
            for name, grad in grads.items():
                self.check_name(name)
                if name not in lookup.ids:
                    raise InputError(f"table {name!r}: gradients for a table that was not looked up")
                pieces += self.local[name].check_grads(lookup.ids[name], grad, None)
            names = list(grads)
            assert prepared.deduped.offsets is not None
            offsets = [prepared.deduped.offsets[prepared.occurrences(name)] for name in names]
            flat = (
                scatter_pieces([p.contiguous() for p in pieces], offsets, size)
                if names
                else torch.zeros(size)
            )
            reached = [(prepared.occurrences(name).start, prepared.occurrences(name).stop) for name in names]
        else:
            if isinstance(grads, Mapping):
                raise InputError("with pooling, grads must be a list of one gradient per output")
            joined = lookup.joined(pooling)
            names = joined.tables
            checked = list(grads)
            if names:
                checked = self.local[names[0]].check_grads(lookup.ids[names[0]], checked, pooling)
            flat = joined.unpool(checked, size)
            reached = joined.reached
        trainable = (name for name, config in self.configs.items() if config.trainable)
        for name in names or list(trainable)[:1]:  # a rank without gradients sends these numbers too
            self.local[name].check_step(step, time, scale, clip_norm)
        lookup.use()
        return GradientPush(flat, reached_mask(prepared, reached), step, time, float(scale), clip_norm)

    def flush(self) -> None:
        """Waits for all exchanges under way and raises the errors of gradients that were pushed."""
        self.exchange.settle()
        pushed, self._pushed = self._pushed, []
        for sent in pushed:
            sent.result()

    # ---- rows

    def assign(self, rows: Rows, *, time: float | None = None) -> None:
        """See `Shards.assign`; where ranks name one id, the highest rank's stays. Of times, the latest."""
        self._write("assign", rows, time)

    def assign_add(self, rows: Rows, *, time: float | None = None) -> None:
        """See `Shards.assign_add`."""
        self._write("assign_add", rows, time)

    def _write(self, call: str, rows: Rows, time: float | None) -> None:
        try:
            for name, (ids, values) in rows.items():
                self.check_name(name)
                table = self.local[name]
                table.check_rows(table.check_ids(ids), values)
            self._check_time(time)
            prepared = self.preparer({name: ids for name, (ids, _) in rows.items()}, distinct=False)
            assert prepared.deduped.offsets is not None
            pieces = [plain(values) for _, values in rows.values()]
            offsets = [prepared.deduped.offsets[prepared.occurrences(name)] for name in rows]
            size = int(self._messages.floats(prepared.deduped.counts).sum())
            flat = scatter_pieces(pieces, offsets, size)
        except Exception as error:
            self.abort(error, call)
            raise
        self.exchange.run(lambda: self._messages.write(call, prepared, flat, time))

    def reinitialize(
        self, ids: Ids, *, time: float | None = None, missing_ok: bool = False
    ) -> dict[str, Tensor]:
        """See `Shards.reinitialize`; ids that several ranks name are created by the lowest."""
        try:
            prepared = self.preparer(ids, missing_ok=missing_ok, distinct=False)
            self._check_time(time)
        except Exception as error:
            self.abort(error, "reinitialize")
            raise
        status = self.exchange.run(lambda: self._messages.reinitialize(prepared, time))
        found = status[prepared.deduped.inverse]
        return {
            name: found[prepared.occurrences(name)] if name in prepared.ids else missing_status(column)
            for name, column in ids.items()
        }

    def _check_time(self, time: float | None) -> None:
        for table in self.local.values():
            table.check_time(time)

    def remove(self, ids: Ids) -> dict[str, int]:
        """See `Shards.remove`: how many had a row, on all ranks together."""
        try:
            prepared = self.prepare(ids)
        except Exception as error:
            self.abort(error, "remove")
            raise
        mine = self.exchange.run(lambda: self._messages.remove(prepared))
        everywhere = self.exchange.gather(mine)
        return {name: sum(part.get(name, 0) for part in everywhere) for name in ids}

    def evict(self, now: float | None = None) -> dict[str, Tensor]:
        """Applies eviction policies to this rank's rows; the ids removed here."""
        return self._own.evict(now)

    def scan(self, table: str, chunk_size: int = 65536) -> Iterator[Chunk]:
        """Walks this rank's rows of one table."""
        return self._own.scan(table, chunk_size)

    def restore(self, table: str, chunk: Chunk) -> None:
        """Writes back those of the rows that this rank owns; every rank may be given all."""
        owned = self.router(table).owner(chunk.ids) == self.rank
        self._own.restore(table, chunk if bool(owned.all()) else chunk.select(owned))

    def clear(self) -> None:
        """Empties every table of this rank; every rank must do it."""
        self.flush()
        self._own.clear()

    def reserve(self, rows: Mapping[str, int]) -> None:
        """Makes room for this rank's share: {table: rows on all ranks}."""
        self._own.reserve({name: -(-n // self.world_size) for name, n in rows.items()})

    # ---- touched rows, stats: of this rank

    def track(self, consumer: str) -> None:
        """See `Shards.track`."""
        self._own.track(consumer)

    def untrack(self, consumer: str) -> None:
        """See `Shards.untrack`."""
        self._own.untrack(consumer)

    def drain_touched(self, consumer: str) -> dict[str, tuple[Tensor, Tensor]]:
        """See `Shards.drain_touched`."""
        return self._own.drain_touched(consumer)

    def mark_touched(self, consumer: str, ids: Ids) -> None:
        """See `Shards.mark_touched`."""
        owned = {name: x[self.router(name).owner(x) == self.rank] for name, x in ids.items()}
        self._own.mark_touched(consumer, owned)

    def stats(self) -> dict[str, TableStats]:
        """See `Shards.stats`."""
        return self._own.stats()

    def memory(self) -> dict[str, MemoryUse]:
        """See `Shards.memory`."""
        return self._own.memory()


class SyncLookup(Lookup):
    """A look-up over ranks: ids are on their way at once, rows with the first use or `fetch`.

    prepared: the distinct ids, where they went, and each occurrence's place. asked: what other ranks want of
    this one, once known. source: the rows received, flat, in the order of the distinct ids.
    """

    prepared: SyncPrepared
    asked: Future[Asked]

    def __init__(self, shards: SyncShards, prepared: SyncPrepared, call: str) -> None:
        super().__init__(prepared.ids)
        self.shards = shards
        self.prepared = prepared
        done = shards.out_of_data
        messages = shards._messages
        self.asked = shards.exchange.submit(lambda: messages.ask(call, prepared, None, done))
        self._rows: Future[Tensor] | None = None
        self._joined: tuple[Pooling, JointPooling] | None = None
        self._given_up = False

    def wait_ids(self) -> None:
        """See `Lookup.wait_ids`."""
        self.asked.result()

    def give_up(self, error: Exception) -> None:
        """See `Lookup.give_up`."""
        if not (self.used or self._given_up or self.asked.exception()):
            self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Takes part in the exchange of gradients to say that this rank has none."""
        self._given_up = True
        asked, prepared, messages = self.asked, self.prepared, self.shards._messages
        self.shards.exchange.run(lambda: messages.push(asked.result(), prepared, None, error))

    def fetch(self) -> None:
        """Starts bringing the rows as they are now; `wait` returns when they are there."""
        if self._rows is None:
            asked, prepared, messages = self.asked, self.prepared, self.shards._messages
            self._rows = self.shards.exchange.submit(lambda: messages.send_rows(asked.result(), prepared))

    def wait(self) -> None:
        """See `Lookup.wait`."""
        _ = self.source

    @property
    def source(self) -> Tensor:
        """The rows received, float32, flat."""
        self.asked.result()
        self.fetch()
        assert self._rows is not None
        return self._rows.result()

    @property
    def out_of_data(self) -> list[int]:
        """The ranks that had run out of data when they made this look-up."""
        return self.asked.result().done

    def gather(self, table: str) -> Tensor:
        """One table's rows in input order."""
        offsets = self.prepared.deduped.offsets
        assert offsets is not None
        index = offsets[self.prepared.occurrences(table)]
        return gather_pieces(self.source, [index], [self.shards.configs[table].dim])[0]

    def pool(self, pooling: Pooling) -> list[Tensor]:
        """See `Lookup.pool`."""
        return self.joined(pooling).pool(self.source)

    def joined(self, pooling: Pooling) -> JointPooling:
        """The pooling over all tables' occurrences in one list."""
        if self._joined is None or self._joined[0] is not pooling:
            dims = {name: config.dim for name, config in self.shards.configs.items()}
            self._joined = (pooling, JointPooling(pooling, self.prepared, dims))
        return self._joined[1]
