"""RankRows: the rows of tables over ranks, sent to rank 0 in chunks while it writes an export.

All ranks make the same rounds, and rank 0 decides what each of them is:

    message    from -> to      content
    command    rank 0 -> all   a table to scan from its beginning; to continue with it; or the end, with
                               the error of rank 0
    sizes      all -> all      the number of rows of each rank's next chunk, or the error of its scan
    chunks     all -> rank 0   ids int64 [k], then rows float32 [k, dim]

A round without rows ends the scan of a table. A round runs in the thread of the exchange as one task, so an
interrupted rank 0 still completes it before it sends the end. The rows of a round are limited for all ranks
together; rank 0 never holds a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.distributed.exchange import Exchange
from megalith.errors import ExportError, MegalithError
from megalith.shards import Shards
from megalith.table import Chunk

ROWS_PER_ROUND = 65536
"""Number of rows of all ranks together that a round sends at most, but at least one row of each rank."""

RowSource = Callable[[str], Iterator[tuple[Tensor, Tensor]]]
"""Table -> chunks of distinct ids int64 [k] and rows float32 [k, dim]. Called twice for each table."""


@dataclass(frozen=True)
class _Command:
    """What rank 0 wants: a table, to scan it from its beginning; None: the next chunks of that table."""

    table: str | None = None
    is_end: bool = False
    error: str | None = None
    """With `is_end`: why rank 0 has failed; None: it has not."""


class RankRows:
    """The rows of all ranks, in an order that is the same as long as no table changes."""

    def __init__(self, tables: Mapping[str, Shards]) -> None:
        exchange = next(iter(tables.values())).ranks
        assert isinstance(exchange, Exchange)
        self._tables, self._exchange = tables, exchange
        self._chunk_size = max(1, ROWS_PER_ROUND // self._exchange.size)
        self._scan: Iterator[Chunk] = iter(())
        self._failure: Exception | None = None
        """The error of this rank's scan."""

    def write(self, write: Callable[[RowSource], None]) -> None:
        """Call a function on rank 0 with the rows of all ranks; if it fails, raise on all. A collective
        call."""
        if self._exchange.rank:
            self._send_all()
            return
        try:
            write(self._rows)
        except BaseException as error:
            with suppress(MegalithError):  # the other ranks cannot be reached
                self._round(_Command(is_end=True, error=f"{type(error).__name__}: {error}"))
            raise
        self._round(_Command(is_end=True))

    def _rows(self, table: str) -> Iterator[tuple[Tensor, Tensor]]:
        command = _Command(table)
        while (chunks := self._round(command)[1]) is not None:
            yield from chunks
            command = _Command()

    def _send_all(self) -> None:
        """Send rows until rank 0 has written them, on the other ranks."""
        command = _Command()
        while not command.is_end:
            command, _ = self._round(None)
        if self._failure is not None:
            raise self._failure
        if command.error is not None:
            raise ExportError(f"rank 0: {command.error}")

    # ---- a round

    def _round(self, command: _Command | None) -> tuple[_Command, list[tuple[Tensor, Tensor]] | None]:
        """Make a round; return rank 0's command and, on rank 0, the chunks; None if no rank has any more."""
        return self._exchange.run(lambda: self._exchange_chunks(command))

    def _exchange_chunks(
        self, command: _Command | None
    ) -> tuple[_Command, list[tuple[Tensor, Tensor]] | None]:
        exchange = self._exchange
        own: _Command = exchange.broadcast(command)
        if own.is_end:
            return own, None
        chunk = self._next_chunk(own)
        size = None if chunk is None else chunk.ids.numel()
        sizes = exchange.gather(size if self._failure is None else f"{self._failure}")
        for rank, found in enumerate(sizes):
            if isinstance(found, str):
                if exchange.rank:
                    return own, None  # rank 0 sends the end
                raise self._failure or ExportError(f"rank {rank}: {found}")
        if all(found is None for found in sizes):
            return own, None
        bytes_of = [(found or 0) * (8 + 4 * self._dim) for found in sizes]
        none = [0] * (exchange.size - 1)
        received = exchange.all_to_all(
            torch.empty(0, dtype=torch.uint8, device="cpu") if chunk is None else _as_bytes(chunk),
            [bytes_of[exchange.rank], *none],
            [0, *none] if exchange.rank else bytes_of,
            "export: rows to rank 0",
        )
        if exchange.rank:
            return own, None
        return own, [self._chunk_of(part) for part in received.split(bytes_of) if part.numel()]

    def _next_chunk(self, command: _Command) -> Chunk | None:
        try:
            if command.table is not None:
                shards = self._tables[command.table]
                self._scan = shards.scan(command.table, self._chunk_size)
                self._dim = shards.configs[command.table].dim
            return next(self._scan, None)
        except Exception as error:
            self._failure = error
            return None

    def _chunk_of(self, part: Tensor) -> tuple[Tensor, Tensor]:
        count = part.numel() // (8 + 4 * self._dim)
        ids, rows = part.split([8 * count, 4 * self._dim * count])
        # A copy, because the address of the ids must be a multiple of 8.
        return ids.clone().view(torch.int64), rows.view(torch.float32).view(count, self._dim)


def _as_bytes(chunk: Chunk) -> Tensor:
    parts = (chunk.ids.contiguous(), chunk.rows.contiguous())
    return torch.cat([part.view(torch.uint8).flatten() for part in parts])
