"""The policies of the cuda engine: which new ids get a row, and which rows are removed for them.

Decisions are those of the other engines. Ids without a row are counted on the host, by the classes of
reference_policies.py; rows that are removed for new ones are found on the device. An update of a table
with an admission policy or a `Capacity` waits for the device.

`DeviceVictimSearch` finds rows with low named scores. It chooses the rows that
`reference_policies.VictimSearch` chooses, which defines the result (and native/table_evict.hpp the
method): a walk over the table takes rows below a threshold, which comes from a sample of all rows. Here
many rows of the walk are visited in one call of the device. A call reads the headers of some rows for
each row that goes, however large the table is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megalith.errors import TableFullError
from megalith.table.engines.cuda.device_functions import LIVE
from megalith.table.engines.reference_policies import LOW_PART, SAMPLE, WALK, AdmissionState, IdLog
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
        self.admission.set_key(key)

    def forget(self) -> None:
        """Drop the counts of ids without a row, after `clear`."""
        self.admission.counts.clear()
        self._search = DeviceVictimSearch()

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


Scored = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Reads rows, int32 [n]: whether each is in use, bool [n], and its score, int64 [n], by `ordered`."""

_HIGHEST = 2**63 - 1
_AHEAD = 2 * LOW_PART  # Rows of the walk that are looked at for each row that is needed


def ordered(scores: Tensor) -> Tensor:
    """Map unsigned scores to signed numbers of the same order."""
    # scores: int64 [n], the bits of unsigned numbers; returns: int64 [n].
    return scores ^ -(2**63)


class DeviceVictimSearch:
    """The search of one table; it continues where the last call ended."""

    def __init__(self) -> None:
        self._cursor = 0
        self._left = 0
        self._found = 1
        self._threshold = _HIGHEST

    def choose(self, need: int, high: int, scored: Scored, kept: Tensor, size: int) -> Tensor:
        # kept: int64 [k], distinct rows that must stay; returns: int32 [need], in the order of their removal.
        call = _Call(high, scored, kept, max(size - kept.numel(), 1))
        victims: list[Tensor] = []
        count, places = 0, WALK * need + SAMPLE
        while count < need:
            if self._left == 0:
                self._estimate(call, need - count)
            if places <= 0:
                while count < need and (low := self._lowest_of_sample(call, need - count)).numel():
                    call.taken[low.long()] = True
                    victims.append(low)
                    count += low.numel()
                if count == need:
                    break
            if self._cursor >= high:
                self._cursor = 0
            wanted = need - count
            rows = min(self._left, high - self._cursor, max(1, places), _AHEAD * wanted + SAMPLE)
            hits = call.walk(self._cursor, rows, self._threshold)[:wanted]
            if hits.numel() == wanted:
                rows = int(hits[-1]) + 1 - self._cursor
            call.taken[hits.long()] = True
            victims.append(hits)
            count += hits.numel()
            self._found += hits.numel()
            self._cursor += rows
            self._left -= rows
            places -= rows
        return torch.cat(victims)

    def _estimate(self, call: _Call, need: int) -> None:
        take_any = self._found == 0
        self._left, self._found = call.high, 0
        rows, scores, low = call.sample(self._cursor, need)
        usable = 1 <= low <= rows.numel() and not take_any
        self._threshold = int(scores[low - 1]) if usable else _HIGHEST

    def _lowest_of_sample(self, call: _Call, need: int) -> Tensor:
        rows, scores, low = call.sample(self._cursor, need)
        low = min(low, rows.numel())
        self._left, self._found, self._threshold = call.high, 1, _HIGHEST
        if low < 1:
            return rows[:0]
        self._threshold = int(scores[low - 1])
        self._cursor = int(rows[0]) + 1
        return rows[: min(low, need)]


class _Call:
    """One call: how to read rows, and which must stay or were chosen."""

    def __init__(self, high: int, scored: Scored, kept: Tensor, candidates: int) -> None:
        self.high = high
        self.taken = torch.zeros(high, dtype=torch.bool, device=kept.device)
        self.taken[kept] = True
        self._scored = scored
        self._candidates = candidates

    def walk(self, start: int, count: int, threshold: int) -> Tensor:
        """Return the rows among the next ones that may go and have no score above the threshold."""
        rows = torch.arange(start, start + count, dtype=torch.int32, device=self.taken.device)
        live, scores = self._scored(rows)
        return rows[live & (scores <= threshold) & ~self.taken[start : start + count]]

    def sample(self, start: int, need: int) -> tuple[Tensor, Tensor, int]:
        """Return rows from all over the table by ascending score, their scores, and how many are low."""
        count = min(self.high, SAMPLE)
        steps = torch.arange(count, device=self.taken.device) * self.high // count
        rows = (steps + start) % self.high
        live, scores = self._scored(rows.to(torch.int32))
        usable = live & ~self.taken[rows]
        scores, order = scores[usable].sort(stable=True)
        found = rows[usable][order].to(torch.int32)
        n = found.numel()
        return found, scores, max(n // LOW_PART, -(-need * n // self._candidates))


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
