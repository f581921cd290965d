"""Gathering: the rows of a request in one buffer, table after table, and the pooling over them.

What does not depend on the ids is compiled once and reused by requests of the same shape, above all by those
with one id for each feature.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megalith.ops.pool_rows import pool_flat
from megalith.ops.pooling import Bags, Pooling, covered
from megalith.shards.joint_pooling import joint_weights


class Gathering:
    """A pooling over the rows of one buffer.

    Args:
        sizes: Table -> number of ids.
        pooling: How rows are reduced.
        dims: Table -> width of a row.
    """

    def __init__(self, sizes: Mapping[str, int], pooling: Pooling, dims: Mapping[str, int]) -> None:
        self._outputs = pooling.outputs
        self._dim = max(dims[name] for name in sizes)
        self._shapes = {name: (n, dims[name]) for name, n in sizes.items()}
        self._sizes = [n * dim for n, dim in self._shapes.values()]
        index = []
        weights = joint_weights(pooling, list(sizes), list(sizes.values()))
        self._bags: list[Bags] = []
        begin = at = 0
        for name, (n, dim) in self._shapes.items():
            index.append(torch.arange(at, at + n * dim, dim))
            for each in pooling.of(name):
                offsets = each.offsets + begin if begin else each.offsets
                own = None if each.weights is None else weights
                self._bags.append(Bags(offsets, each.parts, own, each.divisor, each.shared))
            begin += n
            at += n * dim
        self._index = torch.cat(index)
        self._covered = covered(self._bags, self._outputs)

    def rows(self) -> Gathered:
        """Allocate the buffer of a request."""
        buffer = torch.empty(sum(self._sizes))
        parts = zip(self._shapes.items(), buffer.split(self._sizes), strict=True)
        return Gathered(buffer, {name: part.view(shape) for (name, shape), part in parts})

    def pool(self, gathered: Gathered) -> list[Tensor]:
        """Reduce the rows of a request.

        Args:
            gathered: The filled buffer of `rows`.

        Returns:
            The outputs of the pooling, float32, in its order.
        """
        return pool_flat(gathered.buffer, self._index, self._bags, self._outputs, self._dim, self._covered)


class Gathered:
    """Rows to fill, all in one buffer.

    Args:
        buffer: float32, flat: the rows of table after table.
        rows: Table -> its part of the buffer, float32 [n, dim].
    """

    def __init__(self, buffer: Tensor, rows: dict[str, Tensor]) -> None:
        self.buffer = buffer
        self.rows = rows
