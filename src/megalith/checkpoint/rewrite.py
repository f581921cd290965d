"""Rewriting a checkpoint without a model: merge its deltas, or distribute its rows over other shards.

Rows are streamed; the memory is that of a few files and of the ids of all deltas.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from os import PathLike

import torch
from torch import Tensor

from megalith.checkpoint.manifest import (
    DATA,
    CollectionEntry,
    Manifest,
    Piece,
    Routing,
    TableEntry,
    commit,
    folders_of,
    full_name,
    read_manifest,
)
from megalith.checkpoint.saved_rows import PIECE_BYTES, latest_rows, read_pending, write_chunk, write_pending
from megalith.errors import CheckpointError, InputError
from megalith.routing import Router
from megalith.storage.store import Store, StoredFile, open_store
from megalith.table import Chunk
from megalith.table.rounding import DTYPES
from megalith.table.table_data import concatenated_chunks

OnRows = Callable[[int], None]


def compact(path: str | PathLike[str] | Store, *, on_rows: OnRows | None = None) -> Manifest:
    """Merge the deltas of a checkpoint into its base, in place. A model can add further deltas afterwards.

    Args:
        path: A directory, a URL or a store.
        on_rows: Called with the number of rows written so far.

    Returns:
        The manifest of the merged checkpoint.

    Raises:
        CheckpointError: The checkpoint is damaged, or was saved again in the meantime. It is unchanged.
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
        raise CheckpointError(f"{store.where} was saved again while it was being compacted: compact it again")


def reshard(
    path: str | PathLike[str] | Store,
    to: str | PathLike[str] | Store,
    *,
    num_shards: int,
    dist_type: str | None = None,
    block_size: int | None = None,
    on_rows: OnRows | None = None,
) -> Manifest:
    """Write a copy of a checkpoint, with its deltas merged, as another number of ranks would save it.

    `load` never needs this, because it distributes rows itself; but it reads less if the routing is the same.

    Args:
        path: The checkpoint: a directory, a URL or a store.
        to: Another directory, URL or store for the copy.
        num_shards: The number of shards of the copy.
        dist_type: The routing mode; None keeps that of each table.
        block_size: The block size of the mode "continuous"; None keeps that of each table.
        on_rows: Called with the number of rows written so far.

    Returns:
        The manifest of the copy.

    Raises:
        CheckpointError: The checkpoint is damaged.
        InputError: Both paths are the same, or the routing is not valid.
    """
    if dist_type is not None and not isinstance(dist_type, str):
        raise InputError(f"reshard: dist_type must be a routing mode, got {type(dist_type).__name__}")
    source, target = open_store(path), open_store(to)
    if source.address == target.address:
        raise InputError(f"reshard: {source.where} cannot be rewritten in place; pass another path as `to`")
    manifest = read_manifest(source)

    def router_for(entry: TableEntry) -> Router:
        mode = dist_type or entry.routing.dist_type
        block = (block_size or entry.routing.block_size) if mode == "continuous" else None
        return Router(mode, num_shards, block_size=block, skip_first=entry.routing.skip_first)

    written = _rewrite(source, target, manifest, router_for, on_rows)
    commit(target, written)
    return written


