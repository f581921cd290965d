"""The policies of the reference engine in plain Python; native/admission.hpp and table_evict.hpp do the same.

The engines must remove the same rows and admit the same ids, so that tests can compare them. Every decision
here therefore depends only on the sequence of calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.bits import mix64, signed
from megalith.table.initializers import draw_bits
from megalith.table.policies import MAX_COUNT, Admission, MinCount, Probability

SAMPLE = 2048
WALK = 64
LOW_PART = 8
MIN_COMPACT = 4096

_WORD = 2**64 - 1
_DRAWS = 1 << 16
_STEP_FACTOR = 0xD1B54A32D192ED03


class IdLog:
    """The most recent ids of a kind of event, until the user fetches them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._ids: list[int] = []
        self.lost = 0

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, ids: list[int]) -> None:
        """Append ids."""
        self._ids += ids
        excess = max(0, len(self._ids) - self.most)
        del self._ids[:excess]
        self.lost += excess

    def lost_with(self, more: int) -> int:
        """Return how many ids would be lost after more were added."""
        return self.lost + max(0, len(self._ids) + more - self.most)

    def take(self) -> Tensor:
        """Return the ids, int64, from the oldest on, and empty the log."""
        ids, self._ids = self._ids, []
        return torch.tensor(ids, dtype=torch.int64, device="cpu")


class AdmissionState:
    """Decides which new ids get a row, and counts those that do not."""

    def __init__(self, policy: Admission | None, key: int, max_ids: int, max_log: int) -> None:
        self._policy = policy
        self._max_ids = max_ids
        self._key = key & _WORD
        self.counts: dict[int, int] = {}
        self.dropped = 0
        self.refused = IdLog(max_log)
        self.refusals = 0

    def set_key(self, key: int) -> None:
        """Change the key of the random numbers."""
        self._key = key & _WORD

    def admits(self, ids: Tensor, occurrences: Tensor, step: int) -> Tensor:
        """Decide which ids without a row get one. Changes nothing."""
        # ids: int64 [n], distinct; occurrences: number of occurrences of each in this call, int64 [n];
        # returns: whether each gets a row, bool [n].
        if isinstance(self._policy, MinCount):
            before = torch.tensor(
                [self.counts.get(id, 0) for id in ids.tolist()], dtype=torch.int64, device="cpu"
            )
            return (before + occurrences).clamp(max=MAX_COUNT) >= self._policy.n
        if not isinstance(self._policy, Probability):
            return torch.ones_like(ids, dtype=torch.bool)
        keys = mix64(mix64(ids ^ signed(self._key)) + signed((step + 1) * _STEP_FACTOR & _WORD))[:, None]
        admitted = torch.zeros_like(ids, dtype=torch.bool)
        most = int(occurrences.max()) if ids.numel() else 0
        block = max(1, _DRAWS // max(1, ids.numel()))
        for first in range(0, most, block):  # some draws of all ids at a time
            numbers = torch.arange(first, min(most, first + block), device="cpu")
            low = draw_bits(keys, numbers) < self._policy.limit
            admitted |= (low & (numbers < occurrences[:, None])).any(dim=1)
        return admitted

    def refuse(self, seen: list[tuple[int, int]]) -> None:
        """Record refused ids. Which ones a new id displaces does not depend on their order in the call."""
        for id, occurrences in sorted(seen, key=lambda pair: pair[0] not in self.counts):
            if isinstance(self._policy, MinCount):
                self.count(id, occurrences)
            self.refusals += 1
        self.refused.add([id for id, _ in seen])

    def count(self, id: int, occurrences: int) -> None:
        """Add occurrences of an id that has no row."""
        if not isinstance(self._policy, MinCount):
            return
        if id not in self.counts and len(self.counts) >= self._max_ids:
            del self.counts[next(iter(self.counts))]
            self.dropped += 1
        self.counts[id] = min(self.counts.get(id, 0) + occurrences, MAX_COUNT)


class VictimSearch:
    """Finds rows with low scores; see native/table_evict.hpp for the method."""

    def __init__(self) -> None:
        self._cursor = 0
        self._left = 0
        self._found = 1
        self._threshold = 0
        self._live: list[bool] = []
        self._scores: list[int] = []
        self._taken: set[int] = set()
        self._high = self._candidates = 0

    def choose(self, need: int, live: list[bool], scores: list[int], kept: set[int], size: int) -> list[int]:
        """Choose rows to remove."""
        self._live, self._scores, self._high = live, scores, len(live)
        self._taken, self._candidates = set(kept), max(size - len(kept), 1)
        victims: list[int] = []
        places = WALK * need + SAMPLE
        while len(victims) < need:
            if self._left == 0:
                self._estimate(need - len(victims))
            if places <= 0:
                while len(victims) < need and (low := self._lowest_of_sample(need - len(victims))):
                    self._taken.update(low)
                    victims += low
                if len(victims) == need:
                    break
            if self._cursor >= self._high:
                self._cursor = 0
            row, self._cursor = self._cursor, self._cursor + 1
            if live[row] and scores[row] <= self._threshold and row not in self._taken:
                self._taken.add(row)
                victims.append(row)
                self._found += 1
            self._left -= 1
            places -= 1
        return victims

    def _sample(self, need: int) -> tuple[list[tuple[int, int, int]], int]:
        """Return scores, numbers and rows from all over the table, sorted, and how many of them are low."""
        high, count = self._high, min(self._high, SAMPLE)
        rows = [(self._cursor + k * high // count) % high for k in range(count)]
        sample = [
            (self._scores[row], k, row)
            for k, row in enumerate(rows)
            if self._live[row] and row not in self._taken
        ]
        return sorted(sample), max(len(sample) // LOW_PART, -(-need * len(sample) // self._candidates))

    def _estimate(self, need: int) -> None:
        take_any = self._found == 0
        self._left, self._found = self._high, 0
        sample, low = self._sample(need)
        self._threshold = sample[low - 1][0] if 1 <= low <= len(sample) and not take_any else _WORD

    def _lowest_of_sample(self, need: int) -> list[int]:
        sample, low = self._sample(need)
        low = min(low, len(sample))
        self._left, self._found, self._threshold = self._high, 1, _WORD
        if low < 1:
            return []
        self._threshold = sample[low - 1][0]
        self._cursor = sample[0][2] + 1
        return [row for _, _, row in sample[: min(low, need)]]


def is_sparse(used: int, places: int) -> bool:
    """Return whether a table has so many free places that moving its rows is worth the time."""
    return places > MIN_COMPACT and 2 * used < places
