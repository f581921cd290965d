"""The overlay: rows written since an export, in front of its frozen ones.

Each table's rows lie in a Table of one column more, which says whether the row is there or gone. So a row and
its end are one write, and a reader beside a writer sees the one or the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from megalith.table import SGD, Table, TableConfig, Zeros

THERE, GONE = 1.0, -1.0
RowsByTable = Mapping[str, tuple[Tensor, Tensor]]
_NOTHING: Mapping[str, Tensor] = MappingProxyType({})


class Overlay:
    """Rows by table, written over frozen ones. dims: the width of each table's rows.

    hides_base: an id that is not here has no row, whatever lies below. Threads may share it; one at a time
    writes.
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
        """How many ids of a table were written, removals included."""
        return len(self._tables[table])

    def apply(self, rows: RowsByTable, removed: Mapping[str, Tensor] = _NOTHING) -> None:
        """Writes rows float32 [n, dim], then removes ids; what is given is taken to be checked."""
        for name, (ids, values) in rows.items():
            there = torch.full((ids.numel(), 1), THERE)
            self._tables[name].assign(ids, torch.cat([values, there], 1))  # faster than filling columns
        for name, ids in removed.items():
            if self.hides_base:
                self._tables[name].remove(ids)
                continue
            flagged = torch.zeros(ids.numel(), self.dims[name] + 1)
            flagged[:, -1] = GONE
            self._tables[name].assign(ids, flagged)

    def read(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows float32 [n, dim], zeros where none is, and float32 [n]: THERE, GONE, or 0 for not written."""
        flagged = self._tables[table].lookup(ids)
        return flagged[:, :-1], flagged[:, -1]

    def scan(self, table: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """All that was written, piece by piece: ids, rows, flags."""
        for chunk in self._tables[table].scan():
            yield chunk.ids, chunk.rows[:, :-1], chunk.rows[:, -1]
