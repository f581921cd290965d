"""DeviceVictimSearch: finds rows with low scores on the device, for a `Capacity` with a named score.

It chooses the rows that `reference_policies.VictimSearch` chooses, which defines the result (and
native/table_evict.hpp the method): a walk over the table takes rows below a threshold, which comes from a
sample of all rows. Here many rows of the walk are looked at in one call of the device. A call reads the
headers of some rows for each row that goes, however large the table is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalith.table.engines.reference_policies import LOW_PART, SAMPLE, WALK

Scored = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Reads rows, int32 [n]: whether each is in use, bool [n], and its score, int64 [n], by `ordered`."""

_HIGHEST = 2**63 - 1
_AHEAD = 2 * LOW_PART
"""Rows of the walk that are looked at for each row that is needed."""


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
        """Choose rows to remove."""
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
