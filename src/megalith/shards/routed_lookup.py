"""RoutedLookup: what lookups over ranks (`SyncLookup`) and on servers (`ServerLookup`) have in common.

Their rows are elsewhere. Each distinct id travels once, and its row comes back. The rows of all tables
arrive in one buffer, in the order of the distinct ids; occurrences refer to it. A `JointPooling` names
occurrences of all tables in one list, so that one kernel reads the buffer. On the way back, gradients are
summed to one per distinct id. How ids, rows and gradients travel is not handled here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import pairwise
from operator import mul

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.library import span
from megalith.ops import gather_pieces, scatter_pieces
from megalith.ops.pooling import Bags, Pooling, covered, pool_flat, unpool_flat
from megalith.routing import Router
from megalith.shards.contract import Shards
from megalith.shards.gradients import Gradients
from megalith.shards.lookup import Lookup
from megalith.shards.preparer import RoutedIds, RoutingPreparer
from megalith.table import TableConfig
from megalith.table.validation import check_pooling


class RoutedLookup(Lookup):
    """The part of such lookups that does not depend on how rows travel.

    Args:
        shards: The shards that make it.
        routed: See the attribute.
        step: See `Lookup`.

    Attributes:
        routed: The distinct ids, their owners, and the place of each occurrence.
        size: The number of floats of the rows of all distinct ids.
    """

    def __init__(self, shards: Shards, routed: RoutedIds, step: int | None) -> None:
        super().__init__(shards, routed.ids, step)
        self.routed = routed
        self._dims = shards.dims
        counts = routed.deduped.counts.sum(0).tolist()
        self.size = sum(map(mul, counts, self._dims.values()))
        self._joint: tuple[Pooling, JointPooling] | None = None

    @property
    @abstractmethod
    def source(self) -> Tensor:
        """The received rows, float32 [size], in the order of the distinct ids."""

    def wait(self) -> None:
        _ = self.source

    def gather(self, table: str) -> Tensor:
        self.check_table(table)
        return gather_pieces(self.source, [self.routed.offsets(table)], [self._dims[table]])[0]

    def pool(self, pooling: Pooling) -> list[Tensor]:
        source = (
            self.source
        )  # before an error in the pooling: the other ranks take part in the exchange of rows
        with span("megalith.pool"):
            return self.joint_pooling(pooling).pool(source)

    def joint_pooling(self, pooling: Pooling) -> JointPooling:
        """Return a pooling of several tables as one.

        Args:
            pooling: The pooling, per table.

        Returns:
            The pooling over the occurrences of all tables; the last one is kept.

        Raises:
            InputError: It is not a Pooling, or does not fit the ids of this lookup.
        """
        if self._joint is None or self._joint[0] is not pooling:
            # Collections keep the pooling of batches with equal shapes; then only places of rows differ.
            known = self.shards.last_joint
            joint = known[1].at(self.routed) if known is not None and known[0] is pooling else None
            if joint is None:
                check_pooling(pooling)
                joint = JointPooling(pooling, self.routed, self._dims)
            self._joint = self.shards.last_joint = (pooling, joint)
        return self._joint[1]

    def check_fits(self, pooling: Pooling) -> None:
        self.joint_pooling(pooling)

    def _sum_gradients(
        self,
        gradients: Mapping[str, list[Tensor]],
        pooling: Pooling | None,
        occurrences: Mapping[str, Tensor],
    ) -> Gradients:
        """Sum validated gradients per distinct id of all tables, in the order of the occurrences."""
        routed = self.routed
        if pooling is None:
            offsets = [routed.offsets(name) for name in gradients]
            pieces = [own[0].contiguous() for own in gradients.values()]
            flat = torch.zeros(self.size, dtype=torch.float32, device=routed.deduped.ids.device)
            if pieces:
                flat = scatter_pieces(pieces, offsets, self.size)
            slices = [routed.occurrences(name) for name in gradients]
            used = [(own.start, own.stop) for own in slices]
        else:
            joint = self.joint_pooling(pooling)
            flat = joint.unpool(next(iter(gradients.values()), []), self.size)
            used = joint.used
        counts = None
        if any(config.admission is not None for config in self.shards.configs.values()):
            each = None
            if occurrences:
                each = torch.ones(routed.total, dtype=torch.int64, device=routed.deduped.ids.device)
                for name, own in occurrences.items():
                    each[routed.occurrences(name)] = own.to(each.device)
            counts = used_occurrences(routed, used, each)
        return Gradients(routed.deduped.ids, flat, counts, used_mask(routed, used))


class JointPooling:
    """A pooling of several tables as one."""

    def __init__(self, pooling: Pooling, routed: RoutedIds, dims: Mapping[str, int]) -> None:
        self.tables = [name for name in pooling.bags if pooling.of(name)]
        for name in self.tables:
            if name not in routed.ids:
                raise InputError(f"table {name!r}: pooled, but it was not looked up")
        self._begin, self._total, self._names = routed.begin, routed.total, routed.ids.keys()
        device = routed.deduped.inverse.device
        on_host, pooling = pooling.to("cpu"), pooling.to(device)
        self._pooling = on_host
        self._device = device
        self._dims = {name: dims[name] for name in self.tables}
        self._sizes = {name: routed.ids[name].numel() for name in self.tables}
        slices = [routed.occurrences(name) for name in self.tables]
        # On a GPU, rows of one width are addressed as rows: sums then sort row numbers, not elements.
        one_width = device.type != "cpu" and set(dims.values()) == {self._dim}
        self._stride = self._dim if one_width else 1
        self._slices = slices
        self._index = self._index_of(routed)
        self._bags: list[Bags] = []
        self.used: list[tuple[int, int]] = []
        begin = 0
        weights = joint_weights(pooling, self.tables, list(self._sizes.values()), device)
        for name, where in zip(self.tables, slices, strict=True):
            ends = on_host.check_ends(name, self._sizes[name], dims[name])
            for bags, (first, last) in zip(pooling.of(name), ends, strict=True):
                self.used.append((where.start + first, where.start + last))
                own = None if bags.weights is None else weights
                offsets = bags.offsets + begin if begin else bags.offsets
                self._bags.append(Bags(offsets, bags.parts, own, bags.divisor, bags.shared))
            begin += self._sizes[name]
        self._whole = covered(self._bags, pooling.outputs)

    def at(self, routed: RoutedIds) -> JointPooling | None:
        """Return the same pooling for other ids with the same tables and sizes; None if these differ."""
        same = routed.begin == self._begin and routed.total == self._total
        if not same or routed.ids.keys() != self._names or routed.deduped.inverse.device != self._device:
            return None
        other = copy(self)  # only the places of the rows differ
        other._index = self._index_of(routed)
        return other

    def _index_of(self, routed: RoutedIds) -> Tensor:
        """Return the places of the rows of the occurrences, int64 [n]."""
        places = routed.deduped.offsets if self._stride == 1 else routed.deduped.inverse
        assert places is not None
        slices = self._slices
        if not slices:
            return places[:0]
        if all(a.stop == b.start for a, b in pairwise(slices)):
            return places[slices[0].start : slices[-1].stop]
        return torch.cat([places[where] for where in slices])

    def mask(self, routed: RoutedIds) -> Tensor | None:
        """Return which distinct ids are in some bag."""
        # returns: bool [u], for the u distinct ids.
        return used_mask(routed, self.used)

    def pool(self, source: Tensor) -> list[Tensor]:
        """Read and reduce rows."""
        # source: the rows of the distinct ids, in their order, float32 [size].
        try:
            return pool_flat(
                source, self._index, self._bags, self._pooling.outputs, self._dim, self._whole, self._stride
            )
        except InputError:
            self._name_table()
            raise

    def unpool(self, grads: Sequence[Tensor], size: int) -> Tensor:
        """Sum output gradients per distinct id, in the order of its occurrences."""
        # returns: float32 [size], in the order of the distinct ids.
        if not self._bags:
            return torch.zeros(size, dtype=torch.float32, device=self._device)
        try:
            return unpool_flat(grads, self._index, self._bags, size, self._dim, self._stride)
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


def used_mask(routed: RoutedIds, used: Sequence[tuple[int, int]]) -> Tensor | None:
    """Return which distinct ids have an occurrence in one of some ranges."""
    # returns: bool [u], for the u distinct ids.
    at = 0
    for start, stop in sorted(used):
        if start != at:
            break
        at = stop
    if at == routed.total:
        return None
    mask = torch.zeros(routed.deduped.ids.numel(), dtype=torch.bool, device=routed.deduped.ids.device)
    for start, stop in used:
        mask[routed.deduped.inverse[start:stop]] = True
    return mask


def sum_gradients(
    configs: Mapping[str, TableConfig],
    ids: Mapping[str, Tensor],
    pooling: Pooling,
    grads: Sequence[Tensor],
) -> dict[str, Gradients]:
    """Sum output gradients per distinct id, for each pooled table."""
    # ids: int64 [n] per table.
    tables = {name: configs[name] for name in ids}
    device = grads[0].device if grads else torch.device("cpu")
    ids = {name: own.to(device) for name, own in ids.items()}
    routed = RoutingPreparer(tables, {name: Router("roundrobin", 1) for name in tables}, device)(ids)
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
        part = Gradients(own, flat.view(-1, dim), count)
        if name in joint.tables:
            parts[name] = part if keep is None else part.select(keep)
    return parts


def used_occurrences(
    routed: RoutedIds, used: Sequence[tuple[int, int]], occurrences: Tensor | None
) -> Tensor:
    """Count the occurrences of each distinct id in some ranges."""
    # occurrences: int64 [n], number of occurrences that each one stands for; returns: int64 [u], for the u
    # distinct ids.
    seen = torch.zeros_like(routed.deduped.ids)
    for start, stop in used:
        where = routed.deduped.inverse[start:stop]
        seen.index_add_(0, where, torch.ones_like(where) if occurrences is None else occurrences[start:stop])
    return seen


def joint_weights(
    pooling: Pooling, tables: Sequence[str], sizes: Sequence[int], device: torch.device | None = None
) -> Tensor | None:
    """Return the weights of the occurrences of several tables."""
    # returns: float32 [n], 1 for tables without weights.
    if not any(bags.weights is not None for name in tables for bags in pooling.of(name)):
        return None
    place = torch.device("cpu") if device is None else device
    pieces = []
    for name, size in zip(tables, sizes, strict=True):
        own = next((bags.weights for bags in pooling.of(name) if bags.weights is not None), None)
        pieces.append(torch.ones(size, dtype=torch.float32, device=place) if own is None else own)
    return torch.cat(pieces)
