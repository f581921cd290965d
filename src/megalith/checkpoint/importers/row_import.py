"""RowImport: the part that all importers share, from rows of another system's files to tables.

An importer provides a function that iterates over all rows in chunks of bounded size. It is called twice:
first to validate all rows, then to write them, so that a bad file is rejected before any table changes. With
several ranks each rank iterates over all rows, and its shards keep the rows that it owns.
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
from megalith.ops import checks
from megalith.ops.checks import all_finite
from megalith.table import Chunk, TableConfig
from megalith.table.table_data import MAX_TIME

OnError = Literal["raise", "skip"]
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class ImportReport:
    """The result of an import.

    Attributes:
        rows: Number of rows read, by table of the collection.
        kept: Number of rows now in this process's table, by table.
        left_out: What was not imported, with the reason.
    """

    rows: dict[str, int]
    kept: dict[str, int]
    left_out: dict[str, str]


@dataclass(frozen=True)
class ImportedRows:
    """Some rows of a table."""

    table: str  # The name of the table in the collection
    where: str  # The file, for messages
    ids: Tensor  # int64 [n]
    rows: Tensor  # Weights, float32 [n, dim]
    # Optimizer state by "segment number/name", float32 [n, size]; empty if it starts fresh
    state: Mapping[str, Tensor]
    time: Tensor  # Last-update times in seconds, int64 [n]


ReadRows = Callable[[], Iterable[ImportedRows]]


class RowImport:
    """An import into tables of a collection."""

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
            raise InputError(
                f'tables must map tables to names in the source ({{"user": "name"}}), got {tables!r}'
            )
        checks.one_of(on_error, ("raise", "skip"), "on_error")
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

    def run(self, read_rows: ReadRows) -> ImportReport:
        """Validate all rows, then write them."""
        read, bad = Counter(dict.fromkeys(self.configs, 0)), Counter[str]()
        for piece in read_rows():
            read[piece.table] += piece.ids.numel()
            bad[piece.table] += int((~self._usable(piece)).sum())
        self.shards.reserve(read)
        for piece in read_rows():
            self._write(piece)
        kept = {name: stats.rows for name, stats in self.shards.stats().items() if name in self.configs}
        for name, rows in read.items():
            if bad[name]:
                self.left_out[f"{name}: {bad[name]} rows"] = "they contain NaN or Inf"
            again = rows - bad[name] - kept[name]
            if again and self.shards.world_size == 1:
                self.left_out[f"{name}: {again} rows"] = (
                    "their ids occur again, and the last row of an id is kept"
                )
        return ImportReport(dict(read), kept, self.left_out)

    def _usable(self, piece: ImportedRows) -> Tensor:
        """Return which rows are finite, bool [n]; unless such rows are skipped, raise if one is not."""
        finite = torch.ones(piece.ids.numel(), dtype=torch.bool, device="cpu")
        for values in (piece.rows, *piece.state.values()):
            if not all_finite(values):
                finite &= torch.isfinite(values).all(1)
        if not self._skip and not bool(finite.all()):
            first = int(piece.ids[~finite][0])
            raise CheckpointError(
                f"{piece.where}: the row of id {first} (table {piece.table!r}) contains NaN or Inf; "
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
    """Return the optimizer state of rows that were never trained."""
    # returns: float32 [n, size] by "segment number/name".
    return {c.key: torch.full((n, c.end - c.start), c.initial, device="cpu") for c in config.state_columns}


def spread_state(config: TableConfig, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split the optimizer state of whole rows into that of the table's segments."""
    # whole: state by name: float32 [n, dim], of which each segment takes its columns, or [n, 1] for one
    # number per row.
    state, start = {}, 0
    for number, segment in enumerate(config.segments):
        end = start + segment.dim
        for kept in segment.optimizer.states(segment.dim):
            values = whole[kept.name]
            alone = values.shape[1] == 1 and kept.size == 1
            state[f"{number}/{kept.name}"] = values if alone else values[:, start:end]
        start = end
    return state


def optimizer_of(config: TableConfig) -> str:
    """Name the optimizer of a table."""
    names = [segment.optimizer.name for segment in config.segments]
    return names[0] if len(set(names)) == 1 else " and ".join(names)


def pieces_of(rows: int, floats: int) -> Iterator[slice]:
    """Split rows into slices of bounded size."""
    size = chunk_rows(floats)
    return (slice(at, min(rows, at + size)) for at in range(0, rows, size))


def chunk_rows(floats: int) -> int:
    """Return the number of rows to import at a time."""
    return max(1, min(65_536, CHUNK_BYTES // (4 * floats + 16)))


def _seconds(time: float | None) -> int:
    if time is None:
        return int(clock.time())
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time <= MAX_TIME:
        raise InputError(f"time must be seconds between 0 and {MAX_TIME}, got {time!r}")
    return int(time)
