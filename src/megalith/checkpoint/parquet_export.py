"""Parquet: the rows of tables as files that other tools read. Needs pyarrow (the extra `data`).

`export` takes them from a checkpoint, `export_parquet` from a collection, `write_parquet` from any chunks.

| column | type | content |
| --- | --- | --- |
| `id` | int64 | the id |
| `weights` | fixed-size list of float32 | the row |
| `state/SEGMENT/NAME` | fixed-size list of float32 | optimizer state; omitted with state=False |
| `time` | timestamp, UTC | last update |
| `count` | int64 | number of updates; only if a policy counts them |
| `step` | int64 | step of the last update; only if a policy counts updates |

Rows are written in the order they come, one row group at a time. A file appears under its name when it is
complete.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from megalith.checkpoint.manifest import Manifest, full_name, read_manifest
from megalith.checkpoint.saved_rows import latest_rows
from megalith.errors import CheckpointError, InputError, MissingDependencyError, UnknownNameError
from megalith.nn import EmbeddingCollection
from megalith.ops import checks
from megalith.storage.store import LocalStore, Store, open_store
from megalith.table import Chunk

ROW_GROUP = 65_536
SUFFIX = ".parquet"


def export(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    tables: Sequence[str] | None = None,
    state: bool = True,
    on_rows: Callable[[int], None] | None = None,
) -> dict[str, int]:
    """Write tables of a checkpoint, with its deltas applied, as Parquet files.

    Args:
        path: The directory or URL of the checkpoint.
        out: A directory or URL that receives a file NAME.parquet for each table, or, for one table, the name
            of a file that ends in .parquet.
        tables: "collection.table", or only the table's name if one collection has it; None exports all.
        state: Whether to write the optimizer state.
        on_rows: Called with the number of rows written so far.

    Returns:
        The number of rows of each file written.

    Raises:
        UnknownNameError: The checkpoint has no such table.
        MissingDependencyError: Pyarrow is not installed.
    """
    checks.flag(state, "export: state")
    if tables is not None:
        tables = [checks.text(name, "export: a table") for name in checks.as_list(tables, "export: tables")]
    source = open_store(path)
    manifest = read_manifest(source)
    entries = manifest.tables()
    selected = _select(manifest, tables)
    target, names = _targets(str(out), selected)
    needed = [p.file for name in selected for e in entries[name] for p in e.files()]
    written = {}
    done = 0

    def counted(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        nonlocal done
        for chunk in chunks:
            yield chunk
            done += chunk.ids.numel()
            if on_rows is not None:
                on_rows(done)

    with source.local_copy(needed, CheckpointError) as local:
        for name in selected:
            last = entries[name][-1]
            chunks = _or_no_rows(counted(latest_rows(local, entries[name])), last.dim, last.state_sizes)
            written[f"{target.where}/{names[name]}"] = _write(target, names[name], chunks, state)
    return written


def export_parquet(
    collection: EmbeddingCollection,
    directory: str | Path,
    *,
    tables: Sequence[str] | None = None,
    state: bool = True,
) -> dict[str, int]:
    """Write tables of a collection, each as a dataset `directory/TABLE/part-RANK.parquet`."""
    # Each rank writes the rows it holds. In file names, characters of a table's name other than letters,
    # digits and _.-~ are written as %XX.
    shards = collection.shards
    names = list(shards.configs) if tables is None else list(tables)
    for name in names:
        shards.check_name(name)
    written = {}
    for name in names:
        folder = Path(directory) / _file_name(name)
        folder.mkdir(parents=True, exist_ok=True)
        config = shards.configs[name]
        state_sizes = {c.key: c.end - c.start for c in config.state_columns}
        path = folder / f"part-{shards.rank:05d}{SUFFIX}"
        chunks = _or_no_rows(shards.scan(name), config.dim, state_sizes)
        written[name] = write_parquet(path, chunks, state=state)
    return written


def write_parquet(path: str | Path, chunks: Iterable[Chunk], *, state: bool = True) -> int:
    """Write the chunks of one table to a Parquet file."""
    # If writing fails, the previous content of the file remains.
    pa, parquet = _arrow("pyarrow"), _arrow("pyarrow.parquet")
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    writer: Any = None
    rows = 0
    try:
        for chunk in chunks:
            batch = _batch(pa, chunk, state)
            if writer is None:
                writer = parquet.ParquetWriter(part, batch.schema, use_dictionary=False)
            if chunk.ids.numel():
                writer.write_batch(batch, row_group_size=ROW_GROUP)
            rows += chunk.ids.numel()
        if writer is None:
            schema = pa.schema([("id", pa.int64()), ("time", pa.timestamp("s", tz="UTC"))])
            writer = parquet.ParquetWriter(part, schema)
        writer.close()
        part.replace(target)
    finally:
        if writer is not None:
            writer.close()
        part.unlink(missing_ok=True)
    return rows


def _select(manifest: Manifest, tables: Sequence[str] | None) -> list[str]:
    """Return the full names of the tables to export."""
    full = {
        full_name(path, name): name
        for path, collection in manifest.collections.items()
        for name in collection.tables
    }
    if tables is None:
        return list(full)
    selected = []
    for wanted in tables:
        matches = [wanted] if wanted in full else [key for key, name in full.items() if name == wanted]
        if len(matches) != 1:
            problem = "no table" if not matches else "several collections have a table"
            raise UnknownNameError(f"{problem} {wanted!r} (known: {', '.join(full)})")
        selected += matches
    return list(dict.fromkeys(selected))


def _targets(out: str, selected: list[str]) -> tuple[Store, dict[str, str]]:
    """Return the store for the files and the name of each table's file."""
    if not out.endswith(SUFFIX):
        names = {name: _file_name(name) + SUFFIX for name in selected}
    elif len(selected) == 1:
        head, slash, last = out.rpartition("/")
        out, names = head or slash or ".", {selected[0]: last}
    else:
        raise InputError(
            f"{out}: one file holds one table, not {', '.join(selected)}; name one table, or give a directory"
        )
    return open_store(out), names


