"""Snapshot: a table as it was at one moment, read while training continues.

Before a row changes, the engine saves a copy of it, so the reader sees the row as it was when the snapshot
started. The room for copies is bounded: when it is full, writers wait for the reader, and raise if it reads
nothing for ten minutes. Read a snapshot from a different thread than the one that writes, and always call
`close`; any thread may do so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType

from megalith.errors import UsageError
from megalith.table.engines.contract import Engine
from megalith.table.table_data import Chunk, SnapshotStart


class Snapshot:
    """The result of `Table.snapshot`.

    `rows` and `live` are the numbers of rows in the snapshot and in the table when it started; `removed`
    holds the ids removed since the consumer's last drain, int64; `pending` the ids without a row that
    `MinCount` counted, and their counts; `waited` the seconds that writers waited for the reader, known after
    `close`.
    """

    def __init__(self, engine: Engine, start: SnapshotStart) -> None:
        self.rows, self.live, self.removed, self.pending = start
        self.waited = 0.0
        self._engine = engine
        self._open = True
        self._lock = threading.Lock()  # after `close` nothing is read from the table's next snapshot

    def read(self, chunk: Chunk) -> int:
        """Read the next rows into a chunk from its start; return their number, less than its size only at the
        end.

        The chunk is from `Table.new_chunk`. UsageError: the snapshot was closed.
        """
        size, filled = chunk.ids.numel(), 0
        while filled < size:
            part = chunk.part(filled, min(size, filled + self._engine.snapshot_rows))
            with self._lock:
                if not self._open:
                    raise UsageError(f"table {self._engine.name!r}: this snapshot was closed")
                count = self._engine.read_snapshot(part)
            if not count:
                break
            filled += count
        return filled

    @property
    def pressure(self) -> float:
        """Used part of the room for saved rows, 0 to 1; at 1 writers wait."""
        return self._engine.snapshot_pressure()

    def chunks(self, chunk_size: int) -> Iterator[Chunk]:
        """Yield the remaining rows in chunks of at least one row, each with its own memory."""
        while True:
            chunk = self._engine.new_chunk(min(chunk_size, max(1, self.rows)))
            count = self.read(chunk)
            if not count:
                return
            yield chunk.part(0, count)

    def close(self, *, give_back: bool = False) -> None:
        """End the snapshot. A second call has no effect.

        With `give_back` the drained rows of the consumer are marked as touched again, for instance after a
        failed save.
        """
        with self._lock:
            if self._open:
                self._open = False
                self.waited = self._engine.end_snapshot(give_back)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(give_back=kind is not None)
