"""CudaEngineGroup: the hot calls over all tables of one LocalShards, one set of launches per kind of table.

Tables with equal optimizers, precisions and padded dims share launches; see row_layout.py. The ids of such
tables are concatenated once, in `find`, and the result is kept with the row numbers, so that `pool` and
`update` do not concatenate again.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.library import span
from megalith.ops.pooling import Bags, Pooling
from megalith.table.engines.contract import Engine
from megalith.table.engines.cuda.engine import CudaEngine, FoundBy
from megalith.table.engines.cuda.graphs import RecordedCalls, SearchSlots
from megalith.table.engines.cuda.launch_group import LaunchGroup, RowSearch
from megalith.table.engines.cuda.pooling_plans import (
    Cut,
    PoolingPlan,
    PoolingPlans,
    TablePart,
    on_device,
    waves,
)
from megalith.table.engines.cuda.row_layout import launch_kind
from megalith.table.engines.cuda.streams import hold
from megalith.table.engines.cuda.updates import Gradients, TableUpdate, stage_updates
from megalith.table.engines.group import EngineGroup
from megalith.table.engines.shard_capacity import check_capacity
from megalith.table.table_data import FoundRows, Update


class JoinedRows(NamedTuple):
    """Ids and rows of the tables of a launch group, one table after another."""

    ids: Tensor
    search: RowSearch
    sizes: list[int]


class SharedLaunches:
    """The tables of one kind."""

    def __init__(self, engines: Sequence[CudaEngine]) -> None:
        self.engines = list(engines)
        self.names = [engine.name for engine in engines]
        one = len(self.engines) == 1  # rows that its engine found are then known here
        self.group = self.engines[0].group if one else LaunchGroup([engine.table for engine in engines])
        self.plans = PoolingPlans()
        self.recorded = RecordedCalls(self.group)
        self.slots = SearchSlots(self.group)
        self.limited = [engine for engine in engines if engine.config.capacity is not None]
        self.active = any(engine.policies.active for engine in engines)
        self._tiered = [engine for engine in engines if engine.tier is not None]
        self._none = torch.empty(0, dtype=torch.int64, device=engines[0].device)

    def columns(self, ids: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the ids of all tables."""
        # ids: int64 [n] by table; returns: int64 [n] of each table, none for a table that does not occur.
        found = [ids.get(name, self._none) for name in self.names]
        hold(found)
        return found

    def search(
        self,
        columns: list[Tensor],
        sizes: list[int],
        *,
        counted: bool = True,
        fetched: Collection[CudaEngine] = (),
    ) -> JoinedRows:
        """Find the rows of ids; those in host memory move to the device."""
        ids = columns[0] if len(columns) == 1 else torch.cat(columns)
        found = self.group.find(ids, sizes)
        if self._tiered:
            for engine, own, rows in zip(self.engines, columns, found.rows.split(sizes), strict=True):
                if engine not in fetched:
                    engine.fetch(own, rows, counted=counted)
        return JoinedRows(ids, found, sizes)

    def find(self, ids: Mapping[str, Tensor]) -> tuple[JoinedRows, dict[str, FoundRows]]:
        """Find the rows of ids."""
        # ids: int64 [n] by table.
        columns = self.columns(ids)
        joined = self.search(columns, [column.numel() for column in columns])
        return joined, self._noted(ids, joined)

    def find_and_pool(
        self, ids: Mapping[str, Tensor], plan: PoolingPlan, bags: Sequence[Bags], outputs: Sequence[Tensor]
    ) -> dict[str, FoundRows] | None:
        """Find rows and reduce them into outputs, with launches that are recorded for later calls."""
        # ids: int64 [n] by table.
        if any(engine.fetches for engine in self._tiered):
            return None
        columns = self.columns(ids)
        sizes = [column.numel() for column in columns]
        slot = self.slots.find(sizes) if sum(sizes) else None
        if slot is None:
            return None
        search = slot.take()
        torch.cat(columns, out=slot.ids)
        addresses = plan.output_addresses(bags, outputs)
        aligned = [plan.is_aligned(cut, addresses) for cut in plan.launches]
        # A part has an even number of fields, so each launch reads aligned descriptors: Triton compiles a
        # kernel once more for those that are not.
        fields = [plan.fill(cut, bags, addresses) for cut in plan.launches]
        written = slot.write_fields([x for own in fields for x in own])

        def launch() -> None:
            search.missing.zero_()
            self.group.launch_find(slot.ids, sizes, search)
            parts = written.split([len(own) for own in fields])
            for cut, wide, part in zip(plan.launches, aligned, parts, strict=True):
                plan.launch(cut, wide, part, slot.ids, search)

        self.recorded.run(("pool", id(slot), id(plan), *aligned), launch)
        return self._noted(ids, JoinedRows(slot.ids, search, sizes))

    def _noted(self, ids: Mapping[str, Tensor], joined: JoinedRows) -> dict[str, FoundRows]:
        """Return the rows of each table, with how they were found."""
        by = FoundBy(self.group, [engine.writes for engine in self.engines], *joined)
        parts = zip(self.names, self.engines, joined.search.rows.split(joined.sizes), strict=True)
        return {name: engine.note_found(rows, by) for name, engine, rows in parts if name in ids}

    def joined(self, ids: Mapping[str, Tensor], found: Mapping[str, FoundRows]) -> JoinedRows:
        """Return ids and current rows of all tables."""
        # ids: int64 [n] by table.
        columns = self.columns(ids)
        sizes = [column.numel() for column in columns]
        kept: FoundBy | None = None
        for number, (engine, size) in enumerate(zip(self.engines, sizes, strict=True)):
            if size:
                by = engine.known(found.get(engine.name), self.group, number)
                if by is None or (kept is not None and by is not kept) or by.sizes != sizes:
                    unused = ids.keys().isdisjoint(found)
                    fetched = [e for e in self._tiered if e.known(found.get(e.name), e.group) is not None]
                    return self.search(columns, sizes, counted=unused, fetched=fetched)
                kept = by
        return self.search(columns, sizes) if kept is None else JoinedRows(*kept[2:])


