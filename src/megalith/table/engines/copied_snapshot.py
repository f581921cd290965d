"""CopiedSnapshot: the rows of a snapshot, copied when it began."""

from __future__ import annotations

from torch import Tensor

from megalith.table.table_data import Chunk


class CopiedSnapshot:
    """The rows of a snapshot, the next row to read, and the ids that were drained for it.

    Args:
        rows: The rows.
        consumer: Number of the consumer whose touched rows were drained, or -1.
        drained: The updated and removed ids that were drained.
    """

    def __init__(self, rows: Chunk, consumer: int, drained: tuple[Tensor, Tensor]) -> None:
        self._rows = rows
        self._at = 0
        self.consumer = consumer
        self.drained = drained

    def read(self, chunk: Chunk) -> int:
        """Fill a chunk with the next rows.

        Args:
            chunk: Receives the rows from its start.

        Returns:
            Number of rows written; 0 at the end.
        """
        n = min(chunk.ids.numel(), self._rows.ids.numel() - self._at)
        part = self._rows.part(self._at, self._at + n)
        chunk.ids[:n], chunk.time[:n] = part.ids, part.time
        if chunk.count is not None and chunk.step is not None:
            assert part.count is not None
            assert part.step is not None
            chunk.count[:n], chunk.step[:n] = part.count, part.step
        for target, column in zip(chunk.columns(), part.columns(), strict=True):
            target[:n] = column
        self._at += n
        return n
