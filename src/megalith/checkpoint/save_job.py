"""SaveJob: one save, frozen when it is made and written by `run`, in whatever thread.

Rows are frozen by snapshots, dense weights by a copy, so training can go on while they are written. Data goes
into a folder of its own, then the manifest is replaced in one step: a reader sees the last complete
checkpoint, whenever the writer stops. What no manifest names is deleted afterwards.

With many ranks each writes its own rows and leaves a note of them in the folder; rank 0 puts the notes
together. Nothing is exchanged between ranks once a save has begun.
"""

from __future__ import annotations

import json
import time as clock
import uuid
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from os import PathLike
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import nn

from megalith.checkpoint.chain import (
    CONSUMER,
    agree,
    check_idle,
    check_tip,
    ranks_of,
    set_busy,
    set_idle,
    set_tip,
)
from megalith.checkpoint.dense_state import collections_of, dense_state, tables_of
from megalith.checkpoint.manifest import (
    NAME,
    CollectionEntry,
    Delta,
    Manifest,
    Piece,
    Routing,
    TableEntry,
    describe,
    full_name,
    read_pieces,
)
from megalith.checkpoint.piece_writer import PieceWriter
from megalith.checkpoint.saved_rows import MAX_MANIFEST, read_manifest, write_tensors
from megalith.checkpoint.tree import pack
from megalith.errors import CheckpointError, InputError, UsageError
from megalith.shards import Shards
from megalith.storage.store import Store, open_store
from megalith.storage.strict_json import parse_json
from megalith.table.snapshot import Snapshot

BUFFER_BYTES = 64 << 20
"""Rows set aside while a save is under way, all tables together; when that is full, training waits."""
DATA = "data-"
PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_LOOK_EVERY = 0.02


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """What `save` and its kin are asked for; see there."""

    optimizer: torch.optim.Optimizer | None
    progress: dict[str, Any] | None
    precision: str
    track: bool
    delta: bool
    on_rows: Callable[[int], None] | None
    timeout: float


@dataclass
class _Frozen:
    """A table of this rank: its snapshot, where its files go, and those written so far."""

    collection: str
    name: str
    snapshot: Snapshot
    folder: str
    pieces: list[Piece] = field(default_factory=list)
    removed: list[Piece] = field(default_factory=list)
    files: int = 0


