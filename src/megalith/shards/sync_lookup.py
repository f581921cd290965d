"""SyncLookup: a lookup over ranks, in progress or done."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from megalith.shards.lookup_series import LookupSeries
from megalith.shards.preparer import RoutedIds
from megalith.shards.rank_messages import RankMessages, RequestedIds
from megalith.shards.routed_lookup import RoutedLookup

if TYPE_CHECKING:
    from megalith.shards.sync import SyncShards


class SyncLookup(RoutedLookup):
    """A lookup over ranks: ids are sent at once, rows are fetched by the first use or by `fetch`.

    Args:
        shards: The shards that make it.
        messages: The exchanges of the shards.
        routed: See `RoutedLookup`.
        call: "lookup", or "apply_gradients" for an update without a lookup.
        series: The series of the lookup, if it has one.
        step: See `Lookup`.
        out_of_data: Whether this rank has no more data.

    Attributes:
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
        super().__init__(shards.configs, routed, step)
        shards.exchange.lend(routed.deduped.ids)
        self.shards = shards
        self.failed = False
        self._messages = messages
        self.requested: Future[RequestedIds] = shards.exchange.submit(
            lambda: messages.request(call, routed, out_of_data=out_of_data, series=series)
        )
        self._rows: Future[Tensor] | None = None

    def wait_ids(self) -> None:
        self.requested.result()

    def fail(self, error: Exception, *, leave: bool = False) -> NoReturn:
        if not (self.used or self.failed or self.requested.exception()):
            self.shards.fail_update(self, error, leave=leave)
        raise error

    def fetch(self) -> None:
        if self._rows is None:
            requested, routed, messages, step = self.requested, self.routed, self._messages, self.step
            self._rows = self.shards.exchange.submit(
                lambda: messages.send_rows(requested.result(), routed, step)
            )

    @property
    def source(self) -> Tensor:
        """The received rows, float32 [size], in the order of the distinct ids."""
        self.requested.result()
        self.fetch()
        assert self._rows is not None
        return self.shards.exchange.take(self._rows.result())

    @property
    def out_of_data(self) -> list[int]:
        """The ranks that made this lookup with out_of_data=True; the same on all ranks."""
        return self.requested.result().out_of_data
