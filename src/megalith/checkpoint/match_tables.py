"""match_tables: which table of a checkpoint is loaded into which table of a model, and what prevents it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megalith.checkpoint.dense_state import tables_of
from megalith.checkpoint.manifest import (
    Manifest,
    TableEntry,
    describe,
    describe_policies,
    full_name,
    show_policies,
)
from megalith.errors import CheckpointError, InputError
from megalith.nn import EmbeddingCollection
from megalith.shards import Shards
from megalith.table import TableConfig


@dataclass(frozen=True)
class TableMatch:
    """A table of the model and its entries in the base and the deltas."""

    name: str  # The table's name in the whole model
    config: TableConfig
    shards: Shards
    local: str  # Its name within its shards
    entries: list[TableEntry]
    fresh: bool  # Whether optimizer state starts fresh instead of being loaded
    # The update count of every loaded row, where the table keeps counts and the checkpoint does not; None if
    # the state is loaded as it is, apart from counts that the table does not keep
    count: int | None = None

    @property
    def policy_note(self) -> str:
        """How the table's policies differ from those that it was saved with; empty if they do not."""
        saved, now = self.entries[-1].policies, describe_policies(self.config)
        if saved is None or saved == now:
            return ""
        return (
            f"table {self.name!r} was saved with policies {show_policies(saved)}, "
            f"and is loaded with {show_policies(now)}"
        )

    @property
    def keeps_state(self) -> bool:
        """Whether optimizer state is loaded as it was saved."""
        return not self.fresh and self.entries[-1].state_sizes == {
            column.key: column.end - column.start for column in self.config.state_columns
        }

    @property
    def is_exact(self) -> bool:
        """Whether the rows are loaded as they were saved, with all state and without rounding."""
        saved = [str(segment.get("precision", "float32")) for segment in self.entries[-1].segments]
        stored = [segment.precision for segment in self.config.segments]
        return self.keeps_state and all(
            new in (old, "float32") for old, new in zip(saved, stored, strict=True)
        )


@dataclass(frozen=True)
class TableMatches:
    """The matching tables."""

    matches: list[TableMatch]
    missing: list[str]  # Tables of the model that keep their rows
    extra: list[str]  # Tables of the checkpoint that are not loaded

    @property
    def is_exact(self) -> bool:
        """Whether the model's rows will be exactly those of the checkpoint."""
        return not self.missing and not self.extra and all(match.is_exact for match in self.matches)


def match_tables(
    manifest: Manifest,
    collections: Mapping[str, EmbeddingCollection],
    *,
    where: str,
    reroute: bool,
    rename: Mapping[str, str],
    drop_optimizer_state: bool | Collection[str],
    convert_bias_correction: bool,
    allow_missing: bool,
) -> TableMatches:
    """Match the tables of a checkpoint with those of a model, by name. See `load` for the options."""
    saved = manifest.tables()
    renamed = {rename.get(name, name): entries for name, entries in saved.items()}
    if len(renamed) != len(saved):
        raise InputError(f"rename: two tables of {where} would have the same name")
    matches, missing, used = [], [], set()
    for path, local, shards in tables_of(collections):
        name, config = full_name(path, local), shards.configs[local]
        if name not in renamed:
            missing.append(name)
            continue
        used.add(name)
        entries = renamed[name]
        drop = drop_optimizer_state
        fresh = drop if isinstance(drop, bool) else name in drop
        problem = _differs(entries, config, fresh, convert_bias_correction)
        if problem and allow_missing:
            missing.append(name)
            continue
        if problem:
            raise CheckpointError(f"{where}: table {name!r}{problem}")
        _check_routing(name, entries[-1], shards, local, reroute)
        step = manifest.steps.get(path, 0) if convert_bias_correction else None
        matches.append(TableMatch(name, config, shards, local, entries, fresh, step))
    if not isinstance(drop_optimizer_state, bool):
        unknown = sorted(set(drop_optimizer_state) - used)
        if unknown:
            raise InputError(
                f"drop_optimizer_state: no table {unknown[0]!r} is loaded (loaded: {sorted(used)})"
            )
    return TableMatches(matches, missing, sorted(set(renamed) - used))


def _differs(entries: list[TableEntry], config: TableConfig, fresh: bool, convert: bool) -> str:
    wanted = describe(config)
    for entry in entries:
        if len(wanted) != len(entry.segments):
            return f" has {len(entry.segments)} segments, but the model's has {len(wanted)}"
        for number, (old, new) in enumerate(zip(entry.segments, wanted, strict=True)):
            where = f", segment {number}"
            if old["dim"] != new["dim"]:
                return f"{where} has dim {old['dim']}, but the model's has dim {new['dim']}"
            if fresh:
                continue
            before, now = old["optimizer"]["name"], new["optimizer"]["name"]
            if before != now:
                return (
                    f"{where} was trained with {before}, but the model uses {now}; drop_optimizer_state=True "
                    "loads only the weights"
                )
            kept, wants = old.get("state", []), new["state"]
            if kept != wants and _without_counts(kept) == _without_counts(wants):
                if convert:
                    continue
                forms = ('"row"', '"step"') if len(kept) > len(wants) else ('"step"', '"row"')
                return (
                    f"{where} was trained with {now}(bias_correction={forms[0]}), but the model uses "
                    f"{forms[1]}; convert_bias_correction=True drops or sets the update counts of rows"
                )
            if kept != wants:
                return (
                    f"{where} has other optimizer state than the model's {now}; drop_optimizer_state=True "
                    "loads only the weights"
                )
    return ""


def _without_counts(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the states of an optimizer without the update count that the row form of Adam keeps."""
    return [state for state in states if state["name"] != "count"]


def _check_routing(name: str, entry: TableEntry, shards: Shards, local: str, reroute: bool) -> None:
    router = shards.router(local)
    there = entry.routing.dist_type
    here = router.mode if router is not None else shards.configs[local].dist_type or there
    if here != there and not reroute:
        raise InputError(
            f"Input dist_type mismatch: table {name!r} was saved with {there!r}, but the model uses "
            f"{here!r}; load with reroute=True to move every row to its new owner"
        )
