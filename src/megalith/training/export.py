"""Exports of a run: a checkpoint written as a version for model servers.

`export_run` copies rows from the files of the checkpoint to those of the export in chunks; no table is loaded
whole.

`export_newest` writes to RUN/exports/NAME, where NAME is the name of the model in requests. Servers that are
started together on one run, under one name, share its exports: one writes the newest checkpoint, the others
wait for it. Older exports without a label are deleted: they can be written again from kept checkpoints.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from megalith import checkpoint
from megalith.checkpoint import read_manifest
from megalith.checkpoint.saved_rows import latest_rows
from megalith.data import Schema
from megalith.errors import CheckpointError, ExportError, InputError
from megalith.serving.discovery.contract import check_name
from megalith.serving.export.exporter import Provenance, RowSource, export_model
from megalith.serving.export.signature import Signature
from megalith.serving.server.versions import read_labels, versions_of
from megalith.storage.local_files import take_lock
from megalith.storage.store import open_store
from megalith.training.config import DataConfig
from megalith.training.directory import CHECKPOINT, find_checkpoint
from megalith.training.model import config_of, load_dense, model_for

COLLECTION = "embeddings"
"""The attribute of a `Model` that holds its collection."""
_TRIES = 5


def export_run(path: str | Path, out: str | Path, **options: Any) -> Path:
    """Write a checkpoint of a run as a version below `out`; `options` are those of `export_model`."""
    # A checkpoint that training replaces meanwhile is read again.
    for _ in range(_TRIES - 1):
        root = find_checkpoint(path)
        manifest = checkpoint.read_manifest(root)
        try:
            return _export(root, manifest, out, **options)
        except (CheckpointError, OSError):
            if checkpoint.read_manifest(root).tip == manifest.tip:
                raise  # otherwise training has replaced the checkpoint
    return _export(root, checkpoint.read_manifest(root), out, **options)


def _export(
    root: Path,
    manifest: checkpoint.Manifest,
    out: str | Path,
    *,
    name: str | None = None,
    block_size: int | None = None,
    **options: Any,
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
    manifest = checkpoint.read_manifest(find_checkpoint(path))
    return sum(entries[-1].live for entries in manifest.tables().values())


def describe_dense(path: str | Path) -> str:
    """Say which dense values requests must send; "" if they are the columns of the data as they are."""
    root = find_checkpoint(path)
    data = config_of(checkpoint.read_manifest(root), root).data
    if not data.schema.get("dense"):
        return ""
    columns = Schema.from_dict({"label": None, "features": {}, **data.schema}).dense_columns
    if all(column.normalise == "none" and not column.indicator for column in columns):
        return ""
    values = []
    for column in columns:
        values.append(_FORMULAS[column.normalise].format(column))
        if column.indicator:
            values.append(f"1 if {column.column} is missing, else 0")
    return (
        f"the server does not normalise dense values; send [{', '.join(values)}], and 0 for a missing value"
    )


_FORMULAS = {
    "none": "{0.column}",
    "log1p": "log1p({0.column})",
    "standard": "({0.column} - {0.mean}) / {0.std}",
}


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


EXPORTS = "exports"
KEPT_EXPORTS = 2
"""Exports that stay: the newest, and the one before, to which an operator may return."""
LOCK_SECONDS = 1800.0
"""Seconds that the export of another process may take."""
_LOCK = ".lock"


def export_newest(run: Path, name: str | None) -> Path:
    """Export the newest checkpoint of a run as a new version, unless the newest version is of it."""
    name = name or config_of(read_manifest(run / CHECKPOINT), run).model.name
    out = run / EXPORTS / check_name(name, "the name of the model")
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out / _LOCK):
        newest = max(versions_of(out), default=None)
        version = None
        if newest is not None:
            manifest = read_manifest(run / CHECKPOINT)
            with suppress(ExportError):  # a version that cannot be read is replaced by a newer one
                signature = Signature.read(out / str(newest))
                if signature.base == manifest.tip:
                    return out
            steps = [each.global_step for each in manifest.latest.collections.values()]
            version = max(newest + 1, *steps)
        export_run(run, out, name=name, version=version)
        try:
            labels = read_labels(out)
        except InputError:  # servers log it; nothing is deleted that it may name
            return out
        for old in sorted(versions_of(out))[:-KEPT_EXPORTS]:
            if old in labels.values():
                continue
            shutil.rmtree(out / str(old), ignore_errors=True)  # a server that has it open keeps its files
    return out


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for the lock of a file, and hold it; on a file system without locks, hold nothing."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        locked = True
        with suppress(OSError):
            locked = take_lock(file, LOCK_SECONDS)
        if not locked:
            raise ExportError(
                f"{path}: another process has held the lock of the exports for {LOCK_SECONDS:g} s: end it if "
                "it hangs (`fuser` of this file names it), then start again"
            )
        yield
    finally:
        os.close(file)
