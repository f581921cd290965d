"""ServerLookup: a lookup on servers, in progress or done: one call per server for all tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from megalith.errors import UsageError
from megalith.shards.preparer import RoutedIds
from megalith.shards.routed_lookup import RoutedLookup
from megalith.shards.servers.server_messages import array_of
from megalith.shards.servers.worker.link_group import LinkGroup
from megalith.shards.servers.worker.pending_calls import PendingRead

if TYPE_CHECKING:
    from megalith.shards.servers.worker.server_shards import ServerShards


class ServerLookup(RoutedLookup):
    """Rows are requested by the first use or by `fetch`, as they are then, and servers write them here.

    Args:
        shards: The shards that make it.
        links: The connections to the servers.
        routed: See `RoutedLookup`.
        step: See `Lookup`.

    Attributes:
        links: The connections to the servers.
    """

    def __init__(self, shards: ServerShards, links: LinkGroup, routed: RoutedIds, step: int | None) -> None:
        super().__init__(shards.configs, routed, step)
        self.shards = shards
        self.links = links
        self._reads: list[PendingRead | None] | None = None
        self._received: Tensor | None = None
        self._source: Tensor | None = None

    @property
    def moved(self) -> bool:
        return self.links is not self.shards.links

    def check_place(self) -> None:
        """Raise UsageError if the tables were moved to other servers since."""
        if self.moved:
            raise UsageError("the tables were moved to other servers after this lookup: look up again")

    def fetch(self) -> None:
        if self._reads is not None or self.moved:
            return
        deduped = self.routed.deduped
        sizes = self.shards.rows_wire.sizes(deduped.counts, list(self._dims.values()))
        self._received = self.links.pool.new(sum(sizes))
        counts = deduped.counts.tolist()
        pieces = deduped.ids.split_with_sizes([sum(own) for own in counts])
        self._reads = [
            link.read(array_of(ids), own, self.step, out) if ids.numel() else None
            for link, ids, own, out in zip(
                self.links, pieces, counts, self._received.split_with_sizes(sizes), strict=True
            )
        ]

    @property
    def source(self) -> Tensor:
        # With an exact wire it is the memory that the servers have filled.
        if self._source is None:
            self.check_place()
            self.fetch()
            assert self._reads is not None
            assert self._received is not None
            for link, read in zip(self.links, self._reads, strict=True):
                if read is not None:
                    link.result(read)
            reads = [read for read in self._reads if read is not None]
            if any(read.moved for read in reads):
                self._received = torch.cat([read.out for read in reads])
            counts, dims = self.routed.deduped.counts, list(self._dims.values())
            self._source = self.shards.rows_wire.decode(self._received, counts, dims)
        return self._source

    def fail(self, error: Exception, *, leave: bool = False) -> NoReturn:
        # With mode="sync" the other workers wait for the gradients, and raise.
        if not self.used:
            self.used = True
            self.shards.report_failure(error)
        raise error
