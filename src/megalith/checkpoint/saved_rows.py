"""The rows of a checkpoint: writing and reading files of rows, and the latest version of each row.

`PieceWriter` writes the rows of snapshots, filling one buffer while others are being written. Its files are
not flushed one by one: the system writes them to the disk in the background, and the end of the writer waits
for all of them. Nothing may refer to a file before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from megalith.checkpoint.manifest import Piece, TableEntry
from megalith.errors import CheckpointError
from megalith.storage.store import Store, StoredFile
from megalith.storage.tensor_files import TensorPlace, decode, encode, header_end, read_places
from megalith.table import Chunk, TableConfig
from megalith.table.rounding import DTYPES
from megalith.table.snapshot import Snapshot
from megalith.table.table_data import MAX_TIME

_Form = tuple[torch.dtype, list[int]]
_COUNTED = ("count", "step")
_ROW_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def write_tensors(store: Store, name: str, tensors: dict[str, Tensor], *, flush: bool = True) -> StoredFile:
    return store.write(name, encode(tensors), flush=flush)


def read_tensors(store: Store, entry: StoredFile) -> dict[str, Tensor]:
    """Read a file of tensors without computing its checksum."""
    return decode(store.read_file(entry, CheckpointError), f"{store.where}/{entry.path}", CheckpointError)


def write_chunk(
    store: Store, name: str, chunk: Chunk, shard: int, precision: torch.dtype, *, flush: bool = True
) -> Piece:
    """Write rows of a table to a file."""
    stored = {"ids": chunk.ids, "rows": chunk.rows.to(precision), "time": chunk.time}
    stored |= {f"state/{key}": value for key, value in chunk.state.items()}
    stored |= {name: getattr(chunk, name) for name in _COUNTED if getattr(chunk, name) is not None}
    return Piece(write_tensors(store, name, stored, flush=flush), shard=shard, rows=chunk.ids.numel())


def read_chunk(store: Store, piece: Piece, entry: TableEntry) -> Chunk:
    """Read a file of rows."""
    where = f"{store.where}/{piece.file.path}"
    tensors = read_tensors(store, piece.file)
    _check_shapes({name: (t.dtype, list(t.shape)) for name, t in tensors.items()}, piece, entry, where)
    for name in ("time", *(tensors.keys() & _COUNTED)):
        _check_range(name, tensors[name], where)
    return Chunk(
        tensors["ids"],
        tensors["rows"].float(),
        {key: tensors[f"state/{key}"] for key in entry.state_sizes},
        tensors["time"],
        tensors.get("count"),
        tensors.get("step"),
    )


def write_pending(store: Store, name: str, ids: Tensor, counts: Tensor, shard: int) -> Piece:
    """Write the counts of ids that have no row yet."""
    # ids: int64 [n]; counts: int64 [n], positive.
    return Piece(write_tensors(store, name, {"ids": ids, "count": counts}), shard=shard, rows=ids.numel())


def read_pending(store: Store, piece: Piece) -> tuple[Tensor, Tensor]:
    """Read the counts of ids that have no row yet."""
    # returns: ids and counts, int64 [n] each.
    where = f"{store.where}/{piece.file.path}"
    tensors = read_tensors(store, piece.file)
    for name in ("ids", "count"):
        found = tensors.get(name)
        if found is None or (found.dtype, list(found.shape)) != (torch.int64, [piece.rows]):
            raise CheckpointError(f"{where} does not hold {piece.rows} ids and counts")
    counts = tensors["count"]
    if piece.rows and not 0 < int(counts.min()) <= int(counts.max()) <= MAX_TIME:
        raise CheckpointError(f"{where} holds counts that are not between 1 and {MAX_TIME}")
    return tensors["ids"], counts


def read_removed(store: Store, piece: Piece) -> Tensor:
    """Read a file of removed ids."""
    # returns: int64 [n].
    tensors = read_tensors(store, piece.file)
    found = {name: (t.dtype, list(t.shape)) for name, t in tensors.items()}
    _check_removed(found, piece, f"{store.where}/{piece.file.path}")
    return tensors["ids"]


def check_piece(store: Store, piece: Piece, entry: TableEntry) -> None:
    """Raise if `read_chunk` would, or if the file holds rows of another shard."""
    # Only the header, the times and, with several shards, the ids of the file are read.
    where = f"{store.where}/{piece.file.path}"
    found = _places(store, piece.file)
    _check_shapes({name: (p.dtype, p.shape) for name, p in found.items()}, piece, entry, where)
    for name in ("time", *(found.keys() & _COUNTED)):
        _check_range(name, _read_place(store, piece.file, found[name]), where)
    router = entry.routing.router()
    if router is None:
        return
    owners = router.owner(_read_place(store, piece.file, found["ids"]))
    if bool((owners != piece.shard).any()):
        raise CheckpointError(f"{where} holds rows that do not belong to its shard, {piece.shard}")


def check_removed(store: Store, piece: Piece) -> None:
    """Raise if `read_removed` would. Only the header of the file is read."""
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
    shapes |= {name: [n] for name in _COUNTED if name in found}
    for name, wanted in shapes.items():
        dtype, shape = found[name]
        if shape != wanted:
            raise CheckpointError(f"{where} holds {name} {shape}, but its manifest states {wanted}")
        is_integer = name in ("ids", "time", *_COUNTED)
        dtypes = (torch.int64,) if is_integer else _ROW_TYPES if name == "rows" else (torch.float32,)
        if dtype not in dtypes:
            raise CheckpointError(f"{where} holds {name} of dtype {dtype}")


def _check_range(name: str, values: Tensor, where: str) -> None:
    if not values.numel():
        return
    low, high = torch.aminmax(values)
    if not 0 <= int(low) <= int(high) <= MAX_TIME:
        problem = "times that are not seconds since 1970" if name == "time" else f"{name} above {MAX_TIME}"
        raise CheckpointError(f"{where} holds {problem} or below 0")


def _check_removed(found: Mapping[str, _Form], piece: Piece, where: str) -> None:
    if found.get("ids") != (torch.int64, [piece.rows]):
        raise CheckpointError(f"{where} does not hold {piece.rows} ids")


def latest_rows(store: Store, entries: Sequence[TableEntry]) -> Iterator[Chunk]:
    """Yield each row of a table once, in its latest version, file by file."""
    # The memory is that of one file and of the ids of all deltas.
    newer = torch.empty(0, dtype=torch.int64, device="cpu")
    for number, entry in reversed(list(enumerate(entries))):
        ids = []
        for piece in entry.pieces:
            chunk = read_chunk(store, piece, entry)
            if number:
                ids.append(chunk.ids)
            fresh = ~contains(newer, chunk.ids)
            if bool(fresh.all()):
                yield chunk
            elif bool(fresh.any()):
                yield chunk.select(fresh)
        ids += [read_removed(store, piece) for piece in entry.removed]
        if ids:
            newer = torch.unique(torch.cat([newer, *ids]))


def contains(ids: Tensor, queries: Tensor) -> Tensor:
    """Find out which ids are in a set."""
    # ids: the set, int64 [k], sorted; queries: int64 [n]; returns: bool [n].
    if not ids.numel():
        return torch.zeros(queries.numel(), dtype=torch.bool, device="cpu")
    at = torch.searchsorted(ids, queries).clamp(max=ids.numel() - 1)
    return ids[at] == queries


PIECE_BYTES = 32 << 20
"""The size of a file of rows."""
BUFFERS = 3
"""One buffer is filled while the others are copied to the operating system."""


class PieceWriter:
    """Writes rows of snapshots as files of a store; its memory is BUFFERS buffers of PIECE_BYTES.

    Files are written by other threads: the error of a write is raised by a later call or at the end.
    """

    def __init__(self, store: Store, shard: int, precision: str) -> None:
        self._store, self._shard, self._precision = store, shard, precision
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * BUFFERS
        self._writes: list[Future[None] | None] = [None] * BUFFERS
        self._next = 0
        self._names: list[str] = []
        self._failed = False
        self._threads = ThreadPoolExecutor(BUFFERS - 1, "megalith piece writer")

    def write(self, snapshot: Snapshot, config: TableConfig, name: str, pieces: list[Piece]) -> int:
        """Read the next rows of a snapshot, up to one file, and start writing them."""
        chunk = self._empty_chunk(config, snapshot.rows)
        count = snapshot.read(chunk)
        if count:
            dtype = DTYPES[config.precision if self._precision == "float32" else self._precision]
            rows = chunk if count == chunk.ids.numel() else chunk.part(0, count)
            self._writes[self._next] = self._threads.submit(self._put, rows, name, dtype, pieces)
            self._names.append(name)
            self._next = (self._next + 1) % BUFFERS
        return count

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the threads; wait until all files are written and would survive a power failure."""
        self._threads.shutdown()
        if kind is None:
            for write in self._writes:
                if write is not None:
                    write.result()  # no limit: the store has one
            self._store.flush(self._names)

    def _put(self, chunk: Chunk, name: str, dtype: torch.dtype, pieces: list[Piece]) -> None:
        if self._failed:  # an unreachable store would make us wait again for every file
            return
        try:
            pieces.append(write_chunk(self._store, name, chunk, self._shard, dtype, flush=False))
        except BaseException:
            self._failed = True
            raise

    def _empty_chunk(self, config: TableConfig, rows: int) -> Chunk:
        """Return a chunk in the next buffer, after waiting until that buffer is written."""
        write = self._writes[self._next]
        if write is not None:
            self._writes[self._next] = None
            write.result()  # no limit: the store has one
        row_bytes = (32 if config.counted else 16) + 4 * config.row_floats
        size = max(1, min(rows, PIECE_BYTES // row_bytes))
        if self._buffers[self._next].numel() < size * row_bytes:
            # Not on huge pages: on some virtual machines their first write takes as long as writing the file.
            self._buffers[self._next] = torch.empty(size * row_bytes, dtype=torch.uint8, device="cpu")
        return _chunk_in(self._buffers[self._next], config, size)


def _chunk_in(buffer: Tensor, config: TableConfig, n: int) -> Chunk:
    """Return a chunk of n rows whose columns are views of a buffer: integers first, for their alignment."""
    states = config.state_columns
    integers = ["ids", "time", *(_COUNTED if config.counted else ())]
    widths = [config.dim, *(column.end - column.start for column in states)]
    sizes = [8 * n] * len(integers) + [4 * n * width for width in widths]
    parts = buffer[: sum(sizes)].split_with_sizes(sizes)
    whole = {name: part.view(torch.int64) for name, part in zip(integers, parts, strict=False)}
    floats = [part.view(torch.float32).view(n, -1) for part in parts[len(integers) :]]
    state = {column.key: values for column, values in zip(states, floats[1:], strict=True)}
    return Chunk(whole["ids"], floats[0], state, whole["time"], whole.get("count"), whole.get("step"))
