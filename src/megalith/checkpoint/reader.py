"""load: a checkpoint back into a model, everything verified before anything is overwritten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megalith.checkpoint import files
from megalith.checkpoint.manifest import CollectionEntry, Manifest, Piece, TableEntry, describe, read_manifest
from megalith.checkpoint.model import collections_of, load_dense
from megalith.checkpoint.tree import unpack
from megalith.errors import CheckpointError, InputError
from megalith.nn import EmbeddingCollection
from megalith.table import Chunk, Table


@dataclass(frozen=True)
class LoadReport:
    """What a load did: the manifest, rows per table, and the caller's progress."""

    manifest: Manifest
    rows: dict[str, int]
    progress: dict[str, Any]


def load(
    model: nn.Module,
    path: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    reroute: bool = False,
    on_rows: Callable[[int], None] | None = None,
) -> LoadReport:
    """Loads what `save` wrote: rows of all collections, dense weights, and the optimizer's state if given.

    Hyper-parameters may differ, optimizer classes, segments and dims may not. A routing mode other than the
    one saved raises, unless reroute=True. Files are checked against the manifest before any table is cleared;
    raises CheckpointError naming file and problem. on_rows: called with the number of rows read so far.
    """
    root = Path(path)
    manifest = read_manifest(root)
    collections = collections_of(model)
    _check_collections(root, manifest, collections, reroute)
    for file in manifest.files():
        files.verify(root, file)
    rows: dict[str, int] = {}
    done = 0
    for name, collection in collections.items():
        saved = manifest.collections[name]
        for table_name, entry in saved.tables.items():
            table = collection.shards.local[table_name]
            table.clear()
            table.reserve(entry.rows)
            for piece in entry.pieces:
                table.restore(read_piece(root, piece, table))
                done += piece.rows
                if on_rows is not None:
                    on_rows(done)
            rows[f"{name}.{table_name}".lstrip(".")] = entry.rows
        collection.zero_grad()
        collection.global_step = saved.global_step
    if manifest.dense is not None:
        load_dense(model, files.TensorFile(root, manifest.dense).all())
    if optimizer is not None:
        optimizer.load_state_dict(_optimizer_state(root, manifest))
    return LoadReport(manifest, rows, dict(manifest.progress))


def read_piece(root: Path, piece: Piece, table: Table) -> Chunk:
    """The rows of one file, in the shape of this table."""
    file = files.TensorFile(root, piece.file)
    names = {"ids", "rows", "time", *(f"state/{c.key}" for c in table.config.state_columns)}
    missing = sorted(names - set(file.keys()))
    if missing:
        raise CheckpointError(f"{file.path} lacks {', '.join(missing)}")
    chunk = Chunk(
        ids=file.get("ids"),
        rows=file.get("rows"),
        state={c.key: file.get(f"state/{c.key}") for c in table.config.state_columns},
        time=file.get("time"),
    )
    if chunk.ids.shape != (piece.rows,):
        raise CheckpointError(
            f"{file.path} holds ids {list(chunk.ids.shape)}, its manifest says {piece.rows}"
        )
    return chunk


def _check_collections(
    root: Path, manifest: Manifest, collections: dict[str, EmbeddingCollection], reroute: bool
) -> None:
    if set(manifest.collections) != set(collections):
        raise CheckpointError(
            f"{root} holds collections {sorted(manifest.collections)}, the model has {sorted(collections)}"
        )
    for name, collection in collections.items():
        _check_tables(root, manifest.collections[name], collection, reroute)


def _check_tables(root: Path, saved: CollectionEntry, collection: EmbeddingCollection, reroute: bool) -> None:
    here = collection.shards.local
    if set(saved.tables) != set(here):
        raise CheckpointError(f"{root} holds tables {sorted(saved.tables)}, the model has {sorted(here)}")
    for name, entry in saved.tables.items():
        _check_table(root, name, entry, here[name], reroute)


def _check_table(root: Path, name: str, entry: TableEntry, table: Table, reroute: bool) -> None:
    wanted = describe(table.config)
    if len(wanted) != len(entry.segments):
        raise CheckpointError(
            f"{root}: table {name!r} has {len(entry.segments)} segments, here {len(wanted)}"
        )
    for number, (old, new) in enumerate(zip(entry.segments, wanted, strict=True)):
        where = f"{root}: table {name!r}, segment {number}"
        if old["dim"] != new["dim"]:
            raise CheckpointError(f"{where} has dim {old['dim']}, here {new['dim']}")
        if old["optimizer"]["name"] != new["optimizer"]["name"]:
            raise CheckpointError(
                f"{where} was trained with {old['optimizer']['name']}, here it is {new['optimizer']['name']}"
            )
    mode = table.config.dist_type or entry.routing.dist_type
    if mode != entry.routing.dist_type and not reroute:
        raise InputError(
            f"Input dist_type mismatch: table {name!r} was saved with {entry.routing.dist_type!r}, here it "
            f"is {mode!r}; load with reroute=True to move every row to its new owner"
        )


def _optimizer_state(root: Path, manifest: Manifest) -> Any:
    if manifest.optimizer is None:
        raise CheckpointError(f"{root} holds no optimizer state; load without optimizer=")
    tensors = {}
    if manifest.optimizer_tensors is not None:
        tensors = files.TensorFile(root, manifest.optimizer_tensors).all()
    return unpack(manifest.optimizer, tensors)
