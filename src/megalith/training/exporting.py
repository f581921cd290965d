"""Export of a run: writes its newest checkpoint as a version for servers.

Rows are copied from the files of the checkpoint to those of the export in chunks; no table is loaded whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megalith import checkpoint
from megalith.checkpoint.saved_rows import latest_rows
from megalith.errors import CheckpointError, InputError
from megalith.serving.export.exporter import Provenance, export_model
from megalith.serving.export.rank_rows import RowSource
from megalith.storage.store import open_store
from megalith.training.run_model import config_of, find_checkpoint, load_dense, model_for
from megalith.training.run_sections import DataConfig

COLLECTION = "embeddings"
"""The attribute of a `Model` that holds its collection."""
_TRIES = 5


def export_run(
    path: str | Path,
    out: str | Path,
    *,
    name: str | None = None,
    block_size: int | None = None,
    **options: Any,
) -> Path:
    """Writes a checkpoint of a run as a version below `out`."""
    # A checkpoint that training replaces meanwhile is read again.
    for _ in range(_TRIES - 1):
        root = find_checkpoint(path)
        manifest = checkpoint.read_manifest(root)
        try:
            return _export(root, manifest, out, name, block_size, options)
        except (CheckpointError, OSError):
            if checkpoint.read_manifest(root).tip == manifest.tip:
                raise  # otherwise training has replaced the checkpoint
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
    on_cpu = config.changed(train_device="cpu")
    model = model_for(on_cpu, progress["features"], progress["num_dense"])
    load_dense(model, root, manifest)
    latest = manifest.latest.collections[COLLECTION]
    if block_size is None:
        block_size = _block_size(manifest, options.get("num_shards", 0))
    features = [feature.name for feature in model.embeddings.features]
    return export_model(
        model,
        out,
        name=name or config.model.name,
        block_size=block_size,
        rows=_rows_of(root, manifest),
        source=Provenance(manifest.tip, latest.global_step),
        id_kinds=_id_kinds(config.data, features),
        single_ids=_single_ids(features, progress.get("list_features")),
        **options,
    )


def _id_kinds(config: DataConfig, features: Sequence[str]) -> dict[str, str]:
    """Return what the ids of features are, as far as the schema records it; see `export_model`."""
    columns = config.schema.get("features", {})
    kinds = {}
    for name in features:
        column = columns.get(name)
        if isinstance(column, Mapping) and (column.get("slot") is not None or column.get("ids")):
            kinds[name] = column["ids"] if column.get("slot") is None else "fid"
    return kinds


def _single_ids(features: Sequence[str], list_features: Any) -> list[str]:
    """Return the features of which training saw one id per row; none for a checkpoint that does not say."""
    known = isinstance(list_features, list)
    return [name for name in features if name not in list_features] if known else []


def count_rows(path: str | Path) -> int:
    """Return the number of rows of a run's newest checkpoint."""
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
    """Return the block size that distributes the ids of training over the parts; None without blocks."""
    sizes = [
        routing.block_size * routing.num_shards
        for entries in manifest.tables().values()
        if (routing := entries[-1].routing).block_size is not None
    ]
    return -(-max(sizes) // num_shards) if sizes and num_shards else None
