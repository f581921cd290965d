"""The policies of the cuda engine: which new ids get a row, and which rows make room for them.

Decisions are those of the other engines. Ids without a row are counted on the host, by the classes of
reference_policies.py; rows that make room are found on the device. An update of a table with an admission
policy or a `Capacity` waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megalith.errors import TableFullError
from megalith.table.engines.cuda.device_functions import LIVE
from megalith.table.engines.cuda.occurrences import first_occurrences
from megalith.table.engines.cuda.victim_search import DeviceVictimSearch, ordered
from megalith.table.engines.reference_policies import AdmissionState, IdLog
from megalith.table.engines.room import make_room
from megalith.table.table_data import RowCounters

if TYPE_CHECKING:
    from megalith.table.engines.cuda.stored_rows import StoredRows


class AdmissionPlan(NamedTuple):
    """What an update will do with ids that have no row."""

    wanted: Tensor  # int8 [n], 0 for occurrences of refused ids and those that were not wanted before
    admitted: int  # Number of new ids
    new: Tensor  # The new ids, on the device
    refused: list[tuple[int, int]]  # Pairs of a refused id and the number of its occurrences


class CudaPolicies:
    """The policies of one engine, and its counters and logs."""

    def __init__(self, engine: StoredRows) -> None:
        self._engine = engine
        config = engine.config
        self.active = config.admission is not None or config.capacity is not None
        limits = engine.limits
        self.admission = AdmissionState(
            config.admission, engine.table.key, limits.counted_ids, limits.log_ids
        )
        self.evicted_log = IdLog(limits.log_ids)
        self.removed = 0
        self.evicted = 0
        self._search = DeviceVictimSearch()

    def set_key(self, key: int) -> None:
        """Change the key of the random numbers."""
        self.admission.set_key(key)

    def forget(self) -> None:
        """Drop the counts of ids without a row, after `clear`."""
        self.admission.counts.clear()
        self._search = DeviceVictimSearch()

    def count(self, ids: list[int], counts: list[int]) -> None:
        """Add occurrences of ids without a row."""
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
        """Remove rows so that new ids fit; none that belongs to the call."""
        # call: int64 [n], all ids of the call.
        engine = self._engine
        capacity, limit = engine.config.capacity, engine.row_limit
        if capacity is None or limit is None or not new:
            return False
        epoch = engine.epoch
        need = len(engine) + new - limit
        if need > 0 and callable(capacity.score):
            make_room(engine, call.cpu(), new)
            need = len(engine) + new - limit
        if need <= 0:
            return engine.epoch != epoch
        found = engine.group.find(call, [call.numel()]).rows
        kept = torch.unique(found[found >= 0]).long()
        if capacity.score is None or callable(capacity.score) or len(engine) - kept.numel() < need:
            raise TableFullError(
                f"table {engine.name!r} holds {len(engine)} rows and needs {new} more, but its Capacity is "
                f"{limit} rows"
            )
        score = capacity.score

        def scored(rows: Tensor) -> tuple[Tensor, Tensor]:
            _, times, flags, counts, steps = engine.table.headers(rows)
            scores = {"lru": times, "lfu": (counts << 32) | times, "step": steps}[score]
            return (flags & LIVE.value) != 0, ordered(scores)

        used = engine.table.read_counters()[0]
        victims = self._search.choose(need, used, scored, kept, len(engine))
        engine.evict_ids(engine.table.headers(victims)[0].contiguous())
        return True

    def counters(self, created: int) -> RowCounters:
        """Return the counters of the table."""
        state = self.admission
        return RowCounters(
            created=created,
            removed=self.removed,
            evicted=self.evicted,
            refused=state.refusals,
            pending=len(state.counts),
            pending_dropped=state.dropped,
            log_lost=self.evicted_log.lost + state.refused.lost,
        )

    def memory(self) -> int:
        """Return the bytes of counts, logs and candidates, with 100 bytes for a counted id."""
        search = self._engine.score_search
        logs = 8 * (len(self.evicted_log) + len(self.admission.refused))
        return 100 * len(self.admission.counts) + logs + (0 if search is None else search.bytes)
