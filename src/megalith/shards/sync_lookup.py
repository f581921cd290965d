"""SyncLookup: a lookup over ranks, in progress or done."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from megalith.library import span
from megalith.ops import gather_pieces
from megalith.ops.pooling import Pooling
from megalith.shards.joint_pooling import JointPooling
from megalith.shards.lookup import Lookup
from megalith.shards.lookup_series import LookupSeries
from megalith.shards.preparer import RoutedIds
from megalith.shards.rank_messages import RankMessages, RequestedIds
from megalith.table.validation import check_pooling

if TYPE_CHECKING:
    from megalith.shards.sync import SyncShards


class SyncLookup(Lookup):
    """A lookup over ranks: ids are sent at once, rows are fetched by the first use or by `fetch`.

    Args:
        shards: The shards that make it.
        messages: The exchanges of the shards.
        routed: See the attribute.
        call: "lookup", or "apply_gradients" for an update without a lookup.
        series: The series of the lookup, if it has one.
        step: See `Lookup`.
        out_of_data: Whether this rank has no more data.

    Attributes:
        routed: The distinct ids, their owners, and the place of each occurrence.
        requested: The ids that other ranks request from this one, when they have arrived.
        failed: Whether this rank has reported that it has no gradients.
    """

    def __init__(
        self,
        shards: SyncShards,
        messages: RankMessages,
        routed: RoutedIds,
        call: str,
        series: LookupSeries | None,
        step: int | None,
        out_of_data: bool,
    ) -> None:
        super().__init__(routed.ids, step)
        self.shards = shards
        self.routed = routed
        self.failed = False
        self._messages = messages
        self.requested: Future[RequestedIds] = shards.exchange.submit(
            lambda: messages.request(call, routed, out_of_data=out_of_data, series=series)
        )
        self._rows: Future[Tensor] | None = None
        self._joint: tuple[Pooling, JointPooling] | None = None

    def wait_ids(self) -> None:
        """See `Lookup.wait_ids`."""
        self.requested.result()

    def fail(self, error: Exception, *, leave: bool = False) -> NoReturn:
        """See `Lookup.fail`."""
        if not (self.used or self.failed or self.requested.exception()):
            self.shards.fail_update(self, error, leave=leave)
        raise error

    def fetch(self) -> None:
        """See `Lookup.fetch`."""
        if self._rows is None:
            requested, routed, messages, step = self.requested, self.routed, self._messages, self.step
            self._rows = self.shards.exchange.submit(
                lambda: messages.send_rows(requested.result(), routed, step)
            )

    def wait(self) -> None:
        """See `Lookup.wait`."""
        _ = self.source

    @property
    def source(self) -> Tensor:
        """The received rows, float32 [size], in the order of the distinct ids."""
        self.requested.result()
        self.fetch()
        assert self._rows is not None
        return self._rows.result()

    @property
    def out_of_data(self) -> list[int]:
        """The ranks that made this lookup with out_of_data=True; the same on all ranks."""
        return self.requested.result().out_of_data

    def gather(self, table: str) -> Tensor:
        """See `Lookup.gather`."""
        self.check_table(table)
        dim = self.shards.configs[table].dim
        return gather_pieces(self.source, [self.routed.offsets(table)], [dim])[0]

    def pool(self, pooling: Pooling) -> list[Tensor]:
        """See `Lookup.pool`."""
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
            dims = {name: config.dim for name, config in self.shards.configs.items()}
            self._joint = (pooling, JointPooling(pooling, self.routed, dims))
        return self._joint[1]
