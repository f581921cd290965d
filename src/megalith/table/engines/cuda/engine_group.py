"""CudaEngineGroup: the hot calls over all tables of one LocalShards, one set of launches per kind of table.

Tables with equal optimizers, precisions and padded dims share launches; see row_layout.py. What one search
found for all tables stays together (`FoundTogether`), so that `pool` and `update` of a lookup search once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from functools import partial

import torch
from torch import Tensor

from megalith.library import span
from megalith.ops.pooling import Bags, OutputSlice, Pooling
from megalith.table.engines.contract import Engine
from megalith.table.engines.cuda.engine import CudaEngine, found_by
from megalith.table.engines.cuda.graphs import RECENT, FoundTogether, SearchSlot, SearchSlots
from megalith.table.engines.cuda.launch_group import JoinedRows, LaunchGroup
from megalith.table.engines.cuda.pooling_plans import (
    PlannedPooling,
    PoolingPlan,
    PoolingPlans,
    Room,
    TableKind,
    are_aligned,
)
from megalith.table.engines.cuda.row_layout import launch_kind
from megalith.table.engines.cuda.streams import hold, is_captured
from megalith.table.engines.cuda.updates import GradientSource, SharedLaunches
from megalith.table.engines.group import EngineGroup, Found
from megalith.table.engines.shard_capacity import check_capacity
from megalith.table.table_data import FoundRows, Update

MAX_POOLINGS = 16


class CudaEngineGroup(EngineGroup):
    """See `EngineGroup`."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        super().__init__(engines)
        by_kind: dict[Hashable, list[CudaEngine]] = {}
        for engine in engines.values():
            assert isinstance(engine, CudaEngine)
            by_kind.setdefault(launch_kind(engine.layout), []).append(engine)
        # Rows that an engine of its own kind found are known here, because it shares its launches.
        self._shared = [
            own[0].launches if len(own) == 1 else SharedLaunches(own, LaunchGroup([e.table for e in own]))
            for own in by_kind.values()
        ]
        self._cuda = [engine for own in by_kind.values() for engine in own]
        self._device = self._cuda[0].device
        self._views = {engine.name for engine in self._cuda if engine.view is not None}
        self._limited = [engine for engine in self._cuda if engine.config.capacity is not None]
        self._tiered = [engine for engine in self._cuda if engine.tier is not None]
        self._order = self._cuda[0].order
        for engine in self._cuda[1:]:
            self._order.join(engine.order)
            engine.order = self._order
        self._by_group = {shared.group: shared for shared in self._shared}
        self._plans = PoolingPlans([TableKind(shared.group, shared.names) for shared in self._shared])
        self._slots = SearchSlots()
        # Of `gather`
        self._poolings: dict[tuple[tuple[str, int], ...], Pooling] = {}
        self._recent: deque[tuple[tuple[str, int], ...]] = deque(maxlen=RECENT)

    def find(self, ids: Mapping[str, Tensor]) -> Found:
        ids = self._moved(ids)
        found = Found()
        with span("megalith.ids"), self._order:
            if len(ids) == 1:
                found.update({name: self[name].find(own) for name, own in ids.items()})
                return found
            used = [shared for shared in self._shared if not ids.keys().isdisjoint(shared.names)]
            rows = [shared.find(ids, shared.sizes_of(ids)) for shared in used]
            groups = [shared.group for shared in used]
            found.joint = FoundTogether(self._order.writes, groups, rows)
            for shared, own in zip(used, rows, strict=True):
                parts = zip(shared.engines, own.search.rows.split(own.sizes), strict=True)
                found.update({e.name: e.note_found(part, found.joint) for e, part in parts if e.name in ids})
            return found

    def _known(
        self, shared: SharedLaunches, found: Mapping[str, FoundRows], sizes: list[int]
    ) -> JoinedRows | None:
        """Return the rows of the tables of a kind, if a search of all of them is current."""
        joint = self._current(found)
        if joint is None:  # entries of what `find` returned
            by = [found_by(found.get(name)) for name, size in zip(shared.names, sizes, strict=True) if size]
            joint = by[0] if by and by.count(by[0]) == len(by) else None
        if joint is None or joint.writes != self._order.writes:
            return None
        return joint.rows(shared.group, sizes)

    def _current(self, found: Mapping[str, FoundRows]) -> FoundTogether | None:
        """Return what a search found for several tables together, if no table was written since."""
        joint: FoundTogether | None = getattr(found, "joint", None)
        return joint if joint is not None and not joint.used and joint.writes == self._order.writes else None

    def gather(
        self,
        table: str,
        ids: Mapping[str, Tensor],
        found: Found,
        *,
        step: int | None = None,
    ) -> Tensor:
        # The rows of all tables are read together, as a pooling with one occurrence for each output row: its
        # launches are recorded. Rows of other tables wait in `found` until they are asked for.
        ahead = found.ahead
        if ahead is None or table not in ahead or self._current(found) is None:
            # A lookup that began to read one table after another continues so.
            pooling = None if found and found.joint is None else self._rows_as_pooling(ids)
            if pooling is None:
                return super().gather(table, ids, found, step=step)
            ahead = found.ahead = dict(zip(pooling.bags, self.pool(ids, found, pooling), strict=True))
        return ahead.pop(table)

    def _rows_as_pooling(self, ids: Mapping[str, Tensor]) -> Pooling | None:
        """Return the pooling whose outputs are the rows of ids, if their numbers repeat."""
        key = tuple([(name, own.numel()) for name, own in ids.items()])
        pooling = self._poolings.get(key)
        if pooling is None:
            again = key in self._recent
            self._recent.append(key)
            if not again or self._views or not all(n for _, n in key):
                return None
            if len(self._poolings) >= MAX_POOLINGS:
                self._poolings.pop(next(iter(self._poolings)))
            shapes = tuple((n, self[name].dim) for name, n in key)
            bags = {
                name: (
                    Bags(
                        torch.arange(n + 1, dtype=torch.int64, device=self._device),
                        (OutputSlice(number, 0, 0, self[name].dim),),
                        first=0,
                    ),
                )
                for number, (name, n) in enumerate(key)
            }
            pooling = self._poolings[key] = Pooling(shapes, bags)
        return pooling

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
        ids = self._moved(ids)
        with span("megalith.rows"), self._order:
            tables: dict[str, Tensor] = {}
            for shared in self._shared:
                sizes = shared.sizes_of(ids)
                if any(sizes):
                    joined = self._known(shared, found, sizes)
                    joined = joined or shared.find(ids, sizes, _looked_up(ids, found))
                    dims = shared.group.layout.dims
                    floats = [size * dim for size, dim in zip(sizes, dims, strict=True)]
                    rows = torch.empty(sum(floats), dtype=torch.float32, device=self._device)
                    shared.group.read(joined.ids, joined.search, sizes, rows)
                    for name, part, dim in zip(shared.names, rows.split(floats), dims, strict=True):
                        tables[name] = part.view(-1, dim)
            parts = [
                tables[name].split(own) if name in tables else None
                for name, own in zip(self._engines, counts.t().tolist(), strict=True)
            ]
            blocks = [part[peer].view(-1) for peer in range(counts.shape[0]) for part in parts if part]
            flat = torch.cat(blocks) if blocks else out[:0]
            out.copy_(flat, non_blocking=flat.device == out.device)

    # ---- the two calls of a training step

    def pool(
        self,
        ids: Mapping[str, Tensor],
        found: MutableMapping[str, FoundRows],
        pooling: Pooling,
        *,
        step: int | None = None,
    ) -> list[Tensor]:
        if self._views and not self._views.isdisjoint(pooling.bags):
            return self._pool_one_by_one(ids, found, pooling, step)
        with span("megalith.pool"), self._order:
            planned = self._plans.find(pooling, ids)
            outputs = planned.plan.new_outputs(self._device)
            joint = self._current(found)
            rows = None if joint is None else joint.all_rows(planned)
            if rows is not None:
                planned.pool(rows, outputs)
            elif planned.plan.groups:
                joint = self._find_and_pool(planned, ids, outputs)
                if isinstance(found, Found):
                    found.joint = joint
            return outputs

    def _pool_one_by_one(
        self,
        ids: Mapping[str, Tensor],
        found: MutableMapping[str, FoundRows],
        pooling: Pooling,
        step: int | None,
    ) -> list[Tensor]:
        """Pool tables one after another, because some table has a view."""
        outputs = pooling.new_outputs(None, self._device)
        for name in filter(pooling.of, pooling.bags):
            if name not in found:
                found[name] = self[name].find(ids[name])
            self[name].pool_lookup(ids[name], found[name], pooling, outputs, step=step)
        return outputs

    def _find_and_pool(
        self, planned: PlannedPooling, ids: Mapping[str, Tensor], outputs: Sequence[Tensor]
    ) -> FoundTogether:
        """Find rows and reduce them into outputs, by launches that are recorded if sizes repeat."""
        plan = planned.plan
        columns = plan.columns(ids)
        hold(columns)
        planned.hold()
        # A user's graph that is replayed later must not overwrite what eager calls keep in a slot.
        kept = None if is_captured(self._device) else self._slots.find(planned)
        slot = kept or SearchSlot(plan, [Room.of(sizes, padded=False) for sizes in planned.kind_sizes])
        addresses = [output.data_ptr() for output in outputs]
        aligned = are_aligned(addresses)
        rows = slot.fill(planned, columns, addresses)
        if any(engine.fetches for engine in self._tiered):
            _find(plan, rows)
            for group, own in zip(plan.groups, rows, strict=True):
                self._by_group[group].fetch(own)
            plan.launch(slot.fields, rows, aligned=aligned)
        else:
            launch = partial(_find_and_pool, plan, rows, slot.fields, aligned=aligned)
            if kept is None:
                launch()
            else:
                slot.run(("pool", aligned), launch)
        found = FoundTogether(self._order.writes, plan.groups, rows, planned, kept)
        if kept is not None:
            kept.give(found)
        return found

    def update(
        self,
        ids: Mapping[str, Tensor],
        found: Mapping[str, FoundRows],
        grads: Mapping[str, list[Tensor]],
        pooling: Pooling | None,
        update: Update,
    ) -> None:
        if self._order.num_snapshots:
            for engine in self._cuda:
                if engine.name in grads:
                    engine.wait_for_reader()
        with span("megalith.optimizer"), self._order:
            joint: FoundTogether | None = getattr(found, "joint", None)
            planned: PlannedPooling | None = None
            if pooling is None:
                ids = self._moved({name: ids[name] for name in grads})
                sources = self._matrices(ids, grads)
            else:
                planned = self._plans.find(pooling, ids)
                pooling = planned.moved or pooling
                sources = self._pooled(planned, grads)
            # What may raise comes before the first write.
            for engine in self._limited:
                if engine.name in grads:
                    seen = update.occurrences.get(engine.name)
                    check_capacity(engine, ids[engine.name], pooling, update.of(engine.name), seen)
            writes = []
            for shared, sizes, source in sources:
                rows, slot = self._known(shared, found, sizes), None
                # Gradients are recorded for the plan of the lookup.
                if joint is not None and rows is not None and joint.is_planned(planned):
                    slot = joint.slot
                writes.append(
                    shared.stage_update(update, ids, sizes, rows, source, slot, _looked_up(ids, found))
                )
            for write in writes:
                write()
            if joint is not None:
                joint.used = True

    def _matrices(
        self, ids: Mapping[str, Tensor], grads: Mapping[str, list[Tensor]]
    ) -> list[tuple[SharedLaunches, list[int], GradientSource]]:
        """Return the tables of each kind, their numbers of ids, and the gradients of their ids."""
        found = []
        empty = torch.empty(0, 1, dtype=torch.float32, device=self._device)
        for shared in self._shared:
            if not grads.keys().isdisjoint(shared.names):
                matrices = [self._contiguous(grads[n][0]) if n in grads else empty for n in shared.names]
                found.append((shared, shared.sizes_of(ids), GradientSource.of(matrices)))
        return found

    def _pooled(
        self, planned: PlannedPooling, grads: Mapping[str, list[Tensor]]
    ) -> list[tuple[SharedLaunches, list[int], GradientSource]]:
        """The same for the gradients of a pooling's outputs, a list that all tables share."""
        moved = [self._contiguous(grad) for grad in next(iter(grads.values()), ())]
        hold(moved)
        planned.hold()
        found = [
            (self._by_group[group], sizes, planned.gradients(number, moved))
            for number, (group, sizes) in enumerate(zip(planned.plan.groups, planned.kind_sizes, strict=True))
        ]
        for *_, source in found:
            source.tensors = moved
        return found

    def _contiguous(self, grad: Tensor) -> Tensor:
        if grad.device == self._device and grad.is_contiguous():
            return grad
        return grad.to(self._device, non_blocking=True).contiguous()

    def _moved(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tensors on the device: the mapping itself if all are there."""
        if all(tensor.device == self._device for tensor in tensors.values()):
            return tensors
        return {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}


def _looked_up(ids: Mapping[str, Tensor], found: Mapping[str, FoundRows]) -> dict[str, int | None]:
    """Return the tables whose use a lookup has counted, and their epoch then, if it is known."""
    epochs: dict[str, int | None] = {name: rows.epoch for name, rows in found.items()}
    return epochs if getattr(found, "joint", None) is None else {name: epochs.get(name) for name in ids}


def _find(plan: PoolingPlan, rows: Sequence[JoinedRows]) -> None:
    for group, own in zip(plan.groups, rows, strict=True):
        own.search.missing.zero_()
        if own.ids.numel():
            group.launch_find(own.ids, own.spans, own.search)


def _find_and_pool(plan: PoolingPlan, rows: Sequence[JoinedRows], fields: Tensor, *, aligned: bool) -> None:
    _find(plan, rows)
    plan.launch(fields, rows, aligned=aligned)
