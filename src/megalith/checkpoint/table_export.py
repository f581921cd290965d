"""export: tables of a checkpoint as Parquet files, without a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import torch

from megalith.checkpoint.manifest import Manifest, TableEntry, full_name
from megalith.checkpoint.parquet_export import write_parquet
from megalith.checkpoint.saved_rows import latest_rows, read_manifest
from megalith.errors import InputError, UnknownNameError
from megalith.storage.object_store import RemoteStore
from megalith.storage.store import LocalStore, open_store
from megalith.table import Chunk

SUFFIX = ".parquet"


def export(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    tables: Sequence[str] | None = None,
    state: bool = True,
    on_rows: Callable[[int], None] | None = None,
) -> dict[str, int]:
    """Writes tables of a checkpoint, deltas applied, as Parquet; returns where each is and its rows.

    out: a directory or address that gets a file NAME.parquet for each table, or the name of one such file for
    one table. tables: "collection.table", or the table alone where only one collection has it; None: all.
    state: whether to write optimizer state. on_rows: called with the number of rows written so far.
    Columns are those of `checkpoint.parquet`. Raises UnknownNameError for a table that is not there.
    """
    source = open_store(path)
    manifest = read_manifest(source)
    found = manifest.tables()
    chosen = _chosen(manifest, tables)
    target, names = _targets(str(out), chosen)
    needed = [p.file for name in chosen for e in found[name] for p in (*e.pieces, *e.removed)]
    written = {}
    done = 0

    def counted(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        nonlocal done
        for chunk in chunks:
            yield chunk
            done += chunk.ids.numel()
            if on_rows is not None:
                on_rows(done)

    with source.nearby(needed) as near:
        for name in chosen:
            entries = found[name]
            chunks = counted(_any_rows(latest_rows(near, entries), entries[-1]))
            written[f"{target.where}/{names[name]}"] = _write(target, names[name], chunks, state)
    return written


def _chosen(manifest: Manifest, tables: Sequence[str] | None) -> list[str]:
    full = {
        full_name(path, name): name
        for path, collection in manifest.collections.items()
        for name in collection.tables
    }
    if tables is None:
        return list(full)
    chosen = []
    for wanted in tables:
        fits = [wanted] if wanted in full else [key for key, name in full.items() if name == wanted]
        if len(fits) != 1:
            problem = "no table" if not fits else "several collections have a table"
            raise UnknownNameError(f"{problem} {wanted!r} (known: {', '.join(full)})")
        chosen += fits
    return list(dict.fromkeys(chosen))


def _targets(out: str, chosen: list[str]) -> tuple[LocalStore | RemoteStore, dict[str, str]]:
    """Where files go, and under which name each."""
    if not out.endswith(SUFFIX):
        names = {name: re.sub(r"^\.", "%2E", quote(name, safe="")) + SUFFIX for name in chosen}
    elif len(chosen) == 1:
        head, slash, last = out.rpartition("/")
        out, names = head or slash or ".", {chosen[0]: last}
    else:
        raise InputError(
            f"{out}: one file holds one table, not {', '.join(chosen)}; name a table or a directory"
        )
    store = open_store(out)
    assert isinstance(store, LocalStore | RemoteStore)
    return store, names


def _any_rows(chunks: Iterator[Chunk], entry: TableEntry) -> Iterator[Chunk]:
    """The chunks, and one without rows if there is none: it tells the columns."""
    empty = True
    for chunk in chunks:
        empty = False
        yield chunk
    if empty:
        none = torch.empty(0, dtype=torch.int64)
        state = {key: torch.empty(0, size) for key, size in entry.state_sizes.items()}
        yield Chunk(none, torch.empty(0, entry.dim), state, none)


def _write(store: LocalStore | RemoteStore, name: str, chunks: Iterator[Chunk], state: bool) -> int:
    if isinstance(store, LocalStore):
        store.root.mkdir(parents=True, exist_ok=True)
        return write_parquet(store.root / name, chunks, state=state)
    with TemporaryDirectory(prefix="megalith-") as folder:
        file = Path(folder) / "table.parquet"
        rows = write_parquet(file, chunks, state=state)
        store.upload(name, file)
    return rows
