"""Metrics and log lines of a window, and the peers to penalise.

Everything is derived from the merged result, so it is equal for any number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from megalith.gather.overlap import Overlap
from megalith.gather.reduce import medians
from megalith.gather.result import Gathered, as_result
from megalith.gather.status import PEER_FAULTS


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
    return dict(zip(result.schema.names, medians(result.norm_table()).tolist(), strict=True))


def quality(gathered: Gathered, scores: Mapping[int, float]) -> dict[str, float]:
    """Return the mean score of the wanted and of the accepted peers.

    Args:
        gathered: The result.
        scores: By uid; 0 for a uid without one.

    Returns:
        The two means by name.
    """
    result = as_result(gathered)
    return {
        "gather/intended_mean": _mean(result.intended, scores),
        "gather/actual_mean": _mean(result.actual, scores),
    }


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
        found |= quality(result, scores)
    if overlap is not None:
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


def _mean(uids: Sequence[int], scores: Mapping[int, float]) -> float:
    return sum(scores.get(uid, 0.0) for uid in uids) / len(uids) if uids else 0.0
