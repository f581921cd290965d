"""What follows from a result: copies among its peers, whether to update, numbers and log lines.

Everything is derived from the merged result, so it is equal for any number of ranks.

The Gram matrix counts, for each pair of peers, the positions that both sent. It is a sum over rows, so that
each rank counts the rows that it has of all peers, and the sum over ranks is exact for any number of them.
Thresholds are compared in integers: rounding cannot change a decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations

from torch import Tensor

from megalith.distributed.surviving_ranks import Ranks
from megalith.errors import InputError
from megalith.gather.columns import Columns
from megalith.gather.plan import LEVELS, PEER_FAULTS, Level, OverlapConfig, Status
from megalith.gather.result import Gathered, GatherResult, as_result
from megalith.ops import checks


@dataclass(frozen=True)
class OverlapPair:
    """Two peers that have too much in common."""

    first: int  # The first uid, in canonical order
    second: int  # The second uid
    shared: int  # The number of positions that both sent
    overlap: float  # The share of positions that both sent
    level: Level  # The level of this share
    offender: int  # The uid that is blamed


@dataclass(frozen=True)
class Overlap:
    """What the Gram matrix shows.

    Attributes:
        uids: The peers, in canonical order.
        gram: The positions that each pair has in common, int64 [peers, peers].
        total: The positions that each peer sent.
        pairs_checked: The number of pairs.
        mean: The mean share over all pairs.
        minimum: The smallest share.
        maximum: The largest share.
        pairs: The pairs at or above the threshold.
        levels: The level of each blamed uid.
        exact: Whether all counts are exact; with `OverlapConfig.sample`, only those of `pairs` are.
    """

    uids: tuple[int, ...]
    gram: Tensor
    total: int
    pairs_checked: int
    mean: float
    minimum: float
    maximum: float
    pairs: tuple[OverlapPair, ...]
    levels: dict[int, Level]
    exact: bool = True

    @property
    def ratio_high(self) -> float:
        """The share of pairs at or above the threshold."""
        return len(self.pairs) / self.pairs_checked if self.pairs_checked else 0.0

    def at_least(self, level: Level) -> tuple[int, ...]:
        """Return the blamed uids of a level or a higher one.

        Args:
            level: The level.

        Returns:
            The uids in canonical order.
        """
        least = LEVELS.index(checks.one_of(level, LEVELS, "level"))
        return tuple(
            uid for uid in self.uids if uid in self.levels and LEVELS.index(self.levels[uid]) >= least
        )


def find_overlap(gathered: Gathered, matrix: Tensor | None = None, *, exact: bool = True) -> Overlap:
    """Find overlaps, by the plan's settings.

    Args:
        gathered: The result. Without a matrix, all payloads must be in this process.
        matrix: The Gram matrix, if it is known already.
        exact: Whether this matrix is exact.

    Returns:
        The overlaps.

    Raises:
        InputError: The matrix does not match the peers, or a payload is in another process.
        BudgetError: Not even one row fits into the plan's budget.
    """
    result = as_result(gathered)
    config, uids = result.plan.overlap, result.uids
    if matrix is None:
        matrix, exact = Columns(result, Ranks.alone()).gram()
    counts = matrix
    checks.flag(exact, "exact")
    if checks.tensor(counts, "matrix", None).is_meta or counts.shape != (len(uids), len(uids)):
        raise InputError(f"a Gram matrix of {len(uids)} peers must have the shape {[len(uids)] * 2}")
    total = sum(spec.kept for spec in result.schema.parameters if config.full_rows or not spec.full)
    numbers = counts.tolist()
    pairs, values = [], []
    for (i, first), (j, second) in combinations(enumerate(uids), 2):
        shared = numbers[i][j]
        values.append(shared)
        level = config.level_of(shared, total)
        if level is not None:
            offender = _offender(result, first, second)
            pairs.append(OverlapPair(first, second, shared, shared / total, level, offender))
    levels: dict[int, Level] = {}
    for pair in pairs:
        old = levels.get(pair.offender)
        if old is None or config.level == "last" or LEVELS.index(pair.level) > LEVELS.index(old):
            levels[pair.offender] = pair.level
    scale = total if total and values else 1
    return Overlap(
        uids=uids,
        gram=counts,
        total=total,
        pairs_checked=len(values),
        mean=sum(values) / (len(values) * scale) if values else 0.0,
        minimum=min(values, default=0) / scale,
        maximum=max(values, default=0) / scale,
        pairs=tuple(pairs),
        levels=levels,
        exact=exact,
    )


def excluded_uids(overlap: Overlap, config: OverlapConfig) -> tuple[int, ...]:
    """Return the peers that are left out of the update for copying.

    Args:
        overlap: The overlaps.
        config: The settings.

    Returns:
        Their uids.
    """
    checks.instance(overlap, Overlap, "overlap")
    exclude = checks.instance(config, OverlapConfig, "config").exclude
    return () if exclude == "none" else overlap.at_least(exclude)


def _offender(result: GatherResult, first: int, second: int) -> int:
    """The one that wrote later; on a tie the later uid in canonical order, or the first, by the settings."""
    a, b = result.records[first].last_modified, result.records[second].last_modified
    if a is None or b is None or a == b:
        return first if result.plan.overlap.tie == "first" else second
    return first if a > b else second


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
