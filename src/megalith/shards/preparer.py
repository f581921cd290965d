"""Preparers: the part of a lookup that needs neither tables nor other ranks.

They validate ids and, if the tables are spread over ranks, keep each id once and sort ids by owner. A
preparer can be pickled, so a data worker can run it ahead of the lookup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.errors import InputError, UnknownNameError
from megalith.ops import Deduped, scatter_pieces
from megalith.ops.bucketing import find_distinct
from megalith.routing import MODES, Router
from megalith.shards.contract import Ids, Rows, missing_status
from megalith.shards.lookup import PreparedIds
from megalith.table import TableConfig
from megalith.table.validation import (
    InputChecks,
    are_plain_ids,
    check_by_table,
    check_flag,
    check_table_name,
)


@dataclass(frozen=True)
class RoutedIds(PreparedIds):
    """Ids with their routes: the distinct ids by owner and table, and the row of each occurrence."""

    deduped: Deduped  # The distinct ids, sorted by rank, then table, and the index of each occurrence
    # The first occurrence of each table among the occurrences of all tables, in table order
    begin: dict[str, int]
    total: int  # The number of occurrences
    routers: tuple[Router, ...]  # The router of each table, by which the ids were sorted

    def occurrences(self, table: str) -> slice:
        """Return the position of a table's occurrences."""
        return slice(self.begin[table], self.begin[table] + self.ids[table].numel())

    def offsets(self, table: str) -> Tensor:
        """Return where the rows of a table's occurrences begin."""
        # returns: int64 [n], positions in the rows of all distinct ids, counted in floats.
        assert self.deduped.offsets is not None
        return self.deduped.offsets[self.occurrences(table)]

    def status(self, found: Tensor, ids: Ids) -> dict[str, Tensor]:
        """Return the status of ids in the order of the input."""
        # found: int32 [u], the status of the ids that were sent, by owner; returns: int32 [n] per table.
        each = found.to(self.deduped.inverse.device)[self.deduped.inverse]
        return {
            name: each[self.occurrences(name)] if name in self.ids else missing_status(column)
            for name, column in ids.items()
        }

    def to(self, device: torch.device) -> RoutedIds:
        """Return the routes on another device; the ids as they were passed and the counts stay."""
        found = self.deduped
        if found.ids.device == device:
            return self
        ids, first, inverse = (
            x.to(device, non_blocking=True) for x in (found.ids, found.first, found.inverse)
        )
        offsets = None if found.offsets is None else found.offsets.to(device, non_blocking=True)
        deduped = Deduped(ids, first, found.counts, inverse, offsets)
        return RoutedIds(self.ids, deduped, self.begin, self.total, self.routers)


class LocalPreparer:
    """Validates ids for tables of this process."""

    def __init__(self, configs: Mapping[str, TableConfig], device: torch.device | None = None) -> None:
        self.device = torch.device("cpu") if device is None else device
        self._checks = {name: InputChecks(config, device) for name, config in configs.items()}

    def __call__(self, ids: Ids, *, missing_ok: bool = False) -> PreparedIds:
        return PreparedIds(self.checked(ids, missing_ok))

    def trusted(self, ids: Mapping[str, Tensor]) -> PreparedIds:
        """Prepare ids that need no validation: contiguous int64 [n] per table."""
        return PreparedIds(ids)

    def checked(self, ids: Ids, missing_ok: bool = False) -> dict[str, Tensor]:
        """Validate ids."""
        # ids: int64 or int32 [n] per table; returns: int64 [n] per known table.
        check_by_table(ids, "ids", "{'user': ids}")
        check_flag(missing_ok, "missing_ok")
        if not missing_ok:
            for name in ids:
                check_table_name(name, self._checks)
            if are_plain_ids(ids.values(), self.device):
                return dict(ids)
        return {
            name: self._checks[name].ids(x, move=False) for name, x in ids.items() if name in self._checks
        }