def _rewrite(
    source: Store,
    target: Store,
    manifest: Manifest,
    router_for: Callable[[TableEntry], Router] | None,
    on_rows: OnRows | None,
) -> Manifest:
    """Write the files of a checkpoint with one save, whose id is the old tip, and return its manifest."""
    folder = f"{DATA}{uuid.uuid4().hex[:12]}"
    latest = manifest.latest
    tables = manifest.tables()
    done = 0
    try:
        with source.local_copy(manifest.all_files(), CheckpointError) as local:
            collections = {}
            for c, (path, collection) in enumerate(latest.collections.items()):
                collections[path] = CollectionEntry(collection.global_step, {})
                for i, name in enumerate(collection.tables):
                    entries = tables[full_name(path, name)]
                    router = None if router_for is None else router_for(entries[-1])
                    writer = _ShardWriter(target, f"{folder}/tables/{c}-{i}", entries[-1], router)
                    for chunk in latest_rows(local, entries):
                        writer.add(chunk)
                        done += chunk.ids.numel()
                        if on_rows is not None:
                            on_rows(done)
                    for piece in entries[-1].pending:
                        writer.add_pending(*read_pending(local, piece))
                    collections[path].tables[name] = writer.finish()
            copied = {
                key: _copy(local, target, f"{folder}/{key}.safetensors", file)
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
class _ShardBuffer:
    """Rows of one shard that are not written yet, and the number of files written."""

    chunks: list[Chunk] = field(default_factory=list)
    rows: int = 0
    files: int = 0


class _ShardWriter:
    """Splits the rows of a table by shard and writes each shard's rows to files."""

    def __init__(self, store: Store, folder: str, like: TableEntry, router: Router | None) -> None:
        self._store, self._folder, self._like, self._router = store, folder, like, router
        self._buffers: dict[int, _ShardBuffer] = {}
        self._pieces: list[Piece] = []
        self._pending: list[Piece] = []
        row_bytes = 16 + 4 * (like.dim + sum(like.state_sizes.values()))
        shards = like.routing.num_shards if router is None else router.num_shards
        self._max_rows = max(1, PIECE_BYTES // row_bytes // min(shards, 8))

    def add(self, chunk: Chunk) -> None:
        for shard, rows in self._split(chunk):
            buffer = self._buffers.setdefault(shard, _ShardBuffer())
            buffer.chunks.append(rows)
            buffer.rows += rows.ids.numel()
            if buffer.rows >= self._max_rows:
                self._write(shard, buffer)

    def add_pending(self, ids: Tensor, counts: Tensor) -> None:
        """Write counts of ids without a row, each to a file of its shard."""
        router = self._router or self._like.routing.router()
        owners = torch.zeros_like(ids) if router is None else router.owner(ids)
        for shard in torch.unique(owners).tolist():
            own = owners == shard
            name = f"{self._folder}/{shard}-pending-{len(self._pending)}.safetensors"
            self._pending.append(write_pending(self._store, name, ids[own], counts[own], shard))

    def finish(self) -> TableEntry:
        """Write the remaining rows and return the entry of the table."""
        for shard, buffer in sorted(self._buffers.items()):
            self._write(shard, buffer)
        routing = self._like.routing
        if self._router is not None:
            r = self._router
            routing = Routing(r.mode, r.num_shards, r.block_size, r.skip_first)
        live = sum(piece.rows for piece in self._pieces)
        return replace(
            self._like, routing=routing, pieces=self._pieces, live=live, removed=[], pending=self._pending
        )

    def _split(self, chunk: Chunk) -> Iterator[tuple[int, Chunk]]:
        router = self._router or self._like.routing.router()
        if router is None or router.num_shards == 1:
            yield 0, chunk
            return
        owners = router.owner(chunk.ids)
        for shard in torch.unique(owners).tolist():
            yield shard, chunk.select(owners == shard)

    def _dtype(self, chunk: Chunk) -> torch.dtype:
        """Return the dtype of the table's segments if they agree and it holds these weights exactly."""
        found = {str(segment.get("precision", "float32")) for segment in self._like.segments}
        dtype = DTYPES.get(found.pop(), torch.float32) if len(found) == 1 else torch.float32
        return dtype if torch.equal(chunk.rows.to(dtype).float(), chunk.rows) else torch.float32

    def _write(self, shard: int, buffer: _ShardBuffer) -> None:
        if buffer.rows:
            name = f"{self._folder}/{shard}-{buffer.files:05}.safetensors"
            chunk = buffer.chunks[0] if len(buffer.chunks) == 1 else concatenated_chunks(buffer.chunks)
            self._pieces.append(write_chunk(self._store, name, chunk, shard, self._dtype(chunk)))
            buffer.files += 1
            buffer.chunks, buffer.rows = [], 0


def _copy(source: Store, target: Store, name: str, file: StoredFile | None) -> StoredFile | None:
    return None if file is None else target.write(name, [source.read_file(file, CheckpointError).numpy()])
