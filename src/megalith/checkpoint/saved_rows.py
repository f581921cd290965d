"""Rows of a checkpoint: read piece by piece, and each row once where deltas lie on top of a base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike

import torch
from torch import Tensor

from megalith.checkpoint.manifest import NAME, Manifest, Piece, TableEntry
from megalith.errors import CheckpointError
from megalith.storage.store import Store, StoredFile, open_store
from megalith.storage.tensor_files import TensorPlace, decode, encode, header_end, read_places
from megalith.table import Chunk
from megalith.table.table_data import MAX_TIME

MAX_MANIFEST = 1 << 28
_Form = tuple[torch.dtype, list[int]]
_ROW_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def read_manifest(path: str | PathLike[str] | Store) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError if there is none or it is wrong."""
    store = open_store(path)
    where = f"{store.where}/{NAME}"
    try:
        text = store.read_whole(NAME, MAX_MANIFEST).decode()
    except FileNotFoundError:
        raise CheckpointError(f"{store.where} holds no complete checkpoint: it has no {NAME}") from None
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else None
        raise CheckpointError(f"{where} cannot be read: {problem or error}") from None
    return Manifest.from_json(text, where)


def write_tensors(store: Store, name: str, tensors: dict[str, Tensor]) -> StoredFile:
    """Writes a file of tensors and returns its entry for the manifest."""
    return store.write(name, encode(tensors))


def read_tensors(store: Store, entry: StoredFile) -> dict[str, Tensor]:
    """All tensors of a file."""
    return decode(store.read_file(entry, CheckpointError), f"{store.where}/{entry.path}", CheckpointError)


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
    _check_shapes({name: (t.dtype, list(t.shape)) for name, t in tensors.items()}, piece, entry, where)
    _check_times(tensors["time"], where)
    return Chunk(
        tensors["ids"],
        tensors["rows"].float(),
        {key: tensors[f"state/{key}"] for key in entry.state_sizes},
        tensors["time"],
        tensors.get("count"),
    )


def read_removed(store: Store, piece: Piece) -> Tensor:
    """The ids of a file of removed ids."""
    tensors = read_tensors(store, piece.file)
    found = {name: (t.dtype, list(t.shape)) for name, t in tensors.items()}
    _check_removed(found, piece, f"{store.where}/{piece.file.path}")
    return tensors["ids"]


def check_piece(store: Store, piece: Piece, entry: TableEntry) -> None:
    """Raises CheckpointError if `read_chunk` would, or if rows lie in another shard's file.

    Reads little of the file: its header, times, and ids where there are shards.
    """
    where = f"{store.where}/{piece.file.path}"
    found = _places(store, piece.file)
    _check_shapes({name: (p.dtype, p.shape) for name, p in found.items()}, piece, entry, where)
    _check_times(_read_place(store, piece.file, found["time"]), where)
    router = entry.routing.router()
    if router is None:
        return
    owners = router.owner(_read_place(store, piece.file, found["ids"]))
    if bool((owners != piece.shard).any()):
        raise CheckpointError(f"{where} holds rows of other shards than {piece.shard}, its own")


def check_removed(store: Store, piece: Piece) -> None:
    """Raises CheckpointError if `read_removed` would."""
    found = {name: (p.dtype, p.shape) for name, p in _places(store, piece.file).items()}
    _check_removed(found, piece, f"{store.where}/{piece.file.path}")


def _places(store: Store, file: StoredFile) -> dict[str, TensorPlace]:
    where = f"{store.where}/{file.path}"
    head = store.read_part(file, min(8, file.bytes), error=CheckpointError)
    head = store.read_part(file, header_end(head, file.bytes, where, CheckpointError), error=CheckpointError)
    return read_places(head, file.bytes, where, CheckpointError)


def _read_place(store: Store, file: StoredFile, place: TensorPlace) -> Tensor:
    data = store.read_part(file, place.end - place.begin, place.begin, error=CheckpointError)
    return data.view(place.dtype).view(place.shape)


def _check_shapes(found: Mapping[str, _Form], piece: Piece, entry: TableEntry, where: str) -> None:
    n = piece.rows
    shapes = {"ids": [n], "rows": [n, entry.dim], "time": [n]}
    shapes |= {f"state/{key}": [n, size] for key, size in entry.state_sizes.items()}
    missing = sorted(set(shapes) - set(found))
    if missing:
        raise CheckpointError(f"{where} lacks {', '.join(missing)}")
    if "count" in found:
        shapes["count"] = [n]
    for name, wanted in shapes.items():
        dtype, shape = found[name]
        if shape != wanted:
            raise CheckpointError(f"{where} holds {name} {shape}, its manifest says {wanted}")
        whole = name in ("ids", "time", "count")
        kinds = (torch.int64,) if whole else _ROW_TYPES if name == "rows" else (torch.float32,)
        if dtype not in kinds:
            raise CheckpointError(f"{where} holds {name} of {dtype}")


def _check_times(time: Tensor, where: str) -> None:
    if time.numel() and not 0 <= int(time.min()) <= int(time.max()) <= MAX_TIME:
        raise CheckpointError(f"{where} holds times that are no seconds since 1970")


def _check_removed(found: Mapping[str, _Form], piece: Piece, where: str) -> None:
    if found.get("ids") != (torch.int64, [piece.rows]):
        raise CheckpointError(f"{where} does not hold {piece.rows} ids")


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