class SaveJob:
    """A save under way. id: its own. waited: seconds that writers of rows stood still, known at its end."""

    def __init__(self, model: nn.Module, path: str | PathLike[str] | Store, options: SaveOptions) -> None:
        self.store = open_store(path)
        self.waited = 0.0
        self._options = options
        self._collections = collections_of(model)
        self._ranks = ranks_of(self._collections)
        self._steps = {path: c.global_step for path, c in self._collections.items()}
        self._tables: list[_Frozen] = []
        agree(self._ranks, lambda: self._check(model))
        self.id = str(self._ranks.broadcast(uuid.uuid4().hex[:12]))
        self._folder = f"{DATA}{self.id}"
        try:
            agree(self._ranks, self._freeze)
        except BaseException:
            self._end(give_back=True)
            raise

    # ---- freezing

    def _check(self, model: nn.Module) -> None:
        options = self._options
        if options.precision not in PRECISIONS:
            raise InputError(f"precision must be one of {', '.join(PRECISIONS)}, got {options.precision!r}")
        check_idle(self._collections)
        names = [full_name(path, name) for path, name, _ in tables_of(self._collections)]
        if len(set(names)) != len(names):
            raise UsageError(f"two tables of this model have one name: {', '.join(sorted(names))}")
        try:
            # A copy, too: the caller may go on changing what is inside.
            self._progress: Any = parse_json(json.dumps(options.progress or {}, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"progress must be JSON-able: {error}") from None
        # Copies: tied weights would share memory, and training goes on.
        self._dense = {name: t.detach().clone() for name, t in dense_state(model).items()}
        self._structure: Any = None
        self._tensors: dict[str, torch.Tensor] = {}
        if options.optimizer is not None:
            self._structure, self._tensors = pack(options.optimizer.state_dict())
        if options.delta and self._ranks.rank == 0:
            check_tip(self._collections.values(), self.store, read_manifest(self.store))

    def _freeze(self) -> None:
        for collection in self._collections.values():
            collection.shards.flush()
            if self._options.track:
                collection.shards.track(CONSUMER)
            set_busy(collection, self)
        tables = tables_of(self._collections)
        sizes = [max(1, shards.local[name].memory().rows) for _, name, shards in tables]
        for number, (path, name, shards) in enumerate(tables):
            snapshot = shards.local[name].snapshot(
                consumer=CONSUMER if self._options.track else None,
                touched_only=self._options.delta,
                buffer_bytes=max(1 << 20, BUFFER_BYTES * sizes[number] // sum(sizes)),
            )
            place = f"{list(self._collections).index(path)}-{list(shards.local).index(name)}"
            self._tables.append(_Frozen(path, name, snapshot, f"{self._folder}/tables/{place}"))

    # ---- writing

    def run(self) -> Manifest:
        """Writes everything. If that fails, the checkpoint before stays, and rows count as changed again."""
        try:
            self._write_tables()
            manifest = self._finish() if self._ranks.rank == 0 else self._hand_in()
        except BaseException as error:
            self._end(give_back=True)
            self._give_up(error)
            raise
        self._end(give_back=False)
        if self._options.track:
            set_tip(self._collections.values(), self.store, self.id)
        return manifest

    def _end(self, *, give_back: bool) -> None:
        for frozen in self._tables:
            frozen.snapshot.close(give_back=give_back)
        self.waited = sum(frozen.snapshot.waited for frozen in self._tables)
        for collection in self._collections.values():
            set_idle(collection, self)

    def _write_tables(self) -> None:
        shard = self._ranks.rank
        done = 0
        pen = PieceWriter(self.store, shard, PRECISIONS[self._options.precision])
        try:
            open_tables = list(self._tables)
            while open_tables:
                # Where training is about to wait for room, rows are taken first.
                frozen = max(open_tables, key=lambda f: f.snapshot.pressure > 0.5)
                name = f"{frozen.folder}/{shard}-{frozen.files:05}.safetensors"
                count = pen.write(frozen.snapshot, name, frozen.pieces)
                if not count:
                    open_tables.remove(frozen)
                    continue
                frozen.files += 1
                done += count
                if self._options.on_rows is not None:
                    self._options.on_rows(done)
        finally:
            pen.close()
        for frozen in self._tables:
            frozen.pieces.sort(key=lambda piece: piece.file.path)
            assert sum(piece.rows for piece in frozen.pieces) == frozen.snapshot.rows, frozen.name
            ids = frozen.snapshot.removed
            if self._options.delta and ids.numel():
                file = write_tensors(self.store, f"{frozen.folder}/{shard}-removed.safetensors", {"ids": ids})
                frozen.removed.append(Piece(file, shard, ids.numel()))

    def _finish(self) -> Manifest:
        """On rank 0: waits for the other ranks' notes, writes the manifest, deletes what is old."""
        notes = [self._note(), *(self._read_note(rank) for rank in range(1, self._ranks.size))]
        common = {
            "id": self.id,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "collections": self._entries(notes),
            "dense": self._tensor_file("dense", self._dense),
            "optimizer": self._structure,
            "optimizer_tensors": self._tensor_file("optimizer", self._tensors),
            "progress": self._progress,
        }
        if self._options.delta:
            before = read_manifest(self.store)  # it may have been compacted since
            check_tip(self._collections.values(), self.store, before)
            delta = Delta(**common, previous=before.tip)
            manifest = replace(before, deltas=[*before.deltas, delta])
        else:
            manifest = Manifest(**common, megalith=megalith_version())
        self._check_files(notes)
        commit(self.store, manifest)
        if self._ranks.size > 1:
            with suppress(OSError):  # nobody reads them any more
                self.store.remove(f"{self._folder}/ranks")
        return manifest

    def _check_files(self, notes: list[dict[str, Any]]) -> None:
        """Raises CheckpointError if another save has deleted what was written: all, so the first tells."""
        for note in notes:
            paths = [piece["file"]["path"] for part in note.values() for piece in part["pieces"]]
            try:
                for path in paths[:1]:
                    self.store.size(path)
            except FileNotFoundError:
                raise CheckpointError(
                    f"{self.store.where}: another save ended meanwhile and deleted this one's files; "
                    "one at a time may write to a place"
                ) from None

    def _tensor_file(self, name: str, tensors: dict[str, torch.Tensor]) -> Any:
        return write_tensors(self.store, f"{self._folder}/{name}.safetensors", tensors) if tensors else None

    def _entries(self, notes: list[dict[str, Any]]) -> dict[str, CollectionEntry]:
        where = f"{self.store.where}/{self._folder}"
        entries = {path: CollectionEntry(step, {}) for path, step in self._steps.items()}
        for frozen in self._tables:
            shards = self._collections[frozen.collection].shards
            parts = [note[full_name(frozen.collection, frozen.name)] for note in notes]
            entries[frozen.collection].tables[frozen.name] = TableEntry(
                segments=describe(shards.configs[frozen.name]),
                seed=frozen.snapshot.table.seed,
                routing=_routing(shards, frozen.name),
                pieces=[piece for part in parts for piece in read_pieces(part, "pieces", where)],
                live=sum(part["live"] for part in parts),
                removed=[piece for part in parts for piece in read_pieces(part, "removed", where)],
            )
        return entries

    # ---- many ranks

    def _note(self) -> dict[str, Any]:
        return {
            full_name(frozen.collection, frozen.name): {
                "pieces": [asdict(piece) for piece in frozen.pieces],
                "removed": [asdict(piece) for piece in frozen.removed],
                "live": frozen.snapshot.live,
            }
            for frozen in self._tables
        }

    def _note_name(self, rank: int) -> str:
        return f"{self._folder}/ranks/{rank:05}.json"

    def _read_note(self, rank: int) -> dict[str, Any]:
        note: dict[str, Any] = self._await(
            lambda: _read_json(self.store, self._note_name(rank)), f"rank {rank} to write its rows"
        )
        if "error" in note:
            raise CheckpointError(f"rank {rank}: {note['error']}")
        tables: dict[str, Any] = note["tables"]
        return tables

    def _hand_in(self) -> Manifest:
        """On other ranks: leaves a note, then waits until rank 0 has written the manifest."""
        self._write_json(self._note_name(self._ranks.rank), {"tables": self._note()})

        def look() -> Manifest | None:
            failed = _read_json(self.store, f"{self._folder}/failed.json")
            if failed is not None:
                raise CheckpointError(f"rank 0: {failed['error']}")
            return read_manifest(self.store) if self._is_committed() else None

        found: Manifest = self._await(look, "rank 0 to write the manifest")
        return found

    def _await(self, look: Callable[[], Any], what: str) -> Any:
        deadline = clock.monotonic() + self._options.timeout
        while (found := look()) is None:
            if clock.monotonic() > deadline:
                raise CheckpointError(
                    f"{self.store.where}: rank {self._ranks.rank} waited {self._options.timeout} s for {what}"
                )
            clock.sleep(_LOOK_EVERY)
        return found

    def _give_up(self, error: BaseException) -> None:
        """Tells the other ranks; alone, leaves nothing behind."""
        try:
            if self._ranks.size == 1:
                if not self._is_committed():
                    self.store.remove(self._folder)
            else:
                own = self._note_name(self._ranks.rank)
                name = own if self._ranks.rank else f"{self._folder}/failed.json"
                self._write_json(name, {"error": f"{type(error).__name__}: {error}"})
        except Exception:
            return  # what went wrong first is what counts; the others time out

    def _is_committed(self) -> bool:
        """Whether the manifest names this save: it may have been replaced before something went wrong."""
        try:
            return self.id.encode() in self.store.read_whole(NAME, MAX_MANIFEST)
        except FileNotFoundError:
            return False

    def _write_json(self, name: str, data: dict[str, Any]) -> None:
        self.store.write(name, [json.dumps(data).encode()])


def commit(store: Store, manifest: Manifest, replaced: Manifest | None = None) -> None:
    """Makes a manifest the checkpoint, and deletes what it does not name.

    replaced: deletes only what this one named, so that a save under way keeps its files.
    """
    store.write(NAME, [manifest.to_json().encode()])
    try:
        old = store.folders() if replaced is None else folders_of(replaced)
        for folder in set(old) - folders_of(manifest):
            if folder.startswith(DATA):
                store.remove(folder)
    except OSError as error:
        # The checkpoint is complete; the next save deletes what is left.
        warnings.warn(f"{store.where}: old files could not be deleted: {error}", stacklevel=2)


def folders_of(manifest: Manifest) -> set[str]:
    """The folders that hold a checkpoint's files."""
    return {PurePosixPath(file.path).parts[0] for file in manifest.all_files()}


def _routing(shards: Shards, table: str) -> Routing:
    router = shards.router(table)
    if router is None:
        return Routing(dist_type=shards.configs[table].dist_type or "roundrobin")
    return Routing(router.mode, router.num_shards, router.block_size, router.skip_first)


def _read_json(store: Store, name: str) -> Any:
    """A small JSON file, or None if it is not there."""
    try:
        return json.loads(store.read_whole(name, MAX_MANIFEST))
    except FileNotFoundError:
        return None


def megalith_version() -> str:
    """The version files say they were written by."""
    from megalith import __version__

    return __version__
