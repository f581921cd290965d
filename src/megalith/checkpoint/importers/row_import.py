"""Rows on their way from another system's files into a collection: what every importer shares.

An importer gives a function that walks all rows, whole and in bounded pieces. It is walked twice: once to
check everything, once to write, so that a bad file is refused before a table is touched. Under a placement
over many ranks each rank walks all rows, and the shards keep those it owns.
"""

from __future__ import annotations

import time as clock
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megalith.errors import CheckpointError, InputError, UsageError
from megalith.nn import EmbeddingCollection
from megalith.ops.checks import all_finite
from megalith.table import Chunk, TableConfig
from megalith.table.table_data import MAX_TIME

OnError = Literal["raise", "skip"]
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class ImportReport:
    """What an import did, by table of the collection.

    rows: rows read. kept: rows this process's table holds now. left_out: what was not taken over, and why.
    """

    rows: dict[str, int]
    kept: dict[str, int]
    left_out: dict[str, str]


@dataclass(frozen=True)
class ImportedRows:
    """Some rows of a table. where: the file, for errors. state: empty where it starts fresh."""

    table: str
    where: str
    ids: Tensor
    rows: Tensor
    state: Mapping[str, Tensor]
    time: Tensor


Walk = Callable[[], Iterable[ImportedRows]]


class RowImport:
    """One import into some tables of a collection (None: all), which must have no rows yet.

    time: seconds, the last-update time of rows that bring none; None is now. on_error: "skip" leaves rows
    with NaN or Inf out and counts them. Raises InputError, UnknownNameError or UsageError if the arguments
    or the tables are not fit.
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        tables: Mapping[str, object] | None,
        *,
        time: float | None = None,
        on_error: OnError = "raise",
    ) -> None:
        if not isinstance(collection, EmbeddingCollection):
            raise InputError(f"an import needs an EmbeddingCollection, got {type(collection).__name__}")
        if tables is not None and not (isinstance(tables, Mapping) and tables):
            raise InputError(f'tables must map tables to names there ({{"user": "name"}}), got {tables!r}')
        if on_error not in ("raise", "skip"):
            raise InputError(f'on_error must be "raise" or "skip", got {on_error!r}')
        self.shards = collection.shards
        self.configs: dict[str, TableConfig] = {}
        self.left_out: dict[str, str] = {}
        self.time = _seconds(time)
        self._skip = on_error == "skip"
        stats = self.shards.stats()
        for name in self.shards.configs if tables is None else tables:
            self.shards.check_name(name)
            self.configs[name] = self.shards.configs[name]
            if stats[name].rows:
                raise UsageError(
                    f"table {name!r} already holds {stats[name].rows} rows: import into a new collection, or "
                    "clear it first (collection.shards.clear())"
                )

    def run(self, walk: Walk) -> ImportReport:
        """Checks all pieces, then writes them."""
        read, bad = Counter(dict.fromkeys(self.configs, 0)), Counter[str]()
        for piece in walk():
            read[piece.table] += piece.ids.numel()
            bad[piece.table] += int((~self._usable(piece)).sum())
        self.shards.reserve(read)
        for piece in walk():
            self._write(piece)
        kept = {name: stats.rows for name, stats in self.shards.stats().items() if name in self.configs}
        for name, rows in read.items():
            if bad[name]:
                self.left_out[f"{name}: {bad[name]} rows"] = "they hold NaN or Inf"
            again = rows - bad[name] - kept[name]
            if again and self.shards.world_size == 1:
                self.left_out[f"{name}: {again} rows"] = (
                    "their ids came again, and the last row of an id stays"
                )
        return ImportReport(dict(read), kept, self.left_out)

    def _usable(self, piece: ImportedRows) -> Tensor:
        """Which rows are finite, bool [n]; raises CheckpointError if one is not, unless such are skipped."""
        finite = torch.ones(piece.ids.numel(), dtype=torch.bool)
        for values in (piece.rows, *piece.state.values()):
            if not all_finite(values):
                finite &= torch.isfinite(values).all(1)
        if not self._skip and not bool(finite.all()):
            first = int(piece.ids[~finite][0])
            raise CheckpointError(
                f"{piece.where}: the row of id {first} (table {piece.table!r}) holds NaN or Inf; "
                'on_error="skip" leaves such rows out'
            )
        return finite

    def _write(self, piece: ImportedRows) -> None:
        state = piece.state or fresh_state(self.configs[piece.table], piece.ids.numel())
        chunk = Chunk(piece.ids, piece.rows, state, piece.time)
        usable = self._usable(piece)
        if not bool(usable.all()):
            chunk = Chunk(
                chunk.ids[usable],
                chunk.rows[usable],
                {key: values[usable] for key, values in state.items()},
                chunk.time[usable],
            )
        self.shards.restore(piece.table, chunk)


def fresh_state(config: TableConfig, n: int) -> dict[str, Tensor]:
    """The optimizer state of n rows that were never trained."""
    return {c.key: torch.full((n, c.end - c.start), c.initial) for c in config.state_columns}


def spread_state(config: TableConfig, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State of whole rows, given by name, as the table's segments keep it.

    whole: float32 [n, dim], of which each segment takes its columns, or [n, 1] for one number a row.
    """
    state, start = {}, 0
    for number, segment in enumerate(config.segments):
        end = start + segment.dim
        for kept in segment.optimizer.state(segment.dim):
            values = whole[kept.name]
            alone = values.shape[1] == 1 and kept.size == 1
            state[f"{number}/{kept.name}"] = values if alone else values[:, start:end]
        start = end
    return state


def optimizer_of(config: TableConfig) -> str:
    """The optimizer's name if all segments have the same, else the names joined."""
    names = [segment.optimizer.name for segment in config.segments]
    return names[0] if len(set(names)) == 1 else " and ".join(names)


def pieces_of(rows: int, floats: int) -> Iterator[slice]:
    """Rows 0 .. rows in parts of bounded size. floats: of a row, state included."""
    size = chunk_rows(floats)
    return (slice(at, min(rows, at + size)) for at in range(0, rows, size))


def chunk_rows(floats: int) -> int:
    """How many rows of this many floats make a piece."""
    return max(1, min(65_536, CHUNK_BYTES // (4 * floats + 16)))


def _seconds(time: float | None) -> int:
    if time is None:
        return int(clock.time())
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time <= MAX_TIME:
        raise InputError(f"time must be seconds between 0 and {MAX_TIME}, got {time!r}")
    return int(time)
