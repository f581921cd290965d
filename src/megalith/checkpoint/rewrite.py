"""Rewrites of a checkpoint without a model: deltas merged into the base, rows spread over other shards.

Rows stream through; memory is the ids of all deltas and a few files.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from os import PathLike

import torch
from torch import Tensor

from megalith.checkpoint.manifest import CollectionEntry, Manifest, Piece, Routing, TableEntry, full_name
from megalith.checkpoint.piece_writer import PIECE_BYTES
from megalith.checkpoint.save_job import DATA, commit, folders_of
from megalith.checkpoint.saved_rows import latest_rows, read_manifest, write_chunk
from megalith.errors import CheckpointError, InputError
from megalith.routing import Router
from megalith.storage.store import Store, StoredFile, open_store
from megalith.table import Chunk

OnRows = Callable[[int], None]


def compact(path: str | PathLike[str] | Store, *, on_rows: OnRows | None = None) -> Manifest:
    """Merges a checkpoint's deltas into its base, in place; a model may go on adding deltas.

    Raises CheckpointError if the checkpoint changes meanwhile, and then leaves it as it is.
    """
    store = open_store(path)
    manifest = read_manifest(store)
    if not manifest.deltas:
        return manifest
    try:
        merged = _rewrite(store, store, manifest, None, on_rows)
    except (CheckpointError, OSError):
        _check_unchanged(store, manifest)
        raise
    try:
        _check_unchanged(store, manifest)
    except CheckpointError:
        for folder in folders_of(merged):
            store.remove(folder)
        raise
    commit(store, merged, replaced=manifest)
    return merged


def _check_unchanged(store: Store, manifest: Manifest) -> None:
    if read_manifest(store).tip != manifest.tip:
        raise CheckpointError(f"{store.where} got a new save while it was compacted: compact it again")


def reshard(
    path: str | PathLike[str] | Store,
    to: str | PathLike[str] | Store,
    *,
    num_shards: int,
    dist_type: str | None = None,
    block_size: int | None = None,
    on_rows: OnRows | None = None,
) -> Manifest:
    """Writes a checkpoint's rows, deltas merged, to another place, as that many ranks would have saved them.

    dist_type: the routing mode; None keeps each table's. Loading never needs this: `load` spreads rows
    itself, and reads less when they already lie as they are wanted.
    """
    source, target = open_store(path), open_store(to)
    if source.address == target.address:
        raise InputError(f"reshard: {source.where} cannot be rewritten in place; name another place")
    manifest = read_manifest(source)

    def spread(entry: TableEntry) -> Router:
        mode = dist_type or entry.routing.dist_type
        block = (block_size or entry.routing.block_size) if mode == "continuous" else None
        return Router(mode, num_shards, block_size=block, skip_first=entry.routing.skip_first)

    written = _rewrite(source, target, manifest, spread, on_rows)
    commit(target, written)
    return written


def _rewrite(
    source: Store,
    target: Store,
    manifest: Manifest,
    spread: Callable[[TableEntry], Router] | None,
    on_rows: OnRows | None,
) -> Manifest:
    """A checkpoint with one save, whose id is the tip of the old one. Its files are written, itself not."""
    folder = f"{DATA}{uuid.uuid4().hex[:12]}"
    latest = manifest.latest
    tables = manifest.tables()
    done = 0
    try:
        with source.local_copy(manifest.all_files(), CheckpointError) as near:
            collections = {}
            for c, (path, collection) in enumerate(latest.collections.items()):
                collections[path] = CollectionEntry(collection.global_step, {})
                for i, name in enumerate(collection.tables):
                    entries = tables[full_name(path, name)]
                    router = None if spread is None else spread(entries[-1])
                    shelf = _Shelf(target, f"{folder}/tables/{c}-{i}", entries[-1], router)
                    for chunk in latest_rows(near, entries):
                        shelf.add(chunk)
                        done += chunk.ids.numel()
                        if on_rows is not None:
                            on_rows(done)
                    collections[path].tables[name] = shelf.entry()
            copied = {
                key: _copy(near, target, f"{folder}/{key}.safetensors", file)
                for key, file in (("dense", latest.dense), ("optimizer", latest.optimizer_tensors))
            }
    except BaseException:
        target.remove(folder)
        raise
    return Manifest(
        id=latest.id,
        created=latest.created,
        megalith=manifest.megalith,
        collections=collections,
        dense=copied["dense"],
        optimizer=latest.optimizer,
        optimizer_tensors=copied["optimizer"],
        progress=latest.progress,
    )


@dataclass
class _Box:
    """Rows of one shard on their way to a file."""

    chunks: list[Chunk] = field(default_factory=list)
    rows: int = 0
    files: int = 0


class _Shelf:
    """Sorts rows by shard and writes each shard's in files."""

    def __init__(self, store: Store, folder: str, like: TableEntry, router: Router | None) -> None:
        self._store, self._folder, self._like, self._router = store, folder, like, router
        self._boxes: dict[int, _Box] = {}
        self._pieces: list[Piece] = []
        row_bytes = 16 + 4 * (like.dim + sum(like.state_sizes.values()))
        shards = like.routing.num_shards if router is None else router.num_shards
        self._most = max(1, PIECE_BYTES // row_bytes // min(shards, 8))

    def add(self, chunk: Chunk) -> None:
        for shard, rows in self._split(chunk):
            box = self._boxes.setdefault(shard, _Box())
            box.chunks.append(rows)
            box.rows += rows.ids.numel()
            if box.rows >= self._most:
                self._write(shard, box)

    def entry(self) -> TableEntry:
        """What is written, all of it."""
        for shard, box in sorted(self._boxes.items()):
            self._write(shard, box)
        routing = self._like.routing
        if self._router is not None:
            r = self._router
            routing = Routing(r.mode, r.num_shards, r.block_size, r.skip_first)
        live = sum(piece.rows for piece in self._pieces)
        return replace(self._like, routing=routing, pieces=self._pieces, live=live, removed=[])

    def _split(self, chunk: Chunk) -> Iterator[tuple[int, Chunk]]:
        router = self._router or self._like.routing.router()
        if router is None or router.num_shards == 1:
            yield 0, chunk
            return
        owners = router.owner(chunk.ids)
        for shard in torch.unique(owners).tolist():
            yield shard, chunk.select(owners == shard)

    def _write(self, shard: int, box: _Box) -> None:
        if box.rows:
            name = f"{self._folder}/{shard}-{box.files:05}.safetensors"
            joined = _join(box.chunks)
            self._pieces.append(write_chunk(self._store, name, joined, shard, torch.float32))
            box.files += 1
            box.chunks, box.rows = [], 0


def _join(chunks: list[Chunk]) -> Chunk:
    def cat(columns: list[Tensor]) -> Tensor:
        return torch.cat(columns) if len(columns) > 1 else columns[0]

    counts = [chunk.count for chunk in chunks if chunk.count is not None]
    return Chunk(
        cat([chunk.ids for chunk in chunks]),
        cat([chunk.rows for chunk in chunks]),
        {key: cat([chunk.state[key] for chunk in chunks]) for key in chunks[0].state},
        cat([chunk.time for chunk in chunks]),
        cat(counts) if len(counts) == len(chunks) else None,
    )


def _copy(source: Store, target: Store, name: str, file: StoredFile | None) -> StoredFile | None:
    return None if file is None else target.write(name, [source.read_file(file, CheckpointError).numpy()])
