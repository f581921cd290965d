"""Parquet: a table's rows as a file that anything reads. Needs pyarrow (`pip install megalith[data]`).

| column | type | what |
| --- | --- | --- |
| `id` | int64 | the id |
| `weights` | fixed-size list of float32 | the row |
| `state/SEGMENT/NAME` | fixed-size list of float32 | a piece of optimizer state; left out with state=False |
| `time` | timestamp, UTC | last update |
| `count` | int64 | updates so far; only where a policy counts |

Rows are written as they come, a row group at a time; a file appears under its name when it is complete.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from megalith.errors import MissingDependencyError
from megalith.nn import EmbeddingCollection
from megalith.table import Chunk, TableConfig

ROW_GROUP = 65_536


def export_parquet(
    collection: EmbeddingCollection,
    directory: str | Path,
    *,
    tables: Sequence[str] | None = None,
    state: bool = True,
) -> dict[str, int]:
    """Writes tables of a collection (None: all), each as a dataset `directory/TABLE/part-RANK.parquet`.

    Each rank writes the rows it holds. In file names, characters of a table's name other than letters, digits
    and _.-~ stand as %XX. Returns rows written by table. Raises UnknownNameError for a table that is not
    there, MissingDependencyError without pyarrow.
    """
    shards = collection.shards
    names = list(shards.configs) if tables is None else list(tables)
    for name in names:
        shards.check_name(name)
    written = {}
    for name in names:
        folder = Path(directory) / re.sub(r"^\.", "%2E", quote(name, safe=""))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"part-{shards.rank:05d}.parquet"
        chunks = itertools.chain([_no_rows(shards.configs[name])], shards.scan(name))
        written[name] = write_parquet(path, chunks, state=state)
    return written


def write_parquet(path: str | Path, chunks: Iterable[Chunk], *, state: bool = True) -> int:
    """Writes one table's chunks to a Parquet file and returns how many rows there were.

    state: whether to write optimizer state. Without any chunk the file has no rows, and only `id` and `time`.
    Raises MissingDependencyError without pyarrow; where writing fails, what was there before is still there.
    """
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


def _no_rows(config: TableConfig) -> Chunk:
    """Tells the columns of a table that may have no rows."""
    none = torch.empty(0, dtype=torch.int64)
    state = {c.key: torch.empty(0, c.end - c.start) for c in config.state_columns}
    return Chunk(none, torch.empty(0, config.dim), state, none)


def _batch(pa: Any, chunk: Chunk, state: bool) -> Any:
    columns = {"id": pa.array(chunk.ids.numpy()), "weights": _lists(pa, chunk.rows)}
    if state:
        columns |= {f"state/{key}": _lists(pa, values) for key, values in chunk.state.items()}
    columns["time"] = pa.array(chunk.time.numpy()).cast(pa.timestamp("s", tz="UTC"))
    if chunk.count is not None:
        columns["count"] = pa.array(chunk.count.numpy())
    return pa.RecordBatch.from_pydict(columns)


def _lists(pa: Any, values: Tensor) -> Any:
    """[n, width] -> n lists of this length."""
    flat = pa.array(values.contiguous().view(-1).numpy())
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _arrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{module} is needed to write Parquet: pip install megalith[data]"
        ) from error
