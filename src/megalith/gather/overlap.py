"""Which peers sent the same positions: exact counts, from integers alone.

The Gram matrix counts, for each pair of peers, the positions both sent. It adds over rows, so each rank
counts the rows it holds of all peers and the sum of all ranks is exact, for any number of them. Thresholds
are compared in integers: no rounding can turn a decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from megalith.errors import BudgetError, InputError
from megalith.gather.ledger import Ledger
from megalith.gather.merge import Gathered, GatherResult, as_result
from megalith.gather.packing import unpack_indices
from megalith.gather.schema import ParameterSpec
from megalith.gather.settings import LEVELS, Level, OverlapConfig

_ENTRY_BYTES = 48  # one sent position: its key, place and peer, and what comparing takes
_PAIR_BYTES = 32  # one pair of peers: its count, and what adding to it takes


@dataclass(frozen=True)
class Pair:
    """Two peers, in canonical order, the positions both sent, and what that amounts to."""

    first: int
    second: int
    shared: int
    overlap: float
    level: Level
    offender: int


@dataclass(frozen=True)
class Overlap:
    """What the Gram matrix says. total: positions that each peer sent; pairs: those from the threshold on."""

    uids: tuple[int, ...]
    gram: Tensor
    total: int
    pairs_checked: int
    mean: float
    minimum: float
    maximum: float
    pairs: tuple[Pair, ...]
    levels: dict[int, Level]
    """Blamed uids and their level."""

    @property
    def ratio_high(self) -> float:
        """The share of pairs from the threshold on."""
        return len(self.pairs) / self.pairs_checked if self.pairs_checked else 0.0

    def at_least(self, level: Level) -> tuple[int, ...]:
        """Blamed uids of this level or a higher one, in canonical order."""
        return tuple(
            u for u in self.uids if u in self.levels and LEVELS.index(self.levels[u]) >= LEVELS.index(level)
        )


def gram_bytes(spec: ParameterSpec, num_peers: int) -> int:
    """Memory that counting one row of a parameter takes, beside the matrix."""
    return num_peers * spec.keep * _ENTRY_BYTES + spec.keep * 16


def block_gram(spec: ParameterSpec, rows: Sequence[Tensor]) -> Tensor:
    """Shared positions within one block: int64 [peers, peers]. rows: each peer's packed indices."""
    count = len(rows)
    num_rows = rows[0].shape[0] if count else 0
    each = num_rows * spec.keep
    keys = np.empty((count, each), np.int64)
    starts = np.arange(num_rows, dtype=np.int64)[:, None] * spec.size
    for number, packed in enumerate(rows):
        places = unpack_indices(packed, spec.keep).cpu().numpy() + starts
        keys[number] = places.reshape(-1) * count + number
    flat = keys.reshape(-1)
    flat.sort()
    places, peers = np.divmod(flat, max(1, count))
    found = np.zeros(count * count, np.int64)
    for shift in range(1, count):
        same = places[shift:] == places[:-shift]
        if not same.any():
            break
        pairs = peers[:-shift][same] * count + peers[shift:][same]
        found += np.bincount(pairs, minlength=count * count)
    matrix = found.reshape(count, count)
    matrix += matrix.T
    matrix[np.arange(count), np.arange(count)] = each
    return torch.from_numpy(matrix)


def counted(spec: ParameterSpec, config: OverlapConfig) -> bool:
    """Whether a parameter's rows are counted: rows that are sent whole tell nothing."""
    return config.full_rows or not spec.full


def gram(gathered: Gathered, *, memory_budget: int | None = None) -> Tensor:
    """The Gram matrix of all accepted peers, in canonical order: int64 [peers, peers]. Needs all payloads
    here.

    memory_budget: the plan's unless given. Raises BudgetError if not even one row fits.
    """
    result = as_result(gathered)
    payloads = result.held(result.uids)
    ledger = Ledger(result.plan.memory_budget if memory_budget is None else memory_budget, "overlap")
    count = len(payloads)
    with ledger.hold(_PAIR_BYTES * count * count, "the Gram matrix"):
        total = torch.zeros(count, count, dtype=torch.int64)
        for number, spec in enumerate(result.schema.parameters):
            if not counted(spec, result.plan.overlap) or not count:
                continue
            each = gram_bytes(spec, count)
            rows = min(spec.rows, (ledger.budget - ledger.used) // each)
            if not rows and spec.rows:
                raise BudgetError(
                    f"overlap: one row of {spec.name!r} takes {each} bytes: raise memory_budget"
                )
            for start in range(0, spec.rows, max(1, rows)):
                stop = min(start + rows, spec.rows)
                with ledger.hold((stop - start) * each, "a block"):
                    total += block_gram(spec, [p.indices(number, start, stop) for p in payloads])
    return total


def find_overlap(gathered: Gathered, matrix: Tensor | None = None) -> Overlap:
    """What overlaps there are, by the plan's settings. matrix: the Gram matrix, if it is known already."""
    result = as_result(gathered)
    config = result.plan.overlap
    counts = gram(result) if matrix is None else matrix
    uids = result.uids
    if counts.shape != (len(uids), len(uids)):
        raise InputError(f"a Gram matrix of {tuple(counts.shape)} does not fit {len(uids)} peers")
    total = sum(spec.kept for spec in result.schema.parameters if counted(spec, config))
    numbers = counts.tolist()
    pairs, values = [], []
    for i in range(len(uids)):
        for j in range(i + 1, len(uids)):
            shared = numbers[i][j]
            values.append(shared)
            level = level_of(shared, total, config)
            if level is not None:
                offender = _offender(result, uids[i], uids[j])
                pairs.append(Pair(uids[i], uids[j], shared, shared / total, level, offender))
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
    )


def excluded_uids(overlap: Overlap, config: OverlapConfig) -> tuple[int, ...]:
    """Who is left out of the update for copying, by the settings."""
    return () if config.exclude == "none" else overlap.at_least(config.exclude)


def level_of(shared: int, total: int, config: OverlapConfig) -> Level | None:
    """The level of a pair that shares this many of its positions, or None. Exact."""
    for limit, level in config.limits:
        if total and Fraction(shared, total) >= limit:
            return level
    return None


def _offender(result: GatherResult, first: int, second: int) -> int:
    """Who wrote later; on a tie the later uid in canonical order, or the first if the settings say so."""
    a, b = result.records[first].last_modified, result.records[second].last_modified
    if a is None or b is None or a == b:
        return first if result.plan.overlap.tie == "first" else second
    return first if a > b else second
