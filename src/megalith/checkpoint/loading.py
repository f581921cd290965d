"""load: read a checkpoint into a model. The numbers of ranks of the two may differ.

`match_tables` decides which table of the checkpoint is loaded into which table of the model, and what
prevents it. All files are verified and compared with the manifest and the model before any table changes.
Then the rows are read file by file, the base first and the deltas in order. With several ranks each keeps the
rows that it owns by the routing of the model, not that of the checkpoint, and its part of sharded dense
weights.
"""

from __future__ import annotations

import builtins
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import nn

from megalith.checkpoint.json_state import unpack
from megalith.checkpoint.manifest import (
    MAX_MANIFEST,
    NAME,
    Manifest,
    TableEntry,
    describe,
    describe_policies,
    full_name,
    read_manifest,
    show_policies,
)
from megalith.checkpoint.model_state import (
    DenseMatch,
    check_equal_options,
    check_idle,
    check_weights,
    collections_of,
    dense_state,
    distribute_state,
    keep_routing,
    match_dense,
    ranks_of,
    set_last_save,
    tables_of,
    track_changes,
)
from megalith.checkpoint.parts import (
    TableLoad,
    check_part_fits,
    load_on_server,
    load_part,
    loaded_on_server,
    place_of,
    relevant_pieces,
)
from megalith.checkpoint.saved_rows import check_piece, check_removed, read_pending, read_tensors
from megalith.distributed.ranks import Ranks
from megalith.errors import CheckpointError, InputError, RankFailedError, RankTimeoutError
from megalith.nn import EmbeddingCollection
from megalith.ops import checks
from megalith.shards import Shards
from megalith.storage.store import Store, StoredFile, open_store
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
    manifest: Manifest, collections: Mapping[str, EmbeddingCollection], where: str, options: _LoadOptions
) -> TableMatches:
    """Match the tables of a checkpoint with those of a model, by name."""
    saved, drop = manifest.tables(), options.drop_optimizer_state
    renamed = {options.rename.get(name, name): entries for name, entries in saved.items()}
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
        fresh = drop if isinstance(drop, bool) else name in drop
        problem = _differs(entries, config, fresh, options.convert_bias_correction)
        if problem and options.allow_missing:
            missing.append(name)
            continue
        if problem:
            raise CheckpointError(f"{where}: table {name!r}{problem}")
        _check_routing(name, entries[-1], shards, local, options.reroute)
        step = manifest.steps.get(path, 0) if options.convert_bias_correction else None
        matches.append(TableMatch(name, config, shards, local, entries, fresh, step))
    if not isinstance(drop, bool):
        unknown = sorted(set(drop) - used)
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


logger = logging.getLogger(__name__)

T = TypeVar("T")
_TRIES = 5
_Check = Callable[[Store], object]


def _agree(ranks: Ranks, work: Callable[[], T]) -> T:
    return ranks.agree(work, error=CheckpointError)


@dataclass(frozen=True)
class TableReport:
    """Numbers of rows of a table, summed over all ranks.

    Attributes:
        read: Rows in the files, deltas included.
        kept: Rows that are now in the table.
        refused: Rows that the table had when it was saved but does not have now.
    """

    read: int
    kept: int
    refused: int


@dataclass(frozen=True)
class LoadReport:
    """The result of a load.

    Attributes:
        manifest: The manifest of the checkpoint.
        tables: The numbers of rows by table.
        missing: Tables and dense weights of the model that were not loaded and keep their values.
        extra: Tables and dense weights of the checkpoint that the model does not have.
        progress: The caller's data, as passed to `save`.
        notes: What is different from the saved model and was loaded nevertheless: policies of tables.
    """

    manifest: Manifest
    tables: dict[str, TableReport]
    missing: list[str]
    extra: list[str]
    progress: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> dict[str, int]:
        """The number of rows of each loaded table."""
        return {name: report.kept for name, report in self.tables.items()}


