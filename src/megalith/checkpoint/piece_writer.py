"""PieceWriter: writes a snapshot's rows to files, one buffer being filled while others are being written."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from megalith.checkpoint.manifest import Piece
from megalith.checkpoint.saved_rows import write_chunk
from megalith.storage.store import Store
from megalith.table import Chunk, Table
from megalith.table.snapshot import Snapshot

PIECE_BYTES = 32 << 20
"""Of a file of rows."""
BUFFERS = 3
"""One is being filled, one copied to the system, one on its way to the disk: all the memory a pen takes."""


class PieceWriter:
    """Writes rows of snapshots as files of a store. A write's error comes with a later call or `close`."""

    def __init__(self, store: Store, shard: int, precision: torch.dtype) -> None:
        self._store, self._shard, self._precision = store, shard, precision
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * BUFFERS
        self._busy: list[Future[None] | None] = [None] * BUFFERS
        self._turn = 0
        self._failed = False
        self._threads = ThreadPoolExecutor(BUFFERS - 1, "megalith pen")

    def write(self, snapshot: Snapshot, name: str, pieces: list[Piece]) -> int:
        """Reads up to a file's rows of a snapshot and sends them off under this name; 0 at its end.

        pieces: gets the file's entry once it is written.
        """
        chunk = self._blank(snapshot.table, snapshot.rows)
        count = snapshot.read(chunk)
        if count:
            rows = chunk.part(0, count)
            self._busy[self._turn] = self._threads.submit(self._put, rows, name, pieces)
            self._turn = (self._turn + 1) % BUFFERS
        return count

    def close(self) -> None:
        """Returns when everything is written."""
        try:
            for busy in self._busy:
                if busy is not None:
                    busy.result()
        finally:
            self._threads.shutdown()

    def _put(self, chunk: Chunk, name: str, pieces: list[Piece]) -> None:
        if self._failed:  # a store that is away would keep us waiting again
            return
        try:
            pieces.append(write_chunk(self._store, name, chunk, self._shard, self._precision))
        except BaseException:
            self._failed = True
            raise

    def _blank(self, table: Table, rows: int) -> Chunk:
        """A chunk in the buffer whose turn it is, when that is free."""
        busy = self._busy[self._turn]
        if busy is not None:
            self._busy[self._turn] = None
            busy.result()
        row_bytes = 16 + 4 * table.config.row_floats
        size = max(1, min(rows, PIECE_BYTES // row_bytes))
        if self._buffers[self._turn].numel() < size * row_bytes:
            self._buffers[self._turn] = torch.empty(size * row_bytes, dtype=torch.uint8)
        return _carve(self._buffers[self._turn], table, size)


def _carve(buffer: Tensor, table: Table, n: int) -> Chunk:
    at = 0

    def take(dtype: torch.dtype, *shape: int) -> Tensor:
        nonlocal at
        size = torch.Size(shape).numel() * dtype.itemsize
        at += size
        return buffer[at - size : at].view(dtype).view(shape)

    return Chunk(
        take(torch.int64, n),
        time=take(torch.int64, n),
        rows=take(torch.float32, n, table.dim),
        state={c.key: take(torch.float32, n, c.end - c.start) for c in table.config.state_columns},
    )
