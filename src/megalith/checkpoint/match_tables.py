"""TableMatches: which table of a checkpoint goes into which table of a model, and what is in the way."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megalith.checkpoint.dense_state import tables_of
from megalith.checkpoint.manifest import Manifest, TableEntry, describe, full_name
from megalith.errors import CheckpointError, InputError
from megalith.nn import EmbeddingCollection
from megalith.shards import Shards
from megalith.table import Table


@dataclass(frozen=True)
class Match:
    """A table of the model and its entries in base and deltas. fresh: optimizer state is not loaded."""

    name: str
    table: Table
    shards: Shards
    local: str
    entries: list[TableEntry]
    fresh: bool


@dataclass(frozen=True)
class TableMatches:
    """missing: tables of the model that keep what they have. extra: tables of the checkpoint, not loaded."""

    matches: list[Match]
    missing: list[str]
    extra: list[str]

    @property
    def is_exact(self) -> bool:
        """Whether the model's rows will be the checkpoint's, all of them and nothing else."""
        return not self.missing and not self.extra and not any(match.fresh for match in self.matches)


def match_tables(
    manifest: Manifest,
    collections: Mapping[str, EmbeddingCollection],
    *,
    where: str,
    reroute: bool,
    rename: Mapping[str, str],
    drop_optimizer_state: bool | Collection[str],
    allow_missing: bool,
) -> TableMatches:
    """Matches tables by name. Raises CheckpointError naming the table, and what of it differs."""
    saved = manifest.tables()
    renamed = {rename.get(name, name): entries for name, entries in saved.items()}
    if len(renamed) != len(saved):
        raise InputError(f"rename: two tables of {where} would have one name")
    matches, missing, used = [], [], set()
    for path, local, shards in tables_of(collections):
        name, table = full_name(path, local), shards.local[local]
        if name not in renamed:
            missing.append(name)
            continue
        used.add(name)
        entries = renamed[name]
        drop = drop_optimizer_state
        fresh = drop if isinstance(drop, bool) else name in drop
        problem = _differs(entries, table, fresh)
        if problem and allow_missing:
            missing.append(name)
            continue
        if problem:
            raise CheckpointError(f"{where}: table {name!r}{problem}")
        _check_routing(name, entries[-1], shards, local, reroute)
        matches.append(Match(name, table, shards, local, entries, fresh))
    if not isinstance(drop_optimizer_state, bool):
        unknown = sorted(set(drop_optimizer_state) - used)
        if unknown:
            raise InputError(
                f"drop_optimizer_state: no table {unknown[0]!r} is loaded (loaded: {sorted(used)})"
            )
    return TableMatches(matches, missing, sorted(set(renamed) - used))


def _differs(entries: list[TableEntry], table: Table, fresh: bool) -> str:
    wanted = describe(table.config)
    for entry in entries:
        if len(wanted) != len(entry.segments):
            return f" has {len(entry.segments)} segments, here {len(wanted)}"
        for number, (old, new) in enumerate(zip(entry.segments, wanted, strict=True)):
            where = f", segment {number}"
            if old["dim"] != new["dim"]:
                return f"{where} has dim {old['dim']}, here {new['dim']}"
            if fresh:
                continue
            before, now = old["optimizer"]["name"], new["optimizer"]["name"]
            if before != now:
                return (
                    f"{where} was trained with {before}, here it is {now}; drop_optimizer_state=True loads "
                    "the weights alone"
                )
            if old.get("state", []) != new["state"]:
                return (
                    f"{where} has other state than {now} keeps here; drop_optimizer_state=True leaves it out"
                )
    return ""


def _check_routing(name: str, entry: TableEntry, shards: Shards, local: str, reroute: bool) -> None:
    router = shards.router(local)
    there = entry.routing.dist_type
    here = router.mode if router is not None else shards.configs[local].dist_type or there
    if here != there and not reroute:
        raise InputError(
            f"Input dist_type mismatch: table {name!r} was saved with {there!r}, here it is {here!r}; "
            "load with reroute=True to move every row to its new owner"
        )