def _write(store: Store, name: str, chunks: Iterable[Chunk], state: bool) -> int:
    if isinstance(store, LocalStore):
        store.root.mkdir(parents=True, exist_ok=True)
        return write_parquet(store.root / name, chunks, state=state)
    with TemporaryDirectory(prefix="megalith-") as folder:
        file = Path(folder) / "table.parquet"
        rows = write_parquet(file, chunks, state=state)
        store.upload(name, file)
    return rows


def _file_name(table: str) -> str:
    return re.sub(r"^\.", "%2E", quote(table, safe=""))


def _or_no_rows(chunks: Iterable[Chunk], dim: int, state_sizes: Mapping[str, int]) -> Iterator[Chunk]:
    """Yield the chunks, or one chunk without rows, which gives the file of an empty table its columns."""
    empty = True
    for chunk in chunks:
        empty = False
        yield chunk
    if empty:
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        state = {key: torch.empty(0, size, device="cpu") for key, size in state_sizes.items()}
        yield Chunk(none, torch.empty(0, dim, device="cpu"), state, none)


def _batch(pa: Any, chunk: Chunk, state: bool) -> Any:
    columns = {"id": pa.array(chunk.ids.numpy()), "weights": _lists(pa, chunk.rows)}
    if state:
        columns |= {f"state/{key}": _lists(pa, values) for key, values in chunk.state.items()}
    columns["time"] = pa.array(chunk.time.numpy()).cast(pa.timestamp("s", tz="UTC"))
    if chunk.count is not None:
        columns["count"] = pa.array(chunk.count.numpy())
    if chunk.step is not None:
        columns["step"] = pa.array(chunk.step.numpy())
    return pa.RecordBatch.from_pydict(columns)


def _lists(pa: Any, values: Tensor) -> Any:
    """Convert float32 [n, width] to n lists of length width."""
    flat = pa.array(values.contiguous().view(-1).numpy())
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _arrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError.of_extra(f"{module} is needed to write Parquet", "data") from error
