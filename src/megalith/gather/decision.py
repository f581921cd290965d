"""Whether a window's update happens: decided once, from the merged result, and sent to all ranks as six
numbers.

A skip leaves weights and counters as they are on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from megalith.errors import InputError
from megalith.gather.merge import Gathered, as_result


class SkipReason(IntEnum):
    """Why a window's update is skipped; GO if it is not."""

    GO = 0
    NO_PEERS = 1
    BELOW_MIN_PEERS = 2
    PLAN_MISMATCH = 3
    RANK_LOST = 4
    BUDGET_TOO_SMALL = 5
    DIGEST_CONFLICT = 6
    OPERATOR = 7


@dataclass(frozen=True)
class Decision:
    """Whether the update happens. Travels as six numbers."""

    reason: SkipReason
    accepted: int
    skipped: int
    attempt: int
    plan64: int

    @property
    def go(self) -> bool:
        """Whether the update happens."""
        return self.reason is SkipReason.GO

    def to_numbers(self) -> list[int]:
        """Six int64 for a broadcast."""
        return [int(self.go), int(self.reason), self.accepted, self.skipped, self.attempt, self.plan64]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Decision:
        """Reads what `to_numbers` gave."""
        go, reason, accepted, skipped, attempt, plan64 = numbers
        if bool(go) != (reason == SkipReason.GO):
            raise InputError(f"a decision cannot be go={go} with reason {reason}")
        return cls(SkipReason(reason), accepted, skipped, attempt, plan64)


def decide(
    gathered: Gathered, *, excluded: Sequence[int] = (), refuse: SkipReason = SkipReason.GO
) -> Decision:
    """Whether to update with this result. excluded: accepted but left out. refuse: a reason known already."""
    result = as_result(gathered)
    count = len(set(result.uids) - set(excluded))
    reason = refuse
    if reason is SkipReason.GO and count < result.plan.min_peers:
        reason = SkipReason.NO_PEERS if count == 0 else SkipReason.BELOW_MIN_PEERS
        if result.conflicts and count + len(result.conflicts) >= result.plan.min_peers:
            reason = SkipReason.DIGEST_CONFLICT
    return Decision(
        reason, len(result.uids), len(result.skipped_uids), result.plan.attempt, result.plan.digest64
    )
