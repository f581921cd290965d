"""Reload: a served model catches up from the checkpoint of the run that trains it.

If the save it was exported from is in the checkpoint's chain, the deltas behind it are enough; otherwise all
rows are read. Nothing of the served model changes here: what was read is for `Servable.adopt`.
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
"""Where a run keeps its checkpoint."""


@dataclass(frozen=True)
class Reloaded:
    """A checkpoint's rows over an export's, its dense weights, and the id of its latest save."""

    save: str
    overlay: Overlay
    dense: Mapping[str, Tensor]


def latest_save(checkpoint: Path) -> str:
    """The id of a checkpoint's latest save. Raises CheckpointError if there is none."""
    return read_manifest(_store(checkpoint)).tip


def read_newer(checkpoint: Path, servable: Servable) -> Reloaded:
    """What a checkpoint holds beyond what a model was exported from.

    checkpoint: its directory, or that of the run. Raises CheckpointError if it is missing, damaged, being
    replaced, or of another model.
    """
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
    overlay = Overlay(signature.dims) if known else servable.stage()
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
    """Each served table's entries; raises CheckpointError for a table that is not there or another one."""
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
                f"{where}: table {table!r} has {found[table][0].dim} columns, the served one {dim}"
            )
    return {table: found[table] for table in dims}


def _own(servable: Servable, table: str, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The ids and rows that the served part has."""
    signature = servable.signature
    if signature.shard is None:
        return ids, rows
    mine = signature.tables[table].router().owner(ids) == signature.shard
    return ids[mine], rows[mine]
