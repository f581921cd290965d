"""Sums of gradients per distinct id, in a fixed order: a binary tree over micro-batches and ranks.

The tree does not depend on the number of ranks that share the micro-batches, so neither do the bits of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.ops import dedup
from megalith.table import TableConfig


class GradientSum(NamedTuple):
    """Summed gradients of distinct ids."""

    ids: Tensor  # int64 [n]
    grads: Tensor  # float32 [n, dim]
    # How often each id occurred, int64 [n]; None if no admission policy needs it
    occurrences: Tensor | None = None

    def select(self, mask: Tensor) -> GradientSum:
        """Return the part of some ids."""
        # mask: bool [n].
        seen = None if self.occurrences is None else self.occurrences[mask]
        return GradientSum(self.ids[mask], self.grads[mask], seen)


def empty_sum(config: TableConfig, device: torch.device) -> GradientSum:
    """Return the sum of no gradients of a table."""
    ids = torch.empty(0, dtype=torch.int64, device=device)
    return GradientSum(ids, torch.empty(0, config.dim, dtype=torch.float32, device=device))


def add(a: GradientSum, b: GradientSum) -> GradientSum:
    """Add two sums."""
    n = a.ids.numel()
    if not n or not b.ids.numel():
        return a if n else b
    found = dedup(torch.cat([a.ids, b.ids]))
    at = found.inverse[n:]  # ids of `a` come first, in their order
    common = at < n
    sums = torch.cat([a.grads, b.grads[~common]])
    sums.index_add_(0, at[common], b.grads[common])
    seen = None
    if a.occurrences is not None and b.occurrences is not None:
        seen = torch.cat([a.occurrences, b.occurrences[~common]])
        seen.index_add_(0, at[common], b.occurrences[common])
    return GradientSum(found.ids, sums, seen)


def halves(parts: Sequence[GradientSum]) -> list[GradientSum]:
    """Sum parts by a binary tree, except for its last addition."""
    level = list(parts)
    while len(level) > 2:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [add(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return level


def sum_received(received: GradientSum, counts: Sequence[int], mask: Tensor | None) -> GradientSum:
    """Sum the gradients that an owner received for one table by the tree, until each id occurs at most
    twice."""
    # mask: which ids have a gradient, bool [n].
    if mask is not None and bool(mask.all()):
        mask = None
    if mask is None and sum(n > 0 for n in counts) <= 2:
        return received
    # Empty parts are kept: the position of a part in the tree of sums must not change.
    parts = _split(received, counts)
    if mask is not None:
        masks = mask.split_with_sizes(list(counts))
        parts = [part.select(own) for part, own in zip(parts, masks, strict=True)]
    both = halves(parts)
    return GradientSum(
        torch.cat([part.ids for part in both]),
        torch.cat([part.grads for part in both]),
        _concatenated([part.occurrences for part in both]),
    )


def _split(received: GradientSum, counts: Sequence[int]) -> list[GradientSum]:
    sizes = list(counts)
    seen: Sequence[Tensor | None] = [None] * len(sizes)
    if received.occurrences is not None:
        seen = received.occurrences.split_with_sizes(sizes)
    ids, grads = received.ids.split_with_sizes(sizes), received.grads.split_with_sizes(sizes)
    return [GradientSum(*each) for each in zip(ids, grads, seen, strict=True)]


def _concatenated(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known and len(known) == len(parts) else None


def total(parts: Sequence[GradientSum]) -> GradientSum:
    """Sum parts by a binary tree."""
    both = halves(parts)
    return add(*both) if len(both) == 2 else both[0]
