"""OwnerRows: what the owner of rows does for other processes: read requested rows, apply received gradients.

Ranks and servers own rows in the same way; they differ in how requests arrive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalith.library import span
from megalith.shards.gradients import Gradients, sum_received
from megalith.shards.local import LocalShards
from megalith.table.table_data import FoundRows, Update


class OwnerRows:
    """The rows of one owner, for requests of several sources.

    In all methods `counts` is the number of ids, int64 [sources, tables].
    """

    def __init__(self, shards: LocalShards) -> None:
        self._engines = shards.engines
        self._names = list(shards.local)
        self._dims = [table.dim for table in shards.local.values()]
        self._widths = torch.tensor(self._dims, dtype=torch.int64, device="cpu")

    def floats(self, counts: Tensor) -> Tensor:
        """Return the size of rows."""
        # returns: the number of floats of their rows, int64 [sources].
        return counts @ self._widths

    def read(
        self, ids: Mapping[str, Tensor], counts: Tensor, flat: Tensor, step: int | None
    ) -> dict[str, FoundRows]:
        """Read rows into a buffer, by source, then table."""
        # ids: int64 [n] per table, the ids of all sources concatenated; flat: float32 [size], to fill.
        found = self._engines.find({name: own for name, own in ids.items() if own.numel()})
        self._engines.read_blocks(ids, found, counts, flat, step=step)
        return found

    def update(
        self,
        received: Mapping[str, Gradients],
        counts: Tensor,
        update: Update,
        found: Mapping[str, FoundRows],
    ) -> None:
        """Sum the gradients of all sources by a tree, and make one optimizer step per distinct id."""
        # received: per table the gradients of all sources, concatenated.
        ids: dict[str, Tensor] = {}
        grads: dict[str, list[Tensor]] = {}
        occurrences: dict[str, Tensor] = {}
        known: dict[str, FoundRows] = {}
        sources = counts.t().tolist()
        for t, name in enumerate(self._names):
            one = received.get(name)
            if one is None or not one.ids.numel():
                continue
            own = one
            if one.mask is not None or len(sources[t]) > 2:
                with span("megalith.gradients"):
                    own = sum_received(one, sources[t])
                if not own.ids.numel():
                    continue
            ids[name], grads[name] = own.ids, [own.values]
            if own.counts is not None:
                occurrences[name] = own.counts
            if own.ids is one.ids and name in found:
                known[name] = found[name]
        self._engines.update(ids, known, grads, None, update._replace(occurrences=occurrences))


def blocks_by_table(flat: Tensor, counts: Tensor) -> list[list[Tensor]]:
    """Split data ordered by source, then table, into views."""
    # counts: int64 [sources, tables], the size of each block.
    tables = counts.shape[1]
    pieces: Sequence[Tensor] = flat.split(counts.reshape(-1).tolist()) if counts.numel() else ()
    return [list(pieces[t::tables]) for t in range(tables)]
