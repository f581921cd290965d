"""EngineGroup: the engines of one LocalShards, called together.

All engines of a group are of one kind. Input is validated before it reaches the group. This class calls one
engine after another; an engine that runs all tables in one native call or one set of launches has a subclass
(`GROUPS` of the package).

The contract forces no data-dependent host synchronisation: row numbers and epochs (`FoundRows`) are opaque to
callers, no call returns a size that depends on the data, and outputs have the shapes that the input
determines.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from megalith.library import span
from megalith.ops.pooling import Pooling
from megalith.table.engines.contract import Engine
from megalith.table.table_data import FoundRows, Update


class Found(dict[str, FoundRows]):
    """The rows that a lookup found, by table.

    `joint` is what a group found for several tables together, for its own later calls. A table without an
    entry may be covered by it; asked for alone, it is searched again. `ahead` holds rows by table that
    `gather` has read for later calls.
    """

    joint: Any = None
    ahead: dict[str, Tensor] | None = None


class EngineGroup:
    """The hot calls over all tables of one LocalShards; arguments are those of `Engine`, by table."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines

    def __getitem__(self, table: str) -> Engine:
        return self._engines[table]

    def find(self, ids: Mapping[str, Tensor]) -> dict[str, FoundRows]:
        """Find the rows of ids; never create one."""
        with span("megalith.ids"):
            return {name: self._engines[name].find(own) for name, own in ids.items()}

    def read(
        self,
        table: str,
        ids: Tensor,
        found: FoundRows,
        out: Tensor | None = None,
        *,
        step: int | None = None,
    ) -> Tensor:
        """Read what lookups of one table's ids return, in `out` if it is given."""
        with span("megalith.rows"):
            return self._engines[table].lookup(ids, found, out, step=step)

    def gather(
        self,
        table: str,
        ids: Mapping[str, Tensor],
        found: Found,
        *,
        step: int | None = None,
    ) -> Tensor:
        """Find and read what lookups of one table return now; `ids` are those of all tables."""
        if table not in found:
            found |= self.find({table: ids[table]})
        return self.read(table, ids[table], found[table], step=step)

    def read_blocks(
        self,
        ids: Mapping[str, Tensor],
        found: Mapping[str, FoundRows],
        counts: Tensor,
        out: Tensor,
        *,
        step: int | None = None,
    ) -> None:
        """Read what lookups of several peers return, by peer, then table.

        `ids` has every table, in the order of the group, and the ids of all peers in their order; `counts`,
        int64 [peers, tables] and contiguous, has their numbers; `out` is float32, the rows of all ids.
        """
        at = 0
        begins = dict.fromkeys(ids, 0)
        for own in counts.tolist():
            for (name, engine), n in zip(self._engines.items(), own, strict=True):
                if n:
                    part = slice(begins[name], begins[name] + n)
                    rows, epoch = found[name]
                    block = out[at : at + n * engine.dim].view(n, engine.dim)
                    self.read(name, ids[name][part], FoundRows(rows[part], epoch), block, step=step)
                    begins[name] += n
                    at += n * engine.dim

    def pool(
        self,
        ids: Mapping[str, Tensor],
        found: MutableMapping[str, FoundRows],
        pooling: Pooling,
        *,
        step: int | None = None,
    ) -> list[Tensor]:
        """Find the rows that `found` lacks, read all and reduce them; return the pooling's outputs, float32.

        Tables are read in the order of the pooling. InputError: it does not fit the ids or rows of a table.
        """
        with span("megalith.pool"):
            outputs = pooling.new_outputs()
            for name in filter(pooling.of, pooling.bags):
                if name not in found:
                    found[name] = self._engines[name].find(ids[name])
                self._engines[name].pool_lookup(ids[name], found[name], pooling, outputs, step=step)
            return outputs

    def update(
        self,
        ids: Mapping[str, Tensor],
        found: Mapping[str, FoundRows],
        grads: Mapping[str, list[Tensor]],
        pooling: Pooling | None,
        update: Update,
    ) -> None:
        """Make one optimizer step per distinct id of each table in `grads`; the pooling is known to fit.

        TableFullError: the rows of a table do not fit in its capacity. No table was changed, unless another
        thread has used up the room in the meantime.
        """
        with span("megalith.optimizer"), ExitStack() as staged:
            # What may raise comes before the first write. In one order, because tables may be locked.
            writes = [
                staged.enter_context(
                    self._engines[name].stage_update(
                        ids[name],
                        found.get(name),
                        grads[name],
                        pooling,
                        update.of(name),
                        update.occurrences.get(name),
                    )
                )
                for name in sorted(grads)
            ]
            for write in writes:
                write()
