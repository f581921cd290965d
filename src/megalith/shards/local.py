"""LocalShards: all tables of a model in this process.

It validates the input of a call once, for all tables, and then calls the `EngineGroup` of its tables.
`OwnerRows` is what the owner of rows does for other processes: it reads requested rows and applies received
gradients. Ranks and servers own rows in the same way; they differ in how requests arrive.
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.library import span
from megalith.ops.pooling import Pooling
from megalith.shards.contract import (
    Ids,
    Result,
    Rows,
    Shards,
    ShardsPart,
    check_configs,
    check_function,
    missing_status,
    row_shares,
)
from megalith.shards.gradients import Gradients, sum_received
from megalith.shards.lookup import Lookup, LookupSeries, PreparedIds
from megalith.shards.preparer import LocalPreparer
from megalith.table import Chunk, MemoryUse, Table, TableConfig, TableStats
from megalith.table.engines import engine_group
from megalith.table.engines.group import Found
from megalith.table.table_data import FoundRows, Update
from megalith.table.validation import are_plain_ids, check_by_table, check_pooling


class LocalShards(Shards):
    """All tables by name, in this process. See `Shards`.

    Args:
        configs: One TableConfig per table.
        engine: As for `Table`.
        seed: As for `Table`.
        num_shards: As for `Table`.

    Attributes:
        engines: The engines of the tables. They take validated input only.
        device: Where the rows are.

    Raises:
        InputError: Two tables have the same name, or a config or option is wrong.
    """

    def __init__(
        self, configs: Sequence[TableConfig], *, engine: str = "cpu", seed: int = 0, num_shards: int = 1
    ) -> None:
        self.configs = MappingProxyType(check_configs(configs))
        self.local: Mapping[str, Table] = MappingProxyType(
            {
                name: Table(c, engine=engine, seed=seed, num_shards=num_shards)
                for name, c in self.configs.items()
            }
        )
        self.checks = MappingProxyType({name: table.checks for name, table in self.local.items()})
        self.engines = engine_group({name: table.engine_impl for name, table in self.local.items()})
        views = {name: table.engine_impl.view for name, table in self.local.items()}
        self.stepwise = [name for name, view in views.items() if view is not None and view.depends_on_step]
        devices = {table.engine_impl.device for table in self.local.values()}
        self.device = devices.pop() if devices else torch.device("cpu")
        self.preparer = LocalPreparer(self.configs, self.device)
        self._kept: dict[str, Any] = {}

    def __repr__(self) -> str:
        tables = ", ".join(f"{name}: {len(table)} rows" for name, table in self.local.items())
        return f"LocalShards({tables})"

    # ---- a batch

    def _prepared(self, ids: Ids | PreparedIds, missing_ok: bool) -> PreparedIds:
        if not isinstance(ids, PreparedIds):
            return self.prepare(ids, missing_ok=missing_ok)
        plain = self.local.keys() >= ids.ids.keys() and are_plain_ids(ids.ids.values(), self.device)
        # Made by hand or by other shards, or on the CPU for tables on a GPU.
        return ids if plain else self.prepare(ids.ids)

    def _lookup(
        self, prepared: PreparedIds, *, series: LookupSeries | None = None, step: int | None = None
    ) -> LocalLookup:
        # Rows are found and read when they are used. A series has no effect.
        ids = prepared.ids
        if any(x.device != self.device for x in ids.values()):
            ids = {name: x.to(self.device, non_blocking=True) for name, x in ids.items()}
        return LocalLookup(self, ids, step)

    def _look_up_to_update(self, ids: Ids, step: int) -> Lookup:
        return self.lookup(ids, step=step)

    def _update(
        self,
        lookup: Lookup,
        gradients: Mapping[str, list[Tensor]],
        pooling: Pooling | None,
        update: Update,
        wait: bool,
    ) -> None:
        assert isinstance(lookup, LocalLookup)
        rates = self._rates(gradients.keys(), update.step)
        time = int(clock.time()) if update.time is None else update.time  # the same for all tables
        lookup.use()
        self.engines.update(
            lookup.ids, lookup.found, gradients, pooling, update._replace(rates=rates, time=time)
        )

    def flush(self) -> None:
        # Local updates are complete when they return.
        ...

    # ---- rows

    def assign(self, rows: Rows, *, time: float | None = None) -> None:
        self._write(rows, add=False, time=time)

    def assign_add(self, rows: Rows, *, time: float | None = None) -> None:
        self._write(rows, add=True, time=time)

    def _write(self, rows: Rows, *, add: bool, time: float | None) -> None:
        check_by_table(rows, "rows", "{'user': (ids, rows)}")
        checked = {}
        for name in self.known(rows, missing_ok=False):
            checks = self.checks[name]
            checked[name] = *checks.ids_and_rows(rows[name]), checks.time(time)
        for name, (ids, values, seconds) in checked.items():
            self.engines[name].assign(ids, values, add=add, time=seconds)

    def reinitialize(
        self, ids: Ids, *, time: float | None = None, missing_ok: bool = False
    ) -> dict[str, Tensor]:
        checked = self.prepare(ids, missing_ok=missing_ok).ids
        seconds = {name: self.checks[name].time(time) for name in checked}
        return {
            name: self.engines[name].reinitialize(checked[name], seconds[name])
            if name in checked
            else missing_status(ids[name])
            for name in ids
        }

    def remove(self, ids: Ids) -> dict[str, int]:
        return {name: self.engines[name].remove(x) for name, x in self.prepare(ids).ids.items()}

    def scan(self, table: str, chunk_size: int = 65536) -> Iterator[Chunk]:
        self.check_name(table)
        return self.local[table].scan(chunk_size)

    def restore(self, table: str, chunk: Chunk) -> None:
        self.check_name(table)
        self.local[table].restore(chunk)

    def clear(self) -> None:
        for table in self.local.values():
            table.clear()

    def reserve(self, rows: Mapping[str, int]) -> None:
        for name, n in row_shares(self, rows, 1).items():
            self.engines[name].reserve(n)

    def each_part(
        self, function: Callable[..., Result], *args: Any, background: bool = False
    ) -> list[Result]:
        # There is one part, in this process.
        check_function(function)
        return [function(ShardsPart(self, self.rank, self.world_size, self._kept), *args)]

    # ---- touched rows, stats

    def track(self, consumer: str) -> None:
        for table in self.local.values():
            table.track(consumer)

    def untrack(self, consumer: str) -> None:
        self.consumer_numbers(consumer)  # raises before the first table changes
        for table in self.local.values():
            table.untrack(consumer)

    def drain_touched(self, consumer: str) -> dict[str, tuple[Tensor, Tensor]]:
        self.consumer_numbers(consumer)  # raises before the first table changes
        return {name: table.drain_touched(consumer) for name, table in self.local.items()}

    def mark_touched(self, consumer: str, ids: Ids) -> None:
        numbers = self.consumer_numbers(consumer)
        for name, x in self.prepare(ids).ids.items():
            self.engines[name].mark(numbers[name], x)

    def consumer_numbers(self, consumer: str) -> dict[str, int]:
        """Return the number under which the engine of each table knows a consumer.

        Args:
            consumer: The name of the consumer.

        Returns:
            The numbers by table.

        Raises:
            UnknownNameError: Some table does not have this consumer.
        """
        return {name: table.consumer_number(consumer) for name, table in self.local.items()}

    def stats(self) -> dict[str, TableStats]:
        return {name: table.stats() for name, table in self.local.items()}

    def memory(self) -> dict[str, MemoryUse]:
        return {name: table.memory() for name, table in self.local.items()}


class LocalLookup(Lookup):
    """A lookup in local tables: it reads rows directly from the tables' storage, and keeps row numbers.

    Args:
        shards: The shards that make it.
        ids: int64 [n] by table, validated.
        step: See `Lookup`.

    Attributes:
        engines: The tables' engines.
        found: The rows of the ids by table, once they were read.
        pooled: The pooling that was used last, which therefore fits the ids.
    """

    def __init__(self, shards: LocalShards, ids: Mapping[str, Tensor], step: int | None = None) -> None:
        super().__init__(shards, ids, step)
        self.engines = shards.engines
        self.found = Found()
        self.pooled: Pooling | None = None

    def wait(self) -> None:
        # Local rows are available at once.
        ...

    def gather(self, table: str) -> Tensor:
        # Reads the rows as they are now.
        self.check_table(table)
        return self.engines.gather(table, self.ids, self.found, step=self.step)

    def pool(self, pooling: Pooling) -> list[Tensor]:
        # Each engine validates the pooling's bags of its table.
        self._check_tables(pooling)
        outputs = self.engines.pool(self.ids, self.found, pooling, step=self.step)
        self.pooled = pooling
        return outputs

    def _check_tables(self, pooling: Pooling) -> None:
        check_pooling(pooling)
        for name, bags in pooling.bags.items():
            if bags and name not in self.ids:
                raise InputError(f"table {name!r}: pooled, but it was not looked up")

    def check_fits(self, pooling: Pooling) -> None:
        if self.pooled is pooling:  # it was pooled, so it is known to fit
            return
        self._check_tables(pooling)
        for name, ids in self.ids.items():
            engine = self.engines[name]
            check = pooling.check if engine.device.type == "cpu" else pooling.check_shapes
            check(name, ids.numel(), engine.dim)


class OwnerRows:
    """The rows of one owner, for requests of several sources.

    In all methods `counts` is the number of ids, int64 [sources, tables].
    """

    def __init__(self, shards: LocalShards) -> None:
        self._engines = shards.engines
        self._names = list(shards.local)

    def read(
        self, ids: Mapping[str, Tensor], counts: Tensor, flat: Tensor, step: int | None
    ) -> dict[str, FoundRows]:
        """Read rows into a buffer, by source, then table."""
        # ids: int64 [n] per table, the ids of all sources concatenated; flat: float32 [size], to fill.
        found = self._engines.find({name: own for name, own in ids.items() if own.numel()})
        self._engines.read_blocks(ids, found, counts, flat, step=step)
        return found

    def update(
        self,
        received: Mapping[str, Gradients],
        counts: Tensor,
        update: Update,
        found: Mapping[str, FoundRows],
    ) -> None:
        """Sum the gradients of all sources by a tree, and make one optimizer step per distinct id."""
        # received: per table the gradients of all sources, concatenated.
        ids: dict[str, Tensor] = {}
        grads: dict[str, list[Tensor]] = {}
        occurrences: dict[str, Tensor] = {}
        known: dict[str, FoundRows] = {}
        sources = counts.t().tolist()
        for t, name in enumerate(self._names):
            one = received.get(name)
            if one is None or not one.ids.numel():
                continue
            own = one
            if one.mask is not None or len(sources[t]) > 2:
                with span("megalith.gradients"):
                    own = sum_received(one, sources[t])
                if not own.ids.numel():
                    continue
            ids[name], grads[name] = own.ids, [own.values]
            if own.counts is not None:
                occurrences[name] = own.counts
            if own.ids is one.ids and name in found:
                known[name] = found[name]
        self._engines.update(ids, known, grads, None, update._replace(occurrences=occurrences))
