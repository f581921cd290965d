"""Saving and loading rows in the process that holds them: a rank, or a parameter server.

`PartSave` holds the tables of one process, frozen by snapshots, and writes them to files. A `SaveJob` has one
for the tables of its own process. For tables on servers each server has one, so rows go from the server to
the store and not through the process that saves. A server starts writing when it freezes: its calls run one
at a time, and a write that waits for the reader of a snapshot would delay the call that starts the reader.

`load_part` reads the rows of one table that belong to the part: the files one by one, the base first and the
deltas in order. A part keeps the rows that it owns by the routing of the model, not that of the checkpoint.

A parameter server that ends gets its rows back from the last checkpoint (`restore_part`) and from its log of
the updates after it. `recovery` describes this to `ServerShards`.
"""

from __future__ import annotations

import os
import threading
import time as clock
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.checkpoint.manifest import Piece, TableEntry, full_name, read_manifest
from megalith.checkpoint.model_state import CONSUMER
from megalith.checkpoint.saved_rows import (
    PieceWriter,
    read_chunk,
    read_pending,
    read_removed,
    write_pending,
    write_tensors,
)
from megalith.errors import CheckpointError, UsageError
from megalith.ops import checks
from megalith.ps.recovery import Recovery
from megalith.routing import Router
from megalith.shards import Shards, ShardsPart
from megalith.storage.store import Store, open_store, read_ahead
from megalith.table import Chunk, Table, TableConfig
from megalith.table.snapshot import Snapshot

BUFFER_BYTES = 64 << 20
"""Memory for rows that change during a save, for all tables together; when it is full, training waits."""


class SavedTable(NamedTuple):
    """A table to save."""

    collection: str  # The path of its collection
    name: str  # Its name there
    folder: str  # The folder of its files in the store

    @property
    def full_name(self) -> str:
        """Its name in the whole model."""
        return full_name(self.collection, self.name)


@dataclass(frozen=True, kw_only=True)
class PartReport:
    """What one part of a save has written of a table: the writer of pieces adds its files here."""

    pieces: list[Piece] = field(default_factory=list)
    removed: list[Piece] = field(default_factory=list)
    pending: list[Piece] = field(default_factory=list)
    live: int
    seed: int

    @property
    def rows(self) -> int:
        """Number of rows written."""
        return sum(piece.rows for piece in self.pieces)


class _FrozenTable(NamedTuple):
    """A table of this process with its snapshot."""

    saved: SavedTable
    table: Table
    snapshot: Snapshot
    report: PartReport


