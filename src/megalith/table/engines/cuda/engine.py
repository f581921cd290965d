"""The cuda engine: the Engine contract over tables in GPU memory.

The hot calls (find, read, pool, update) are here: they launch kernels and return without waiting for the
device. All other calls are in stored_rows.py.

Reads and writes may come from several threads and CUDA streams: a lock orders the launches, and a call on
another stream than the previous one waits for that stream on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.ops.pooling import Pooling
from megalith.table.engines.cuda.launch_group import RowSearch
from megalith.table.engines.cuda.pooling_parts import on_device
from megalith.table.engines.cuda.pooling_plans import PoolingPlan, PoolingPlans
from megalith.table.engines.cuda.row_steps import Gradients
from megalith.table.engines.cuda.stored_rows import StoredRows
from megalith.table.engines.cuda.stream_order import hold
from megalith.table.engines.cuda.table_updates import TableUpdate, stage_updates
from megalith.table.engines.room import check_room
from megalith.table.table_data import FoundRows, Step


class FoundBy(NamedTuple):
    """Who found rows, and when; kept with the tensor of row numbers, which users may hold."""

    owner: object  # The launch group
    # The number of writes of each engine of the group at that time; while it stays, absent ids stay absent
    writes: list[int]
    ids: Tensor  # The ids of the group's tables
    search: RowSearch  # What the group found
    sizes: list[int]  # Number of ids of each table


class CudaEngine(StoredRows):
    """The hot calls of one table. See `Engine`."""

    _plans: PoolingPlans | None = None

    def find(self, ids: Tensor) -> FoundRows:
        with self.order:
            ids = ids.to(self.device)
            search = self._find(ids)
            # A view: rows that refer to a search that refers to them would be freed late.
            by = FoundBy(self.group, [self.writes], ids, search, [ids.numel()])
            return self.note_found(search.rows.view(-1), by)

    def has_rows(self, ids: Tensor) -> Tensor:
        with self.order:
            ids = ids.to(self.device)
            return self.group.find(ids, [ids.numel()]).rows >= 0

    def _find(self, ids: Tensor, *, counted: bool = True) -> RowSearch:
        """Find rows that a call uses; with a host tier they move to the device."""
        search = self.group.find(ids, [ids.numel()])
        self.fetch(ids, search.rows, counted=counted)
        return search

    def note_found(self, rows: Tensor, by: FoundBy) -> FoundRows:
        """Return rows that were found now."""
        # rows: int32 [n], the rows of this table.
        rows.megalith_found = by  # type: ignore[attr-defined]
        return FoundRows(rows, self._epoch)

    def known(self, found: FoundRows | None, owner: object, number: int = 0) -> FoundBy | None:
        """Return how rows were found, if they are current."""
        if found is None or found.epoch is None or found.epoch != self._epoch:
            return None
        by: FoundBy | None = getattr(found.rows, "megalith_found", None)
        return by if by is not None and by.owner is owner and by.writes[number] == self.writes else None

    def _search(self, ids: Tensor, found: FoundRows | None) -> RowSearch:
        by = self.known(found, self.group)
        return self._find(ids, counted=found is None) if by is None else by.search

    def read(self, ids: Tensor, found: FoundRows | None = None, out: Tensor | None = None) -> Tensor:
        with self.order:
            ids = ids.to(self.device)
            by = self.known(found, self.group)
            search = None if by is None else by.search  # None: found by the kernel that reads
            if search is None and self.fetches:
                search = self._find(ids, counted=found is None)
            direct = out is not None and out.device == self.device
            shape = ids.numel(), self.dim
            result = out if direct else torch.empty(shape, dtype=torch.float32, device=self.device)
            assert result is not None
            self.group.read(ids, search, [ids.numel()], result)
            if out is not None and not direct:
                out.copy_(result)
            return result if out is None else out

    def _plan(self, pooling: Pooling, n: int) -> PoolingPlan:
        if self._plans is None:
            self._plans = PoolingPlans()
        return self._plans.find(self.group, [self.name], [n], pooling)

    def pool(self, ids: Tensor, found: FoundRows | None, pooling: Pooling, outputs: list[Tensor]) -> None:
        with self.order:
            ids = ids.to(self.device)
            pooling = on_device(pooling, self.device)
            plan = self._plan(pooling, ids.numel())
            search, bags = self._search(ids, found), plan.bags_of(pooling)
            for cut in plan.launches:
                plan.pool(cut, bags, ids, search, outputs)

    def update(
        self,
        ids: Tensor,
        found: FoundRows | None,
        grads: list[Tensor],
        pooling: Pooling | None,
        step: Step,
        occurrences: Tensor | None = None,
    ) -> None:
        # A row whose summed gradient is not finite is not changed; the next call that waits for the device
        # and returns counters raises.
        with self.stage_update(ids, found, grads, pooling, step, occurrences) as write:
            write()

    @contextmanager
    def stage_update(
        self,
        ids: Tensor,
        found: FoundRows | None,
        grads: list[Tensor],
        pooling: Pooling | None,
        step: Step,
        occurrences: Tensor | None = None,
    ) -> Iterator[Callable[[], None]]:
        self.wait_for_reader()
        with self.order:
            check_room(self, ids, pooling, step, occurrences)
            if pooling is None:
                gradients = Gradients.of(grads)
            else:
                pooling = on_device(pooling, self.device)
                plan = self._plan(pooling, ids.numel())
                gradients = plan.gradients(plan.bags_of(pooling), [grad.contiguous() for grad in grads])
            by = self.known(found, self.group)
            search = None
            if by is not None:  # a copy, because rows of new ids are filled in
                hold([by.search.rows])
                search = ids, RowSearch(by.search.rows.clone(), by.search.missing, by.search.absent)
            update = TableUpdate(self, ids, step, occurrences, found is not None)
            yield stage_updates(self.group, [update], gradients, search)

    def pool_lookup(
        self,
        ids: Tensor,
        found: FoundRows | None,
        pooling: Pooling,
        outputs: list[Tensor],
        *,
        step: int | None = None,
    ) -> None:
        # A view is applied in torch.
        if self.view is None:
            return self.pool(ids, found, pooling, outputs)
        self._plan(on_device(pooling, self.device), ids.numel())  # checks it
        self.pool_rows(self.lookup(ids, found, step=step), pooling.of(self.name), outputs)
