"""load: a checkpoint into a model, whatever the number of ranks on either side.

All files are verified, and what they hold is compared with manifest and model, before anything is written.
Rows are then read piece by piece, base first and deltas in order; with many ranks each keeps the rows it
owns, by the routing of the model, not of the checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn

from megalith.checkpoint.chain import check_idle, forget_last_save, ranks_of, set_last_save, track_changes
from megalith.checkpoint.dense_state import DenseMatch, collections_of, match_dense
from megalith.checkpoint.manifest import NAME, Manifest, Piece, TableEntry
from megalith.checkpoint.match_tables import Match, TableMatches, match_tables
from megalith.checkpoint.nested_state import unpack
from megalith.checkpoint.saved_rows import (
    MAX_MANIFEST,
    check_piece,
    check_removed,
    read_chunk,
    read_manifest,
    read_removed,
    read_tensors,
)
from megalith.distributed.agreement import agree
from megalith.distributed.ranks import RankGroup
from megalith.errors import CheckpointError, InputError, RankFailedError, RankTimeoutError
from megalith.nn import EmbeddingCollection
from megalith.storage.store import Store, StoredFile, open_store
from megalith.table import Chunk

_TRIES = 5
_Check = Callable[[Store], None]
_agree = partial(agree, error=CheckpointError)


@dataclass(frozen=True)
class TableReport:
    """Rows of a table, all ranks together. read: in the files, deltas included. kept: now in the table.
    refused: of the rows it had when it was saved, how many are not there now."""

    read: int
    kept: int
    refused: int


@dataclass(frozen=True)
class LoadReport:
    """What a load did. missing: tables and dense weights of the model that were left as they were; extra: of
    the checkpoint, that the model has no place for. progress: the caller's, as saved."""

    manifest: Manifest
    tables: dict[str, TableReport]
    missing: list[str]
    extra: list[str]
    progress: dict[str, Any]

    @property
    def rows(self) -> dict[str, int]:
        """Rows now in each table that was loaded."""
        return {name: report.kept for name, report in self.tables.items()}


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What `load` was asked for; see there."""

    optimizer: torch.optim.Optimizer | None
    reroute: bool
    rename: Mapping[str, str]
    drop_optimizer_state: bool | Collection[str]
    allow_missing: bool
    deltas: bool
    on_rows: Callable[[int], None] | None


def load(
    model: nn.Module,
    path: str | PathLike[str] | Store,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    reroute: bool = False,
    rename: Mapping[str, str] | None = None,
    drop_optimizer_state: bool | Collection[str] = False,
    allow_missing: bool = False,
    deltas: bool = True,
    on_rows: Callable[[int], None] | None = None,
) -> LoadReport:
    """Loads what `save` wrote: rows of all collections, dense weights, and the optimizer's state if given.

    Hyper-parameters, engine and number of ranks may differ; optimizer classes, segments and dims may not, and
    the error says which does. A routing mode other than the one saved raises, unless reroute=True. A table
    that the checkpoint lacks keeps what it has, one the model lacks is left out; both are named in the report
    and warned of. rename: {name in the checkpoint: name here}, of tables ("collection.table") and dense
    weights. drop_optimizer_state: True, or the tables whose optimizer state starts anew. allow_missing:
    tables and dense weights that do not fit are left as they are, and named, instead of raising.
    deltas: tables remember what changes from now on, for `save_delta` to this path. on_rows: called with the
    number of rows read so far.

    Files are checked against the manifest before any table is cleared; raises CheckpointError naming file and
    problem, and UsageError while a save of the model is under way. A checkpoint that is replaced while it is
    read is read again.
    """
    store = open_store(path)
    ranks = ranks_of(collections_of(model))
    asked = _Asked(
        optimizer=optimizer,
        reroute=reroute,
        rename=rename or {},
        drop_optimizer_state=drop_optimizer_state,
        allow_missing=allow_missing,
        deltas=deltas,
        on_rows=on_rows,
    )
    for _ in range(_TRIES - 1):
        before = _manifest_bytes(store, ranks)
        try:
            return _load(model, store, ranks, asked)
        except (RankFailedError, RankTimeoutError):
            raise
        except Exception:  # raised on every rank, see `agree`
            if _manifest_bytes(store, ranks) == before:
                raise
    return _load(model, store, ranks, asked)


def _manifest_bytes(store: Store, ranks: RankGroup) -> bytes:
    """The manifest as rank 0 finds it; nothing if it cannot be read."""
    found = b""
    if ranks.rank == 0:
        with suppress(OSError):
            found = store.read_whole(NAME, MAX_MANIFEST)
    return bytes(ranks.broadcast(found))


def _load(model: nn.Module, store: Store, ranks: RankGroup, asked: _Asked) -> LoadReport:
    collections = collections_of(model)
    _agree(ranks, lambda: check_idle(collections))
    text = _agree(ranks, lambda: read_manifest(store).to_json() if ranks.rank == 0 else "")
    manifest = Manifest.from_json(ranks.broadcast(text), store.where)
    found = _agree(
        ranks,
        lambda: match_tables(
            manifest,
            collections,
            where=store.where,
            reroute=asked.reroute,
            rename=asked.rename,
            drop_optimizer_state=asked.drop_optimizer_state,
            allow_missing=asked.allow_missing,
        ),
    )
    with _verified(store, ranks, _needed(manifest, found, store)) as near:
        dense = _agree(ranks, lambda: _fit_rest(near, manifest, model, asked))
        tables = _agree(ranks, lambda: _load_tables(near, found, ranks, asked.on_rows))
    dense.copy()
    _set_steps(manifest, collections)
    for collection in collections.values():
        collection.zero_grad()
        if asked.deltas:
            track_changes(collection.shards)
    if asked.deltas:
        forget_last_save(collections.values())
    if asked.deltas and found.is_exact and not asked.rename:
        set_last_save(collections.values(), store, manifest.tip)
    report = LoadReport(
        manifest,
        _all_ranks(ranks, found, tables),
        found.missing + dense.missing,
        found.extra + dense.extra,
        dict(manifest.latest.progress),
    )
    _warn(store, report)
    return report


def _needed(manifest: Manifest, found: TableMatches, store: Store) -> dict[StoredFile, _Check]:
    """The files a load reads, and how each is checked. Of a store that is far, this rank's alone."""
    checks: dict[StoredFile, _Check] = {}
    for match in found.matches:
        for entry in match.entries:
            for piece in entry.pieces if store.is_local else _relevant(entry, match):
                checks[piece.file] = partial(check_piece, piece=piece, entry=entry)
            for piece in entry.removed:
                checks[piece.file] = partial(check_removed, piece=piece)
    rest = (manifest.latest.dense, manifest.latest.optimizer_tensors)
    return checks | {file: lambda near: None for file in rest if file is not None}


