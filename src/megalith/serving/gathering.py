"""Gathered: the rows of a request's ids, table behind table in one buffer, and the pooling over them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megalith.ops.pool_rows import pool_flat
from megalith.ops.pooling import Bags, Pooling
from megalith.shards.joined import joint_weights


class Gathered:
    """Room for one row for each id. rows: float32 [n, dim] by table, to be filled, in one buffer."""

    def __init__(self, ids: Mapping[str, Tensor], dims: Mapping[str, int]) -> None:
        self._ids = ids
        self._dims = {name: dims[name] for name in ids}
        floats = [each.numel() * dims[name] for name, each in ids.items()]
        self._buffer = torch.empty(sum(floats))
        self.total = sum(each.numel() for each in ids.values())
        self.rows = {
            name: part.view(-1, dims[name])
            for name, part in zip(ids, self._buffer.split(floats), strict=True)
        }

    def ids(self, table: str) -> Tensor:
        """A table's ids, int64 [n]."""
        return self._ids[table].to(torch.int64).contiguous()

    def pool(self, pooling: Pooling) -> list[Tensor]:
        """The pooling's outputs, read from the rows."""
        index, bags = [], []
        begin = at = 0
        weights = joint_weights(pooling, list(self._ids), [ids.numel() for ids in self._ids.values()])
        for name, ids in self._ids.items():
            n, dim = ids.numel(), self._dims[name]
            index.append(torch.arange(at, at + n * dim, dim))
            for each in pooling.of(name):
                offsets = each.offsets + begin if begin else each.offsets
                own = None if each.weights is None else weights
                bags.append(Bags(offsets, each.parts, own, each.divisor, each.shared))
            begin += n
            at += n * dim
        return pool_flat(self._buffer, torch.cat(index), bags, pooling.outputs, max(self._dims.values()))
