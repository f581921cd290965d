"""What follows from a result: whether to update, numbers and log lines, and the peers to penalise.

Everything is derived from the merged result, so it is equal for any number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from megalith.errors import InputError
from megalith.gather.overlap import Overlap
from megalith.gather.plan import PEER_FAULTS, Status
from megalith.gather.result import Gathered, as_result
from megalith.ops import checks


class SkipReason(IntEnum):
    """Why the update of a window is skipped; GO if it is not."""

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
    """Whether the update of a window happens. A skip leaves weights and counters as they are on every rank.

    Attributes:
        reason: GO, or why not.
        detail: For PLAN_MISMATCH, the ranks and fields that differ.
    """

    reason: SkipReason
    detail: str = ""

    @property
    def go(self) -> bool:
        """Whether the update happens."""
        return self.reason is SkipReason.GO


def decide(
    gathered: Gathered, *, excluded: Sequence[int] = (), refuse: SkipReason = SkipReason.GO
) -> Decision:
    """Decide whether to update with a result.

    Args:
        gathered: The result.
        excluded: Accepted uids that are left out.
        refuse: A reason that is known already.

    Returns:
        The decision.
    """
    result = as_result(gathered)
    left_out = checks.sizes(excluded, "excluded", 0)
    count = sum(uid not in left_out for uid in result.uids)
    reason = checks.instance(refuse, SkipReason, "refuse")
    if reason is SkipReason.GO and count < result.plan.min_peers:
        reason = SkipReason.NO_PEERS if count == 0 else SkipReason.BELOW_MIN_PEERS
        lost = sum(record.status is Status.RANK_LOST for record in result.records.values())
        if lost and count + lost >= result.plan.min_peers:
            reason = SkipReason.RANK_LOST
        if result.conflicts and count + len(result.conflicts) >= result.plan.min_peers:
            reason = SkipReason.DIGEST_CONFLICT
    return Decision(reason)


def norm_medians(gathered: Gathered) -> dict[str, float]:
    """Return the median norm of each parameter and table, the lower of two.

    Args:
        gathered: The result.

    Returns:
        By name; empty without peers.
    """
    result = as_result(gathered)
    if not result.uids:
        return {}
    middles = result.norm_table().median(dim=0).values
    return dict(zip(result.schema.names, middles.tolist(), strict=True))


def metrics(
    gathered: Gathered, *, scores: Mapping[int, float] | None = None, overlap: Overlap | None = None
) -> dict[str, float]:
    """Return all numbers of a window.

    Args:
        gathered: The result.
        scores: The score of each uid; None: without mean scores.
        overlap: The overlap; None: without its numbers.

    Returns:
        By name.
    """
    result = as_result(gathered)
    found: dict[str, float] = {
        "gather/window": result.plan.window,
        "gather/success_rate": 100.0 * result.success_rate,
        "gather/primary_success_rate": 100.0 * result.primary_success_rate,
        "gather/accepted": len(result.uids),
        "gather/skipped": len(result.skipped_uids),
        "gather/reserve_used": result.reserve_used,
        "gather/duplicates": len(result.duplicate_uids),
        "gather/exact_copies": sum(len(group) - 1 for group in result.copies),
        "gather/download_bytes": result.download_bytes,
        "gather/seconds": result.time,
    }
    statuses = Counter(str(record.status) for record in result.records.values())
    found |= {f"gather/status/{name}": count for name, count in sorted(statuses.items())}
    middles = norm_medians(result).values()
    if middles:
        found |= {"gather/min_median_norm": min(middles), "gather/max_median_norm": max(middles)}
    if scores is not None:
        if not isinstance(scores, Mapping) or None in map(checks.as_number, scores.values()):
            raise InputError(f"scores must be numbers by uid, got {checks.kind(scores)}")
        for name, uids in (("intended", result.intended), ("actual", result.actual)):
            found[f"gather/{name}_mean"] = sum(scores.get(uid, 0.0) for uid in uids) / max(1, len(uids))
    if overlap is not None:
        checks.instance(overlap, Overlap, "overlap")
        found |= {
            "overlap/pairs_checked": overlap.pairs_checked,
            "overlap/pairs_high": len(overlap.pairs),
            "overlap/ratio_high": overlap.ratio_high,
            "overlap/mean": overlap.mean,
            "overlap/min": overlap.minimum,
            "overlap/max": overlap.maximum,
        }
    return found


def to_penalise(gathered: Gathered) -> tuple[int, ...]:
    """Return the skipped peers whose own fault it was.

    Args:
        gathered: The result.

    Returns:
        Their uids, ascending.
    """
    result = as_result(gathered)
    return tuple(uid for uid in result.skipped_uids if result.records[uid].status in PEER_FAULTS)


def lines(gathered: Gathered) -> list[str]:
    """Return one line per attempted uid for a log.

    Args:
        gathered: The result.

    Returns:
        The lines, which begin with the digest of the plan.
    """
    result = as_result(gathered)
    plan = result.plan
    return [
        f"plan={plan.digest[:12]} window={plan.window} uid={uid} tier={record.tier} status={record.status} "
        f"bytes={record.bytes} tries={record.tries}" + (f" detail={record.detail!r}" if record.detail else "")
        for uid, record in sorted(result.records.items())
    ]
