"""Snapshots of engines that copy all rows when a snapshot begins."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.table.engines.contract import Engine
from megalith.table.table_data import Chunk, SnapshotStart


class CopiedSnapshot:
    """The rows of a snapshot, the next row to read, and the ids that were drained for it."""

    def __init__(self, rows: Chunk, consumer: int, drained: tuple[Tensor, Tensor]) -> None:
        self._rows = rows
        self._at = 0
        self.consumer = consumer
        self.drained = drained

    def read(self, chunk: Chunk) -> int:
        """Fill a chunk with the next rows."""
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


class CopyingEngine(Engine):
    """An engine that copies the rows of a snapshot at once. A subclass says which rows and how."""

    _snapshot: CopiedSnapshot | None = None

    @property
    @abstractmethod
    def _guard(self) -> AbstractContextManager[object]:
        """The lock of the table."""

    @property
    @abstractmethod
    def _consumers(self) -> Container[int]:
        """The numbers of the consumers of touched rows."""

    @abstractmethod
    def _copy_rows(self, consumer: int) -> Chunk:
        """Copy the rows that a consumer has not drained, or all rows if it is -1."""

    def begin_snapshot(
        self, consumer: int, touched_only: bool, room: int, with_pending: bool
    ) -> SnapshotStart:
        # Copies the rows at once.
        with self._guard:
            if self._snapshot is not None:
                raise InputError(f"table {self.name!r} already has an open snapshot: close it first")
            none = torch.empty(0, dtype=torch.int64, device="cpu")
            total = len(self)
            rows = self._copy_rows(consumer if touched_only else -1)
            drained = (none, none) if consumer < 0 else self.drain(consumer)
            self._snapshot = CopiedSnapshot(rows, consumer, drained)
            pending = self.pending() if with_pending else (none, none)
            return SnapshotStart(rows.ids.numel(), total, drained[1], pending)

    def read_snapshot(self, chunk: Chunk) -> int:
        assert self._snapshot is not None
        return self._snapshot.read(chunk)

    def snapshot_pressure(self) -> float:
        return 0.0

    def end_snapshot(self, give_back: bool) -> float:
        with self._guard:
            copy, self._snapshot = self._snapshot, None
            if copy is not None and give_back and copy.consumer in self._consumers:
                for ids in copy.drained:
                    self.mark(copy.consumer, ids)
        return 0.0
