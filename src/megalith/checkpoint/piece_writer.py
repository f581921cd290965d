"""PieceWriter: writes the rows of snapshots to files, filling one buffer while others are being written.

Files are not flushed one by one: the system writes them to the disk in the background, and `flush` waits for
all of them. Nothing may refer to a file before.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from megalith.checkpoint.manifest import Piece
from megalith.checkpoint.saved_rows import write_chunk
from megalith.storage.store import Store
from megalith.table import Chunk, TableConfig
from megalith.table.rounding import DTYPES
from megalith.table.snapshot import Snapshot

PIECE_BYTES = 32 << 20
"""The size of a file of rows."""
BUFFERS = 3
"""One buffer is filled while the others are copied to the operating system."""


class PieceWriter:
    """Writes rows of snapshots as files of a store; its memory is BUFFERS buffers of PIECE_BYTES.

    Files are written by other threads: the error of a write is raised by a later call or by `flush`.
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
            rows = chunk.part(0, count)
            self._writes[self._next] = self._threads.submit(
                self._put, rows, name, self._dtype(config), pieces
            )
            self._names.append(name)
            self._next = (self._next + 1) % BUFFERS
        return count

    def flush(self) -> None:
        """Wait until all files are written and would survive a power failure; raise the error of a write."""
        for write in self._writes:
            if write is not None:
                write.result()
        self._store.flush(self._names)
        self._names = []

    def close(self) -> None:
        """End the threads, after the writes in progress."""
        self._threads.shutdown()

    def _dtype(self, config: TableConfig) -> torch.dtype:
        return DTYPES[config.precision if self._precision == "float32" else self._precision]

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
            write.result()
        row_bytes = (32 if config.counted else 16) + 4 * config.row_floats
        size = max(1, min(rows, PIECE_BYTES // row_bytes))
        if self._buffers[self._next].numel() < size * row_bytes:
            # Not on huge pages: on some virtual machines their first write takes as long as writing the file.
            self._buffers[self._next] = torch.empty(size * row_bytes, dtype=torch.uint8, device="cpu")
        return _chunk_in(self._buffers[self._next], config, size)


def _chunk_in(buffer: Tensor, config: TableConfig, n: int) -> Chunk:
    """Return a chunk of n rows whose columns are views of a buffer."""
    at = 0

    def take(dtype: torch.dtype, *shape: int) -> Tensor:
        nonlocal at
        size = torch.Size(shape).numel() * dtype.itemsize
        at += size
        return buffer[at - size : at].view(dtype).view(shape)

    return Chunk(
        take(torch.int64, n),
        time=take(torch.int64, n),
        count=take(torch.int64, n) if config.counted else None,
        step=take(torch.int64, n) if config.counted else None,
        rows=take(torch.float32, n, config.dim),
        state={c.key: take(torch.float32, n, c.end - c.start) for c in config.state_columns},
    )
