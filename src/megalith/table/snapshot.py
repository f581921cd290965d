"""Snapshot: a table as it was at one moment, read while training goes on.

A row about to change is first set aside, so the reader sees what was there when the snapshot was taken. What
may be set aside is bounded: when it is full, whoever writes waits for the reader. Read from another thread
than writes come from, and always end with `close`.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from torch import Tensor

from megalith.errors import UsageError
from megalith.table.table_data import Chunk

if TYPE_CHECKING:
    from megalith.table.table import Table

STEP_ROWS = 4096
"""Rows read while a writer is kept out."""


class Snapshot:
    """What `Table.snapshot` gives.

    rows: how many it holds. live: how many the table had then. removed: ids removed since the consumer's last
    drain, int64. waited: seconds writers stood still for the reader, known after `close`.
    """

    def __init__(self, table: Table, rows: int, live: int, removed: Tensor) -> None:
        self.table = table
        self.rows = rows
        self.live = live
        self.removed = removed
        self.waited = 0.0
        self._open = True

    def read(self, chunk: Chunk) -> int:
        """Fills a chunk (`Table.new_chunk`) from its beginning; the number of rows, 0 at the end."""
        if not self._open:
            raise UsageError(f"table {self.table.name!r}: this snapshot was closed")
        size, filled = chunk.ids.numel(), 0
        while filled < size:
            part = chunk.part(filled, min(size, filled + STEP_ROWS))
            count = self.table._read_snapshot(part)
            if not count:
                break
            filled += count
        return filled

    @property
    def pressure(self) -> float:
        """How full the room for rows set aside is: 0 to 1, where writers wait."""
        return self.table._snapshot_pressure()

    def chunks(self, chunk_size: int) -> Iterator[Chunk]:
        """The rows in chunks of their own memory."""
        while True:
            chunk = self.table.new_chunk(min(chunk_size, max(1, self.rows)))
            count = self.read(chunk)
            if not count:
                return
            yield chunk.part(0, count)

    def close(self, *, give_back: bool = False) -> None:
        """Ends it. give_back: the consumer's touched rows count as touched again, as after a failed save."""
        if self._open:
            self._open = False
            self.waited = self.table._end_snapshot(give_back)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(give_back=kind is not None)
