"""Rows of a checkpoint: read piece by piece, and each row once where deltas lie on top of a base."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike

import torch
from torch import Tensor

from megalith.checkpoint.manifest import NAME, FileEntry, Manifest, Piece, TableEntry
from megalith.checkpoint.store import Store, open_store, read_file
from megalith.checkpoint.tensors import decode, encode
from megalith.errors import CheckpointError
from megalith.table import Chunk
from megalith.table.records import MAX_TIME

_MAX_MANIFEST = 1 << 28
_ROW_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def read_manifest(path: str | PathLike[str] | Store) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError if there is none or it is wrong."""
    store = open_store(path)
    where = f"{store.where}/{NAME}"
    try:
        size = store.size(NAME)
        if size > _MAX_MANIFEST:
            raise CheckpointError(f"{where} is larger than a manifest can be")
        text = store.read(NAME, size).numpy().tobytes().decode()
    except FileNotFoundError:
        raise CheckpointError(f"{store.where} holds no complete checkpoint: it has no {NAME}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from None
    return Manifest.from_json(text, where)


def write_tensors(store: Store, name: str, tensors: dict[str, Tensor]) -> FileEntry:
    """Writes a file of tensors and returns its entry for the manifest."""
    return store.write(name, encode(tensors))


def read_tensors(store: Store, entry: FileEntry) -> dict[str, Tensor]:
    """All tensors of a file."""
    return decode(read_file(store, entry), f"{store.where}/{entry.path}")


def write_chunk(store: Store, name: str, chunk: Chunk, shard: int, precision: torch.dtype) -> Piece:
    """Writes some rows of a table."""
    stored = {"ids": chunk.ids, "rows": chunk.rows.to(precision), "time": chunk.time}
    stored |= {f"state/{key}": value for key, value in chunk.state.items()}
    if chunk.count is not None:
        stored["count"] = chunk.count
    return Piece(write_tensors(store, name, stored), shard=shard, rows=chunk.ids.numel())


def read_chunk(store: Store, piece: Piece, entry: TableEntry) -> Chunk:
    """The rows of one file, weights as float32. Raises CheckpointError unless they are as the entry says."""
    where = f"{store.where}/{piece.file.path}"
    tensors = read_tensors(store, piece.file)
    n = piece.rows
    shapes = {"ids": [n], "rows": [n, entry.dim], "time": [n]}
    shapes |= {f"state/{key}": [n, size] for key, size in entry.state_sizes.items()}
    missing = sorted(set(shapes) - set(tensors))
    if missing:
        raise CheckpointError(f"{where} lacks {', '.join(missing)}")
    if "count" in tensors:
        shapes["count"] = [n]
    for name, shape in shapes.items():
        tensor = tensors[name]
        if list(tensor.shape) != shape:
            raise CheckpointError(f"{where} holds {name} {list(tensor.shape)}, its manifest says {shape}")
        whole = name in ("ids", "time", "count")
        kinds = (torch.int64,) if whole else _ROW_TYPES if name == "rows" else (torch.float32,)
        if tensor.dtype not in kinds:
            raise CheckpointError(f"{where} holds {name} of {tensor.dtype}")
    time = tensors["time"]
    if n and not 0 <= int(time.min()) <= int(time.max()) <= MAX_TIME:
        raise CheckpointError(f"{where} holds times that are no seconds since 1970")
    return Chunk(
        tensors["ids"],
        tensors["rows"].float(),
        {key: tensors[f"state/{key}"] for key in entry.state_sizes},
        time,
        tensors.get("count"),
    )


def read_removed(store: Store, piece: Piece) -> Tensor:
    """The ids of a file of removed ids."""
    ids = read_tensors(store, piece.file).get("ids")
    if ids is None or ids.dtype != torch.int64 or list(ids.shape) != [piece.rows]:
        raise CheckpointError(f"{store.where}/{piece.file.path} does not hold {piece.rows} ids")
    return ids


def latest_rows(store: Store, entries: Sequence[TableEntry]) -> Iterator[Chunk]:
    """Each row of a table once, as its newest save has it, file by file. Files are taken to be verified.

    entries: the table's entry in the base and in each delta. Memory: the ids of all deltas, and one file.
    """
    newer = torch.empty(0, dtype=torch.int64)
    for number, entry in reversed(list(enumerate(entries))):
        mine = []
        for piece in entry.pieces:
            chunk = read_chunk(store, piece, entry)
            if number:
                mine.append(chunk.ids)
            fresh = ~contains(newer, chunk.ids)
            if bool(fresh.all()):
                yield chunk
            elif bool(fresh.any()):
                yield chunk.select(fresh)
        mine += [read_removed(store, piece) for piece in entry.removed]
        if mine:
            newer = torch.unique(torch.cat([newer, *mine]))


def contains(ids: Tensor, queries: Tensor) -> Tensor:
    """Which queries are among the ids, which are sorted."""
    if not ids.numel():
        return torch.zeros(queries.numel(), dtype=torch.bool)
    at = torch.searchsorted(ids, queries).clamp(max=ids.numel() - 1)
    return ids[at] == queries
