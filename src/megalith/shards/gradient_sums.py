"""Sums of gradients per distinct id, in a fixed order: a binary tree over micro-batches and ranks.

The tree does not depend on the number of ranks that share the micro-batches, so neither do the bits of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.ops import dedup


class GradientSum(NamedTuple):
    """Summed gradients of distinct ids.

    Attributes:
        ids: int64 [n].
        grads: float32 [n, dim].
        occurrences: How often each id occurred, int64 [n]; None if no admission policy needs it.
    """

    ids: Tensor
    grads: Tensor
    occurrences: Tensor | None = None

    def select(self, mask: Tensor) -> GradientSum:
        """Return the part of some ids.

        Args:
            mask: bool [n].

        Returns:
            The part.
        """
        seen = None if self.occurrences is None else self.occurrences[mask]
        return GradientSum(self.ids[mask], self.grads[mask], seen)


def add(a: GradientSum, b: GradientSum) -> GradientSum:
    """Add two sums.

    Args:
        a: The left sum.
        b: The right sum.

    Returns:
        The ids of `a`, then those that only `b` has; an id that is in one of them keeps its gradient.
    """
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
    """Sum parts by a binary tree, except for its last addition.

    Args:
        parts: The sums of micro-batches or ranks, in their order; empty ones keep their position.

    Returns:
        The two halves of the tree, or the only part. An optimizer step on both adds them.
    """
    level = list(parts)
    while len(level) > 2:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [add(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return level


class ReceivedGradients(NamedTuple):
    """The gradients of one table that one rank sent.

    Attributes:
        mask: Which of its ids take part, bool [m]; None: all.
        values: The floats of all its ids.
        occurrences: How often each id occurred there, int64 [m]; None if no admission policy needs it.
    """

    mask: Tensor | None
    values: Tensor
    occurrences: Tensor | None


def sum_received(ids: Tensor, received: Sequence[ReceivedGradients], dim: int) -> GradientSum:
    """Sum the gradients that an owner received for one table by the tree, until each id occurs at most twice.

    Args:
        ids: int64 [n], the ids of all sources concatenated.
        received: The gradients of each source.
        dim: The dim of the table.

    Returns:
        Ids int64 [k], gradients float32 [k, dim] and occurrences; the ids are `ids` itself if nothing had to
        be summed.
    """
    grads = [part.values.view(-1, dim) for part in received]
    masked = any(part.mask is not None and not bool(part.mask.all()) for part in received)
    full = [g for g in grads if g.numel()]
    if not masked and len(full) <= 2:
        return GradientSum(
            ids,
            full[0] if len(full) == 1 else torch.cat(full) if full else grads[0],
            _concatenated([part.occurrences for part in received]),
        )
    sources = zip(ids.split_with_sizes([len(g) for g in grads]), grads, received, strict=True)
    # Empty parts are kept: the position of a part in the tree of sums must not change.
    sums = [(GradientSum(i, g, part.occurrences), part.mask) for i, g, part in sources]
    both = halves([each if mask is None else each.select(mask) for each, mask in sums])
    return GradientSum(
        torch.cat([part.ids for part in both]),
        torch.cat([part.grads for part in both]),
        _concatenated([part.occurrences for part in both]),
    )


def _concatenated(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known and len(known) == len(parts) else None


def total(parts: Sequence[GradientSum]) -> GradientSum:
    """Sum parts by a binary tree.

    Args:
        parts: At least one part; see `halves`.

    Returns:
        The sum of all parts.
    """
    both = halves(parts)
    return add(*both) if len(both) == 2 else both[0]