@dataclass(frozen=True, kw_only=True)
class _LoadOptions:
    """The options of `load`, which describes them."""

    optimizer: torch.optim.Optimizer | None
    reroute: bool
    rename: Mapping[str, str]
    drop_optimizer_state: bool | Collection[str]
    convert_bias_correction: bool
    allow_missing: bool
    deltas: bool
    on_rows: Callable[[int], None] | None

    def __post_init__(self) -> None:
        if self.optimizer is not None and not hasattr(self.optimizer, "load_state_dict"):
            raise InputError(f"optimizer must be a torch optimizer, got {type(self.optimizer).__name__}")
        if not isinstance(self.rename, Mapping):
            raise InputError(f"rename must be a dict of names, got {type(self.rename).__name__}")
        dropped = self.drop_optimizer_state
        if not isinstance(dropped, bool) and not (
            isinstance(dropped, list | tuple | set | Mapping) and all(isinstance(x, str) for x in dropped)
        ):
            raise InputError(f"drop_optimizer_state must be True, False or a list of tables, got {dropped!r}")
        for name in ("reroute", "convert_bias_correction", "allow_missing", "deltas"):
            checks.flag(getattr(self, name), name)
        checks.callback(self.on_rows, "on_rows")

    @property
    def shared(self) -> dict[str, Any]:
        """The options that must be equal on all ranks."""
        dropped = self.drop_optimizer_state
        return {
            "optimizer": None if self.optimizer is None else type(self.optimizer).__name__,
            "reroute": self.reroute,
            "rename": dict(self.rename),
            "drop_optimizer_state": dropped if isinstance(dropped, bool) else sorted(dropped),
            "convert_bias_correction": self.convert_bias_correction,
            "allow_missing": self.allow_missing,
            "deltas": self.deltas,
        }


def load(
    model: nn.Module,
    path: str | PathLike[str] | Store,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    reroute: bool = False,
    rename: Mapping[str, str] | None = None,
    drop_optimizer_state: bool | Collection[str] = False,
    convert_bias_correction: bool = False,
    allow_missing: bool = False,
    deltas: bool = True,
    on_rows: Callable[[int], None] | None = None,
) -> LoadReport:
    """Load a checkpoint: the rows of all collections, dense weights, and the optimizer's state if given.

    Hyperparameters, engine and number of ranks may differ from the saved model; optimizer classes, segments
    and dims may not. A table that the checkpoint lacks keeps its rows, and a table that the model lacks is
    ignored; the report names both, and a warning is issued. All files are verified before any table is
    cleared. A checkpoint that is replaced during the load is loaded again.

    Args:
        model: The model. With several ranks all of them call `load`. Sharded dense weights (DTensors) keep
            their placement.
        path: A directory, a URL or a store.
        optimizer: The optimizer of the dense weights; its state is loaded too.
        reroute: Allow a routing mode other than the saved one; every row moves to its new owner.
        rename: {name in the checkpoint: name in the model}, for tables ("collection.table") and
            dense weights.
        drop_optimizer_state: True, or the tables whose optimizer state starts fresh.
        convert_bias_correction: Allow the other bias_correction than the saved one, for Adam and its
            relatives: the update counts of rows are dropped, or set to the saved global step.
        allow_missing: Skip and report tables and dense weights that do not match, instead of raising.
        deltas: Whether tables track changes from now on, for `save_delta` to this path.
        on_rows: Called with the number of rows read so far.

    Returns:
        What was loaded, and what was missing or extra.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or does not match the model; the message names
            the file, or the table and the difference.
        InputError: The routing mode differs (see `reroute`), or an option has the wrong type, names something
            unknown, or differs between ranks.
        UsageError: A save of the model is in progress, or the placement of a sharded weight is not supported.
    """
    ranks = ranks_of(model)
    store, options = _agree(
        ranks,
        lambda: (
            open_store(path),
            _LoadOptions(
                optimizer=optimizer,
                reroute=reroute,
                rename={} if rename is None else rename,
                drop_optimizer_state=drop_optimizer_state,
                convert_bias_correction=convert_bias_correction,
                allow_missing=allow_missing,
                deltas=deltas,
                on_rows=on_rows,
            ),
        ),
    )
    check_equal_options(ranks, "load", options.shared)
    for _ in range(_TRIES - 1):
        before = _manifest_bytes(store, ranks)
        try:
            return _load(model, store, ranks, options)
        except (RankFailedError, RankTimeoutError):
            raise
        except Exception:  # it is raised on every rank, see `agree`
            if _manifest_bytes(store, ranks) == before:
                raise
    return _load(model, store, ranks, options)


