"""Table rows: embedding tables as gather sees them, and the change of a peer's rows since its last window.

`TableShards` is the part of `megalith.Shards` that an update needs; LocalShards and SyncShards have it. Each
reduced row is added once: by its owner if the tables are divided over the ranks, by every process that has
all rows otherwise.

A peer that trains tables keeps two of them, of the same configuration and seed: `local`, which it trains, and
`shared`, which holds the rows of the last window and to which windows are applied.

    peer:     local steps -> changes() -> compress(..., tables=changes) -> publish
    window:   run_window(..., tables=shared)
    peer:     adopt(): rows that it sent or the window changed are copied from shared to local
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops import checks

RowChanges = dict[str, tuple[Tensor, Tensor]]
"""By table: ids int64 [n] and the change of their rows, float32 [n, dim]."""


class TableRouter(Protocol):
    """The part of `megalith.Router` that gather needs."""

    num_shards: int

    def owner(self, ids: Tensor) -> Tensor:
        """Return the rank that holds each id.

        Args:
            ids: int64 [n].

        Returns:
            int32 [n].
        """


class TableShards(Protocol):
    """The part of `megalith.Shards` that gather needs."""

    def assign_add(self, rows: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add to rows. A collective call if the tables are divided over ranks.

        Args:
            rows: By table: ids int64 [n] and what is added, float32 [n, dim].
        """

    def track(self, consumer: str) -> None:
        """Start to record changed ids.

        Args:
            consumer: The name under which they are recorded.
        """

    def drain_touched(self, consumer: str) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Take the ids that have changed since the last call.

        Args:
            consumer: The name.

        Returns:
            By table: changed ids and removed ids.
        """

    def router(self, table: str) -> TableRouter | None:
        """Return how the ids of a table are divided over ranks.

        Args:
            table: The name of the table.

        Returns:
            The router; None if this process holds all ids.
        """


class RowAdder:
    """Adds reduced rows to tables, each once.

    Args:
        tables: The tables.
        names: The tables of the schema.
        place: The place of this rank.
        size: The number of ranks.

    Raises:
        InputError: A table is unknown, or divided over another number of ranks.
    """

    def __init__(self, tables: TableShards, names: list[str], place: int, size: int) -> None:
        for method in ("assign_add", "track", "drain_touched", "router"):
            if not callable(getattr(tables, method, None)):
                raise InputError(
                    f"tables must have the method {method}, as collection.shards has, "
                    f"got {checks.kind(tables)}"
                )
        if not getattr(tables, "holds_rows", True):
            raise InputError("tables are on parameter servers, of which a gather cannot read rows")
        self._tables = tables
        self._place = place
        self._routers: dict[str, TableRouter | None] = {}
        for name in names:
            router = tables.router(name)
            shards = 1 if router is None else router.num_shards
            if shards not in (1, size):
                raise InputError(
                    f"table {name!r} is divided over {shards} ranks, but {size} ranks gather: "
                    "pass ranks=Ranks.of_group() of the same ranks"
                )
            self._routers[name] = None if shards == 1 else router

    def __call__(self, table: str, ids: Tensor, change: Tensor) -> None:
        """Add the rows of which this process is the owner."""
        router = self._routers[table]
        if router is not None:
            own = router.owner(ids) == self._place
            ids, change = ids[own], change[own]
        self._tables.assign_add({table: (ids, change)})


class PeerTables:
    """The tables of a peer: those that it trains, and those of the last window.

    Args:
        local: The shards that the peer trains.
        shared: The shards of the last window, with the same tables and seed.
        consumer: The name under which changed ids are recorded.
    """

    def __init__(self, local: Any, shared: Any, *, consumer: str = "gather") -> None:
        if set(local.configs) != set(shared.configs):
            raise InputError(
                f"local has the tables {sorted(local.configs)}, shared has {sorted(shared.configs)}: "
                "both must have the same"
            )
        self._local = local
        self._shared = shared
        self._consumer = consumer
        self._sent: dict[str, Tensor] = {}
        local.track(consumer)
        shared.track(consumer)

    def changes(self) -> RowChanges:
        """Return the change of this peer's rows since its last window, as `compress` takes it.

        Returns:
            By table: the ids that training has touched, and their rows before minus after. Of
            SyncShards, the ids of this rank.
        """
        touched = {name: updated for name, (updated, _) in self._local.drain_touched(self._consumer).items()}
        self._sent = touched
        before, after = _rows(self._shared, touched), _rows(self._local, touched)
        return {name: (ids, before[name] - after[name]) for name, ids in touched.items()}

    def adopt(self) -> None:
        """Copy the rows that this peer sent, or that the window changed, from `shared` to `local`."""
        changed = self._shared.drain_touched(self._consumer)
        ids = {
            name: torch.cat([self._sent.get(name, updated[:0]), updated]).unique()
            for name, (updated, _) in changed.items()
        }
        rows = _rows(self._shared, ids)
        self._local.assign({name: (each, rows[name]) for name, each in ids.items()})
        self._local.drain_touched(self._consumer)  # what was copied is not a change of this peer
        self._sent = {}


def _rows(shards: Any, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return stored rows of this process: what lookups return may be in a serving precision."""
    return {name: shards.local[name].lookup(each, stored=True) for name, each in ids.items()}
