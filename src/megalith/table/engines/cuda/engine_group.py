"""CudaEngineGroup: the hot calls over all tables of one LocalShards, one set of launches per row layout.

Tables with equal layouts (dim, precision, optimizer and its settings) share launches; learning rates,
initializers and sizes may differ. The ids of such tables are concatenated once, in `find`, and the result is
kept with the row numbers, so that `pool` and `update` do not concatenate again.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.library import span
from megalith.ops.pooling import Pooling
from megalith.table.engines.contract import Engine
from megalith.table.engines.cuda.engine import CudaEngine
from megalith.table.engines.cuda.launch_group import LaunchGroup
from megalith.table.engines.cuda.pooling_parts import PoolingParts, TablePart, on_device, waves
from megalith.table.engines.cuda.row_layout import RowLayout
from megalith.table.engines.cuda.stream_order import JointOrder
from megalith.table.engines.cuda.table_updates import TableUpdate, stage_updates
from megalith.table.engines.group import EngineGroup
from megalith.table.engines.room import check_room
from megalith.table.table_data import FoundRows, Step


class JoinedRows(NamedTuple):
    """Ids and rows of the tables of a launch group, one table after another."""

    ids: Tensor
    rows: Tensor
    sizes: list[int]


class SharedLaunches:
    """The tables of one layout.

    Args:
        engines: Their engines.
    """

    def __init__(self, engines: Sequence[CudaEngine]) -> None:
        self.engines = list(engines)
        self.names = [engine.name for engine in engines]
        self.group = LaunchGroup([engine.table for engine in engines])
        self._none = torch.empty(0, dtype=torch.int64, device=engines[0].device)

    def find(self, ids: Mapping[str, Tensor]) -> dict[str, FoundRows]:
        """Find the rows of ids.

        Args:
            ids: int64 [n] by table; tables of other layouts are ignored.

        Returns:
            The rows of the tables that occur in `ids`.
        """
        columns = [ids.get(name, self._none) for name in self.names]
        sizes = [column.numel() for column in columns]
        joined_ids = columns[0] if len(columns) == 1 else torch.cat(columns)
        joined = JoinedRows(joined_ids, self.group.find(joined_ids, sizes), sizes)
        found = {}
        for engine, rows in zip(self.engines, joined.rows.split(sizes), strict=True):
            if engine.name in ids:
                found[engine.name] = engine.note_found(rows)
                rows.megalith_joined = joined
        return found

    def joined(self, ids: Mapping[str, Tensor], found: Mapping[str, FoundRows]) -> JoinedRows:
        """Return ids and current rows of all tables.

        Args:
            ids: int64 [n] by table.
            found: Rows that `find` returned for them.

        Returns:
            What `find` kept if all its rows are current, otherwise new rows.
        """
        columns = [ids.get(name, self._none) for name in self.names]
        sizes = [column.numel() for column in columns]
        kept: set[int] = set()
        for engine, size in zip(self.engines, sizes, strict=True):
            own = found.get(engine.name)
            if not size:
                continue
            current = own is not None and own.epoch == engine.epoch
            if own is None or not current or getattr(own.rows, "megalith_writes", None) != engine.writes:
                break
            candidate = getattr(own.rows, "megalith_joined", None)
            kept.add(id(candidate))
            if candidate is None or candidate.sizes != sizes or len(kept) > 1:
                break
        else:
            if kept and isinstance(candidate, JoinedRows):
                return candidate
        joined_ids = columns[0] if len(columns) == 1 else torch.cat(columns)
        return JoinedRows(joined_ids, self.group.find(joined_ids, sizes), sizes)


class CudaEngineGroup(EngineGroup):
    """See `EngineGroup`.

    Args:
        engines: Engines by table name.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        super().__init__(engines)
        by_layout: dict[RowLayout, list[CudaEngine]] = {}
        for engine in engines.values():
            assert isinstance(engine, CudaEngine)
            by_layout.setdefault(engine.layout, []).append(engine)
        self._shared = [SharedLaunches(own) for own in by_layout.values()]
        self._cuda = [engine for own in by_layout.values() for engine in own]
        self._order = JointOrder([engine.order for engine in self._cuda])

    def find(self, ids: Mapping[str, Tensor]) -> dict[str, FoundRows]:
        """See `EngineGroup.find`."""
        ids = _moved(ids, self._cuda[0].device)
        with span("megalith.ids"), self._order:
            found: dict[str, FoundRows] = {}
            for shared in self._shared:
                if any(name in ids for name in shared.names):
                    found |= shared.find(ids)
            return {name: found[name] for name in ids}

    def pool(
        self,
        ids: Mapping[str, Tensor],
        found: MutableMapping[str, FoundRows],
        pooling: Pooling,
        *,
        step: int | None = None,
    ) -> list[Tensor]:
        """See `EngineGroup.pool`. If a table has a view, the tables are read one after another."""
        device = self._cuda[0].device
        pooling = pooling.to(device)
        ids = _moved(ids, device)
        names = [name for name in pooling.bags if pooling.of(name)]
        if any(self[name].view is not None for name in names):
            outputs = pooling.new_outputs(None, device)
            for name in names:
                if name not in found:
                    found[name] = self[name].find(ids[name])
                self[name].pool_lookup(ids[name], found[name], pooling, outputs, step=step)
            return outputs
        for name in names:
            on_device(pooling, name, ids[name].numel(), self[name].dim, device)
        with span("megalith.pool"), self._order:
            outputs = pooling.new_outputs(None, device)
            absent = {name: ids[name] for name in names if name not in found}
            if absent:
                found.update(self.find(absent))
            joined, all_parts = {}, []
            for number, shared in enumerate(self._shared):
                own = [name if name in names else "" for name in shared.names]
                if any(own):
                    joined[number] = shared.joined(ids, found)
                    parts = PoolingParts(shared.group, own, joined[number].sizes, pooling)
                    all_parts.append((number, parts))
            for wave in _joint_waves(all_parts, names, self._shared):
                for number, parts, chosen in wave:
                    parts.pool(joined[number].ids, joined[number].rows, outputs, chosen)
            return outputs

    def update(
        self,
        ids: Mapping[str, Tensor],
        found: Mapping[str, FoundRows],
        grads: Mapping[str, list[Tensor]],
        pooling: Pooling | None,
        steps: Mapping[str, Step],
        occurrences: Mapping[str, Tensor] | None = None,
    ) -> None:
        """See `EngineGroup.update`."""
        seen = occurrences or {}
        device = self._cuda[0].device
        pooling = None if pooling is None else pooling.to(device)
        ids = _moved(ids, device)
        # With a pooling all tables have the same list of gradients.
        moved = {id(own): [g.to(device, non_blocking=True) for g in own] for own in grads.values()}
        grads = {name: moved[id(own)] for name, own in grads.items()}
        with span("megalith.optimizer"), self._order:
            # What may raise comes before the first write.
            for name in grads:
                check_room(self[name], ids[name], pooling, steps[name], seen.get(name))
            writes = []
            for shared in self._shared:
                own = [name for name in shared.names if name in grads]
                if not own:
                    continue
                any_step = steps[own[0]]
                updates = []
                for engine in shared.engines:
                    name = engine.name
                    if name in grads:
                        arguments = (ids[name], found.get(name), grads[name], steps[name], seen.get(name))
                        updates.append(TableUpdate(engine, *arguments))
                    else:
                        nothing = torch.empty(0, engine.dim, device=engine.device)
                        updates.append(TableUpdate(engine, shared._none, None, [nothing], any_step, None))
                rows = None
                if all(name in found for name in own) and not any(e.policies.active for e in shared.engines):
                    rows = shared.joined({name: ids[name] for name in own}, found)
                grads_first = next(u.grads for u in updates if u.ids.numel() or u.engine.name in grads)
                write = stage_updates(
                    shared.group,
                    updates,
                    pooling,
                    outputs=grads_first,
                    known=None if rows is None else (rows.ids, rows.rows.clone()),
                )
                writes.append(write)
            for write in writes:
                write()


def _moved(tensors: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Tensor]:
    """Return tensors on a device: the mapping itself if all are there."""
    if all(tensor.device == device for tensor in tensors.values()):
        return tensors
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def _joint_waves(
    groups: Sequence[tuple[int, PoolingParts]], names: Sequence[str], shared: Sequence[SharedLaunches]
) -> list[list[tuple[int, PoolingParts, list[TablePart]]]]:
    """Divide the parts of several launch groups into waves, in the order of the pooling's tables."""
    ordered: list[tuple[int, TablePart]] = []
    for name in names:
        for number, parts in groups:
            if name in shared[number].names:
                at = shared[number].names.index(name)
                ordered += [(number, part) for part in parts.parts if part.table == at]
    origin = {id(part): number for number, part in ordered}
    by_number = dict(groups)
    result = []
    for wave in waves([part for _, part in ordered]):
        launches = []
        for number in sorted({origin[id(part)] for part in wave}):
            chosen = [part for part in wave if origin[id(part)] == number]
            launches.append((number, by_number[number], chosen))
        result.append(launches)
    return result