def _manifest_bytes(store: Store, ranks: Ranks) -> bytes:
    """Return the manifest as rank 0 reads it; empty if it cannot be read."""
    found = b""
    if ranks.rank == 0:
        with suppress(OSError):
            found = store.read_whole(NAME, MAX_MANIFEST)
    return bytes(ranks.broadcast(found))


def _load(model: nn.Module, store: Store, ranks: Ranks, options: _LoadOptions) -> LoadReport:
    collections = collections_of(model)
    _agree(ranks, lambda: check_idle(collections))
    check_weights(_agree(ranks, lambda: dense_state(model)), ranks)
    text = _agree(ranks, lambda: read_manifest(store).to_json() if ranks.rank == 0 else "")
    manifest = Manifest.from_json(ranks.broadcast(text), store.where)
    found = _agree(
        ranks,
        lambda: match_tables(manifest, collections, store.where, options),
    )
    with _verified(store, ranks, _needed(manifest, found, store)) as local:
        dense = _agree(ranks, lambda: _match_dense(local, manifest, model, options))
        tables = _agree(ranks, lambda: _load_tables(store, local, found, ranks, options.on_rows))
    dense.copy()
    _set_steps(manifest, collections)
    _keep_routing(found, collections)
    for collection in collections.values():
        collection.zero_grad()
        if options.deltas:
            track_changes(collection.shards)
    if options.deltas:
        # The rows may be equal to no save: then no delta can be added.
        set_last_save(collections.values(), None)
    tables_read = _all_ranks(ranks, found, tables)
    complete = not any(each.refused for each in tables_read.values())
    exact = found.is_exact and complete and not options.rename
    if options.deltas and exact:
        set_last_save(collections.values(), (store.address, manifest.tip))
    _tell_servers(found, collections, store, manifest.tip, exact)
    report = LoadReport(
        manifest,
        tables_read,
        found.missing + dense.missing,
        found.extra + dense.extra,
        dict(manifest.latest.progress),
        [note for match in found.matches if (note := match.policy_note)],
    )
    _warn(store, report)
    for note in report.notes:
        logger.info("%s: %s", store.where, note)
    logger.info("loaded %s from %s", manifest.tip, store.where)
    return report


def _needed(manifest: Manifest, found: TableMatches, store: Store) -> dict[StoredFile, _Check]:
    """Return the files to read and the check of each; from an object store, only those of this rank."""
    checks: dict[StoredFile, _Check] = {}
    for match in found.matches:
        for entry in match.entries:
            router = match.shards.router(match.local)
            every = store.is_local or not match.shards.holds_rows
            for piece in entry.pieces if every else relevant_pieces(entry, router, match.shards.rank):
                checks[piece.file] = partial(check_piece, piece=piece, entry=entry)
            for piece in entry.removed:
                checks[piece.file] = partial(check_removed, piece=piece)
        for piece in match.entries[-1].pending:
            checks[piece.file] = partial(read_pending, piece=piece)
    rest = (manifest.latest.dense, manifest.latest.optimizer_tensors)
    return checks | {file: lambda local: None for file in rest if file is not None}


@contextmanager
def _verified(store: Store, ranks: Ranks, needed: dict[StoredFile, _Check]) -> Iterator[Store]:
    """Verify the files and yield a store to read them from; of local files each rank verifies a share."""
    files = list(needed)
    share = files[ranks.rank :: ranks.size] if store.is_local else files
    with ExitStack() as stack:

        def verify() -> Store:
            local = stack.enter_context(store.local_copy(share, CheckpointError))
            for file in share:
                needed[file](local)
            return local

        yield _agree(ranks, verify)


def _load_tables(
    store: Store,
    local: Store,
    found: TableMatches,
    ranks: Ranks,
    on_rows: Callable[[int], None] | None,
) -> dict[str, int]:
    """Load the rows of all tables; return the number of rows of each, of this rank or of all servers."""
    parts = [_part_of(match, ranks) for match in found.matches]
    if ranks.size == 1:
        for match, part in zip(found.matches, parts, strict=True):
            if match.shards.holds_rows:
                match.shards.each_part(check_part_fits, part)
    kept, done = {}, 0
    for match, part in zip(found.matches, parts, strict=True):
        if match.shards.holds_rows:
            counted = None if on_rows is None else (lambda rows, before=done: on_rows(before + rows))
            results = match.shards.each_part(load_part, local, part, counted)
        else:
            results = match.shards.each_part(load_on_server, store, part, background=True)
        done += sum(read for read, _ in results)
        if on_rows is not None and not match.shards.holds_rows:
            on_rows(done)
        kept[match.name] = sum(rows for _, rows in results)
    return kept


