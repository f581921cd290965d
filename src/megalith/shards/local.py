"""LocalShards: all tables of a model in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from megalith.errors import InputError
from megalith.ops.pooling import Pooling
from megalith.shards.contract import (
    Ids,
    Lookup,
    Prepared,
    Rows,
    Shards,
    check_configs,
    missing_status,
)
from megalith.table import Chunk, MemoryUse, Table, TableConfig, TableStats
from megalith.table.validation import Checks


class LocalShards(Shards):
    """Tables by name, in this process. See `Shards`.

    configs: one TableConfig per table. engine, seed: as for `Table`.
    """

    def __init__(self, configs: Sequence[TableConfig], *, engine: str = "cpu", seed: int = 0) -> None:
        self.configs = MappingProxyType(check_configs(configs))
        self.local: Mapping[str, Table] = MappingProxyType(
            {name: Table(c, engine=engine, seed=seed) for name, c in self.configs.items()}
        )

    def __repr__(self) -> str:
        tables = ", ".join(f"{name}: {len(table)} rows" for name, table in self.local.items())
        return f"LocalShards({tables})"

    # ---- a batch

    @property
    def preparer(self) -> LocalPreparer:
        """See `Shards.preparer`."""
        return LocalPreparer(self.configs)

    def prepare(self, ids: Ids, *, missing_ok: bool = False) -> Prepared:
        """Checks ids; a local look-up needs nothing else ahead."""
        names = self.known(ids, missing_ok)
        return Prepared({name: self.local[name].check_ids(ids[name]) for name in names})

    def lookup(self, ids: Ids | Prepared, *, missing_ok: bool = False) -> LocalLookup:
        """Finds rows; they are read when asked for."""
        if not isinstance(ids, Prepared):
            ids = self.prepare(ids, missing_ok=missing_ok)
        self.known(ids.ids, missing_ok=False)
        return LocalLookup(self.local, ids.ids)

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
        """See `Shards.apply_gradients`."""
        if not isinstance(lookup, Lookup):
            lookup = self.lookup(lookup)
        if not isinstance(lookup, LocalLookup) or lookup.tables is not self.local:
            raise InputError("this Lookup was made by other Shards")
        lookup.check_unchanged()
        checked = self._check_gradients(lookup, grads, pooling)
        when = self._check_time(time)
        steps = {name: self.local[name].check_step(step, when, scale, clip_norm) for name in checked}
        lookup.use()
        for name, gradients in checked.items():
            rows, epoch = lookup.found[name]
            self.local[name].update_checked(
                rows, lookup.ids[name], gradients, pooling, steps[name], epoch=epoch
            )

    def _check_time(self, time: float | None) -> int | None:
        """One time for all tables of a call."""
        for table in self.local.values():
            return table.check_time(time)
        return None

    def _check_gradients(
        self,
        lookup: LocalLookup,
        grads: Mapping[str, Tensor] | Sequence[Tensor],
        pooling: Pooling | None,
    ) -> dict[str, list[Tensor]]:
        if pooling is None:
            if not isinstance(grads, Mapping):
                raise InputError("without pooling, grads must map tables to tensors")
            for name in grads:
                self.check_name(name)
                if name not in lookup.ids:
                    raise InputError(f"table {name!r}: gradients for a table that was not looked up")
            return {
                name: self.local[name].check_grads(lookup.ids[name], grad, None)
                for name, grad in grads.items()
            }
        if isinstance(grads, Mapping):
            raise InputError("with pooling, grads must be a list of one gradient per output")
        names = [name for name in lookup.ids if pooling.of(name)]
        if lookup.pooled is not pooling:  # what it has pooled is known to fit
            lookup.check(pooling)
        if not names:
            return {}
        first = self.local[names[0]].check_grads(lookup.ids[names[0]], grads, pooling)
        return dict.fromkeys(names, first)

    def flush(self) -> None:
        """Local updates are done when they return."""

    # ---- rows

    def assign(self, rows: Rows, *, time: float | None = None) -> None:
        """See `Shards.assign`."""
        self._check_rows(rows, time)
        for name, (ids, values) in rows.items():
            self.local[name].assign(ids, values, time=time)

    def assign_add(self, rows: Rows, *, time: float | None = None) -> None:
        """See `Shards.assign_add`."""
        self._check_rows(rows, time)
        for name, (ids, values) in rows.items():
            self.local[name].assign_add(ids, values, time=time)

    def _check_rows(self, rows: Rows, time: float | None) -> None:
        for name, (ids, values) in rows.items():
            self.check_name(name)
            table = self.local[name]
            table.check_rows(table.check_ids(ids), values)
            table.check_time(time)

    def reinitialize(
        self, ids: Ids, *, time: float | None = None, missing_ok: bool = False
    ) -> dict[str, Tensor]:
        """See `Shards.reinitialize`."""
        names = self.known(ids, missing_ok)
        checked = {name: self.local[name].check_ids(ids[name]) for name in names}
        return {
            name: self.local[name].reinitialize(checked[name], time=time)
            if name in checked
            else missing_status(ids[name])
            for name in ids
        }

    def remove(self, ids: Ids) -> dict[str, int]:
        """See `Shards.remove`."""
        checked = self.prepare(ids).ids
        return {name: self.local[name].remove(x) for name, x in checked.items()}

    def evict(self, now: float | None = None) -> dict[str, Tensor]:
        """See `Shards.evict`."""
        return {name: table.evict(now) for name, table in self.local.items()}

    def scan(self, table: str, chunk_size: int = 65536) -> Iterator[Chunk]:
        """See `Shards.scan`."""
        self.check_name(table)
        return self.local[table].scan(chunk_size)

    def restore(self, table: str, chunk: Chunk) -> None:
        """See `Shards.restore`."""
        self.check_name(table)
        self.local[table].restore(chunk)

    def clear(self) -> None:
        """See `Shards.clear`."""
        for table in self.local.values():
            table.clear()

    def reserve(self, rows: Mapping[str, int]) -> None:
        """See `Shards.reserve`."""
        for name in self.known(rows, missing_ok=False):
            self.local[name].reserve(rows[name])

    # ---- touched rows, stats

    def track(self, consumer: str) -> None:
        """See `Shards.track`."""
        for table in self.local.values():
            table.track(consumer)

    def untrack(self, consumer: str) -> None:
        """See `Shards.untrack`."""
        self._check_consumer(consumer)
        for table in self.local.values():
            table.untrack(consumer)

    def drain_touched(self, consumer: str) -> dict[str, tuple[Tensor, Tensor]]:
        """See `Shards.drain_touched`."""
        self._check_consumer(consumer)
        return {name: table.drain_touched(consumer) for name, table in self.local.items()}

    def mark_touched(self, consumer: str, ids: Ids) -> None:
        """See `Shards.mark_touched`."""
        self._check_consumer(consumer)
        checked = self.prepare(ids).ids
        for name, x in checked.items():
            self.local[name].mark_touched(consumer, x)

    def _check_consumer(self, consumer: str) -> None:
        """Raises before the first table is touched if some table does not know the consumer."""
        for table in self.local.values():
            table.check_consumer(consumer)

    def stats(self) -> dict[str, TableStats]:
        """See `Shards.stats`."""
        return {name: table.stats() for name, table in self.local.items()}

    def memory(self) -> dict[str, MemoryUse]:
        """See `Shards.memory`."""
        return {name: table.memory() for name, table in self.local.items()}


class LocalPreparer:
    """Checks ids: what `LocalShards.prepare` does, without the tables."""

    def __init__(self, configs: Mapping[str, TableConfig]) -> None:
        self._checks = {name: Checks(config) for name, config in configs.items()}

    def __call__(self, ids: Ids) -> Prepared:
        """ids: int64 or int32 [n] by table."""
        return Prepared({name: self._checks[name].check_ids(x) for name, x in ids.items()})


class LocalLookup(Lookup):
    """A look-up in local tables: row numbers, read straight from the tables' own storage."""

    def __init__(self, tables: Mapping[str, Table], ids: Mapping[str, Tensor]) -> None:
        super().__init__(ids)
        self.tables = tables
        self.found = {name: tables[name].find_with_epoch(x) for name, x in ids.items()}
        self.pooled: Pooling | None = None

    def wait(self) -> None:
        """Local rows are there at once."""

    def gather(self, table: str) -> Tensor:
        """One table's rows as they are now."""
        rows, epoch = self.found[table]
        gathered: Tensor = self.tables[table].read(rows, self.ids[table], epoch=epoch)
        return gathered

    def pool(self, pooling: Pooling) -> list[Tensor]:
        """Reads each table's rows straight into the outputs; each table checks its part."""
        self.check_tables(pooling)
        outputs = pooling.new_outputs()
        for name in filter(pooling.of, pooling.bags):
            rows, epoch = self.found[name]
            self.tables[name].read(rows, self.ids[name], pooling, epoch=epoch, out=outputs)
        self.pooled = pooling
        return outputs

    def check_tables(self, pooling: Pooling) -> None:
        """Raises InputError if a table is pooled that was not looked up."""
        for name in pooling.bags:
            if pooling.of(name) and name not in self.ids:
                raise InputError(f"table {name!r}: pooled, but it was not looked up")

    def check(self, pooling: Pooling) -> None:
        """Raises InputError unless the pooling fits what was looked up."""
        self.check_tables(pooling)
        for name, ids in self.ids.items():
            pooling.check(name, ids.numel(), self.tables[name].dim)
