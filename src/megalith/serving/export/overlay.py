"""Overlay: rows written since an export, which take precedence over its frozen rows.

The rows of each table are in a Table with one more column, a flag: PRESENT or REMOVED. A row and its removal
are thus one write each, and a concurrent reader sees the state before or after it.

A table with codes (row_format.py) holds the codes: three bytes in each column, as an integer below 2^24,
which float32 holds exactly.
"""

from __future__ import annotations

import time as clock
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megalith.serving.export.row_format import Formats
from megalith.table import SGD, Table, TableConfig, Zeros

PRESENT, REMOVED = 1.0, -1.0
MAX_RESERVED = 1 << 24
RowsByTable = Mapping[str, tuple[Tensor, Tensor]]
_NOTHING: Mapping[str, Tensor] = MappingProxyType({})
_NO_CODES: Formats = MappingProxyType({})
_BYTES = 3  # of a column with codes


class Overlay:
    """Rows by table that take precedence over frozen ones. Thread-safe; one thread at a time writes.

    Args:
        dims: Table -> width of its rows.
        hides_base: An id that is not in the overlay has no row, even if it has a frozen one.
        codes: Tables that hold codes, and their formats. Their rows are those of the codes.
    """

    def __init__(
        self, dims: Mapping[str, int], *, hides_base: bool = False, codes: Formats = _NO_CODES
    ) -> None:
        self.dims = dict(dims)
        self.hides_base = hides_base
        self._codes = dict(codes)
        widths = self.dims | {name: -(-each.row_bytes // _BYTES) for name, each in codes.items()}
        self._tables = {
            name: Table(
                TableConfig(
                    name,
                    dim=width + 1,
                    optimizer=SGD(0.0),
                    initializer=Zeros(),
                    missing="zeros",
                    # The first write of a huge page took 30 times as long on a virtual machine, and the first
                    # push writes nothing but new pages. Requests read few rows, so small pages cost little.
                    huge_pages=False,
                )
            )
            for name, width in widths.items()
        }

    def __len__(self) -> int:
        return sum(len(table) for table in self._tables.values())

    def rows_of(self, table: str) -> int:
        """Return the number of written ids of a table, including removed ones.

        Args:
            table: Name of the table.

        Returns:
            The number of ids.
        """
        return len(self._tables[table])

    def reserve(self, rows: Mapping[str, int]) -> None:
        """Make room for rows that are about to be written.

        Args:
            rows: The number of rows of each table; room is made for at most MAX_RESERVED.
        """
        for name, count in rows.items():
            self._tables[name].reserve(min(count, MAX_RESERVED))

    def apply(self, rows: RowsByTable, removed: Mapping[str, Tensor] = _NOTHING) -> None:
        """Write rows, then remove ids; the caller has validated both.

        Args:
            rows: Table -> (ids int64 [n], rows float32 [n, dim]).
            removed: Table -> ids int64 [n].
        """
        for name, (ids, values) in rows.items():
            stored = values if name not in self._codes else _columns(self._codes[name].encode(values))
            # The engine itself: rows were validated when they arrived.
            engine: Any = self._tables[name].engine_impl
            engine.assign_filled(
                ids.contiguous(), stored.to(torch.float32).contiguous(), PRESENT, int(clock.time())
            )
        for name, ids in removed.items():
            if self.hides_base:
                self._tables[name].remove(ids)
                continue
            flagged = torch.zeros(ids.numel(), self._tables[name].dim)
            flagged[:, -1] = REMOVED
            self._tables[name].assign(ids, flagged)

    def read(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Read rows.

        Args:
            table: Name of the table.
            ids: int64 [n].

        Returns:
            Rows float32 [n, dim], zeros where there is none; and flags float32 [n]: PRESENT, REMOVED, or 0 if
            the id was not written.
        """
        flagged = self._tables[table].lookup(ids)
        return self._rows(table, flagged), flagged[:, -1]

    def _rows(self, table: str, flagged: Tensor) -> Tensor:
        stored, format = flagged[:, :-1], self._codes.get(table)
        if format is None:
            return stored
        rows = format.decode(_bytes(stored, format.row_bytes))
        rows[flagged[:, -1] != PRESENT] = 0.0
        return rows

    def scan(self, table: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield everything written.

        Args:
            table: Name of the table.

        Yields:
            Chunks: ids int64 [k], rows float32 [k, dim] and flags float32 [k].
        """
        for chunk in self._tables[table].scan():
            yield chunk.ids, self._rows(table, chunk.rows), chunk.rows[:, -1]


def _columns(codes: Tensor) -> Tensor:
    """Return codes, uint8 [n, bytes], as integers below 2^24, float32 [n, columns]."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % _BYTES)).to(torch.int32)
    low, middle, high = padded[:, 0::3], padded[:, 1::3], padded[:, 2::3]
    return (low | (middle << 8) | (high << 16)).to(torch.float32)


def _bytes(columns: Tensor, count: int) -> Tensor:
    """Return the codes of `_columns`, uint8 [n, count]."""
    integers = columns.to(torch.int32)
    parts = [(integers >> shift) & 255 for shift in (0, 8, 16)]
    return torch.stack(parts, dim=2).flatten(1)[:, :count].to(torch.uint8)
