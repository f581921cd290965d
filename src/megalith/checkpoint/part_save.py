"""PartSave: the tables of one process, frozen by snapshots and written to files.

A `SaveJob` has one for the tables of its own process. For tables on servers each server has one, so rows go
from the server to the store and not through the process that saves. A server starts writing when it freezes:
its calls run one at a time, and a write that waits for the reader of a snapshot would hold up the call that
starts the reader.
"""

from __future__ import annotations

import threading
import time as clock
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from megalith.checkpoint.chain import CONSUMER
from megalith.checkpoint.manifest import Piece, full_name
from megalith.checkpoint.piece_writer import PieceWriter
from megalith.checkpoint.saved_rows import write_pending, write_tensors
from megalith.errors import UsageError
from megalith.shards.part import ShardsPart
from megalith.storage.store import Store
from megalith.table import Table
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


@dataclass
class _FrozenTable:
    """A table of this process: its snapshot, its files so far."""

    saved: SavedTable
    table: Table
    snapshot: Snapshot
    pieces: list[Piece] = field(default_factory=list)
    removed: list[Piece] = field(default_factory=list)
    pending: list[Piece] = field(default_factory=list)
    files: int = 0


class PartSave:
    """One part of a save. It is frozen when it is created; `close` must be called."""

    def __init__(
        self, tables: Sequence[tuple[SavedTable, Table]], shard: int, *, track: bool, delta: bool
    ) -> None:
        self._shard, self._delta = shard, delta
        self._tables: list[_FrozenTable] = []
        self._written: Future[dict[str, Any]] = Future()
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
                self._tables.append(_FrozenTable(saved, table, snapshot))
        except BaseException:
            self.close(give_back=True)
            raise

    def write(
        self, store: Store, precision: str, on_rows: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        shard = self._shard
        done = 0
        writer = PieceWriter(store, shard, precision)
        try:
            open_tables = list(self._tables)
            while open_tables:
                # Tables first whose buffers of changed rows are filling up: training would have to wait.
                frozen = max(open_tables, key=lambda f: f.snapshot.pressure > 0.5)
                name = f"{frozen.saved.folder}/{shard}-{frozen.files:05}.safetensors"
                count = writer.write(frozen.snapshot, frozen.table.config, name, frozen.pieces)
                if not count:
                    open_tables.remove(frozen)
                    continue
                frozen.files += 1
                done += count
                if on_rows is not None:
                    on_rows(done)
            writer.flush()
        finally:
            writer.close()
        for frozen in self._tables:
            frozen.pieces.sort(key=lambda piece: piece.file.path)
            assert sum(piece.rows for piece in frozen.pieces) == frozen.snapshot.rows, frozen.saved.name
            folder = frozen.saved.folder
            ids = frozen.snapshot.removed
            if self._delta and ids.numel():
                file = write_tensors(store, f"{folder}/{shard}-removed.safetensors", {"ids": ids})
                frozen.removed.append(Piece(file, shard, ids.numel()))
            ids, counts = frozen.snapshot.pending
            if ids.numel():
                name = f"{folder}/{shard}-pending.safetensors"
                frozen.pending.append(write_pending(store, name, ids, counts, shard))
        return {frozen.saved.full_name: _report(frozen) for frozen in self._tables}

    def start(self, store: Store, precision: str) -> None:
        """Write all rows in a thread. If that fails, the snapshots end: training must not wait for them."""
        thread = threading.Thread(
            target=self._write_all, args=(store, precision), name="megalith save", daemon=True
        )
        thread.start()

    def _write_all(self, store: Store, precision: str) -> None:
        try:
            report = self.write(store, precision)
        except BaseException as error:
            self.close(give_back=True)
            self._written.set_exception(error)
        else:
            self._written.set_result(report)

    def written(self) -> dict[str, Any]:
        """Wait until the thread of `start` has ended."""
        return self._written.result()

    def abandon(self) -> None:
        """End the snapshots of a save whose process has ended. See `Kept`."""
        self.close(give_back=True)

    def close(self, *, give_back: bool) -> None:
        """End the snapshots. Only the first call has an effect."""
        for frozen in self._tables:
            frozen.snapshot.close(give_back=give_back)
        self.waited = sum(frozen.snapshot.waited for frozen in self._tables)


def _report(frozen: _FrozenTable) -> dict[str, Any]:
    return {
        "pieces": [asdict(piece) for piece in frozen.pieces],
        "removed": [asdict(piece) for piece in frozen.removed],
        "pending": [asdict(piece) for piece in frozen.pending],
        "live": frozen.snapshot.live,
        "seed": frozen.table.seed,
    }


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


def write_on_server(part: ShardsPart, id: str) -> dict[str, Any]:
    """Wait until the frozen tables of a server are written."""
    saved = part.kept.get(_key(id))
    if not isinstance(saved, PartSave):
        raise UsageError(f"server {part.index} does not have save {id}: this worker has left in the meantime")
    return saved.written()


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