class PlannedLaunch(NamedTuple):
    """One launch of a pooling over several kinds of tables."""

    number: int
    plan: PoolingPlan
    cut: Cut


class CudaEngineGroup(EngineGroup):
    """See `EngineGroup`."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        super().__init__(engines)
        by_kind: dict[Hashable, list[CudaEngine]] = {}
        for engine in engines.values():
            assert isinstance(engine, CudaEngine)
            by_kind.setdefault(launch_kind(engine.layout), []).append(engine)
        self._shared = [SharedLaunches(own) for own in by_kind.values()]
        self._cuda = [engine for own in by_kind.values() for engine in own]
        self._views = {engine.name for engine in self._cuda if engine.view is not None}
        self._order = self._cuda[0].order
        for engine in self._cuda[1:]:
            self._order.join(engine.order)
            engine.order = self._order
        self._launches: dict[tuple[object, ...], list[PlannedLaunch]] = {}
        self._last_ready: weakref.ref[Pooling] | None = None

    def find(self, ids: Mapping[str, Tensor]) -> dict[str, FoundRows]:
        ids = _moved(ids, self._cuda[0].device)
        with span("megalith.ids"), self._order:
            if len(ids) == 1:
                return {name: self[name].find(own) for name, own in ids.items()}
            found: dict[str, FoundRows] = {}
            for shared in self._shared:
                if any(name in ids for name in shared.names):
                    found |= shared.find(ids)[1]
            return found

    def read_blocks(
        self,
        ids: Mapping[str, Tensor],
        found: Mapping[str, FoundRows],
        counts: Tensor,
        out: Tensor,
        *,
        step: int | None = None,
    ) -> None:
        # The rows of all tables of a kind are read together, and then put in the order of the peers. Tables
        # with a view are read one after another.
        if self._views:
            super().read_blocks(ids, found, counts, out, step=step)
            return
        device = self._cuda[0].device
        ids = _moved(ids, device)
        with span("megalith.rows"), self._order:
            tables: dict[str, Tensor] = {}
            for shared in self._shared:
                own = {name: ids[name] for name in shared.names if ids[name].numel()}
                if own:
                    joined = shared.joined(own, found)
                    dims = shared.group.layout.dims
                    floats = [size * dim for size, dim in zip(joined.sizes, dims, strict=True)]
                    rows = torch.empty(sum(floats), dtype=torch.float32, device=device)
                    shared.group.read(joined.ids, joined.search, joined.sizes, rows)
                    for name, part, dim in zip(shared.names, rows.split(floats), dims, strict=True):
                        tables[name] = part.view(-1, dim)
            parts = [
                tables[name].split(own) if name in tables else None
                for name, own in zip(self._engines, counts.t().tolist(), strict=True)
            ]
            blocks = [part[peer].view(-1) for peer in range(counts.shape[0]) for part in parts if part]
            flat = torch.cat(blocks) if blocks else out[:0]
            out.copy_(flat, non_blocking=flat.device == out.device)

    def pool(
        self,
        ids: Mapping[str, Tensor],
        found: MutableMapping[str, FoundRows],
        pooling: Pooling,
        *,
        step: int | None = None,
    ) -> list[Tensor]:
        # If a table has a view, the tables are read one after another.
        device = self._cuda[0].device
        pooling = self._ready(pooling)
        ids = _moved(ids, device)
        names = [name for name, bags in pooling.bags.items() if bags]
        if not self._views.isdisjoint(names):
            outputs = pooling.new_outputs(None, device)
            for name in names:
                if name not in found:
                    found[name] = self[name].find(ids[name])
                self[name].pool_lookup(ids[name], found[name], pooling, outputs, step=step)
            return outputs
        with span("megalith.pool"), self._order:
            own = {name: ids[name] for name in names}
            plans = self._plans(own, pooling)
            absent = {name: ids[name] for name in names if name not in found}
            outputs = pooling.new_outputs(None, device)
            bags = {number: plan.bags_of(pooling) for number, plan in plans}
            joined = {}
            for number, plan in plans:
                shared = self._shared[number]
                if not any(name in absent for name in shared.names):
                    joined[number] = shared.joined(own, found)
                    continue
                new = None
                if len(plans) == 1 and len(absent) == len(own):
                    new = shared.find_and_pool(own, plan, bags[number], outputs)
                if new is not None:
                    found.update(new)
                    return outputs
                joined[number], new = shared.find(own)
                found.update({name: new[name] for name in new if name in absent})
            for launch in self._ordered(plans, names):
                rows, number = joined[launch.number], launch.number
                launch.plan.pool(launch.cut, bags[number], rows.ids, rows.search, outputs)
            return outputs

    def _ready(self, pooling: Pooling) -> Pooling:
        """Return a pooling as kernels read it; remembers the last one that needs no copy."""
        if self._last_ready is not None and self._last_ready() is pooling:
            return pooling
        ready = on_device(pooling, self._cuda[0].device)
        self._last_ready = weakref.ref(ready)
        return ready

    def _plans(self, ids: Mapping[str, Tensor], pooling: Pooling) -> list[tuple[int, PoolingPlan]]:
        """Return the plan of each kind of tables that the pooling reads; raise if it does not fit."""
        found = []
        for number, shared in enumerate(self._shared):
            if any(name in ids for name in shared.names):
                sizes = [column.numel() for column in shared.columns(ids)]
                found.append((number, shared.plans.find(shared.group, shared.names, sizes, pooling)))
        return found

    def _ordered(
        self, plans: Sequence[tuple[int, PoolingPlan]], names: Sequence[str]
    ) -> Sequence[PlannedLaunch]:
        """Return the launches of several kinds of tables, in the order of the pooling's tables."""
        if len(plans) == 1:
            number, plan = plans[0]
            return [PlannedLaunch(number, plan, cut) for cut in plan.launches]
        key = (*names, *(id(plan) for _, plan in plans))
        known = self._launches.get(key)
        if known is not None and all(launch.plan is dict(plans)[launch.number] for launch in known):
            return known
        owners: dict[int, int] = {}
        ordered: list[TablePart] = []
        for name in names:
            for number, plan in plans:
                if name in self._shared[number].names:
                    at = self._shared[number].names.index(name)
                    own = [part for part in plan.parts if part.table == at]
                    owners |= {id(part): number for part in own}
                    ordered += own
        by_number = dict(plans)
        launches = []
        for wave in waves(ordered):
            for number, plan in by_number.items():
                chosen = [part for part in wave if owners[id(part)] == number]
                launches += [PlannedLaunch(number, plan, cut) for cut in plan.cuts(chosen)]
        if len(self._launches) > 64:
            self._launches.clear()
        self._launches[key] = launches
        return launches

    def update(
        self,
        ids: Mapping[str, Tensor],
        found: Mapping[str, FoundRows],
        grads: Mapping[str, list[Tensor]],
        pooling: Pooling | None,
        update: Update,
    ) -> None:
        seen = update.occurrences
        device = self._cuda[0].device
        pooling = None if pooling is None else self._ready(pooling)
        ids = _moved(ids, device)
        # With a pooling all tables have the same list of gradients.
        distinct = {id(own): own for own in grads.values()}
        moved = {key: [_contiguous(grad, device) for grad in own] for key, own in distinct.items()}
        for engine in self._cuda:
            if engine.open_snapshot is not None and engine.name in grads:
                engine.wait_for_reader()
        with span("megalith.optimizer"), self._order:
            # What may raise comes before the first write.
            for shared in self._shared:
                for engine in shared.limited:
                    name = engine.name
                    if name in grads:
                        check_capacity(engine, ids[name], pooling, update.of(name), seen.get(name))
            writes = []
            for shared in self._shared:
                own = {name: ids[name] for name in shared.names if name in grads}
                if not own:
                    continue
                columns = shared.columns(own)
                any_step = update.of(next(iter(own)))
                updates = [
                    TableUpdate(
                        engine,
                        column,
                        update.of(name) if name in own else any_step,
                        seen.get(name),
                        name in found,
                    )
                    for engine, name, column in zip(shared.engines, shared.names, columns, strict=True)
                ]
                known = None
                if not shared.active and shared.group.layout.has_rules:
                    rows = shared.joined(own, found)
                    known = rows.ids, rows.search
                if pooling is None:
                    empty = torch.empty(0, 1, dtype=torch.float32, device=device)
                    matrices = [moved[id(grads[n])][0] if n in grads else empty for n in shared.names]
                    gradients = Gradients.of(matrices)
                else:
                    sizes = [column.numel() for column in columns]
                    plan = shared.plans.find(shared.group, shared.names, sizes, pooling)
                    gradients = plan.gradients(plan.bags_of(pooling), moved[id(grads[next(iter(own))])])
                writes.append(stage_updates(shared.group, updates, gradients, known, shared.recorded))
            for write in writes:
                write()


def _contiguous(grad: Tensor, device: torch.device) -> Tensor:
    if grad.device == device and grad.is_contiguous():
        return grad
    return grad.to(device, non_blocking=True).contiguous()


def _moved(tensors: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Tensor]:
    """Return tensors on a device: the mapping itself if all are there."""
    if all(tensor.device == device for tensor in tensors.values()):
        return tensors
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
