"""RoutedLookup: a lookup whose rows are elsewhere, and the gradients that its update sends to their owners.

Each distinct id travels once, and its row comes back. The rows of all tables arrive in one buffer, in the
order of the distinct ids; occurrences refer to it. On the way back,
gradients are summed to one per distinct id. How ids, rows and gradients travel is not handled
here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from operator import mul

import torch
from torch import Tensor

from megalith.library import span
from megalith.ops import gather_pieces, scatter_pieces
from megalith.ops.pooling import Pooling
from megalith.shards.contract import Shards
from megalith.shards.gradients import Gradients
from megalith.shards.joint_pooling import JointPooling, used_mask, used_occurrences
from megalith.shards.lookup import Lookup
from megalith.shards.preparer import RoutedIds
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
        check_pooling(pooling)
        if self._joint is None or self._joint[0] is not pooling:
            # Collections keep the pooling of batches with equal shapes; then only places of rows differ.
            known = self.shards.last_joint
            if known is not None and known[0] is pooling and known[1].fits(self.routed):
                joint = known[1].at(self.routed)
            else:
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
