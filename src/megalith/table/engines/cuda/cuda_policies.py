"""The policies of the cuda engine: which new ids get a row, and which rows are removed for them.

Decisions are those of the other engines. A `Capacity` with a named score is kept by kernels (see
victim_kernels.py): the host does not learn how many rows an update removes, and takes their ids from a ring
on the device when somebody asks for them or the ring may be full. Ids without a row are counted on the host,
by the classes of reference_policies.py, so an update of a table with an admission policy waits for the
device; so does one of a full table whose score is a function, or that has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megalith.errors import TableFullError
from megalith.table.engines.cuda.device_functions import CREATED, EVICTED
from megalith.table.engines.cuda.streams import retire
from megalith.table.engines.reference_policies import AdmissionState, IdLog
from megalith.table.engines.shard_capacity import make_room
from megalith.table.table_data import RowCounters

if TYPE_CHECKING:
    from megalith.table.engines.cuda.engine import CudaEngine


class AdmissionPlan(NamedTuple):
    """What an update will do with ids that have no row."""

    wanted: Tensor  # int8 [n], 0 for occurrences of refused ids and those that were not wanted before
    admitted: int  # Number of new ids
    new: Tensor  # The new ids, on the device
    refused: list[tuple[int, int]]  # Pairs of a refused id and the number of its occurrences


class CudaPolicies:
    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        config = engine.config
        self._by_host = config.capacity is not None and not engine.table.row_limit
        # Whether updates ask the host, which waits for the device.
        self.active = config.admission is not None or self._by_host
        limits = engine.limits
        self.admission = AdmissionState(
            config.admission, engine.table.key, limits.counted_ids, limits.log_ids
        )
        self.evicted_log = IdLog(limits.log_ids)
        self.removed = 0
        self._evicted = 0  # by the host
        self._collected = 0  # of the ids that kernels removed

    def set_key(self, key: int) -> None:
        self.admission.set_key(key)

    def forget(self) -> None:
        """Drop the counts of ids without a row, after `clear`."""
        self.admission.counts.clear()

    def count(self, ids: list[int], counts: list[int]) -> None:
        for id, number in zip(ids, counts, strict=True):
            self.admission.count(id, number)

    def created(self, ids: Tensor) -> None:
        """Note that ids got a row, so they are no longer counted."""
        # ids: int64 [n].
        if self.admission.counts:
            for id in ids.tolist():
                self.admission.counts.pop(id, None)

    def plan(
        self, ids: Tensor, wanted: Tensor | None, occurrences: Tensor | None, step: int
    ) -> AdmissionPlan:
        """Decide which ids of an update get a row. Changes nothing."""
        # ids: int64 [n]; wanted: int8 [n], which occurrences count; occurrences: number of occurrences that
        # each id stands for, int64 [n].
        engine = self._engine
        taken = torch.ones_like(ids, dtype=torch.int8) if wanted is None else wanted.clone()
        rows = engine.group.find(ids, [ids.numel()]).rows
        missing = ((rows < 0) & (taken != 0)).nonzero()[:, 0]
        distinct, where = first_occurrences(ids[missing])
        if engine.config.admission is None:
            return AdmissionPlan(taken, distinct.numel(), distinct, [])
        each = torch.ones_like(missing) if occurrences is None else occurrences.to(ids.device)[missing]
        seen = torch.zeros_like(distinct).index_add_(0, where, each)
        admitted = self.admission.admits(distinct.cpu(), seen.cpu(), step).to(ids.device)
        taken[missing] = admitted[where].to(torch.int8)
        refused = list(zip(distinct[~admitted].tolist(), seen[~admitted].tolist(), strict=True))
        return AdmissionPlan(taken, int(admitted.sum()), distinct[admitted], refused)

    def apply(self, plan: AdmissionPlan, ids: Tensor) -> None:
        """Make room for the new ids of a plan, and record the refused ones."""
        # ids: int64 [n], all ids of the call.
        self.make_place(plan.admitted, ids)
        self.created(plan.new)
        self.admission.refuse(plan.refused)  # after the counts of the created ids made room

    def admit(self, ids: Tensor, wanted: Tensor | None, occurrences: Tensor | None, step: int) -> Tensor:
        """Decide which ids of an update get a row, and make room for them."""
        # returns: int8 [n], 0 for occurrences that have no effect.
        if not self.active:
            return torch.ones_like(ids, dtype=torch.int8) if wanted is None else wanted
        plan = self.plan(ids, wanted, occurrences, step)
        self.apply(plan, ids)
        return plan.wanted

    def make_place(self, new: int, call: Tensor) -> bool:
        """Remove rows so that new ids fit, none that belongs to the call; kernels do so for named scores."""
        # call: int64 [n], all ids of the call.
        engine = self._engine
        capacity, limit = engine.config.capacity, engine.row_limit
        if capacity is None or limit is None or not new or engine.most_rows + new <= limit:
            return False
        epoch = engine.epoch
        need = len(engine) + new - limit
        if need > 0 and callable(capacity.score):
            make_room(engine, call.cpu(), new)
            need = len(engine) + new - limit
        kept = 0
        if need > 0 and not self._by_host:
            found = engine.group.find(call, [call.numel()]).rows
            kept = torch.unique(found[found >= 0]).numel()
        if need > 0 and (self._by_host or len(engine) - kept < need):
            raise TableFullError(
                f"table {engine.name!r} holds {len(engine)} rows and needs {new} more, but its Capacity is "
                f"{limit} rows"
            )
        return engine.epoch != epoch

    # ---- the ids that kernels removed

    def expect_evictions(self, n: int) -> None:
        """Prepare for launches that may remove up to n rows; after room was made for as many."""
        engine, table = self._engine, self._engine.table
        if not table.row_limit or table.most_rows <= table.row_limit:
            return
        engine.advance_epoch()
        room, ring = self.admission.refused.most, table.evicted_log
        if table.most_evicted - self._collected <= ring.numel():
            return
        if engine.consumers or ring.numel() < room:  # otherwise only the latest ids are needed
            self.collect()
        most = max(n, 8 * n if engine.consumers else 0, min(room, 4 * ring.numel()))
        if ring.numel() < most:
            self.collect()
            retire(ring)
            table.evicted_log = torch.empty(most, dtype=torch.int64, device=engine.device)
            table.changed()

    def collect(self) -> None:
        """Take the ids that kernels removed. Waits for the device."""
        engine, table = self._engine, self._engine.table
        if not table.row_limit:
            return
        total, ring = table.read_counters()[EVICTED.value], table.evicted_log
        count = min(total - self._collected, ring.numel())
        if count:
            places = torch.arange(total - count, total, device=engine.device) % ring.numel()
            ids = ring[places].cpu()
            self.evicted_log.lost += total - self._collected - count
            self.evicted_log.add(ids.tolist())
            engine.note_removed(ids)
        self._collected = total

    def evict(self, ids: Tensor) -> None:
        """Log ids that the host removed, int64 [n] on the CPU."""
        self.collect()
        self._evicted += ids.numel()
        self.evicted_log.add(ids.tolist())

    def counters(self, values: list[int]) -> RowCounters:
        # values: the counters of the table.
        state = self.admission
        unread = values[EVICTED.value] - self._collected
        return RowCounters(
            created=values[CREATED.value],
            removed=self.removed,
            evicted=self._evicted + values[EVICTED.value],
            refused=state.refusals,
            pending=len(state.counts),
            pending_dropped=state.dropped,
            log_lost=state.refused.lost + self.evicted_log.lost_with(unread),
        )

    def memory(self) -> int:
        """Return the bytes of counts, logs and candidates, with 100 bytes for a counted id."""
        search, table = self._engine.score_search, self._engine.table
        logs = 8 * (len(self.evicted_log) + len(self.admission.refused))
        logs += 8 * table.evicted_log.numel() if table.row_limit else 0
        return 100 * len(self.admission.counts) + logs + (0 if search is None else search.bytes)


def first_occurrences(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Find the distinct ids in the order of their first occurrences."""
    # ids: int64 [n]; returns: the distinct ids, int64 [u], and for each id its position among them, int64
    # [n].
    distinct, inverse = torch.unique(ids, return_inverse=True)
    positions = torch.arange(ids.numel(), device=ids.device)
    first = torch.full_like(distinct, ids.numel()).scatter_reduce_(0, inverse, positions, "amin")
    order = torch.argsort(first)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=ids.device)
    return distinct[order], rank[inverse]


def last_occurrences(ids: Tensor) -> Tensor:
    """Find the position of the last occurrence of each distinct id."""
    # ids: int64 [n]; returns: int64 [u], ascending.
    distinct, inverse = torch.unique(ids, return_inverse=True)
    positions = torch.arange(ids.numel(), device=ids.device)
    last = torch.zeros_like(distinct).scatter_reduce_(0, inverse, positions, "amax")
    return last.sort().values
