"""Gathering: the rows of a request in one buffer, table after table, and the pooling over them.

What does not depend on the ids is compiled once and reused by requests of the same shape, above all by those
with one id for each feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.library import native_module
from megalith.ops.pooling import Bags, Pooling, covered, pool_flat
from megalith.shards.joint_pooling import joint_weights


class Gathering:
    """A pooling over the rows of one buffer."""

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
            index.append(torch.arange(at, at + n * dim, dim, device="cpu"))
            for each in pooling.of(name):
                offsets = each.offsets + begin if begin else each.offsets
                own = None if each.weights is None else weights
                self._bags.append(Bags(offsets, each.parts, own, each.divisor, each.shared))
            begin += n
            at += n * dim
        self._index = torch.cat(index)
        self._covered = covered(self._bags, self._outputs)

    def plan(self, features: Sequence[int], size: int) -> RowPlan:
        """Compile the pooling of requests with one id for each feature and row."""
        native: Any = native_module()
        bags = [each.native for each in self._bags]
        arguments = (bags, self._outputs, self._index, self._dim, sum(self._sizes), list(features), size)
        return RowPlan(native.PoolPlan(*arguments), self._outputs, self._covered)

    def rows(self) -> Gathered:
        """Allocate the buffer of a request."""
        buffer = torch.empty(sum(self._sizes), device="cpu")
        parts = zip(self._shapes.items(), buffer.split(self._sizes), strict=True)
        return Gathered(buffer, {name: part.view(shape) for (name, shape), part in parts})

    def pool(self, gathered: Gathered) -> list[Tensor]:
        """Reduce the rows of a request."""
        return pool_flat(gathered.buffer, self._index, self._bags, self._outputs, self._dim, self._covered)


class RowPlan:
    """A compiled pooling."""

    def __init__(self, native: Any, shapes: Sequence[tuple[int, int]], covered: Sequence[bool]) -> None:
        self.native = native
        self._outputs = [
            (shape, torch.empty if whole else torch.zeros)
            for shape, whole in zip(shapes, covered, strict=True)
        ]

    def outputs(self) -> list[Tensor]:
        """Allocate the outputs of a request, float32."""
        return [make(shape, dtype=torch.float32) for shape, make in self._outputs]


class Gathered:
    """Rows to fill, all in one buffer."""

    def __init__(self, buffer: Tensor, rows: dict[str, Tensor]) -> None:
        self.buffer = buffer
        self.rows = rows
