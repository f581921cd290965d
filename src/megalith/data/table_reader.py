"""TableReader: Parquet, IPC and CSV files, Hive partitions, and tables in memory, read by a Schema.

A reader is a list of parts, in the order of the files or shuffled; a shard is every world_size-th part. If
there are fewer parts than shards, each shard reads its share of every part instead (`split`).

    format          part         read by                        position in a part
    parquet         a row group  a fragment of pyarrow.dataset  rows read
    ipc, memory     a file       a fragment of pyarrow.dataset  rows read
    csv             a file       blocks of lines, see `csv`     offset of a block, lines read from it

A part yields record batches (`TableChunk`). The Arrow schema of each is compared with that of the one before
it, and only a new one is checked against the Schema. Columns that a file lacks come from the directories of
its path ("week=10/part.parquet").
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Self, get_args
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from megalith.data.batch import Position, Samples
from megalith.data.columns import (
    ColumnFault,
    arrow_table,
    check_columns,
    ids,
    is_table,
    kinds_of,
    list_hint,
    read_dense,
    read_samples,
    seconds,
    shown,
)
from megalith.data.files import (
    FilePositions,
    ObjectFile,
    Paths,
    data_root,
    list_files,
    position_integer,
)
from megalith.data.reader import REMEDY, SHUFFLE_ROWS, OnError, Reader, RowBlock
from megalith.data.schema import Schema
from megalith.errors import InputError
from megalith.ops import checks
from megalith.ragged import Texts, arrow, is_list, plain_array

CHUNK_ROWS = 32_768
Format = Literal["parquet", "ipc"]
SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "parquet": (".parquet", ".pq"),
    "ipc": (".arrow", ".feather", ".ipc"),
    "csv": (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz"),
}


class Part(NamedTuple):
    """A part of a file that a shard reads: rows start to stop of a row group, or a whole file."""

    file: Any
    number: int = 0
    """Number of the row group."""
    first: int = 0
    """Number of its first row in the file."""
    start: int = 0
    stop: int = 0
    fault: tuple[str, str] | None = None
    """Reason and message if the file cannot be read."""


class TableChunk(NamedTuple):
    """Rows of a file, before they are decoded."""

    file: Any
    table: Any
    """Arrow record batch of n rows."""
    numbers: NDArray[np.int64]
    """Number of each row in the file, int64 [n]."""
    after: Callable[[int], Position]
    """Return the position after the row with a number."""


class TableReader(Reader):
    """Reads Parquet files, IPC (Feather) files, and tables in memory, through pyarrow.dataset.

    A list column gives rows with several ids, text is hashed, and a null is an empty row. Rows are counted
    from 0. Keys of directories, as in "week=10/part.parquet", are columns too.

    Args:
        paths: Files, directories or patterns, also of an object store ("s3://bucket/clicks/*.parquet"). Or a
            table in memory: of Arrow, a DataFrame of pandas or polars, a Dataset of Hugging Face.
        schema: The columns to read.
        batch_size: Rows per batch.
        format: "parquet" or "ipc". None: by the name of the first file.
        shuffle: See `Reader`. Row groups and files are shuffled too.
        shuffle_rows: See `Reader`.
        prefetch: See `Reader`.
        drop_last: See `Reader`.
        on_error: See `Reader`. A column that is missing in the first file always raises.
        binary_labels: See `Reader`.

    Raises:
        InputError: A file cannot be read, or a column is missing or has the wrong type.
    """

    format: str | None = None
    suffixes: tuple[str, ...] = (*SUFFIXES["parquet"], *SUFFIXES["ipc"])
    row_word = "row"
    part_key = "group"
    """The key of the number of a part in a position."""

    def __init__(
        self,
        paths: Paths | Any,
        schema: Schema,
        *,
        batch_size: int,
        format: Format | None = None,
        shuffle: int | None = None,
        shuffle_rows: int = SHUFFLE_ROWS,
        prefetch: int = 0,
        drop_last: bool = False,
        on_error: OnError = "raise",
        binary_labels: bool = False,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            drop_last=drop_last,
            on_error=on_error,
            binary_labels=binary_labels,
            shuffle=shuffle,
            shuffle_rows=shuffle_rows,
            prefetch=prefetch,
        )
        if format is not None:
            checks.one_of(format, get_args(Format), "reader: format")
            self.format = format
            self.suffixes = SUFFIXES[format]
        self._schema = _checked(schema)
        self._table: Any = None
        self._root = ""
        if is_table(paths):
            self._table, self.format = arrow_table(paths, "reader: paths"), "memory"
            self.files: list[Any] = [_InMemory(self._table.num_rows)]
        else:
            self.files = list_files(paths, self.suffixes)
            self._root = data_root(paths)
        self._keys: dict[Any, dict[str, Any]] = self._partition_keys()
        self._positions: dict[Any, FilePositions] = {}
        self._owned: dict[Any, list[Part]] = {}
        self._fragment: tuple[Any, Any] = None, None
        self._known: Any = None
        """The Arrow schema of the last chunk, which matches the Schema."""
        self._hinted = False
        self.carried: tuple[list[str], list[Any]] = [], []
        self._open()

    def _open(self) -> None:
        """List the parts. A wrong schema raises here."""
        self._all_parts = [part for file in self.files for part in self._list_parts(file)]

    @classmethod
    def from_config(
        cls, path: str | list[str], schema: Mapping[str, Any], *, labelled: bool = True, **options: Any
    ) -> Self:
        checks.mapping(schema, "config: [data.schema]", '{"features": {"user": "user"}, "label": "clicked"}')
        if not schema.get("features"):
            raise InputError(
                f"config: [data.schema] must name the feature and label columns of {path} (command line: "
                f"--label COLUMN --features COLUMN,COLUMN){cls._columns_of(path)}"
            )
        if checks.flag(labelled, "reader: labelled") and not schema.get("label"):
            raise InputError(
                f"config: [data.schema] has no label: name the label column of {path} (command line: "
                f"--label COLUMN){cls._columns_of(path)}"
            )
        if isinstance(schema.get("label"), list | tuple):
            raise InputError("config: [data.schema] names several labels; a model of a run has one output")
        return cls(path, Schema.from_dict({"label": None, **schema}), **options)

    @classmethod
    def _columns_of(cls, path: str | list[str]) -> str:
        """Name the columns of the first file, if it can be read, for an error."""
        found = "csv" if cls.suffixes == SUFFIXES["csv"] else cls.format or "parquet"
        try:
            file = list_files(path, cls.suffixes)[0]
            names = arrow("pyarrow.dataset").dataset(str(file), format=found).schema.names
        except (InputError, arrow().ArrowException, OSError, TypeError):
            return ""
        return f"; {file} has {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"

    @property
    def schema(self) -> Schema:
        """The columns to read. Opening the first file records where the ids of features come from."""
        return self._schema

    @property
    def feature_names(self) -> list[str]:
        return list(self.schema.feature_columns)

    @property
    def num_dense(self) -> int:
        return self.schema.num_dense

    @property
    def num_rows(self) -> int | None:
        """Number of rows of this shard, bad rows included. None if it is unknown before reading."""
        return sum(part.stop - part.start for part in self._own(self._begin()))

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
        other._schema, other._known = schema, None
        return other

    def carrying(self, columns: Sequence[str]) -> Self:
        """Return a reader of the same files, in order, that collects further columns of its rows.

        Args:
            columns: Names of columns of the files.

        Returns:
            A reader whose `carried_column` returns them after the last batch.
        """
        # `carried` holds their names, and Arrow record batches of the rows in the order of the batches.
        other = self.in_order()
        other.carried = list(columns), []
        other._positions, other._owned = {}, {}
        other._open()
        return other

    def carried_column(self, name: str) -> Any:
        """Return a column that the reader has collected.

        Args:
            name: Name of the column.

        Returns:
            An Arrow ChunkedArray of the rows of all batches so far.

        Raises:
            InputError: The files hold it with types that cannot be joined.
        """
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

    # ---- parts and positions

    def _list_parts(self, file: Any) -> Iterator[Part]:
        try:
            fragment = self._fragment_of(file)
            kinds = kinds_of(fragment.physical_schema)
            if hasattr(fragment, "row_groups"):
                sizes = [group.num_rows for group in fragment.row_groups]
            else:
                sizes = [fragment.count_rows()]
        except (arrow().ArrowException, OSError) as error:
            words = {"parquet": "Parquet", "ipc": "an IPC (Feather) file"}
            title = words[self._format_of(file)]
            yield self._faulty(file, ("unreadable file", f"{file}: cannot be read as {title}: {error}"), 1)
            return
        wrong = self._columns_fault(kinds, file)
        if wrong is not None:
            yield self._faulty(file, wrong, sum(sizes))
            return
        first = 0
        for number, size in enumerate(sizes):
            yield Part(file, number, first, 0, size)
            first += size

    def _faulty(self, file: Any, fault: tuple[str, str], rows: int) -> Part:
        if self.on_error == "raise" or (file == self.files[0] and fault[0] != "unreadable file"):
            raise InputError(f"{fault[1]}; {REMEDY}")
        return Part(file, -1, stop=rows, fault=fault)

    def _columns_fault(self, kinds: Mapping[str, Any], file: Any) -> tuple[str, str] | None:
        """Reason and message if a file with columns of these types does not match. Records sources of ids."""
        keys = {name: value.type for name, value in self._keys.get(file, {}).items()}
        self._schema, wrong = check_columns(self.schema, self._columns, {**keys, **kinds}, file)
        return wrong

    def _own(self, position: Position) -> list[Part]:
        """The parts of this shard, or its share of every part, in the order of an epoch; listed once."""
        key = self._share_key(position)
        if key not in self._owned:
            self._owned = {key: self._list_own(position)}
        return self._owned[key]

    def _share_key(self, position: Position) -> tuple[Any, ...]:
        epoch = None if self.shuffle is None else position["epoch"]
        return self.rank, self.world_size, position.get("split", self._splits), self.shuffle, epoch

    def _list_own(self, position: Position) -> list[Part]:
        parts, rank, ranks = self._all_parts, self.rank, self.world_size
        if self.shuffle is not None and len(parts) > 1:
            order = np.random.default_rng([self._seed, position["epoch"]]).permutation(len(parts))
            parts = [parts[i] for i in order.tolist()]
        if not position.get("split", self._splits):
            return parts[rank::ranks]
        sizes = [part.stop for part in parts]
        return [
            part._replace(start=size * rank // ranks, stop=size * (rank + 1) // ranks)
            for part, size in zip(parts, sizes, strict=True)
        ]

    @property
    def _splits(self) -> bool:
        """The `split` of an epoch that begins now. A position keeps that of its epoch: files may be added."""
        return len(self._all_parts) < self.world_size

    def _files_at(self, position: Position) -> FilePositions:
        """The parts of files of this shard, listed once."""
        key = self._share_key(position)
        if key not in self._positions:
            parts = [(part.file, part.number) for part in self._own(position)]
            self._positions = {key: FilePositions(self.part_key, parts, self._root)}
        return self._positions[key]

    def _start(self) -> Position:
        position: Position = {"split": self._splits, "epoch": self._epoch}
        return self._at_part(0, position)

    def _at_part(self, index: int, position: Position) -> Position:
        """The position at the start of a part of this shard, in the epoch of a position."""
        files = self._files_at(position)
        whole = {} if self.shuffle is None else {"files": files.checksum}
        split = position.get("split", self._splits)
        own = self._own(position)
        return {**files.at(index), "split": split, **whole, **self._in_part(own[index] if own else None)}

    def _in_part(self, part: Part | None) -> Position:
        """The rest of the position at the start of a part."""
        return {"rows": [0, 0] if part is None else [part.first, part.stop], "row": 0}

    def _check(self, position: Position) -> None:
        if not isinstance(position.get("split"), bool):
            raise InputError("reader: the position was saved by an earlier version; start over")
        files = self._files_at(position)
        if self.shuffle is not None and position.get("files") != files.checksum:
            raise InputError(
                "reader: the files of the shuffled position have changed; read the same files until the end "
                "of the epoch, or start over"
            )
        files.check(position, partial(self._has_same_rows, position))
        self._check_in_part(position)

    def _has_same_rows(self, position: Position) -> bool:
        """Whether a file that was changed has as many rows before the part of a position, and in it."""
        part = self._own(position)[position[self.part_key]]
        return position.get("rows") == [part.first, part.stop]

    def _check_in_part(self, position: Position) -> None:
        index = position[self.part_key]
        for part in self._own(position)[index : index + 1]:
            position_integer(position, "row", part.stop - part.start)

    # ---- reading

    def _row_blocks(self, position: Position) -> Iterator[RowBlock]:
        for chunk in self._chunks(position):
            if not self._hinted:
                self._hint(chunk)
            samples, kept = self._decode(chunk)
            yield RowBlock(samples, partial(_position_after, chunk, kept), kept)

    def _chunks(self, position: Position) -> Iterator[TableChunk]:
        """The rows of this shard from `position`."""
        at = position
        for i, part in enumerate(self._own(position)):
            if i < position[self.part_key]:
                continue
            if i > position[self.part_key]:
                at = self._at_part(i, position)
            if part.fault is not None:
                self._bad(*part.fault, part.stop - part.start)
            else:
                yield from self._read_part(part, at)

    def _read_part(self, part: Part, position: Position) -> Iterator[TableChunk]:
        at, begin = 0, part.start + position["row"]
        at_part = {key: x for key, x in position.items() if key not in ("shard", "epoch", "shuffled")}
        base = part.first + part.start

        def after(number: int) -> Position:
            return {**at_part, "row": number - base + 1}

        # A multiple of the batch size, so that few batches need rows of two chunks.
        rows = -(-CHUNK_ROWS // self.batch_size) * self.batch_size
        try:
            for table in self._scan(part, rows):
                end = at + len(table)
                low, high = max(at, begin), min(end, part.stop)
                if low < high:
                    numbers = part.first + np.arange(low, high)
                    yield TableChunk(part.file, table.slice(low - at, high - low), numbers, after)
                at = end
                if at >= part.stop:
                    break
        except (arrow().ArrowException, OSError) as error:
            lost = part.stop - max(at, begin)
            where = f"{part.file}: row {part.first + max(at, begin)}"
            self._bad("unreadable file", f"{where}: cannot be read from this row: {error}", lost)

    def _scan(self, part: Part, rows: int) -> Iterator[Any]:
        """Record batches of a part with the columns to read."""
        fragment = self._fragment_of(part.file)
        if isinstance(fragment, arrow("pyarrow.dataset").ParquetFileFragment):  # listing its groups is slow
            fragment = fragment.subset(row_group_ids=[part.number])
        held = set(fragment.physical_schema.names)
        columns = [name for name in self._columns if name in held]
        # Arrow's threads are lost in a worker process that was forked.
        alone = get_worker_info() is not None
        scanner = fragment.scanner(columns=columns, batch_size=rows, batch_readahead=2, use_threads=not alone)
        keys = self._keys.get(part.file, {})
        for table in scanner.to_batches():
            yield self._with_keys(table, keys) if len(table) else table

    def _with_keys(self, table: Any, keys: Mapping[str, Any]) -> Any:
        """A record batch with the columns that are keys of directories."""
        pa, held = arrow(), set(table.schema.names)
        for name in self._columns:
            if name not in held:
                table = table.append_column(name, pa.repeat(keys[name], len(table)))
        return table

    def _format_of(self, file: Any) -> str:
        if self.format is not None:
            return self.format
        name = str(file.name)
        return next((kind for kind in get_args(Format) if name.endswith(SUFFIXES[kind])), "parquet")

    def _fragment_of(self, file: Any) -> Any:
        """The fragment of a file; that of the last file is kept, with its metadata."""
        if self._fragment[0] is not file:
            dataset = arrow("pyarrow.dataset")
            if self._table is not None:
                (fragment,) = dataset.dataset(self._table).get_fragments()
            else:
                kind = self._format_of(file)
                made = dataset.ParquetFileFormat() if kind == "parquet" else dataset.IpcFileFormat()
                fragment = made.make_fragment(*_opened(file))
            self._fragment = file, fragment
        return self._fragment[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_fragment": (None, None)}

    def _partition_keys(self) -> dict[Any, dict[str, Any]]:
        """The keys of the directories of each file, as Arrow scalars: integers if all values of a key are."""
        pa, texts = arrow(), {}
        for file in self.files:
            parts = str(file).split("/")[:-1]
            found = {name: unquote(x) for name, _, x in (part.partition("=") for part in parts) if x}
            if found:
                texts[file] = found
        names = {name for found in texts.values() for name in found}
        whole = {n for n in names if all(_is_integer(found.get(n, "0")) for found in texts.values())}
        nothing = "__HIVE_DEFAULT_PARTITION__"
        return {
            file: {
                name: pa.scalar(None if x == nothing else int(x), pa.int64())
                if name in whole
                else pa.scalar(None if x == nothing else x, pa.string())
                for name, x in found.items()
            }
            for file, found in texts.items()
        }

    # ---- rows

    def _decode(self, chunk: TableChunk) -> tuple[Samples, NDArray[np.int64]]:
        """The valid rows of a chunk and their numbers in the file."""
        if self._known is None or not self._known.equals(chunk.table.schema):
            wrong = self._columns_fault(kinds_of(chunk.table.schema), chunk.file)
            if wrong is not None:  # the file was replaced while it was read
                raise InputError(f"{wrong[1]} from row {chunk.numbers[0]} on")
            self._known = chunk.table.schema
        faults: list[ColumnFault] = []
        samples = read_samples(chunk.table, self.schema, faults, binary_labels=self.binary_labels)
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
                found = f"{where}: {shown(value)} {fault.what}"
                self._bad(fault.reason, found, len(rows), chunk.numbers[rows])
                good[rows] = False
        table = chunk.table.filter(arrow().array(good))
        self._carry(table)
        return read_samples(table, self.schema, []), chunk.numbers[good]

    def _carry(self, table: Any) -> None:
        names, batches = self.carried
        if names:
            batches.append(table.select(names))

    def _hint(self, chunk: TableChunk) -> None:
        """Warn once about texts that look like lists of ids: each would silently become one id."""
        self._hinted = True
        for feature in self.schema.feature_columns.values():
            if feature.hash is not False:  # such text is a bad row otherwise
                hint = list_hint(chunk.table.column(feature.column), feature)
                if hint is not None:
                    warnings.warn(f"{chunk.file}: column {feature.column!r}: {hint}", stacklevel=4)

    # ---- looking at the data before training

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
        read = wanted
        if self._times != (None, None):
            read = replace(wanted, time=self.schema.time, time_format=self.schema.time_format)
        return self.schema.with_fit_of(wanted.fitted(self._whole(read)._raw_parts(rows)))

    def texts(self, feature: str) -> Texts:
        """Read the texts that are hashed to the ids of a feature, to look up what an id means.

        It reads the column in all files, and needs memory for each distinct text.

        Args:
            feature: Name of a feature.

        Returns:
            Id -> text. A feature whose ids are integers in the files gives an empty dict.

        Raises:
            InputError: There is no such feature, or a file cannot be read.
        """
        column = self.schema.feature_columns.get(feature) if isinstance(feature, str) else None
        if column is None:
            known = ", ".join(self.schema.feature_columns)
            raise InputError(f"reader: feature must be one of {known}, got {feature!r}")
        found: Texts = {}
        reader = self._whole(Schema(label=None, features={feature: column}))
        for chunk in reader._chunks(reader._begin()):
            values = plain_array(chunk.table.column(column.column))
            ids(values if is_list(values.type) else values.unique(), column, found)
        return found

    def _whole(self, schema: Schema) -> Self:
        """A reader of some columns of all rows of all ranks, in order."""
        whole = self.in_order().shard(0, 1)
        whole._schema, whole._known = schema, None
        return whole

    def _in_span(self, times: NDArray[np.int64]) -> NDArray[np.bool_]:
        start, end = self._times
        found: NDArray[np.bool_] = times >= (start or 0)
        return found if end is None else found & (times < end)

    def _raw_parts(self, rows: int | None) -> Iterator[NDArray[np.float64]]:
        """The dense values of the first rows, chunk by chunk, with NaN for bad values."""
        seen = 0
        for chunk in self._chunks(self._begin()):
            faults: list[ColumnFault] = []
            values = read_dense(chunk.table, self.schema, faults)
            for fault in faults:
                named = np.array([x.column == fault.column for x in self.schema.dense_columns])
                values[np.ix_(fault.rows, named)] = np.nan
            if self.schema.time is not None:  # of a span
                column = chunk.table.column(self.schema.time)
                values = values[self._in_span(seconds(column, self.schema.time, self.schema.time_format)[0])]
            values = values[: None if rows is None else rows - seen]
            yield values
            seen += len(values)
            if rows is not None and seen >= rows:
                break
        if not seen:
            raise InputError(f"{self.files[0]}: there is no row to fit the schema to")


class ParquetReader(TableReader):
    """A TableReader of Parquet files: in a directory, only these are read."""

    format = "parquet"
    suffixes = SUFFIXES["parquet"]


class _InMemory:
    """Stands for the file of a table in memory."""

    name = "table"

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def exists(self) -> bool:
        return True

    def absolute(self) -> Path:
        return Path("/table")

    def stat(self) -> Any:
        return SimpleNamespace(st_size=self.rows)

    def __str__(self) -> str:
        return "table"


def _opened(file: Any) -> tuple[str, Any]:
    """The path of a file and its file system, as pyarrow takes them."""
    if isinstance(file, ObjectFile):
        return file.key, file.filesystem
    return str(file), arrow("pyarrow.fs").LocalFileSystem()


def _checked(schema: Any) -> Schema:
    if not isinstance(schema, Schema):
        raise InputError(f"reader: schema must be a Schema, got {type(schema).__name__}")
    return schema


def _is_integer(text: str) -> bool:
    digits = text.removeprefix("-")
    return (digits.isascii() and digits.isdecimal() and len(digits) < 19) or text.startswith("__HIVE_DEFAULT")


def _position_after(chunk: TableChunk, kept: NDArray[np.int64], k: int) -> Position:
    return chunk.after(int(kept[k - 1]))
