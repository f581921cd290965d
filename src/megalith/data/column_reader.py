"""ColumnReader: the base class of readers of files with named columns.

It converts Arrow record batches to Samples according to a Schema and finds bad rows. Opening files, sharding
and positions are in `parquet.py` and `csv.py`.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from megalith.data.arrow import (
    ColumnFault,
    arrow,
    id_source,
    ids,
    list_hint,
    numbers,
    seconds,
    why_not_ids,
    why_not_numbers,
)
from megalith.data.batch import Position, Samples
from megalith.data.files import FilePositions, Paths, data_root, list_files
from megalith.data.reader import OnError, Reader, RowBlock
from megalith.data.schema import IdSource, Schema
from megalith.errors import InputError
from megalith.ops import checks

_ID_WORDS: Mapping[IdSource, str] = {"integer": "integers as they are", "xxhash64": "hashes of text"}


class ColumnChunk(NamedTuple):
    file: Path
    table: Any
    """Arrow record batch of n rows."""
    numbers: NDArray[np.int64]
    """Number of each row in the file, int64 [n]."""
    after: Callable[[int], Position]
    """Return the position after the row with a number."""


class ColumnReader(Reader):
    """Reads files of named columns."""

    suffixes: tuple[str, ...]
    row_word = "row"

    def __init__(
        self,
        paths: Paths,
        schema: Schema,
        *,
        batch_size: int,
        drop_last: bool = False,
        on_error: OnError = "raise",
        binary_labels: bool = False,
    ) -> None:
        super().__init__(
            batch_size=batch_size, drop_last=drop_last, on_error=on_error, binary_labels=binary_labels
        )
        self._schema = _checked(schema)
        self.files = list_files(paths, self.suffixes)
        self._root = data_root(paths)
        self._positions: dict[tuple[int, int, bool], FilePositions] = {}
        self._hinted = False
        self.carried: tuple[list[str], list[Any]] = [], []
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Check the files, or the first one, so that a wrong schema raises at construction."""

    @classmethod
    def from_config(
        cls, path: str | list[str], schema: Mapping[str, Any], *, labelled: bool = True, **options: Any
    ) -> Self:
        checks.mapping(schema, "config: [data.schema]", '{"features": {"user": "user"}, "label": "clicked"}')
        if not schema.get("features"):
            raise InputError(f"config: [data.schema] must name the feature and label columns of {path}")
        if checks.flag(labelled, "reader: labelled") and not schema.get("label"):
            raise InputError(f"config: [data.schema] has no label: name the label column of {path}")
        return cls(path, Schema.from_dict({"label": None, **schema}), **options)

    @property
    def schema(self) -> Schema:
        """The columns to read. Opening the first file records where the ids of features come from."""
        return self._schema

    def with_schema(self, schema: Schema) -> Self:
        """Return a reader of the same files with another schema, such as one that `fit` returned.

        Args:
            schema: The new schema. It reads the same columns as that of this reader, or some of them.

        Returns:
            A new reader at the start of its shard.

        Raises:
            InputError: The schema reads other columns.
        """
        known = self._schema.columns
        for name in _checked(schema).columns:
            if name not in known:
                raise InputError(
                    f"reader: column {name!r} of the new schema is not one of this reader's "
                    f"({', '.join(known)}); open the files with that schema instead"
                )
        other = self._copy()
        other._schema = schema
        return other

    def carrying(self, columns: Sequence[str]) -> Self:
        """Return a reader of the same files that collects further columns of the rows that it yields."""
        # `carried` holds their names, and Arrow record batches of the rows in the order of the batches.
        other = self._copy()
        other.carried = list(columns), []
        other._open()
        return other

    def carried_column(self, name: str) -> Any:
        pa = arrow()
        parts = [pa.table({name: batch.column(name)}) for batch in self.carried[1]]
        try:  # files may hold integers or floats of several widths
            return pa.concat_tables(parts, promote_options="permissive").column(name)
        except pa.ArrowTypeError:
            types = ", ".join(dict.fromkeys(str(part.schema.types[0]) for part in parts))
            raise InputError(
                f"column {name!r} has types that cannot be joined ({types}): predict its files one by one"
            ) from None

    @property
    def _columns(self) -> list[str]:
        """The distinct names of all columns to read."""
        return list(dict.fromkeys([*self.schema.columns, *self.carried[0]]))

    @property
    def feature_names(self) -> list[str]:
        return list(self.schema.feature_columns)

    @property
    def num_dense(self) -> int:
        return self.schema.num_dense

    # ---- shards. `split`: a shard is its share of every file or row group; otherwise it is whole ones.

    @property
    @abstractmethod
    def _splits(self) -> bool:
        """The `split` of an epoch that begins now. A position keeps that of its epoch: files may be added."""

    @abstractmethod
    def _parts(self, split: bool) -> tuple[str, list[tuple[Path, int]]]:
        """The key of a part's index in a position, and the parts of files of this shard."""

    def _files_at(self, split: bool) -> FilePositions:
        """The parts of files of this shard, listed once."""
        key = (self.rank, self.world_size, split)
        if key not in self._positions:
            self._positions = {key: FilePositions(*self._parts(split), self._root)}
        return self._positions[key]

    def _at_part(self, index: int, split: bool) -> Position:
        """The entries of a position that name a part of this shard."""
        return {**self._files_at(split).at(index), "split": split}

    def _check_part(self, position: Position) -> None:
        """Raise InputError if the parts up to a position have changed."""
        split = position.get("split")
        if not isinstance(split, bool):
            raise InputError("reader: the position was saved by an earlier version; start over")
        self._files_at(split).check(position)

    @abstractmethod
    def _chunks(self, position: Position) -> Iterator[ColumnChunk]:
        """The rows of this shard from `position`."""

    def fit(self, rows: int | None = None) -> Schema:
        """Compute the missing means and standard deviations of dense columns.

        It reads only these columns, one chunk at a time, and leaves out bad values. The reader itself does
        not change: `reader.with_schema(reader.fit())` uses the result.

        Args:
            rows: Number of rows to read, from the start of the first file. None: all rows. Files are often
                sorted by time, and their first rows then differ from the rest.

        Returns:
            The schema with all means and standard deviations.

        Raises:
            InputError: There is no row or no value to fit, or a file cannot be read.
        """
        if rows is not None:
            checks.integer(rows, "reader: rows")
        wanted = self.schema.unfitted
        if wanted is None:
            return self.schema
        everything = self.shard(0, 1)  # all ranks must fit the same rows
        everything._schema = wanted
        return self.schema.with_fit_of(wanted.fitted(everything._raw_parts(rows)))

    def _raw_parts(self, rows: int | None) -> Iterator[NDArray[np.float64]]:
        """The dense values of the first rows, chunk by chunk, with NaN for bad values."""
        seen = 0
        for chunk in self._chunks(self._start()):
            faults: list[ColumnFault] = []
            values = self._dense(chunk.table, faults)[: None if rows is None else rows - seen]
            for fault in faults:
                named = np.array([x.column == fault.column for x in self.schema.dense_columns])
                values[np.ix_(fault.rows[: len(values)], named)] = np.nan
            yield values
            seen += len(values)
            if rows is not None and seen >= rows:
                break
        if not seen:
            raise InputError(f"{self.files[0]}: there is no row to fit the schema to")

    def _row_blocks(self, position: Position) -> Iterator[RowBlock]:
        for chunk in self._chunks(position):
            if not self._hinted:
                self._hint(chunk)
            samples, kept = self._decode(chunk)
            yield RowBlock(samples, partial(_position_after, chunk, kept), kept)

    def _hint(self, chunk: ColumnChunk) -> None:
        """Warn once about texts that look like lists of ids: each would silently become one id."""
        self._hinted = True
        for feature in self.schema.feature_columns.values():
            if feature.hash is not False:  # such text is a bad row otherwise
                hint = list_hint(chunk.table.column(feature.column), feature)
                if hint is not None:
                    warnings.warn(f"{chunk.file}: column {feature.column!r}: {hint}", stacklevel=4)

    # ---- columns of a file

    def _columns_fault(self, kinds: dict[str, Any], file: Path) -> tuple[str, str] | None:
        """Reason and message if a file with columns of these Arrow types does not match the schema."""
        schema = self.schema
        for name in self._columns:
            if name not in kinds:
                have = ", ".join(list(kinds)[:20]) + (", ..." if len(kinds) > 20 else "")
                role = "label column" if name == schema.label else "column"
                return (
                    "missing column",
                    f"{file}: {role} {name!r} is missing; the file has {have}{self._rename(name)}",
                )
        problems = [(name, why_not_numbers(kinds[name])) for name in (schema.label, schema.weight) if name]
        problems += [(x.column, why_not_numbers(kinds[x.column])) for x in schema.dense_columns]
        problems += [(x.column, why_not_ids(kinds[x.column])) for x in schema.feature_columns.values()]
        if schema.time is not None:
            problems.append((schema.time, why_not_numbers(kinds[schema.time], time=True)))
        for name, why in problems:
            if why is not None:
                return "wrong type", f"{file}: column {name!r} {why}"
        return self._ids_fault(kinds, file)

    def _rename(self, name: str) -> str:
        """The remedy for a column that is missing."""
        roles = {getattr(self.schema, role): f"{role} COLUMN" for role in ("label", "weight", "time")}
        roles |= {column.column: "dense COLUMN" for column in self.schema.dense_columns}
        roles |= {x.column: f"features {key}=COLUMN" for key, x in self.schema.feature_columns.items()}
        return f"; name its column in the schema (command line: --{roles[name]})" if name in roles else ""

    def _ids_fault(self, kinds: dict[str, Any], file: Path) -> tuple[str, str] | None:
        """Reason and message if a file has other ids than those recorded in the schema. Records the first."""
        found: dict[str, IdSource] = {}
        for name, feature in self.schema.feature_columns.items():
            source = id_source(kinds[feature.column], feature)
            if source is None or source == feature.ids:
                continue
            if feature.ids is not None:
                return "wrong type", (
                    f"{file}: column {feature.column!r} holds {kinds[feature.column]}, so that its ids would "
                    f"be {_ID_WORDS[source]}, but feature {name!r} was read with {_ID_WORDS[feature.ids]} "
                    "before; convert the column, or train with hash=True (config file: hash = true), "
                    "which gives integers the ids of their text"
                )
            found[name] = source
        if found:
            self._schema = self._schema.with_ids(found)
        return None

    # ---- rows

    def _decode(self, chunk: ColumnChunk) -> tuple[Samples, NDArray[np.int64]]:
        """The valid rows of a chunk and their numbers in the file."""
        faults: list[ColumnFault] = []
        samples = self._samples(chunk.table, faults)
        if not faults:
            self._carry(chunk.table)
            return samples, chunk.numbers
        good = np.ones(len(chunk.numbers), bool)
        if self.on_error == "raise":  # name the first bad row, whatever is wrong with it
            faults.sort(key=lambda fault: int(np.argmax(fault.rows)))
        for fault in faults:
            rows = np.flatnonzero(fault.rows & good)
            if len(rows):
                value = chunk.table.column(fault.column)[int(rows[0])].as_py()
                where = f"{chunk.file}: {self.row_word} {chunk.numbers[rows[0]]}, column {fault.column!r}"
                found = f"{where}: {_shown(value)} {fault.what}"
                self._bad(fault.reason, found, len(rows), chunk.numbers[rows])
                good[rows] = False
        table = chunk.table.filter(arrow().array(good))
        self._carry(table)
        return self._samples(table, []), chunk.numbers[good]

    def _carry(self, table: Any) -> None:
        names, batches = self.carried
        if names:
            batches.append(table.select(names))

    def _samples(self, table: Any, faults: list[ColumnFault]) -> Samples:
        schema, n = self.schema, len(table)
        labels = np.full(n, np.nan)
        if schema.label is not None:
            labels, unlabelled, found = numbers(table.column(schema.label), schema.label, nan="missing")
            faults += found
            if unlabelled.any():
                faults.append(ColumnFault(unlabelled, schema.label, "no label", "is not a label"))
            if self.binary_labels:
                wrong = (labels != 0) & (labels != 1) & ~np.isnan(labels)
                if wrong.any():
                    faults.append(ColumnFault(wrong, schema.label, "label not 0 or 1", "is not 0 or 1"))
        weights = None
        if schema.weight is not None:
            weights, missing, found = numbers(table.column(schema.weight), schema.weight)
            faults += found
            wrong = missing | (weights < 0)
            if wrong.any():
                faults.append(ColumnFault(wrong, schema.weight, "no weight", "is not a weight of 0 or more"))
        times = None
        if schema.time is not None:
            times, found = seconds(table.column(schema.time), schema.time)
            faults += found
        dense = self._dense(table, faults) if schema.dense_columns else None
        features = {}
        for name, feature in schema.feature_columns.items():
            features[name], found = ids(table.column(feature.column), feature)
            faults += found
        return Samples(
            features,
            torch.from_numpy(labels.astype(np.float32)),
            None if dense is None else schema.normalise(dense),
            None if weights is None else torch.from_numpy(weights.astype(np.float32)),
            None if times is None else torch.from_numpy(times),
        )

    def _dense(self, table: Any, faults: list[ColumnFault]) -> NDArray[np.float64]:
        raw = np.empty((len(table), len(self.schema.dense_columns)), np.float64)
        for i, column in enumerate(self.schema.dense_columns):
            raw[:, i], _, found = numbers(table.column(column.column), column.column, nan=column.nan)
            faults += found
        return raw


def _checked(schema: Any) -> Schema:
    if not isinstance(schema, Schema):
        raise InputError(f"reader: schema must be a Schema, got {type(schema).__name__}")
    return schema


def _position_after(chunk: ColumnChunk, kept: NDArray[np.int64], k: int) -> Position:
    return chunk.after(int(kept[k - 1]))


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
