"""Gathering: the rows of a request's ids, table behind table in one buffer, and the pooling over them.

What does not depend on the ids is compiled once: requests of one shape, above all those with one id a
feature, use it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from megalith.ops.pool_rows import pool_flat
from megalith.ops.pooling import Bags, Pooling
from megalith.shards.joined import joint_weights


class Gathering:
    """A pooling over rows of one buffer. sizes: how many ids each table has. dims: widths of their rows."""

    def __init__(self, sizes: Mapping[str, int], pooling: Pooling, dims: Mapping[str, int]) -> None:
        self._outputs = pooling.outputs
        self._dim = max(dims[name] for name in sizes)
        self._shapes = {name: (n, dims[name]) for name, n in sizes.items()}
        self._bounds = [0]
        index = []
        weights = joint_weights(pooling, list(sizes), list(sizes.values()))
        self._bags: list[Bags] = []
        begin = 0
        for name, (n, dim) in self._shapes.items():
            at = self._bounds[-1]
            self._bounds.append(at + n * dim)
            index.append(torch.arange(at, at + n * dim, dim))
            for each in pooling.of(name):
                offsets = each.offsets + begin if begin else each.offsets
                own = None if each.weights is None else weights
                self._bags.append(Bags(offsets, each.parts, own, each.divisor, each.shared))
            begin += n
        self._index = torch.cat(index)

    def rows(self) -> Gathered:
        """Room for the rows of a request."""
        buffer = torch.empty(self._bounds[-1])
        parts = zip(self._shapes.items(), pairwise(self._bounds), strict=True)
        return Gathered(buffer, {name: buffer[a:b].view(shape) for (name, shape), (a, b) in parts})

    def pool(self, gathered: Gathered) -> list[Tensor]:
        """The pooling's outputs, read from the rows."""
        return pool_flat(gathered.buffer, self._index, self._bags, self._outputs, self._dim)


class Gathered:
    """Rows to be filled: float32 [n, dim] by table, all in one buffer."""

    def __init__(self, buffer: Tensor, rows: dict[str, Tensor]) -> None:
        self.buffer = buffer
        self.rows = rows