class PartSave:
    """One part of a save. It is frozen when it is created; `close` must be called."""

    def __init__(
        self, tables: Sequence[tuple[SavedTable, Table]], shard: int, *, track: bool, delta: bool
    ) -> None:
        self._shard, self._delta = shard, delta
        self._tables: list[_FrozenTable] = []
        self._written: Future[dict[str, PartReport]] = Future()
        self._rows = 0  # read from the snapshots so far
        self._where = ""
        self.waited = 0.0
        sizes = [max(1, table.memory().rows) for _, table in tables]
        try:
            for (saved, table), size in zip(tables, sizes, strict=True):
                snapshot = table.snapshot(
                    consumer=CONSUMER if track else None,
                    touched_only=delta,
                    pending=True,
                    buffer_bytes=max(1 << 20, BUFFER_BYTES * size // sum(sizes)),
                )
                report = PartReport(live=snapshot.live, seed=table.seed)
                self._tables.append(_FrozenTable(saved, table, snapshot, report))
        except BaseException:
            self.close(give_back=True)
            raise

    def write(
        self, store: Store, precision: str, on_rows: Callable[[int], None] | None = None
    ) -> dict[str, PartReport]:
        shard = self._shard
        with PieceWriter(store, shard, precision) as writer:
            unread = [(frozen, count()) for frozen in self._tables]  # with the numbers of its files
            while unread:
                # Tables first whose buffers of changed rows are filling up: training would have to wait.
                frozen, numbers = entry = max(unread, key=lambda each: each[0].snapshot.pressure > 0.5)
                name = f"{frozen.saved.folder}/{shard}-{next(numbers):05}.safetensors"
                rows = writer.write(frozen.snapshot, frozen.table.config, name, frozen.report.pieces)
                if not rows:
                    unread.remove(entry)
                    continue
                self._rows += rows
                if on_rows is not None:
                    on_rows(self._rows)
        for saved, _, snapshot, report in self._tables:
            report.pieces.sort(key=lambda piece: piece.file.path)
            assert report.rows == snapshot.rows, saved.name
            ids = snapshot.removed
            if self._delta and ids.numel():
                file = write_tensors(store, f"{saved.folder}/{shard}-removed.safetensors", {"ids": ids})
                report.removed.append(Piece(file, shard, ids.numel()))
            ids, counts = snapshot.pending
            if ids.numel():
                name = f"{saved.folder}/{shard}-pending.safetensors"
                report.pending.append(write_pending(store, name, ids, counts, shard))
        return {frozen.saved.full_name: frozen.report for frozen in self._tables}

    def start(self, store: Store, precision: str) -> None:
        """Write all rows in a thread. If that fails, the snapshots end: training must not wait for them."""
        self._where = store.where
        threading.Thread(
            target=self._write_all, args=(store, precision), name="megalith save", daemon=True
        ).start()

    def _write_all(self, store: Store, precision: str) -> None:
        try:
            report = self.write(store, precision)
        except BaseException as error:
            self.close(give_back=True)
            self._written.set_exception(error)
        else:
            self._written.set_result(report)

    def written(self, timeout: float) -> dict[str, PartReport]:
        """Wait until the thread of `start` has ended, as long as it writes rows within each `timeout`."""
        rows = -1
        while not self._written.done() and rows != self._rows:
            rows = self._rows
            wait([self._written], timeout)
        if not self._written.done():
            raise CheckpointError(
                f"server {self._shard} has written {rows} rows to {self._where}, and none in {timeout:g} s"
            )
        return self._written.result(0)

    def abandon(self) -> None:
        """End the snapshots of a save whose process has ended. See `PartOperation`."""
        self.close(give_back=True)

    def close(self, *, give_back: bool) -> None:
        """End the snapshots. Only the first call has an effect."""
        for frozen in self._tables:
            frozen.snapshot.close(give_back=give_back)
        self.waited = sum(frozen.snapshot.waited for frozen in self._tables)


# ---- what runs on servers


def freeze_on_server(
    part: ShardsPart,
    id: str,
    tables: Sequence[SavedTable],
    track: bool,
    delta: bool,
    place: Any,
    store: Store,
    precision: str,
) -> None:
    """Freeze the tables of a server and start writing them."""
    own = [(saved, part.shards.local[saved.name]) for saved in tables]
    frozen = PartSave(own, part.index, track=track, delta=delta)
    try:
        if part.recovery is not None:
            part.recovery.frozen(id, place)
        frozen.start(store, precision)
    except BaseException:
        frozen.close(give_back=True)
        raise
    part.kept[_key(id)] = frozen


def write_on_server(part: ShardsPart, id: str, timeout: float) -> dict[str, PartReport]:
    """Wait until the frozen tables of a server are written."""
    saved = part.kept.get(_key(id))
    if not isinstance(saved, PartSave):
        raise UsageError(f"server {part.index} does not have save {id}: this worker has left in the meantime")
    return saved.written(timeout)


def close_on_server(part: ShardsPart, id: str, give_back: bool) -> float:
    """End the save of a server. Nothing happens if it has none."""
    saved = part.kept.pop(_key(id), None)
    if not isinstance(saved, PartSave):
        return 0.0
    saved.close(give_back=give_back)
    if not give_back:
        part.saved_at = clock.time()
    if part.recovery is not None:
        part.recovery.ended(id, complete=not give_back)
    return saved.waited


def _key(id: str) -> str:
    return f"save {id}"


@dataclass(frozen=True)
class TableLoad:
    """A table to load."""

    name: str  # Its name in its shards
    entries: Sequence[TableEntry]  # Its entries in the base and the deltas
    router: Router | None  # The routing of the model; None: the part owns all ids
    keeps_state: bool  # Whether optimizer state is loaded as it was saved
    fresh: bool  # Whether optimizer state starts fresh instead
    count: int | None  # The update count of every row, where the checkpoint does not hold it
    alone: bool  # Whether there is one rank


def check_part_fits(part: ShardsPart, load: TableLoad) -> None:
    """Raise TableFullError if the rows do not fit into the only part."""
    part.shards.local[load.name].check_fits(load.entries[-1].live)


def load_part(
    part: ShardsPart, store: Store, load: TableLoad, on_rows: Callable[[int], None] | None
) -> tuple[int, int]:
    """Replace the rows of a table."""
    table = part.shards.local[load.name]
    table.clear()
    if load.alone and part.count == 1:
        live, limit = load.entries[-1].live, table.engine_impl.row_limit
        table.reserve(live if limit is None else min(live, limit))
    done = 0
    for entry in load.entries:
        # A delta does not save ids that it removes. Removing first keeps the table within its Capacity.
        for piece in entry.removed:
            table.remove(read_removed(store, piece))
        pieces = relevant_pieces(entry, load.router, part.index)
        # One thread reads and decodes files while this one inserts the rows of those before.
        chunks = read_ahead(partial(read_chunk, store, entry=entry), pieces)
        for piece, chunk in zip(pieces, chunks, strict=True):
            if load.router is not None:
                chunk = chunk.select(load.router.owner(chunk.ids) == part.index)
            table.restore(chunk if load.keeps_state else _with_state(chunk, table.config, load))
            done += piece.rows
            if on_rows is not None:
                on_rows(done)
    for piece in load.entries[-1].pending:
        table.restore_pending(*_owned(load.router, part.index, *read_pending(store, piece)))
    return done, len(table)


def load_on_server(part: ShardsPart, store: Store, load: TableLoad) -> tuple[int, int]:
    """Fetch and verify the files that a server needs, and load them."""
    own = object()
    if part.loads.setdefault(load.name, own) is not own:
        raise UsageError(f"table {load.name!r} is being loaded on server {part.index}: load it again later")
    try:
        return _load_files(part, store, load)
    finally:
        del part.loads[load.name]


def _load_files(part: ShardsPart, store: Store, load: TableLoad) -> tuple[int, int]:
    last = load.entries[-1].pending
    pieces = [p for entry in load.entries for p in relevant_pieces(entry, load.router, part.index)]
    removed = [p for entry in load.entries for p in entry.removed]
    with store.local_copy([p.file for p in (*pieces, *removed, *last)], CheckpointError) as local:
        return load_part(part, local, load, None)


def relevant_pieces(entry: TableEntry, router: Router | None, index: int) -> list[Piece]:
    """Return the files that may hold rows of a part: only its own if the routing is the same."""
    saved = entry.routing
    if router is None:
        return entry.pieces
    same = (saved.dist_type, saved.num_shards, saved.block_size, saved.skip_first) == (
        router.mode,
        router.num_shards,
        router.block_size,
        router.skip_first,
    )
    return [piece for piece in entry.pieces if not same or piece.shard == index]


def _with_state(chunk: Chunk, config: TableConfig, load: TableLoad) -> Chunk:
    """Return rows with the optimizer state that the table keeps: fresh, or saved apart from counts."""
    n, columns = chunk.ids.numel(), config.state_columns
    state = {c.key: torch.full((n, c.end - c.start), c.initial, device="cpu") for c in columns}
    if not load.fresh:
        counts = {
            c.key: torch.full((n, 1), float(load.count or 0), device="cpu")
            for c in columns
            if c.name == "count"
        }
        state |= counts | {key: values for key, values in chunk.state.items() if key in state}
    return replace(chunk, state=state)


def _owned(router: Router | None, index: int, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    if router is None:
        return ids, counts
    own = router.owner(ids) == index
    return ids[own], counts[own]


def recovery(directory: str | os.PathLike[str], *, log: str = "sync") -> Recovery:
    """Describe how servers that end get their rows back, for `ServerShards(recovery=...)`.

    Args:
        directory: A directory that all servers reach, for their logs. Use a new one for each run.
        log: What a server records of its updates. "sync": each update is on the disk before it is applied,
            and nothing that was answered is lost. "async": at most the updates of the last 0.2 seconds are
            lost, after a power failure those since the last flush. "none": all updates since the last
            checkpoint.

    Returns:
        The description.

    Raises:
        InputError: An argument is wrong.
    """
    path = checks.path(directory, "recovery: directory").absolute()
    return Recovery(str(path), checks.one_of(log, ("none", "async", "sync"), "recovery: log"), restore_part)


def place_of(shards: Shards, store: Store, tables: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return where a checkpoint is, for the server that will restore its rows from it."""
    found = {}
    for path, name in tables:
        router = shards.router(name)
        assert router is not None
        routing = [router.mode, router.num_shards, router.block_size, router.skip_first]
        found[name] = {"table": full_name(path, name), "routing": routing}
    return {"store": store.address, "tables": found}


def restore_part(part: ShardsPart, place: Mapping[str, Any], *, only: str) -> str | None:
    """Load the rows of a server, if the checkpoint is that of a certain save."""
    store = open_store(place["store"])
    try:
        manifest = read_manifest(store)
    except (CheckpointError, FileNotFoundError):
        return None
    if manifest.tip != only:
        return manifest.tip
    saved = manifest.tables()
    for name, known in place["tables"].items():
        mode, count, block_size, skip_first = known["routing"]
        router = Router(mode, count, block_size=block_size, skip_first=skip_first)
        load_on_server(part, store, TableLoad(name, saved[known["table"]], router, True, False, None, False))
    return manifest.tip


def loaded_on_server(part: ShardsPart, id: str, place: Mapping[str, Any], exact: bool) -> None:
    """Record that rows were loaded: a server that ends starts again from this checkpoint."""
    if part.recovery is not None:
        id = id if exact else f"changed-{id}"
        part.recovery.frozen(id, place)
        part.recovery.ended(id, complete=True)
