"""CpuEngineGroup: the hot calls over all tables, each as one native call.

    forward    read_tables     every table and feature: find rows, read and reduce them, in one pass
    backward   update_tables   every table: sum gradients per distinct id, one optimizer step each

Threads share the work of a call across tables. The native descriptor of a table (dim, segments, optimizer,
precision) lives in its native table; a call passes ids, bags and gradients without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from megalith import _native
from megalith.library import span
from megalith.ops.pooling import Pooling
from megalith.table.engines.contract import Engine
from megalith.table.engines.cpu import CpuEngine
from megalith.table.engines.group import EngineGroup
from megalith.table.table_data import FoundRows, Step


class CpuEngineGroup(EngineGroup):
    """See `EngineGroup`."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        super().__init__(engines)
        self._cpu = {name: engine for name, engine in engines.items() if isinstance(engine, CpuEngine)}
        assert len(self._cpu) == len(engines)
        self._views = any(engine.view is not None for engine in self._cpu.values())

    def find(self, ids: Mapping[str, Tensor]) -> dict[str, FoundRows]:
        found: dict[str, FoundRows] = {}
        with span("megalith.ids"):
            self._read(ids, found, dict.fromkeys(ids, ()), ())
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
        if self._views:
            super().read_blocks(ids, found, counts, out, step=step)
            return
        with span("megalith.rows"):
            reads = [engine.native_block(ids[name], found.get(name)) for name, engine in self._cpu.items()]
            _native.read_blocks(reads, counts, out, torch.get_num_threads())

    def pool(
        self,
        ids: Mapping[str, Tensor],
        found: MutableMapping[str, FoundRows],
        pooling: Pooling,
        *,
        step: int | None = None,
    ) -> list[Tensor]:
        # Tables with a view are read in torch.
        with span("megalith.pool"):
            outputs = pooling.new_outputs()
            if not self._views:
                self._read(ids, found, pooling.native_bags, outputs)
                return outputs
            together: dict[str, object] = {}
            for name, bags in pooling.native_bags.items():
                engine = self._cpu[name]
                if engine.view is None:
                    together[name] = bags
                    continue
                self._read(ids, found, together, outputs)  # before this table: outputs are added to in order
                together = {}
                if name not in found:
                    found[name] = engine.find(ids[name])
                engine.pool_lookup(ids[name], found[name], pooling, outputs, step=step)
            self._read(ids, found, together, outputs)
            return outputs

    def _read(
        self,
        ids: Mapping[str, Tensor],
        found: MutableMapping[str, FoundRows],
        bags: Mapping[str, object],
        outputs: Sequence[Tensor],
    ) -> None:
        """Read the tables of `bags`; add the rows that had to be found."""
        if not bags:
            return
        missing = [name for name in bags if name not in found]
        sizes = [ids[name].shape[0] for name in missing]
        rows = dict(
            zip(missing, torch.empty(sum(sizes), dtype=torch.int32, device="cpu").split(sizes), strict=True)
        )
        reads = [
            self._cpu[name].native_read(ids[name], found.get(name), rows.get(name), own)
            for name, own in bags.items()
        ]
        epochs = _native.read_tables(reads, outputs, torch.get_num_threads())
        for name, epoch in zip(bags, epochs, strict=True):
            if name in rows:
                found[name] = FoundRows(rows[name], epoch)

    def update(
        self,
        ids: Mapping[str, Tensor],
        found: Mapping[str, FoundRows],
        grads: Mapping[str, list[Tensor]],
        pooling: Pooling | None,
        steps: Mapping[str, Step],
        occurrences: Mapping[str, Tensor] | None = None,
    ) -> None:
        # Tables that need Python in their update are written afterwards.
        occurrences = occurrences or {}
        with span("megalith.optimizer"), ExitStack() as staged:
            calls = []
            bags = None if pooling is None else pooling.native_bags
            gradients: Sequence[Tensor] = ()
            for name, own in grads.items():
                engine = self._cpu[name]
                if not engine.joins_updates:
                    continue
                seen, step = occurrences.get(name), steps[name]
                if bags is None:
                    call = engine.native_update(ids[name], found.get(name), None, own[0], step, seen)
                else:
                    call = engine.native_update(
                        ids[name], found.get(name), bags.get(name, ()), None, step, seen
                    )
                    gradients = own  # those of the outputs, the same for each table
                calls.append(call)
            # What may raise comes before the first write. In one order, because tables may be locked.
            writes = [
                staged.enter_context(
                    self._cpu[name].stage_update(
                        ids[name], found.get(name), grads[name], pooling, steps[name], occurrences.get(name)
                    )
                )
                for name in sorted(grads)
                if not self._cpu[name].joins_updates
            ]
            if calls:
                _native.update_tables(calls, gradients, torch.get_num_threads())
            for write in writes:
                write()
