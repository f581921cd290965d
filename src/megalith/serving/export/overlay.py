"""Overlay: rows written since an export, which take precedence over its frozen rows.

The rows of each table are in a Table with one more column, a flag: PRESENT or REMOVED. A row and its removal
are thus one write each, and a concurrent reader sees the state before or after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from megalith.table import SGD, Table, TableConfig, Zeros

PRESENT, REMOVED = 1.0, -1.0
RowsByTable = Mapping[str, tuple[Tensor, Tensor]]
_NOTHING: Mapping[str, Tensor] = MappingProxyType({})


class Overlay:
    """Rows by table that take precedence over frozen ones. Thread-safe; one thread at a time writes.

    Args:
        dims: Table -> width of its rows.
        hides_base: An id that is not in the overlay has no row, even if it has a frozen one.
    """

    def __init__(self, dims: Mapping[str, int], *, hides_base: bool = False) -> None:
        self.dims = dict(dims)
        self.hides_base = hides_base
        self._tables = {
            name: Table(
                TableConfig(name, dim=dim + 1, optimizer=SGD(0.0), initializer=Zeros(), missing="zeros")
            )
            for name, dim in self.dims.items()
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

    def apply(self, rows: RowsByTable, removed: Mapping[str, Tensor] = _NOTHING) -> None:
        """Write rows, then remove ids; the caller has validated both.

        Args:
            rows: Table -> (ids int64 [n], rows float32 [n, dim]).
            removed: Table -> ids int64 [n].
        """
        for name, (ids, values) in rows.items():
            present = torch.full((ids.numel(), 1), PRESENT)
            self._tables[name].assign(ids, torch.cat([values, present], 1))  # faster than filling columns
        for name, ids in removed.items():
            if self.hides_base:
                self._tables[name].remove(ids)
                continue
            flagged = torch.zeros(ids.numel(), self.dims[name] + 1)
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
        return flagged[:, :-1], flagged[:, -1]

    def scan(self, table: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield everything written.

        Args:
            table: Name of the table.

        Yields:
            Chunks: ids int64 [k], rows float32 [k, dim] and flags float32 [k].
        """
        for chunk in self._tables[table].scan():
            yield chunk.ids, chunk.rows[:, :-1], chunk.rows[:, -1]
