"""JointPooling: one pooling over the occurrences of all tables, read from rows in one flat buffer.

SyncShards receives the rows of all tables in one buffer, in the order of the distinct ids. A pooling names
occurrences per table; here they become occurrences of one list, so that one kernel reads all tables.
"""

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
from megalith.shards.preparer import RoutedIds, RoutingPreparer
from megalith.table import TableConfig


class JointPooling:
    """A pooling of several tables as one.

    Args:
        pooling: The pooling, per table.
        routed: The ids that were looked up.
        dims: The dim of each table.

    Attributes:
        tables: The tables that it reads.
        used: The ranges of occurrences that are in some bag.

    Raises:
        InputError: If a pooled table was not looked up, or bags do not match the ids. `pool` and `unpool`
            raise it if offsets do not ascend.
    """

    def __init__(self, pooling: Pooling, routed: RoutedIds, dims: Mapping[str, int]) -> None:
        self.tables = [name for name in pooling.bags if pooling.of(name)]
        for name in self.tables:
            if name not in routed.ids:
                raise InputError(f"table {name!r}: pooled, but it was not looked up")
        self._pooling = pooling
        self._dims = {name: dims[name] for name in self.tables}
        self._sizes = {name: routed.ids[name].numel() for name in self.tables}
        slices = [routed.occurrences(name) for name in self.tables]
        self._index = _index(routed, slices)
        self._bags: list[Bags] = []
        self.used: list[tuple[int, int]] = []
        begin = 0
        weights = joint_weights(pooling, self.tables, list(self._sizes.values()))
        for name, where in zip(self.tables, slices, strict=True):
            ends = pooling.check_ends(name, self._sizes[name], dims[name])
            for bags, (first, last) in zip(pooling.of(name), ends, strict=True):
                self.used.append((where.start + first, where.start + last))
                own = None if bags.weights is None else weights
                offsets = bags.offsets + begin if begin else bags.offsets
                self._bags.append(Bags(offsets, bags.parts, own, bags.divisor, bags.shared))
            begin += self._sizes[name]

    def mask(self, routed: RoutedIds) -> Tensor | None:
        """Return which distinct ids are in some bag.

        Args:
            routed: The ids that were looked up.

        Returns:
            bool [u], for the u distinct ids; None if all are in a bag.
        """
        return used_mask(routed, self.used)

    def pool(self, source: Tensor) -> list[Tensor]:
        """Read and reduce rows.

        Args:
            source: The rows of the distinct ids, in their order, float32 [size].

        Returns:
            One tensor per output of the pooling, float32.
        """
        try:
            return pool_flat(source, self._index, self._bags, self._pooling.outputs, self._dim)
        except InputError:
            self._name_table()
            raise

    def unpool(self, grads: Sequence[Tensor], size: int) -> Tensor:
        """Sum output gradients per distinct id, in the order of its occurrences.

        Args:
            grads: One gradient per output.
            size: The number of floats of the rows of all distinct ids.

        Returns:
            float32 [size], in the order of the distinct ids.
        """
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
        """Raise InputError for the table whose bags are wrong: the op, which found them, has no tables."""
        for name, dim in self._dims.items():
            self._pooling.check(name, self._sizes[name], dim)


def _index(routed: RoutedIds, slices: Sequence[slice]) -> Tensor:
    """Return where the rows of these occurrences begin, int64 [n]."""
    offsets = routed.deduped.offsets
    assert offsets is not None
    if not slices:
        return offsets[:0]
    if all(a.stop == b.start for a, b in pairwise(slices)):
        return offsets[slices[0].start : slices[-1].stop]
    return torch.cat([offsets[where] for where in slices])


def used_mask(routed: RoutedIds, used: Sequence[tuple[int, int]]) -> Tensor | None:
    """Return which distinct ids have an occurrence in one of some ranges.

    Args:
        routed: The ids that were looked up.
        used: Ranges (start, stop) of occurrences of all tables.

    Returns:
        bool [u], for the u distinct ids; None if the ranges contain all occurrences.
    """
    at = 0
    for start, stop in sorted(used):
        if start != at:
            break
        at = stop
    if at == routed.total:
        return None
    mask = torch.zeros(routed.deduped.ids.numel(), dtype=torch.bool)
    for start, stop in used:
        mask[routed.deduped.inverse[start:stop]] = True
    return mask


def sum_gradients(
    configs: Mapping[str, TableConfig],
    ids: Mapping[str, Tensor],
    pooling: Pooling,
    grads: Sequence[Tensor],
) -> dict[str, GradientSum]:
    """Sum output gradients per distinct id, for each pooled table.

    Args:
        configs: The tables by name.
        ids: int64 [n] per table.
        pooling: The pooling that made the outputs.
        grads: One gradient per output.

    Returns:
        The sums by table.
    """
    tables = {name: configs[name] for name in ids}
    routed = RoutingPreparer(tables, {name: Router("roundrobin", 1) for name in tables})(ids)
    dims = [config.dim for config in tables.values()]
    joint = JointPooling(pooling, routed, {name: config.dim for name, config in tables.items()})
    counts = routed.deduped.counts[0].tolist()
    floats = [n * dim for n, dim in zip(counts, dims, strict=True)]
    values = joint.unpool(grads, sum(floats)).split(floats)
    mask = joint.mask(routed)
    masks = [None] * len(counts) if mask is None else mask.split(counts)
    counting = any(config.admission is not None for config in tables.values())
    seen = used_occurrences(routed, joint.used, None).split(counts) if counting else [None] * len(counts)
    parts = {}
    distinct = routed.deduped.ids.split(counts)
    for name, own, flat, keep, dim, count in zip(tables, distinct, values, masks, dims, seen, strict=True):
        part = GradientSum(own, flat.view(-1, dim), count)
        if name in joint.tables:
            parts[name] = part if keep is None else part.select(keep)
    return parts


def used_occurrences(
    routed: RoutedIds, used: Sequence[tuple[int, int]], occurrences: Tensor | None
) -> Tensor:
    """Count the occurrences of each distinct id in some ranges.

    Args:
        routed: The ids that were looked up.
        used: Ranges (start, stop) of occurrences of all tables.
        occurrences: int64 [n], number of occurrences that each one stands for; None: one each.

    Returns:
        int64 [u], for the u distinct ids.
    """
    seen = torch.zeros(routed.deduped.ids.numel(), dtype=torch.int64)
    for start, stop in used:
        where = routed.deduped.inverse[start:stop]
        seen.index_add_(0, where, torch.ones_like(where) if occurrences is None else occurrences[start:stop])
    return seen


def joint_weights(pooling: Pooling, tables: Sequence[str], sizes: Sequence[int]) -> Tensor | None:
    """Return the weights of the occurrences of several tables.

    Args:
        pooling: The pooling.
        tables: The tables that it reads, in order.
        sizes: The number of occurrences of each.

    Returns:
        float32 [n], 1 for tables without weights; None if no bag has weights.
    """
    if not any(bags.weights is not None for name in tables for bags in pooling.of(name)):
        return None
    pieces = []
    for name, size in zip(tables, sizes, strict=True):
        own = next((bags.weights for bags in pooling.of(name) if bags.weights is not None), None)
        pieces.append(torch.ones(size) if own is None else own)
    return torch.cat(pieces)
