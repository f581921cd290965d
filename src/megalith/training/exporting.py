"""Exporting a run: its newest checkpoint becomes a version that a server answers from.

Rows go from the checkpoint's files into the export's; the tables are never in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from megalith import checkpoint
from megalith.checkpoint.saved_rows import latest_rows
from megalith.errors import CheckpointError, InputError
from megalith.serving.export.exporter import Provenance, RowSource, export_model
from megalith.storage.store import open_store
from megalith.training.run_model import config_of, find_checkpoint, load_dense, model_for

COLLECTION = "embeddings"
"""Where a `Model` holds its tables."""
_TRIES = 5


def export_run(
    path: str | Path,
    out: str | Path,
    *,
    name: str | None = None,
    block_size: int | None = None,
    **options: Any,
) -> Path:
    """Writes the newest checkpoint of a run, or a checkpoint of one, as a version below `out`.

    name: of the model in requests (None: the kind of model, such as "deepfm"). block_size: of tables that are
    spread in blocks (None: as training had it). options: precision, num_shards,
    version and on_rows of `export_model`.
    A checkpoint that is replaced while it is read is read again.
    """
    for _ in range(_TRIES - 1):
        root = find_checkpoint(path)
        manifest = checkpoint.read_manifest(root)
        try:
            return _export(root, manifest, out, name, block_size, options)
        except (CheckpointError, OSError):
            if checkpoint.read_manifest(root).tip == manifest.tip:
                raise  # otherwise training has replaced the checkpoint meanwhile
    return _export(root, checkpoint.read_manifest(root), out, name, block_size, options)


def _export(
    root: Path,
    manifest: checkpoint.Manifest,
    out: str | Path,
    name: str | None,
    block_size: int | None,
    options: dict[str, Any],
) -> Path:
    store = open_store(root)
    for entry in manifest.all_files():
        store.verify(entry, CheckpointError)
    config = config_of(manifest, root)
    progress = manifest.latest.progress
    model = model_for(config, progress["features"], progress["num_dense"])
    load_dense(model, root, manifest)
    latest = manifest.latest.collections[COLLECTION]
    if block_size is None:
        block_size = _block_size(manifest, options.get("num_shards", 0))
    return export_model(
        model,
        out,
        name=name or config.model.name,
        block_size=block_size,
        rows=_rows_of(root, manifest),
        source=Provenance(manifest.tip, latest.global_step),
        **options,
    )


def count_rows(path: str | Path) -> int:
    """How many rows a run's newest checkpoint has."""
    manifest = checkpoint.read_manifest(find_checkpoint(path))
    return sum(entries[-1].live for entries in manifest.tables().values())


def _rows_of(root: Path, manifest: checkpoint.Manifest) -> RowSource:
    tables, store = manifest.tables(), open_store(root)

    def rows(table: str) -> Iterator[tuple[Tensor, Tensor]]:
        key = f"{COLLECTION}.{table}"
        if key not in tables:
            raise InputError(f"{root}: the checkpoint has no table {table!r}")
        for chunk in latest_rows(store, tables[key]):
            yield chunk.ids, chunk.rows

    return rows


def _block_size(manifest: checkpoint.Manifest, num_shards: int) -> int | None:
    """For tables spread in blocks: as many ids as training had, over so many parts."""
    sizes = [
        routing.block_size * routing.num_shards
        for entries in manifest.tables().values()
        if (routing := entries[-1].routing).block_size is not None
    ]
    return -(-max(sizes) // num_shards) if sizes and num_shards else None
