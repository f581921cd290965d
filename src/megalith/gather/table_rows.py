"""Table rows: embedding tables as gather sees them, and the change of a peer's rows since its last window.

`TableShards` is the part of `megalith.Shards` that an update needs. Each reduced row is added once:

    tables          a row is added by
    LocalShards     every process, as each has all rows
    SyncShards      the rank that owns it
    ServerShards    one of the ranks, which divide the rows

A peer that trains tables keeps two of them, of the same configuration and seed: `local`, which it trains, and
`shared`, which holds the rows of the last window and to which windows are applied.

    peer, all ranks   local steps -> changes(): of SyncShards, the rows of this rank
                      -> compress(..., tables=changes, ranks=ranks): the first rank gets the rows of all
    first rank        publish
    all ranks         run_window(..., tables=shared, ranks=ranks)
                      -> adopt(): rows that were sent, or that the window changed, go from shared to local
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import isfunction, ismethod
from typing import Any, Protocol

import torch
from torch import Tensor

from megalith.distributed.elastic_ranks import ElasticRanks
from megalith.errors import InputError
from megalith.gather.payload_schema import PayloadSchema
from megalith.ops import checks

_BLOCK_BYTES = 32 << 20  # rows that parameter servers return at once
ApplyRows = Callable[[str, Tensor, Tensor], None]
"""Takes the name of a table, ids int64 [n] ascending, and what to add to their rows, float32 [n, dim]."""


class RowChanges(dict[str, tuple[Tensor, Tensor]]):
    """By table: ids int64 [n] and the change of their rows, float32 [n, dim]."""

    def __init__(self, rows: Mapping[str, tuple[Tensor, Tensor]], num_ranks: int) -> None:
        super().__init__(rows)
        self.num_ranks = num_ranks


class TableRouter(Protocol):
    """The part of `megalith.Router` that gather needs."""

    num_shards: int

    def owner(self, ids: Tensor) -> Tensor: ...


class TableShards(Protocol):
    """The part of `megalith.Shards` that gather needs."""

    def assign_add(self, rows: Mapping[str, tuple[Tensor, Tensor]]) -> None: ...

    def track(self, consumer: str) -> None: ...

    def drain_touched(self, consumer: str) -> Mapping[str, tuple[Tensor, Tensor]]: ...

    def router(self, table: str) -> TableRouter | None: ...


def row_taker(
    schema: PayloadSchema, ranks: ElasticRanks, tables: TableShards | ApplyRows | None
) -> ApplyRows | None:
    """Return what takes the changes of table rows."""
    if tables is None:
        return None
    if isfunction(tables) or ismethod(tables) or isinstance(tables, partial):
        return tables
    for method in ("assign_add", "track", "drain_touched", "router"):
        if not callable(getattr(tables, method, None)):
            raise InputError(
                f"tables must have the method {method}, as collection.shards has, or be a function of a "
                f"table, ids and changes, got {checks.kind(tables)}"
            )
    shared: Any = tables
    on_servers = not getattr(tables, "holds_rows", True)
    for table in schema.tables:
        router = shared.router(table.name)
        shards = 1 if router is None or on_servers else router.num_shards
        if shards not in (1, ranks.size):
            raise InputError(
                f"table {table.name!r} is divided over {shards} ranks, but {ranks.size} ranks gather: "
                "pass ranks=ElasticRanks.of_group() of the same ranks"
            )

    def add(table: str, ids: Tensor, change: Tensor) -> None:
        if on_servers:
            # All wait, so that no rank reads its tables before the others have written.
            part = slice(ranks.place, None, ranks.size)
            ranks.agree(lambda: shared.assign_add({table: (ids[part], change[part])}), "table rows")
            return
        router = shared.router(table)
        if router is not None and router.num_shards > 1:
            own = router.owner(ids) == ranks.place
            ids, change = ids[own], change[own]
        shared.assign_add({table: (ids, change)})

    return add


class PeerTables:
    """The tables of a peer: those that it trains, and those of the last window.

    With SyncShards every rank has a PeerTables. Of ServerShards with several workers, one worker has it, and
    calls it while no other one trains.

    Args:
        local: The shards that the peer trains.
        shared: The shards of the last window, with the same tables and seed.
        consumer: The name under which changed ids are recorded.

    Raises:
        InputError: They have different tables, or rows of `shared` are on other ranks than those of `local`.
    """

    def __init__(self, local: Any, shared: Any, *, consumer: str = "gather") -> None:
        for name, shards in (("local", local), ("shared", shared)):
            if not hasattr(shards, "configs") or not hasattr(shards, "drain_touched"):
                raise InputError(
                    f"{name} must be shards such as collection.shards, got {checks.kind(shards)}"
                )
        if set(local.configs) != set(shared.configs):
            raise InputError(
                f"local has the tables {sorted(local.configs)}, shared has {sorted(shared.configs)}: "
                "both must have the same"
            )
        for name in shared.configs if shared.holds_rows and shared.world_size > 1 else ():
            here, there = local.router(name) if local.holds_rows else None, shared.router(name)
            if here != there:
                raise InputError(
                    f"table {name!r}: the rows of shared are divided over ranks by {there}, those of local "
                    f"by {here}: create both with the same router"
                )
        self._local = local
        self._shared = shared
        self._consumer = checks.text(consumer, "consumer")
        self._sent: dict[str, Tensor] = {}
        self._received: dict[str, Tensor] = {}
        local.track(consumer)
        shared.track(consumer)

    def changes(self) -> RowChanges:
        """Return the change of this peer's rows since its last window, as `compress` takes it.

        Not a collective call. Until `adopt`, a further call returns the same rows and those that training has
        touched since.

        Returns:
            By table: the ids that training has touched, and their rows before minus after. Of
            SyncShards, the ids of this rank: `compress` with ranks sends those of all.
        """
        self._local.flush()
        self._sent = _touched(self._sent, self._local.drain_touched(self._consumer))
        found = {}
        for name, ids in self._sent.items():
            change = _rows(self._shared, name, ids)
            found[name] = ids, change.sub_(_rows(self._local, name, ids))
        return RowChanges(found, self._local.world_size)

    def adopt(self) -> None:
        """Copy the rows that this peer sent, or that the window changed, from `shared` to `local`.

        A collective call with SyncShards: each rank copies its own rows, and an error on one raises on all.
        Other rows that were trained after `changes` stay as they are; the next `changes` returns them.
        """
        try:
            self._received = _touched(self._received, self._shared.drain_touched(self._consumer))
            copied = {
                name: torch.cat([self._sent.get(name, ids[:0]), ids]).unique()
                for name, ids in self._received.items()
            }
            rows = {name: (ids, _rows(self._shared, name, ids)) for name, ids in copied.items()}
        except Exception as error:
            self._local.fail(error, "assign")
        self._local.assign(rows)
        # What was copied is not a change of this peer.
        trained = _touched({}, self._local.drain_touched(self._consumer))
        left = {name: ids[~torch.isin(ids, copied[name])] for name, ids in trained.items()}
        self._local.mark_touched(self._consumer, left)
        self._sent, self._received = {}, {}


def _touched(before: Mapping[str, Tensor], drained: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Add the updated ids of a drain to ids."""
    return {
        name: torch.cat([before.get(name, updated[:0]), updated]).unique()
        for name, (updated, _) in drained.items()
    }


def _rows(shards: Any, name: str, ids: Tensor) -> Tensor:
    """Return stored rows: what lookups return may be in a serving precision, or travel in a lower one."""
    if shards.holds_rows:
        return shards.local[name].lookup(ids, stored=True)  # type: ignore[no-any-return]
    router, dim = shards.router(name), shards.configs[name].dim
    rows = torch.empty(ids.numel(), dim, device="cpu")
    step = max(1, _BLOCK_BYTES // (4 * dim))
    for block, out in zip(ids.cpu().split(step), rows.split(step), strict=True):
        parts = shards.each_part(_rows_of_part, name, router, block.numpy())
        owners = router.owner(block)
        for server, part in enumerate(parts):
            out[owners == server] = torch.from_numpy(part.copy())  # a received array is read-only
    return rows.to(ids.device)


def _rows_of_part(part: Any, name: str, router: TableRouter, ids: Any) -> Any:
    """Runs on a server: its stored rows, as NumPy arrays."""
    given = torch.from_numpy(ids.copy())
    own = given[router.owner(given) == part.index]
    return part.shards.local[name].lookup(own, stored=True).cpu().numpy()
