"""ParquetReader: reads Parquet files one row group at a time.

A shard is every world_size-th row group. If there are fewer row groups than ranks, each rank reads its part
of every row group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megalith.data.arrow import arrow
from megalith.data.batch import Position
from megalith.data.column_reader import ColumnChunk, ColumnReader
from megalith.data.reader import position_integer
from megalith.errors import InputError

CHUNK_ROWS = 32_768


class _Group(NamedTuple):
    """Rows start to stop of a row group, or a file that cannot be read."""

    file: Path
    group: int
    first: int
    """Number of the group's first row in the file."""
    start: int
    stop: int
    fault: tuple[str, str] | None = None
    """Reason and message if the file cannot be read."""


class ParquetReader(ColumnReader):
    """Reads Parquet files.

    A list column gives rows with several ids, text is hashed, and a null is an empty row. Rows are counted
    from 0.

    Args:
        paths: Files, directories or patterns.
        schema: The columns to read.
        batch_size: Rows per batch.
        drop_last: See `Reader`.
        on_error: See `Reader`. A column that is missing in the first file always raises.
        binary_labels: See `Reader`.

    Raises:
        InputError: A file is not Parquet, or a column is missing or has the wrong type.
    """

    suffixes = (".parquet", ".pq")

    def _open(self) -> None:
        self._groups = [group for file in self.files for group in self._list_groups(file)]

    @property
    def num_rows(self) -> int:
        """Number of rows of this shard, bad rows included."""
        return sum(group.stop - group.start for group in self._own(self.position["split"]))

    def _list_groups(self, file: Path) -> Iterator[_Group]:
        try:
            with arrow("pyarrow.parquet").ParquetFile(file) as opened:
                kinds = {field.name: field.type for field in opened.schema_arrow}
                meta = opened.metadata
                sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        except (arrow().ArrowException, OSError) as error:
            fault = "unreadable file", f"{file}: cannot be read as Parquet: {error}"
            yield self._faulty(file, fault, 1)
            return
        wrong = self._columns_fault(kinds, file)
        if wrong is not None:
            yield self._faulty(file, wrong, sum(sizes))
            return
        first = 0
        for i, size in enumerate(sizes):
            yield _Group(file, i, first, 0, size)
            first += size

    def _faulty(self, file: Path, fault: tuple[str, str], rows: int) -> _Group:
        if self.on_error == "raise" or (file == self.files[0] and fault[0] != "unreadable file"):
            raise InputError(fault[1])
        return _Group(file, -1, 0, 0, rows, fault)

    @property
    def _splits(self) -> bool:
        return len(self._groups) < self.world_size

    def _own(self, split: bool) -> list[_Group]:
        """The row groups of this shard, or its part of every row group."""
        rank, ranks = self.rank, self.world_size
        if not split:
            return self._groups[rank::ranks]
        parts = []
        for group in self._groups:
            size = group.stop
            parts.append(group._replace(start=size * rank // ranks, stop=size * (rank + 1) // ranks))
        return parts

    def _start(self) -> Position:
        return {**self._at_part(0, self._splits), "row": 0}

    def _parts(self, split: bool) -> tuple[str, list[tuple[Path, int]]]:
        return "group", [(group.file, group.group) for group in self._own(split)]

    def _check(self, position: Position) -> None:
        self._check_part(position)
        for group in self._own(position["split"])[position["group"] : position["group"] + 1]:
            position_integer(position, "row", group.stop - group.start)

    def _chunks(self, position: Position) -> Iterator[ColumnChunk]:
        done, split = position["row"], position["split"]
        for i, group in enumerate(self._own(split)):
            if i < position["group"]:
                continue
            if group.fault is not None:
                self._bad(*group.fault, group.stop - group.start)
            else:
                yield from self._read(group, done, self._at_part(i, split))
            done = 0

    def _read(self, group: _Group, done: int, at_group: Position) -> Iterator[ColumnChunk]:
        at, begin = 0, group.start + done
        rows = (
            -(-CHUNK_ROWS // self.batch_size) * self.batch_size
        )  # so that few batches need rows of two chunks
        base = group.first + group.start

        def after(number: int) -> Position:
            return {**at_group, "row": number - base + 1}

        try:
            with arrow("pyarrow.parquet").ParquetFile(group.file) as opened:
                columns = self._columns
                for table in opened.iter_batches(batch_size=rows, row_groups=[group.group], columns=columns):
                    end = at + len(table)
                    low, high = max(at, begin), min(end, group.stop)
                    if low < high:
                        numbers = group.first + np.arange(low, high)
                        yield ColumnChunk(group.file, table.slice(low - at, high - low), numbers, after)
                    at = end
                    if at >= group.stop:
                        break
        except (arrow().ArrowException, OSError) as error:
            lost = group.stop - max(at, begin)
            where = f"{group.file}: row {group.first + max(at, begin)}"
            self._bad("unreadable file", f"{where}: cannot be read from this row: {error}", lost)
