"""The policies of the reference engine in plain Python; native/admission.hpp and table_evict.hpp do the same.

The engines must remove the same rows and admit the same ids, so that tests can compare them. Every decision
here therefore depends only on the sequence of calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.table.policies import Admission, MinCount, Probability
from megalith.table.policies.min_count import MAX_COUNT

MAX_LOG = 1 << 20
SAMPLE = 2048
MIN_COMPACT = 4096

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STEP_FACTOR = 0xD1B54A32D192ED03


class IdLog:
    """The most recent ids of a kind of event, until the user fetches them.

    Attributes:
        lost: Number of ids that newer ones replaced.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self.lost = 0

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, ids: list[int]) -> None:
        """Append ids.

        Args:
            ids: The ids, in order.
        """
        self._ids += ids
        excess = max(0, len(self._ids) - MAX_LOG)
        del self._ids[:excess]
        self.lost += excess

    def take(self) -> Tensor:
        """Return the ids, int64, from the oldest on, and empty the log."""
        ids, self._ids = self._ids, []
        return torch.tensor(ids, dtype=torch.int64)


class AdmissionState:
    """Decides which new ids get a row, and counts those that do not.

    Args:
        policy: The admission policy of the table; None admits every id.
        key: The key of the table's random numbers.

    Attributes:
        counts: Occurrences of ids without a row, in the order of their first occurrence.
        dropped: Ids that are no longer counted because there were too many.
        refused: Log of refused ids.
        refusals: Number of refusals.
    """

    def __init__(self, policy: Admission | None, key: int) -> None:
        self._policy = policy
        self._key = key & _WORD
        self.counts: dict[int, int] = {}
        self.dropped = 0
        self.refused = IdLog()
        self.refusals = 0

    def set_key(self, key: int) -> None:
        """Change the key of the random numbers.

        Args:
            key: The new key.
        """
        self._key = key & _WORD

    def admits(self, id: int, occurrences: int, step: int) -> bool:
        """Decide whether an id without a row gets one. Changes nothing.

        Args:
            id: The id.
            occurrences: Number of its occurrences in this call.
            step: The global step.

        Returns:
            Whether it gets a row.
        """
        if isinstance(self._policy, MinCount):
            return min(self.counts.get(id, 0) + occurrences, MAX_COUNT) >= self._policy.n
        if isinstance(self._policy, Probability):
            row_key = _mix((id & _WORD) ^ self._key)
            key = _mix((row_key + (step + 1) * _STEP_FACTOR) & _WORD)
            return any(_draw24(key, k) < self._policy.limit for k in range(occurrences))
        return True

    def refuse(self, seen: list[tuple[int, int]]) -> None:
        """Record refused ids.

        Args:
            seen: Pairs of an id and the number of its occurrences in this call.
        """
        for id, occurrences in seen:
            if isinstance(self._policy, MinCount):
                self.count(id, occurrences)
            self.refusals += 1
        self.refused.add([id for id, _ in seen])

    def count(self, id: int, occurrences: int) -> None:
        """Add occurrences of an id that has no row.

        Args:
            id: The id.
            occurrences: How often it occurred.
        """
        if not isinstance(self._policy, MinCount):
            return
        if id not in self.counts and len(self.counts) >= self._policy.max_ids:
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

    def choose(self, need: int, live: list[bool], scores: list[int], kept: set[int], size: int) -> list[int]:
        """Choose rows to remove.

        Args:
            need: How many.
            live: Whether each row number is in use.
            scores: The score of each row number; rows with low scores go first.
            kept: Rows that must stay.
            size: Number of rows in use.

        Returns:
            Row numbers in the order of their removal.
        """
        taken, high = set(kept), len(live)
        victims: list[int] = []
        while len(victims) < need:
            if self._left == 0:
                self._estimate(need - len(victims), live, scores, taken, size, len(kept))
            if self._cursor >= high:
                self._cursor = 0
            row, self._cursor = self._cursor, self._cursor + 1
            if live[row] and scores[row] <= self._threshold and row not in taken:
                taken.add(row)
                victims.append(row)
                self._found += 1
            self._left -= 1
        return victims

    def _estimate(
        self, need: int, live: list[bool], scores: list[int], taken: set[int], size: int, kept: int
    ) -> None:
        high, take_any = len(live), self._found == 0
        self._left, self._found = high, 0
        stride = max(1, high // SAMPLE)
        places = [(self._cursor + k * stride) % high for k in range(min(high, SAMPLE))]
        sample = sorted(scores[row] for row in places if live[row] and row not in taken)
        candidates = max(size - kept, 1)
        rank = max(len(sample) // 16, -(-need * len(sample) // candidates))
        self._threshold = sample[rank - 1] if 1 <= rank <= len(sample) and not take_any else _WORD


def is_sparse(used: int, places: int) -> bool:
    """Return whether a table has so many free places that moving its rows is worth the time.

    Args:
        used: Number of rows in use.
        places: Number of places of rows.

    Returns:
        Whether fewer than half of the places are in use, and the table is not small.
    """
    return places > MIN_COMPACT and 2 * used < places


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def _draw24(key: int, column: int) -> int:
    x = _mix((key + ((column >> 1) + 1) * _GOLDEN) & _WORD)
    return ((x >> 32 if column & 1 else x) & 0xFFFFFFFF) >> 8
