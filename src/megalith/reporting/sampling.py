"""Reads a sample of ids for `megalith plan` from a checkpoint, data files or a text file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from megalith.bits import signed
from megalith.checkpoint import read_manifest
from megalith.checkpoint.manifest import NAME
from megalith.data.arrow import NOT_AN_ID, arrow
from megalith.data.csv import CsvReader
from megalith.data.files import list_files
from megalith.data.formats.compression import open_bytes
from megalith.data.parquet import ParquetReader
from megalith.data.reader import Reader
from megalith.data.schema import FeatureColumn, Schema
from megalith.errors import InputError
from megalith.ops.ids import hash_strings
from megalith.reporting.inspection import find_table, read_ids

MAX_LINE = 1 << 20
_ROWS = 65_536
_INTEGER = re.compile(rb"[+-]?[0-9]{1,20}")


@dataclass(frozen=True)
class Sample:
    """n ids in the order of the data."""

    ids: Tensor
    """int64 [n]."""
    counts: Tensor | None
    """Number of updates of each id, int64 [n], if a checkpoint has them."""
    distinct: bool
    """Whether the ids are the rows of a table, each once."""
    source: str
    """Description of the source, for the user."""


def read_sample(
    source: Path,
    *,
    size: int,
    column: str | None = None,
    table: str | None = None,
    hash: bool | None = None,
) -> Sample:
    """Reads about `size` ids of a source."""
    # Ids of a checkpoint or of Parquet files are drawn from all of it; of other sources, the first are read.
    if (source / NAME).exists():
        return _from_checkpoint(source, size, table)
    if table is not None:
        raise InputError(f"{source} is not a checkpoint: use --column instead of --table")
    if not source.exists():
        raise InputError(f"{source}: no such file or directory")
    kind = _kind(source)
    if kind == "parquet":
        return _from_parquet(source, size, _named(column, source, kind), hash)
    if kind == "csv":
        ids = _take(_csv(source, _named(column, source, kind), hash), size)
        return Sample(ids, None, False, f"the first {len(ids):,} ids of column {column}")
    if column is not None:
        raise InputError(f"{source} is read as one id per line; --column is for Parquet, CSV and TSV files")
    ids = _from_lines(source, size, hash)
    return Sample(ids, None, False, f"the first {len(ids):,} lines")


# ---- sources


def _from_checkpoint(root: Path, size: int, table: str | None) -> Sample:
    summary, entries = find_table(read_manifest(root), table)
    if not summary.rows:
        raise InputError(f"{root}: table {summary.name!r} has no rows")
    ids, counts = [], []
    generator = torch.Generator().manual_seed(0)
    for found, count in read_ids(root, entries):
        # Random rows: every n-th row of consecutive ids would introduce a pattern.
        part = -(-size * len(found) // summary.rows)
        chosen = torch.randperm(len(found), generator=generator, device="cpu")[:part]
        ids.append(found[chosen])
        if count is not None:
            counts.append(count[chosen])
    known = torch.cat(counts) if len(counts) == len(ids) else None
    every = torch.cat(ids)
    text = f"{len(every):,} of {summary.rows:,} rows of table {summary.name}"
    return Sample(every, known, known is None, text)


def _from_parquet(source: Path, size: int, column: str, hash: bool | None) -> Sample:
    reader = ParquetReader(source, _schema(column, hash), batch_size=_ROWS, on_error="skip")
    total = reader.num_rows
    if total > size:
        reader = reader.shard(0, -(-total // size))  # row groups, or a part of each, from all files
    ids = _take(_column(reader), size)
    return Sample(ids, None, False, f"{len(ids):,} ids of column {column} ({total:,} rows in total)")


def _csv(source: Path, column: str, hash: bool | None) -> Iterator[Tensor]:
    if hash is not None:
        return _column(CsvReader(source, _schema(column, hash), batch_size=_ROWS, on_error="skip"))
    # Every value of a CSV file is text. The ids are integers if the first ones are.
    try:
        reader = CsvReader(source, _schema(column, False), batch_size=1000)
        next(iter(reader), None)
    except InputError as error:
        if NOT_AN_ID not in str(error):
            raise
        return _csv(source, column, True)
    return _csv(source, column, False)


def _from_lines(source: Path, size: int, hash: bool | None) -> Tensor:
    files = list_files(source, (".txt", ".txt.gz", ".ids"))
    lines = list(islice(_lines(files), size))
    if not lines:
        raise InputError(f"{source} contains no ids")
    if not hash and all(_INTEGER.fullmatch(line) for line in lines):
        return torch.tensor([_integer(line, source) for line in lines], device="cpu")
    if hash is False:
        wrong = next(line for line in lines if not _INTEGER.fullmatch(line))
        raise InputError(f"{source}: {wrong[:60]!r} is not an integer")
    return hash_strings(lines)


def _lines(files: list[Path]) -> Iterator[bytes]:
    for path in files:
        try:
            with open_bytes(path) as file:
                while line := file.readline(MAX_LINE):
                    if len(line) == MAX_LINE:
                        raise InputError(f"{path}: a line has more than {MAX_LINE:,} bytes")
                    if stripped := line.strip():
                        yield stripped
        except (EOFError, OSError) as error:
            raise InputError(f"{path} cannot be read: {error}") from None


# ---- helpers


def _kind(source: Path) -> str:
    def has(suffixes: tuple[str, ...]) -> bool:
        if source.is_dir():
            return any(path.name.endswith(suffixes) for path in source.rglob("*"))
        return source.name.endswith(suffixes)

    if has(ParquetReader.suffixes):
        return "parquet"
    return "csv" if has((".csv", ".tsv", ".csv.gz", ".tsv.gz")) else "lines"


def _named(column: str | None, source: Path, kind: str) -> str:
    if column is not None:
        return column
    known = ""
    if kind == "parquet":
        first = list_files(source, ParquetReader.suffixes)[0]
        try:
            names = arrow("pyarrow.parquet").read_schema(first).names
        except (arrow().ArrowException, OSError) as error:
            raise InputError(f"{first} cannot be read as Parquet: {error}") from None
        known = f" (the file has {', '.join(names[:20])})"
    raise InputError(f"{source}: name the column of ids with --column{known}")


def _schema(column: str, hash: bool | None) -> Schema:
    return Schema(features={"ids": FeatureColumn(column, hash=hash)}, label=None)


def _column(reader: Reader) -> Iterator[Tensor]:
    for batch in reader:
        yield batch.features["ids"].values


def _take(parts: Iterator[Tensor], size: int) -> Tensor:
    taken: list[Tensor] = []
    left = size
    for part in parts:
        taken.append(part[:left])
        left -= len(taken[-1])
        if left <= 0:
            break
    ids = torch.cat(taken) if taken else torch.empty(0, dtype=torch.int64, device="cpu")
    if not len(ids):
        raise InputError("the source contains no ids")
    return ids


def _integer(line: bytes, source: Path) -> int:
    value = int(line)
    if not -(2**63) <= value < 2**64:
        raise InputError(f"{source}: {value} does not fit in 64 bits")
    return signed(value)
