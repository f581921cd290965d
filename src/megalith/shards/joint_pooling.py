"""JointPooling: one pooling over the occurrences of all tables, read from rows in one flat buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.pool_rows import pool_flat, unpool_flat
from megalith.ops.pooling import Bags, Pooling
from megalith.routing import Router
from megalith.shards.gradient_sums import GradientSum
from megalith.shards.preparer import Preparer, SyncPrepared
from megalith.table import TableConfig


class JointPooling:
    """A pooling of several tables as one. tables: those it reads. reached: the occurrences some bag holds.

    Raises InputError if a table is pooled that was not looked up, or bags do not fit; `pool` and `unpool` if
    offsets do not ascend.
    """

    def __init__(self, pooling: Pooling, prepared: SyncPrepared, dims: Mapping[str, int]) -> None:
        self.tables = [name for name in pooling.bags if pooling.of(name)]
        for name in self.tables:
            if name not in prepared.ids:
                raise InputError(f"table {name!r}: pooled, but it was not looked up")
        self._pooling = pooling
        self._dims = {name: dims[name] for name in self.tables}
        self._sizes = {name: prepared.ids[name].numel() for name in self.tables}
        slices = [prepared.occurrences(name) for name in self.tables]
        self._index = _index(prepared, slices)
        self._bags: list[Bags] = []
        self.reached: list[tuple[int, int]] = []
        begin = 0
        weights = joint_weights(pooling, self.tables, list(self._sizes.values()))
        for name, where in zip(self.tables, slices, strict=True):
            ends = pooling.check_ends(name, self._sizes[name], dims[name])
            for bags, (first, last) in zip(pooling.of(name), ends, strict=True):
                self.reached.append((where.start + first, where.start + last))
                own = None if bags.weights is None else weights
                offsets = bags.offsets + begin if begin else bags.offsets
                self._bags.append(Bags(offsets, bags.parts, own, bags.divisor, bags.shared))
            begin += self._sizes[name]

    def mask(self, prepared: SyncPrepared) -> Tensor | None:
        """Which distinct ids some bag holds, bool [u]; None if all."""
        return reached_mask(prepared, self.reached)

    def pool(self, source: Tensor) -> list[Tensor]:
        """The outputs, from rows laid out as the distinct ids are."""
        try:
            return pool_flat(source, self._index, self._bags, self._pooling.outputs, self._dim)
        except InputError:
            self._name_table()
            raise

    def unpool(self, grads: Sequence[Tensor], size: int) -> Tensor:
        """Output gradients -> the sum for every distinct id, in the order of its occurrences; float32
        [size]."""
        if not self._bags:
            return torch.zeros(size)
        try:
            return unpool_flat(grads, self._index, self._bags, size, self._dim)
        except InputError:
            self._name_table()
            raise

    @property
    def _dim(self) -> int:
        return max(self._dims.values(), default=1)

    def _name_table(self) -> None:
        """Raises InputError for the table whose bags do not fit: the op, which found it, knows no tables."""
        for name, dim in self._dims.items():
            self._pooling.check(name, self._sizes[name], dim)


def _index(prepared: SyncPrepared, slices: Sequence[slice]) -> Tensor:
    """Where the rows of these occurrences begin."""
    offsets = prepared.deduped.offsets
    assert offsets is not None
    if not slices:
        return offsets[:0]
    if all(a.stop == b.start for a, b in pairwise(slices)):
        return offsets[slices[0].start : slices[-1].stop]
    return torch.cat([offsets[where] for where in slices])


def reached_mask(prepared: SyncPrepared, reached: Sequence[tuple[int, int]]) -> Tensor | None:
    """Which distinct ids have an occurrence in one of the ranges, bool [u]; None if all have."""
    at = 0
    for start, stop in sorted(reached):
        if start != at:
            break
        at = stop
    if at == prepared.total:
        return None
    mask = torch.zeros(prepared.deduped.ids.numel(), dtype=torch.bool)
    for start, stop in reached:
        mask[prepared.deduped.inverse[start:stop]] = True
    return mask


def sum_gradients(
    configs: Mapping[str, TableConfig],
    ids: Mapping[str, Tensor],
    pooling: Pooling,
    grads: Sequence[Tensor],
) -> dict[str, GradientSum]:
    """Output gradients summed per distinct id, for each table that is pooled."""
    tables = {name: configs[name] for name in ids}
    prepared = Preparer(tables, {name: Router("roundrobin", 1) for name in tables})(ids)
    dims = [config.dim for config in tables.values()]
    joined = JointPooling(pooling, prepared, {name: config.dim for name, config in tables.items()})
    counts = prepared.deduped.counts[0].tolist()
    floats = [n * dim for n, dim in zip(counts, dims, strict=True)]
    values = joined.unpool(grads, sum(floats)).split(floats)
    mask = joined.mask(prepared)
    masks = [None] * len(counts) if mask is None else mask.split(counts)
    parts = {}
    distinct = prepared.deduped.ids.split(counts)
    for name, own, flat, keep, dim in zip(tables, distinct, values, masks, dims, strict=True):
        part = GradientSum(own, flat.view(-1, dim))
        if name in joined.tables:
            parts[name] = part if keep is None else GradientSum(part.ids[keep], part.grads[keep])
    return parts


def joint_weights(pooling: Pooling, tables: Sequence[str], sizes: Sequence[int]) -> Tensor | None:
    """One weight for every occurrence, if any bag has weights."""
    if not any(bags.weights is not None for name in tables for bags in pooling.of(name)):
        return None
    pieces = []
    for name, size in zip(tables, sizes, strict=True):
        own = next((bags.weights for bags in pooling.of(name) if bags.weights is not None), None)
        pieces.append(torch.ones(size) if own is None else own)
    return torch.cat(pieces)
