"""RoutedLookup: a lookup whose rows are elsewhere. Each distinct id travels once, and its row comes back.

The rows of all tables arrive in one buffer, in the order of the distinct ids; occurrences refer to it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from megalith.library import span
from megalith.ops import gather_pieces
from megalith.ops.pooling import Pooling
from megalith.shards.joint_pooling import JointPooling
from megalith.shards.lookup import Lookup
from megalith.shards.preparer import RoutedIds
from megalith.table import TableConfig
from megalith.table.validation import check_pooling


class RoutedLookup(Lookup):
    """The part of such lookups that does not depend on how rows travel.

    Args:
        configs: All tables, in order.
        routed: See the attribute.
        step: See `Lookup`.

    Attributes:
        routed: The distinct ids, their owners, and the place of each occurrence.
    """

    def __init__(self, configs: Mapping[str, TableConfig], routed: RoutedIds, step: int | None) -> None:
        super().__init__(routed.ids, step)
        self.routed = routed
        self._dims = {name: config.dim for name, config in configs.items()}
        self._joint: tuple[Pooling, JointPooling] | None = None

    @property
    @abstractmethod
    def source(self) -> Tensor:
        """The received rows, float32 [size], in the order of the distinct ids."""

    @property
    def size(self) -> int:
        """The number of floats of the rows of all distinct ids."""
        counts = self.routed.deduped.counts.sum(0).tolist()
        return sum(n * dim for n, dim in zip(counts, self._dims.values(), strict=True))

    def wait(self) -> None:
        _ = self.source

    def gather(self, table: str) -> Tensor:
        self.check_table(table)
        return gather_pieces(self.source, [self.routed.offsets(table)], [self._dims[table]])[0]

    def pool(self, pooling: Pooling) -> list[Tensor]:
        check_pooling(pooling)
        source = self.source
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
            self._joint = (pooling, JointPooling(pooling, self.routed, self._dims))
        return self._joint[1]
