"""Overlap: copies among the peers of a result.

The Gram matrix counts, for each pair of peers, the positions that both sent. It is a sum over rows, so that
each rank counts the rows that it has of all peers, and the sum over ranks is exact for any number of them.
Thresholds are compared in integers: rounding cannot change a decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from torch import Tensor

from megalith.distributed.elastic_ranks import ElasticRanks
from megalith.errors import InputError
from megalith.gather.columns import Columns
from megalith.gather.plan import LEVELS, Level, OverlapConfig
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
        """Return the blamed uids of a level or a higher one."""
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
        matrix, exact = Columns(result, ElasticRanks.alone()).gram()
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
    """Return the peers that are left out of the update for copying."""
    checks.instance(overlap, Overlap, "overlap")
    exclude = checks.instance(config, OverlapConfig, "config").exclude
    return () if exclude == "none" else overlap.at_least(exclude)


def _offender(result: GatherResult, first: int, second: int) -> int:
    """The one that wrote later; on a tie the later uid in canonical order, or the first, by the settings."""
    a, b = result.records[first].last_modified, result.records[second].last_modified
    if a is None or b is None or a == b:
        return first if result.plan.overlap.tie == "first" else second
    return first if a > b else second