@contextmanager
def _verified(store: Store, ranks: RankGroup, needed: dict[StoredFile, _Check]) -> Iterator[Store]:
    """The files, verified; of files that lie near each rank checks a share, and all agree."""
    files = list(needed)
    share = files[ranks.rank :: ranks.size] if store.is_local else files
    with ExitStack() as stack:

        def verify() -> Store:
            near = stack.enter_context(store.local_copy(share, CheckpointError))
            for file in share:
                needed[file](near)
            return near

        yield _agree(ranks, verify)


def _load_tables(
    store: Store, found: TableMatches, ranks: RankGroup, on_rows: Callable[[int], None] | None
) -> dict[str, int]:
    done = 0
    for match in found.matches:
        table = match.table
        table.clear()
        if ranks.size == 1:
            table.reserve(match.entries[-1].live)
        for entry in match.entries:
            for piece in _relevant(entry, match):
                _restore(match, read_chunk(store, piece, entry))
                done += piece.rows
                if on_rows is not None:
                    on_rows(done)
            for piece in entry.removed:
                table.remove(read_removed(store, piece))
    return {match.name: len(match.table) for match in found.matches}


def _relevant(entry: TableEntry, match: Match) -> list[Piece]:
    """The files that may hold rows of this rank: its own where rows lie as they would be spread here."""
    router = match.shards.router(match.local)
    saved = entry.routing
    if router is None:
        return entry.pieces
    same = (saved.dist_type, saved.num_shards, saved.block_size, saved.skip_first) == (
        router.mode,
        router.num_shards,
        router.block_size,
        router.skip_first,
    )
    return [piece for piece in entry.pieces if not same or piece.shard == match.shards.rank]


def _restore(match: Match, chunk: Chunk) -> None:
    router = match.shards.router(match.local)
    if router is not None:
        chunk = chunk.select(router.owner(chunk.ids) == match.shards.rank)
    if match.fresh:
        n = chunk.ids.numel()
        state = {c.key: torch.full((n, c.end - c.start), c.initial) for c in match.table.config.state_columns}
        chunk = Chunk(chunk.ids, chunk.rows, state, chunk.time, chunk.count)
    match.table.restore(chunk)


def _fit_rest(store: Store, manifest: Manifest, model: nn.Module, asked: _Asked) -> DenseMatch:
    """Reads what is not rows. Dense weights are only matched yet; the optimizer takes its state or raises."""
    latest, rename, optimizer = manifest.latest, asked.rename, asked.optimizer
    saved = {} if latest.dense is None else read_tensors(store, latest.dense)
    unknown = sorted(set(rename) - set(saved) - set(manifest.tables()))
    if unknown:
        known = ", ".join(sorted([*manifest.tables(), *saved]))
        raise InputError(f"rename: {store.where} holds no {unknown[0]!r}; it holds {known}")
    renamed = {rename.get(name, name): tensor for name, tensor in saved.items()}
    if len(renamed) != len(saved):
        raise InputError(f"rename: two dense weights of {store.where} would have one name")
    dense = match_dense(model, renamed, asked.allow_missing)
    if optimizer is not None:
        if latest.optimizer is None:
            raise CheckpointError(f"{store.where} holds no optimizer state; load without optimizer=")
        tensors = {} if latest.optimizer_tensors is None else read_tensors(store, latest.optimizer_tensors)
        state = unpack(latest.optimizer, tensors)
        try:
            optimizer.load_state_dict(state)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{store.where}: its optimizer state does not fit this optimizer: {error!r}"
            ) from None
    return dense


def _set_steps(manifest: Manifest, collections: Mapping[str, EmbeddingCollection]) -> None:
    saved = manifest.latest.collections
    for path, collection in collections.items():
        if path in saved:
            collection.global_step = saved[path].global_step
        elif len(saved) == len(collections) == 1:
            collection.global_step = next(iter(saved.values())).global_step


def _all_ranks(ranks: RankGroup, found: TableMatches, kept: dict[str, int]) -> dict[str, TableReport]:
    everywhere = ranks.gather(kept)
    reports = {}
    for match in found.matches:
        total = sum(part[match.name] for part in everywhere)
        read = sum(entry.rows for entry in match.entries)
        reports[match.name] = TableReport(read, total, max(0, match.entries[-1].live - total))
    return reports


def _warn(store: Store, report: LoadReport) -> None:
    for problem, names in (
        ("has nothing for", report.missing),
        ("holds what the model has no place for:", report.extra),
        ("holds rows twice, of table", [n for n, table in report.tables.items() if table.refused]),
    ):
        if names:
            warnings.warn(f"{store.where} {problem} {', '.join(map(repr, names))}", stacklevel=3)
