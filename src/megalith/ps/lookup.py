"""A batch on servers: ServerLookup reads rows, and push_writes makes the writes of its update.

Both make one call per server for all tables. The rows arrive in memory of this process, where the servers
write them; an update sends ids with one summed gradient each. Connections and retries are handled by
`link.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from megalith.errors import UsageError
from megalith.ps.link import LinkGroup, PendingRead
from megalith.ps.messages import ServerWrite, array_of
from megalith.ps.shared_memory import SegmentPool
from megalith.shards.gradients import Gradients
from megalith.shards.preparer import RoutedIds, blocks_by_table
from megalith.shards.routed_lookup import RoutedLookup
from megalith.shards.row_encoding import Wire
from megalith.table.table_data import Update

if TYPE_CHECKING:
    from megalith.ps.shards import ServerShards


def read_parts(
    routed: RoutedIds, wire: Wire, dims: list[int], pool: SegmentPool
) -> tuple[Tensor, list[tuple[Tensor, list[int], Tensor]]]:
    """Return memory for rows, and for each server the ids to read, their counts, and where its rows go."""
    deduped = routed.deduped
    counts, sizes = deduped.counts.tolist(), wire.sizes(deduped.counts, dims)
    received = pool.new(sum(sizes))
    ids = deduped.ids.split_with_sizes([sum(own) for own in counts])
    return received, list(zip(ids, counts, received.split_with_sizes(sizes), strict=True))


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

    shards: ServerShards

    def __init__(self, shards: ServerShards, links: LinkGroup, routed: RoutedIds, step: int | None) -> None:
        super().__init__(shards, routed, step)
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
        dims = list(self._dims.values())
        self._received, parts = read_parts(self.routed, self.shards.rows_wire, dims, self.links.pool)
        self._reads = [
            link.read(array_of(ids), counts, self.step, out) if ids.numel() else None
            for link, (ids, counts, out) in zip(self.links, parts, strict=True)
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


def push_writes(
    routed: RoutedIds, gradients: Gradients, update: Update, dims: list[int], wire: Wire, everyone: bool
) -> list[ServerWrite | None]:
    """Return what to send to each server; None: nothing, if it is not for everyone."""
    widths = torch.tensor(dims, dtype=torch.int64, device="cpu")
    header = {
        "step": update.step,
        "time": update.time,
        "scale": update.scale,
        "clip_norm": update.clip_norm,
        "rates": dict(update.rates),
    }
    ids, flat, counts, seen = _with_gradients(routed, gradients, widths)
    sizes = counts.sum(1).tolist()
    own_ids = ids.split_with_sizes(sizes)
    own_flat = flat.split_with_sizes((counts @ widths).tolist())
    own_seen = None if seen is None else seen.split_with_sizes(sizes)
    writes: list[ServerWrite | None] = []
    for server, size in enumerate(sizes):
        if not size and not everyone:
            writes.append(None)
            continue
        row = counts[server : server + 1]
        arrays = {
            "ids": array_of(own_ids[server]),
            "grads": array_of(wire.encode(own_flat[server], row, dims)),
        }
        if own_seen is not None:
            arrays["seen"] = array_of(own_seen[server])
        writes.append(ServerWrite("push", header | {"counts": row[0].tolist()}, arrays))
    return writes


def _with_gradients(
    routed: RoutedIds, gradients: Gradients, widths: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return ids, gradients, counts and occurrences of the distinct ids that have a gradient."""
    ids, flat, seen, mask = gradients
    counts = routed.deduped.counts
    if mask is None:
        return ids, flat, counts, seen
    blocks = blocks_by_table(flat, counts * widths)
    masks = blocks_by_table(mask, counts)
    kept = torch.zeros_like(counts)
    pieces: list[Tensor] = []
    for server in range(counts.shape[0]):
        for t, dim in enumerate(widths.tolist()):
            own = masks[t][server]
            pieces.append(blocks[t][server].view(-1, dim)[own].view(-1))
            kept[server, t] = own.sum()
    return ids[mask], torch.cat(pieces), kept, None if seen is None else seen[mask]
