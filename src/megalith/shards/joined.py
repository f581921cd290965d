"""Joined: a pooling over the occurrences of all tables in one list, read from rows in one flat buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.pool_rows import pool_flat, unpool_flat
from megalith.ops.pooling import Bags, Pooling
from megalith.routing import Router
from megalith.shards.prepare import Preparer, SyncPrepared
from megalith.shards.sums import Part
from megalith.table import TableConfig


class Joined:
    """A pooling of several tables as one. tables: those it reads. reached: the occurrences some bag holds.

    Raises InputError if a table is pooled that was not looked up, or bags do not fit.
    """

    def __init__(self, pooling: Pooling, prepared: SyncPrepared, dims: Mapping[str, int]) -> None:
        self.tables = [name for name in pooling.bags if pooling.of(name)]
        for name in self.tables:
            if name not in prepared.ids:
                raise InputError(f"table {name!r}: pooled, but it was not looked up")
            pooling.check(name, prepared.ids[name].numel(), dims[name])
        self._outputs = pooling.outputs
        self._dim = max((dims[name] for name in self.tables), default=1)
        offsets = prepared.deduped.offsets
        assert offsets is not None
        slices = [prepared.occurrences(name) for name in self.tables]
        self._index = torch.cat([offsets[s] for s in slices]) if slices else offsets[:0]
        self._bags: list[Bags] = []
        self.reached: list[tuple[int, int]] = []
        begin = 0
        weights = _weights(pooling, self.tables, [s.stop - s.start for s in slices])
        for name, where in zip(self.tables, slices, strict=True):
            for bags in pooling.of(name):
                first, last = int(bags.offsets[0]), int(bags.offsets[-1])
                self.reached.append((where.start + first, where.start + last))
                own = None if bags.weights is None else weights
                self._bags.append(replace(bags, offsets=bags.offsets + begin, weights=own))
            begin += where.stop - where.start

    def mask(self, prepared: SyncPrepared) -> Tensor | None:
        """Which distinct ids some bag holds, bool [u]; None if all."""
        return reached_mask(prepared, self.reached)

    def pool(self, source: Tensor) -> list[Tensor]:
        """The outputs, from rows laid out as the distinct ids are."""
        return pool_flat(source, self._index, self._bags, self._outputs, self._dim)

    def unpool(self, grads: Sequence[Tensor], size: int) -> Tensor:
        """Output gradients -> the sum for every distinct id, in the order of its occurrences; float32
        [size]."""
        if not self._bags:
            return torch.zeros(size)
        return unpool_flat(grads, self._index, self._bags, size, self._dim)


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
) -> dict[str, Part]:
    """Output gradients summed per distinct id, for each table that is pooled."""
    tables = {name: configs[name] for name in ids}
    prepared = Preparer(tables, {name: Router("roundrobin", 1) for name in tables})(ids)
    dims = [config.dim for config in tables.values()]
    joined = Joined(pooling, prepared, {name: config.dim for name, config in tables.items()})
    counts = prepared.deduped.counts[0].tolist()
    floats = [n * dim for n, dim in zip(counts, dims, strict=True)]
    values = joined.unpool(grads, sum(floats)).split(floats)
    mask = joined.mask(prepared)
    masks = [None] * len(counts) if mask is None else mask.split(counts)
    parts = {}
    distinct = prepared.deduped.ids.split(counts)
    for name, own, flat, keep, dim in zip(tables, distinct, values, masks, dims, strict=True):
        part = Part(own, flat.view(-1, dim))
        if name in joined.tables:
            parts[name] = part if keep is None else Part(part.ids[keep], part.grads[keep])
    return parts


def _weights(pooling: Pooling, tables: Sequence[str], sizes: Sequence[int]) -> Tensor | None:
    """One weight for every occurrence, if any bag has weights."""
    if not any(bags.weights is not None for name in tables for bags in pooling.of(name)):
        return None
    pieces = []
    for name, size in zip(tables, sizes, strict=True):
        own = next((bags.weights for bags in pooling.of(name) if bags.weights is not None), None)
        pieces.append(torch.ones(size) if own is None else own)
    return torch.cat(pieces)
