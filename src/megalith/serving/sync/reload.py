"""Reload: reads the rows that bring a served model to the latest save of its training run.

If the save that the model was exported from is in the chain of the checkpoint, the later deltas are enough;
otherwise all rows are read. The served model is not changed here: the result is passed to `Servable.adopt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from megalith.checkpoint.manifest import NAME, Manifest, TableEntry, full_name
from megalith.checkpoint.saved_rows import latest_rows, read_chunk, read_manifest, read_removed, read_tensors
from megalith.errors import CheckpointError
from megalith.serving.export.overlay import Overlay
from megalith.storage.store import Store, open_store

if TYPE_CHECKING:
    from megalith.serving.export.servable import Servable

FOLDER = "checkpoint"
"""The checkpoint's folder in the directory of a run."""


@dataclass(frozen=True)
class Reloaded:
    """The rows of a checkpoint over those of an export, its dense weights, and the id of its latest save."""

    save: str
    overlay: Overlay
    dense: Mapping[str, Tensor]


def latest_save(checkpoint: Path) -> str:
    """Return the id of the latest save of a checkpoint."""
    return read_manifest(_store(checkpoint)).tip


def read_newer(checkpoint: Path, servable: Servable) -> Reloaded:
    """Read what a checkpoint has in addition to the save a model was exported from."""
    store = _store(checkpoint)
    manifest = read_manifest(store)
    try:
        overlay = _read_rows(store, manifest, servable)
        saved = {} if manifest.latest.dense is None else read_tensors(store, manifest.latest.dense)
    except FileNotFoundError as error:
        raise CheckpointError(f"{store.where} was replaced while it was read: {error.filename}") from None
    dense = {}
    for name, shape in servable.dense_names.items():
        if name not in saved or tuple(saved[name].shape) != tuple(shape):
            raise CheckpointError(f"{store.where} has no dense weight {name!r} {list(shape)}")
        dense[name] = saved[name]
    return Reloaded(manifest.tip, overlay, dense)


def _store(checkpoint: Path) -> Store:
    inside = checkpoint / FOLDER
    return open_store(inside if not (checkpoint / NAME).exists() and inside.exists() else checkpoint)


def _read_rows(store: Store, manifest: Manifest, servable: Servable) -> Overlay:
    signature = servable.signature
    saves = [save.id for save in manifest.saves]
    known = signature.base in saves
    overlay = servable.stage(hides_base=not known)
    if signature.part == "entry":
        return overlay
    for table, entries in _entries(manifest, signature.dims, store.where).items():
        if not known:
            for chunk in latest_rows(store, entries):
                overlay.apply({table: _own(servable, table, chunk.ids, chunk.rows)})
            continue
        for entry in entries[saves.index(signature.base) + 1 :]:
            for piece in entry.removed:
                ids = read_removed(store, piece)
                overlay.apply({}, {table: _own(servable, table, ids, ids)[0]})
            for piece in entry.pieces:
                chunk = read_chunk(store, piece, entry)
                overlay.apply({table: _own(servable, table, chunk.ids, chunk.rows)})
    return overlay


def _entries(manifest: Manifest, dims: Mapping[str, int], where: str) -> dict[str, list[TableEntry]]:
    """Return the entries of each served table; raises CheckpointError if a table is missing or differs."""
    found = {}
    all_entries = manifest.tables()
    for path, collection in manifest.collections.items():
        for name in collection.tables:
            full = full_name(path, name)
            found[name if name in dims else full] = all_entries[full]
    for table, dim in dims.items():
        if table not in found:
            raise CheckpointError(f"{where} has no table {table!r} (it has {', '.join(sorted(found))})")
        if found[table][0].dim != dim:
            raise CheckpointError(
                f"{where}: table {table!r} has {found[table][0].dim} columns, the served table has {dim}"
            )
    return {table: found[table] for table in dims}


def _own(servable: Servable, table: str, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids and rows that belong to the served part."""
    signature = servable.signature
    if signature.shard is None:
        return ids, rows
    mine = signature.tables[table].router().owner(ids) == signature.shard
    return ids[mine], rows[mine]