class RoutingPreparer(LocalPreparer):
    """Validates ids, keeps each once, and sorts them by owner."""

    def __init__(
        self,
        configs: Mapping[str, TableConfig],
        routers: Mapping[str, Router],
        device: torch.device | None = None,
    ) -> None:
        super().__init__(configs, device)
        self._routers = dict(routers)
        self._routes = tuple(routers.values())
        self._dims = [config.dim for config in configs.values()]
        self._num_shards = next((router.num_shards for router in routers.values()), 1)
        rules = {router.rule for router in routers.values()} or {Router("roundrobin", 1).rule}
        # The rule of all tables; empty if they differ: then owners are computed by table.
        self._rule = list(rules.pop()) if len(rules) == 1 else []

    def __call__(self, ids: Ids, *, missing_ok: bool = False, distinct: bool = True) -> RoutedIds:
        # Distinct=False keeps repeated ids, in their order.
        return self.trusted(self.checked(ids, missing_ok), distinct=distinct)

    def routed(self, ids: Ids | PreparedIds, *, missing_ok: bool = False) -> RoutedIds:
        """Return the ids of a lookup with their routes."""
        if isinstance(ids, RoutedIds) and ids.routers == self._routes:
            return ids
        return self(ids.ids if isinstance(ids, PreparedIds) else ids, missing_ok=missing_ok)

    def rows(self, rows: Rows) -> tuple[RoutedIds, Tensor]:
        """Validate rows and sort them by owner."""
        # returns: the ids, repeated ids in their order, and float32 [size], their rows in the same order.
        check_by_table(rows, "rows", "{'user': (ids, rows)}")
        for name in rows:
            check_table_name(name, self._checks)
        checked = {name: self._checks[name].ids_and_rows(pair) for name, pair in rows.items()}
        routed = self.trusted({name: ids for name, (ids, _) in checked.items()}, distinct=False)
        size = int((routed.deduped.counts @ torch.tensor(self._dims, dtype=torch.int64, device="cpu")).sum())
        pieces = [values for _, values in checked.values()]
        return routed, scatter_pieces(pieces, [routed.offsets(name) for name in checked], size)

    def trusted(self, ids: Mapping[str, Tensor], *, distinct: bool = True) -> RoutedIds:
        columns = [ids.get(name, _NONE) for name in self._checks]
        splits = torch.tensor([0, *(column.numel() for column in columns)], device="cpu").cumsum(0)
        begin = dict(zip(self._checks, splits.tolist(), strict=False))
        if not all(column.is_cpu for column in columns):
            columns = [column.to(self.device, non_blocking=True) for column in columns]
            splits = splits.to(self.device)
        flat = torch.cat(columns) if columns else _NONE
        owners = None
        if not self._rule and columns:
            routed = zip(self._routers.values(), columns, strict=True)
            owners = torch.cat([router.owner(column) for router, column in routed])
        found = find_distinct(flat, splits, owners, self._rule, self._num_shards, distinct, self._dims)
        if not found.counts.is_cpu:
            found = found._replace(counts=found.counts.cpu())  # sizes of messages
        ordered = {name: ids[name] for name in begin if name in ids}
        return RoutedIds(ordered, found, begin, flat.numel(), self._routes)


def blocks_by_table(flat: Tensor, counts: Tensor) -> list[list[Tensor]]:
    """Split data ordered by source, then table, into views."""
    # counts: int64 [sources, tables], the size of each block.
    tables = counts.shape[1]
    pieces: Sequence[Tensor] = flat.split(counts.reshape(-1).tolist()) if counts.numel() else ()
    return [list(pieces[t::tables]) for t in range(tables)]


_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


def make_routers(
    configs: Mapping[str, TableConfig], router: str | Router | Mapping[str, str | Router], num_shards: int
) -> dict[str, Router]:
    """Return the router of every table."""
    named = router if isinstance(router, Mapping) else {}
    for name in named:
        if name not in configs:
            raise UnknownNameError(f"router: unknown table {name!r} (known: {', '.join(map(repr, configs))})")
    routers = {}
    for name, config in configs.items():
        default = "roundrobin" if isinstance(router, Mapping) else router
        chosen = named.get(name, default if isinstance(default, Router) else config.dist_type or default)
        routers[name] = _router(name, chosen, num_shards)
        if config.dist_type not in (None, routers[name].mode):
            raise InputError(
                f"table {name!r} has dist_type={config.dist_type!r}, its router is {routers[name].mode!r}"
            )
    return routers


def _router(table: str, chosen: str | Router, num_shards: int) -> Router:
    if isinstance(chosen, Router):
        if chosen.num_shards != num_shards:
            raise InputError(
                f"table {table!r}: {chosen!r} is for {chosen.num_shards} ranks, but there are {num_shards}"
            )
        return chosen
    if not isinstance(chosen, str):
        raise InputError(f"table {table!r}: router must be a mode or a Router, got {type(chosen).__name__}")
    if chosen == "continuous":
        raise InputError(
            f"table {table!r}: mode 'continuous' needs a block size: use "
            f'Router("continuous", {num_shards}, block_size=...)'
        )
    if chosen not in MODES:
        raise InputError(f"table {table!r}: unknown routing mode {chosen!r}; known: {', '.join(MODES)}")
    return Router(chosen, num_shards)
