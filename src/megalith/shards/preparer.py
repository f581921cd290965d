"""Preparer: the part of a look-up over ranks that needs neither tables nor other ranks.

Checks ids, keeps each once, and sorts them by the rank that owns them. A data worker can do it ahead: it is
plain data and can be sent to another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megalith.errors import InputError, UnknownNameError
from megalith.ops import Deduped, dedup
from megalith.routing import MODES, Router
from megalith.shards.contract import Ids, Prepared
from megalith.table import TableConfig
from megalith.table.validation import Checks


@dataclass(frozen=True)
class SyncPrepared(Prepared):
    """Also what goes to which rank: distinct ids by rank, then table, and where each occurrence finds its
    row.

    begin: the first occurrence of each table (all tables, in order), and their number.
    """

    deduped: Deduped
    begin: dict[str, int]
    total: int

    def occurrences(self, table: str) -> slice:
        """A table's occurrences among all."""
        return slice(self.begin[table], self.begin[table] + self.ids[table].numel())


class Preparer:
    """Makes `SyncPrepared`s. configs: all tables in order. routers: one for each."""

    def __init__(self, configs: Mapping[str, TableConfig], routers: Mapping[str, Router]) -> None:
        self._checks = {name: Checks(config) for name, config in configs.items()}
        self._routers = dict(routers)
        self._dims = [config.dim for config in configs.values()]
        self._size = next((router.num_shards for router in routers.values()), 1)
        self._one = next(iter(routers.values())) if len(set(routers.values())) == 1 else None

    def __call__(self, ids: Ids, *, missing_ok: bool = False, distinct: bool = True) -> SyncPrepared:
        """ids: int64 or int32 [n] per table. distinct=False keeps repeated ids, in their order."""
        for name in ids:
            if name not in self._checks and not missing_ok:
                known = ", ".join(map(repr, self._checks)) or "none"
                raise UnknownNameError(f"unknown table {name!r} (known: {known})")
        asked = {name: check.check_ids(ids[name]) for name, check in self._checks.items() if name in ids}
        columns = [asked.get(name, _NONE) for name in self._checks]
        splits = torch.tensor([0, *(column.numel() for column in columns)]).cumsum(0)
        flat = torch.cat(columns) if columns else _NONE
        owners = None
        if self._one is None and columns:
            routed = zip(self._routers.values(), columns, strict=True)
            owners = torch.cat([router.owner(column) for router, column in routed])
        found = dedup(
            flat,
            splits,
            self._one if owners is None else None,
            owners=owners,
            num_shards=self._size,
            distinct=distinct,
            widths=self._dims,
        )
        return SyncPrepared(
            asked, found, dict(zip(self._checks, splits.tolist(), strict=False)), flat.numel()
        )


_NONE = torch.empty(0, dtype=torch.int64)


def make_routers(
    configs: Mapping[str, TableConfig], router: str | Router | Mapping[str, str | Router], size: int
) -> dict[str, Router]:
    """A router for every table over `size` ranks. A table's own dist_type wins over one mode for all."""
    named = router if isinstance(router, Mapping) else {}
    for name in named:
        if name not in configs:
            raise UnknownNameError(f"router: unknown table {name!r} (known: {', '.join(map(repr, configs))})")
    routers = {}
    for name, config in configs.items():
        default = "roundrobin" if isinstance(router, Mapping) else router
        chosen = named.get(name, default if isinstance(default, Router) else config.dist_type or default)
        routers[name] = _router(name, chosen, size)
        if config.dist_type not in (None, routers[name].mode):
            raise InputError(
                f"table {name!r} has dist_type={config.dist_type!r}, its router is {routers[name].mode!r}"
            )
    return routers


def _router(table: str, chosen: str | Router, size: int) -> Router:
    if isinstance(chosen, Router):
        if chosen.num_shards != size:
            raise InputError(
                f"table {table!r}: {chosen!r} is for {chosen.num_shards} ranks, there are {size}"
            )
        return chosen
    if chosen == "continuous":
        raise InputError(
            f"table {table!r}: mode 'continuous' needs the ids of a block: give "
            f'Router("continuous", {size}, block_size=...)'
        )
    if chosen not in MODES:
        raise InputError(f"table {table!r}: unknown routing mode {chosen!r}; known: {', '.join(MODES)}")
    return Router(chosen, size)
