"""save: a model's rows, dense weights, optimizer and progress into one directory.

Data goes into a folder of its own, then the manifest replaces the old one in a single rename: a reader sees
the last complete checkpoint, whenever the writer stops. What no manifest names is deleted afterwards.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megalith.checkpoint import files
from megalith.checkpoint.manifest import (
    NAME,
    CollectionEntry,
    FileEntry,
    Manifest,
    Piece,
    Routing,
    TableEntry,
    describe,
)
from megalith.checkpoint.model import collections_of, dense_state
from megalith.checkpoint.tree import pack
from megalith.errors import InputError
from megalith.nn import EmbeddingCollection
from megalith.table import Chunk, Table

PIECE_BYTES = 64 << 20
_DATA = "data-"


def save(
    model: nn.Module,
    path: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    progress: dict[str, Any] | None = None,
    on_rows: Callable[[int], None] | None = None,
) -> Manifest:
    """Saves a model: rows of all its collections, dense weights, and what else is given.

    path: a directory; a checkpoint that is there is replaced when the new one is complete. optimizer: of the
    dense weights. progress: JSON-able data of the caller's (step, data position, `rng_state()`). on_rows:
    called with the number of rows written so far. Memory beyond the tables: one piece of 64 MiB.
    """
    root = Path(path)
    root.mkdir(parents=True, exist_ok=True)
    number = uuid.uuid4().hex[:12]
    writer = _Writer(root, f"{_DATA}{number}", on_rows)
    try:
        dense = dense_state(model)
        structure, tensors = (None, {}) if optimizer is None else pack(optimizer.state_dict())
        manifest = Manifest(
            id=number,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            megalith=_version(),
            collections={
                name: writer.collection(i, c) for i, (name, c) in enumerate(collections_of(model).items())
            },
            dense=writer.tensors("dense.safetensors", _own(dense)) if dense else None,
            optimizer=structure,
            optimizer_tensors=writer.tensors("optimizer.safetensors", tensors) if tensors else None,
            progress=dict(progress or {}),
        )
        try:
            text = manifest.to_json()
        except (TypeError, ValueError) as error:
            raise InputError(f"progress must be JSON-able: {error}") from None
        files.write_bytes(root, NAME, text.encode())
    except BaseException:
        files.remove_tree(root / writer.folder)
        raise
    for old in root.glob(f"{_DATA}*"):
        if old.name != writer.folder:
            files.remove_tree(old)
    return manifest


class _Writer:
    def __init__(self, root: Path, folder: str, on_rows: Callable[[int], None] | None) -> None:
        self._root = root
        self.folder = folder
        self._on_rows = on_rows
        self._rows = 0

    def tensors(self, name: str, tensors: dict[str, Tensor]) -> FileEntry:
        return files.write_tensors(self._root, f"{self.folder}/{name}", tensors)

    def collection(self, number: int, collection: EmbeddingCollection) -> CollectionEntry:
        collection.shards.flush()
        return CollectionEntry(
            global_step=collection.global_step,
            tables={
                name: self.table(f"tables/{number}-{i}", table)
                for i, (name, table) in enumerate(collection.shards.local.items())
            },
        )

    def table(self, folder: str, table: Table) -> TableEntry:
        """Writes a table's rows in pieces. Names on disk are numbers: table names may be any text."""
        pieces = []
        for i, chunk in enumerate(_pieces(table)):
            stored = {"ids": chunk.ids, "rows": chunk.rows, "time": chunk.time}
            stored |= {f"state/{key}": value for key, value in chunk.state.items()}
            if chunk.count is not None:
                stored["count"] = chunk.count
            file = self.tensors(f"{folder}/0-{i:05}.safetensors", stored)
            pieces.append(Piece(file, shard=0, rows=chunk.ids.numel()))
            self._rows += chunk.ids.numel()
            if self._on_rows is not None:
                self._on_rows(self._rows)
        routing = Routing(dist_type=table.config.dist_type or "roundrobin")
        return TableEntry(describe(table.config), table.seed, routing, pieces)


def _pieces(table: Table) -> Iterator[Chunk]:
    row_bytes = 4 * table.config.row_floats + 16
    return table.scan(max(1, PIECE_BYTES // row_bytes))


def _own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies, as tied weights would share memory in the file."""
    return {name: t.detach().clone() for name, t in tensors.items()}


def _version() -> str:
    from megalith import __version__

    return __version__