def _part_of(match: TableMatch, ranks: Ranks) -> TableLoad:
    return TableLoad(
        match.local,
        match.entries,
        match.shards.router(match.local),
        match.keeps_state,
        match.fresh,
        match.count,
        alone=ranks.size == 1,
    )


def _match_dense(store: Store, manifest: Manifest, model: nn.Module, options: _LoadOptions) -> DenseMatch:
    """Load the optimizer's state and match the dense weights, which are not copied yet."""
    latest, rename, optimizer = manifest.latest, options.rename, options.optimizer
    saved = {} if latest.dense is None else read_tensors(store, latest.dense)
    unknown = sorted(set(rename) - set(saved) - set(manifest.tables()))
    if unknown:
        known = ", ".join(sorted([*manifest.tables(), *saved]))
        raise InputError(f"rename: {store.where} does not hold {unknown[0]!r}; it holds {known}")
    renamed = {rename.get(name, name): tensor for name, tensor in saved.items()}
    if len(renamed) != len(saved):
        raise InputError(f"rename: two dense weights of {store.where} would have the same name")
    dense = match_dense(model, renamed, options.allow_missing)
    if optimizer is not None:
        if latest.optimizer is None:
            raise CheckpointError(f"{store.where} does not hold optimizer state; load without optimizer=")
        tensors = {} if latest.optimizer_tensors is None else read_tensors(store, latest.optimizer_tensors)
        state = unpack(latest.optimizer, tensors)
        try:
            optimizer.load_state_dict(distribute_state(state, optimizer))
        except CheckpointError as error:
            raise CheckpointError(f"{store.where}: {error}") from None
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{store.where}: its optimizer state does not match this optimizer: {error!r}"
            ) from None
    return dense


def _tell_servers(
    found: TableMatches,
    collections: Mapping[str, EmbeddingCollection],
    store: Store,
    id: str,
    exact: bool,
) -> None:
    """Let parameter servers that can start again do so from this checkpoint."""
    by_shards: dict[int, tuple[Shards, list[tuple[str, str]]]] = {}
    for path, name, shards in tables_of(collections):
        if not shards.holds_rows:
            by_shards.setdefault(builtins.id(shards), (shards, []))[1].append((path, name))
    for shards, tables in by_shards.values():
        shards.each_part(loaded_on_server, id, place_of(shards, store, tables), exact)


def _set_steps(manifest: Manifest, collections: Mapping[str, EmbeddingCollection]) -> None:
    saved = manifest.latest.collections
    for path, collection in collections.items():
        if path in saved:
            collection.global_step = saved[path].global_step
        elif len(saved) == len(collections) == 1:
            collection.global_step = next(iter(saved.values())).global_step


def _keep_routing(found: TableMatches, collections: Mapping[str, EmbeddingCollection]) -> None:
    """Remember the saved routing modes, which tables in one shard do not have themselves."""
    matches = {match.name: match for match in found.matches}
    for path, local, _ in tables_of(collections):
        match = matches.get(full_name(path, local))
        if match is not None:
            keep_routing(collections[path], local, match.entries[-1].routing)


def _all_ranks(ranks: Ranks, found: TableMatches, kept: dict[str, int]) -> dict[str, TableReport]:
    everywhere = ranks.gather(kept)
    reports = {}
    for match in found.matches:
        total = sum(part[match.name] for part in everywhere)
        read = sum(entry.rows for entry in match.entries)
        reports[match.name] = TableReport(read, total, max(0, match.entries[-1].live - total))
    return reports


def _warn(store: Store, report: LoadReport) -> None:
    for problem, names in (
        ("does not hold", report.missing),
        ("holds what the model does not have:", report.extra),
        (
            "holds duplicate rows, or more rows than the Capacity, of table",
            [n for n, table in report.tables.items() if table.refused],
        ),
    ):
        if names:
            warnings.warn(f"{store.where} {problem} {', '.join(map(repr, names))}", stacklevel=3)
