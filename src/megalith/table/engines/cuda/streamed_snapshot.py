"""StreamedSnapshot: the rows of a table as they were at one moment, read in blocks while writes continue.

A flag per row number is on the device. Reader and writers take rows in this way:

    row                     flag     what happens
    not in the snapshot     0        -
    in it, not taken        1        the reader gathers the next block of such rows, by ascending number; a
                                     writer gathers those that it is about to change: they are saved
    taken                   0        on its way to the host, or there

Gathers run under the lock of the engine, so a row is taken once, before its first change. The reader has two
blocks: one on the host, the next one on its way. Saved rows are on the host until the reader takes them; it
takes them first. When `room` of them wait, writers wait before their next call; one call may exceed it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from megalith.errors import UsageError
from megalith.table.engines.cuda.streams import ArrivingColumns, HostCopies, all_columns
from megalith.table.table_data import Chunk

WINDOW = 1 << 20  # Row numbers among which the reader looks for rows at once


class StreamedSnapshot:
    def __init__(
        self,
        flags: Tensor,
        room: int,
        block: int,
        guard: AbstractContextManager[object],
        gather: Callable[[Tensor], Chunk],
        copies: HostCopies,
    ) -> None:
        self._flags, self._room, self._block = flags, room, block
        self._guard, self._gather, self._copies = guard, gather, copies
        self.rows = int(flags.sum())
        self.waited = 0.0
        self._left = self.rows  # rows that are not taken
        self._window = torch.empty(0, dtype=torch.int32, device=flags.device)
        self._at = 0  # the first row number after the window
        self._thinned = False  # whether writers have taken rows of the window
        self._ahead: ArrivingColumns | None = None
        self._current: list[Tensor] | None = None
        self._begin = 0  # in the current block
        self._saved: deque[ArrivingColumns] = deque()
        self._saved_rows = 0
        self._open = True
        self._changed = threading.Condition()

    # ---- writers

    def save(self, rows: Tensor) -> None:
        """Take rows that a writer is about to change. The caller holds the lock of the engine."""
        # rows: int32 [n].
        if self._left and rows.numel():
            known = rows[(rows >= 0) & (rows < self._flags.numel())]
            chosen = known[self._flags[known.long()] != 0]
            self._save(torch.unique(chosen))
            self._thinned = True

    def _save(self, rows: Tensor) -> None:
        for part in rows.split(self._block):
            if part.numel():
                columns = self._take(part)
                with self._changed:
                    self._saved.append(columns)
                    self._saved_rows += part.numel()

    def save_all(self) -> None:
        while (rows := self._next_rows()) is not None:
            self._save(rows)

    def wait_for_reader(self, table: str, seconds: float) -> None:
        """Wait until there is room for saved rows."""
        if self._saved_rows < self._room:
            return
        began = time.perf_counter()
        with self._changed:
            while self._saved_rows >= self._room and self._open:
                # The limit is for a reader that has stopped; a slow one may take longer for all rows.
                if not self._changed.wait(seconds):
                    raise UsageError(
                        f"table {table!r}: no row of its open snapshot was read for {seconds:.0f} s, and "
                        "there is no memory for more copies of changed rows: read the snapshot or close it"
                    )
            self.waited += time.perf_counter() - began

    @property
    def pressure(self) -> float:
        """The used part of the room, 0 to 1."""
        return min(1.0, self._saved_rows / self._room)

    # ---- the reader

    def read(self, chunk: Chunk) -> int:
        if self._current is None and not self._next_block():
            return 0
        assert self._current is not None
        left = self._current[0].numel() - self._begin
        n = min(chunk.ids.numel(), left)
        for target, column in zip(all_columns(chunk), self._current, strict=True):
            target[:n] = column[self._begin : self._begin + n]
        self._begin += n
        if n == left:
            self._current = None
        return n

    def _next_block(self) -> bool:
        """Make the next block the current one; start the one after it."""
        block = self._take_saved()
        if block is None:
            with self._guard:
                block = self._ahead or self._gather_block()
                self._ahead = None if block is None else self._gather_block()
            if block is None:  # the last rows may have been saved meanwhile
                block = self._take_saved()
        if block is None:
            return False
        self._current, self._begin = block.wait(), 0  # no limit: a copy of the device
        return True

    def _take_saved(self) -> ArrivingColumns | None:
        with self._changed:
            if not self._saved:
                return None
            block = self._saved.popleft()
        size = block.wait()[0].numel()  # no limit: a copy of the device
        with self._changed:
            self._saved_rows -= size
            self._changed.notify_all()
        return block

    def _gather_block(self) -> ArrivingColumns | None:
        rows = self._next_rows()
        return None if rows is None else self._take(rows)

    def _next_rows(self) -> Tensor | None:
        """Return the numbers of the next rows that are not taken, int32 [n]; None at the end."""
        while self._left:
            while not self._window.numel():
                found = self._flags[self._at : self._at + WINDOW].nonzero()[:, 0]
                self._window = (found + self._at).to(torch.int32)
                self._at += WINDOW
                self._thinned = False
            rows, self._window = self._window[: self._block], self._window[self._block :]
            if self._thinned:  # the number of rows is known to the device only, so the host waits
                rows = rows[self._flags[rows.long()] != 0]
            if rows.numel():
                return rows
        return None

    def _take(self, rows: Tensor) -> ArrivingColumns:
        self._flags[rows.long()] = 0
        self._left -= rows.numel()
        return self._copies.to_host(all_columns(self._gather(rows)))

    def close(self) -> None:
        """End the snapshot: writers continue."""
        with self._changed:
            self._open = False
            self._changed.notify_all()


def flag_rows(size: int, blocks: Iterable[Tensor], device: torch.device) -> Tensor:
    # returns: uint8 [size].
    flags = torch.zeros(size, dtype=torch.uint8, device=device)
    for rows in blocks:
        flags[rows.long()] = 1
    return flags
