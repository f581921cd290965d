"""Opened files: checks the files of an exported version and maps its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megalith.errors import ExportError
from megalith.serving.export.frozen_rows import FrozenRows
from megalith.serving.export.signature import Signature
from megalith.storage.store import LocalStore


def check_files(directory: Path, signature: Signature, *, checksums: bool) -> None:
    """Check that the files of a version are complete."""
    store = LocalStore(directory)
    tables = (table.file for table in signature.tables.values())
    for entry in (*tables, signature.program, signature.examples):
        if entry is None:
            continue
        try:
            if checksums:
                store.verify(entry, ExportError)
            elif store.size(entry.path) != entry.bytes:
                raise ExportError(f"{directory / entry.path} does not have {entry.bytes} bytes")
        except OSError as error:
            raise ExportError(str(error)) from None


def open_rows(
    directory: Path, signature: Signature, *, first: Sequence[str], in_memory: bool
) -> dict[str, FrozenRows]:
    """Open the rows of all tables."""
    rest = [name for name in signature.tables if name not in first]
    return {name: _open_table(directory, signature, name, in_memory) for name in (*first, *rest)}


def _open_table(directory: Path, signature: Signature, name: str, in_memory: bool) -> FrozenRows:
    table = signature.tables[name]
    assert table.file is not None  # the signature was checked
    path = directory / table.file.path
    rows = FrozenRows(path, table.format(signature.precision), in_memory=in_memory)
    if len(rows) != table.rows:
        raise ExportError(f"{path} holds {len(rows)} rows, not {table.rows}")
    return rows
