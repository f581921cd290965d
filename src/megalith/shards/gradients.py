"""Gradients: summed gradients on their way to the owner of the rows, and their sum by a fixed binary tree.

The tree goes over micro-batches and ranks. It does not depend on the number of ranks that share the
micro-batches, so neither do the bits of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.ops import dedup
from megalith.table import TableConfig


class Gradients(NamedTuple):
    """One summed gradient per id, of one table or of all tables.

    Those of all tables are ordered like the ids, and their values are flat, as tables may differ in dim.
    """

    ids: Tensor  # int64 [n]; of one table before the last sum, an id may occur once per source
    values: Tensor  # float32 [n, dim], or of all tables [sum of n * dim]
    counts: Tensor | None = None  # int64 [n], occurrences of each id; None if no admission policy needs it
    mask: Tensor | None = None  # bool [n], which ids have a gradient; None: all

    def select(self, mask: Tensor) -> Gradients:
        """Return the part of some ids of one table."""
        # mask: bool [n].
        return Gradients(
            self.ids[mask], self.values[mask], None if self.counts is None else self.counts[mask]
        )

    def split(self, sizes: Sequence[int]) -> list[Gradients]:
        """Return consecutive parts of the gradients of one table."""
        n = list(sizes)
        columns = [
            [None] * len(n) if column is None else column.split_with_sizes(n)
            for column in (self.ids, self.values, self.counts, self.mask)
        ]
        return [Gradients(*own) for own in zip(*columns, strict=True)]


def no_gradients(config: TableConfig, device: torch.device) -> Gradients:
    """Return the sum of no gradients of a table."""
    ids = torch.empty(0, dtype=torch.int64, device=device)
    return Gradients(ids, torch.empty(0, config.dim, dtype=torch.float32, device=device))


def concatenated(parts: Sequence[Gradients]) -> Gradients:
    """Return the gradients of one table from several sources, one after another."""
    if len(parts) == 1:
        return parts[0]
    counts = [part.counts for part in parts if part.counts is not None]
    return Gradients(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.values for part in parts]),
        torch.cat(counts) if len(counts) == len(parts) else None,
    )


def add(a: Gradients, b: Gradients) -> Gradients:
    """Add two sums, in each of which an id occurs once."""
    n = a.ids.numel()
    if not n or not b.ids.numel():
        return a if n else b
    found = dedup(torch.cat([a.ids, b.ids]))
    at = found.inverse[n:]  # ids of `a` come first, in their order
    common = at < n
    sums = torch.cat([a.values, b.values[~common]])
    sums.index_add_(0, at[common], b.values[common])
    counts = None
    if a.counts is not None and b.counts is not None:
        counts = torch.cat([a.counts, b.counts[~common]])
        counts.index_add_(0, at[common], b.counts[common])
    return Gradients(found.ids, sums, counts)


def halves(parts: Sequence[Gradients]) -> list[Gradients]:
    """Sum parts by a binary tree, except for its last addition."""
    level = list(parts)
    while len(level) > 2:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [add(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return level


def total(parts: Sequence[Gradients]) -> Gradients:
    """Sum parts by a binary tree."""
    both = halves(parts)
    return add(*both) if len(both) == 2 else both[0]


def sum_received(received: Gradients, sources: Sequence[int]) -> Gradients:
    """Sum what an owner received for one table by the tree, until each id occurs at most twice.

    The engine makes the last sum. `sources` has the number of ids of each source.
    """
    mask = received.mask
    if mask is not None and bool(mask.all()):
        received, mask = received._replace(mask=None), None
    if mask is None and sum(n > 0 for n in sources) <= 2:
        return received
    # Empty parts are kept: the position of a part in the tree of sums must not change.
    parts = [part if part.mask is None else part.select(part.mask) for part in received.split(sources)]
    return concatenated(halves(parts))
