"""CsvReader: CSV and TSV files, read block by block.

A block is about `block_bytes` of complete lines and starts where the previous one ended. Arrow parses it; if
the number of rows is not that of lines, it is parsed line by line, which finds the bad ones: Arrow alone
would let an open quote swallow the rest of the block. A position is the offset of a block and the number of
lines read from it, so that reading continues there at once. If there are at least as many files as shards,
each shard reads its own files; otherwise each reads its part of the lines of every block. A row is one line:
quoted line ends are not supported. Lines are counted from 1, including the header.
"""

from __future__ import annotations

import csv as plain
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalith.data.batch import Position
from megalith.data.compression import open_bytes
from megalith.data.files import Paths, position_integer
from megalith.data.reader import SHUFFLE_ROWS, OnError
from megalith.data.schema import Schema
from megalith.data.table_reader import SUFFIXES, Part, TableChunk, TableReader
from megalith.errors import InputError
from megalith.ops import checks
from megalith.ragged import arrow

BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 20


class _Block(NamedTuple):
    data: bytes
    offset: int
    """Offset of the first byte in the file."""
    line: int
    """Number of the first line."""


class CsvReader(TableReader):
    """Reads CSV and TSV files, plain or compressed with gzip. An empty field is a missing value.

    Args:
        paths: Files, directories or patterns.
        schema: The columns to read.
        batch_size: Rows per batch.
        columns: Column names of files without a header. None: the first line names the columns.
        delimiter: One character. None: a tab for files named .tsv or .txt (also .tsv.gz ...), else a comma.
        quote: The quote character. None: fields are never quoted.
        shuffle: See `Reader`. Files are shuffled too.
        shuffle_rows: See `Reader`.
        prefetch: See `Reader`.
        drop_last: See `Reader`.
        on_error: See `Reader`. A column that is missing in the first file always raises.
        binary_labels: See `Reader`.
        block_bytes: Approximate number of bytes to read at a time.

    Raises:
        InputError: A column is missing, or an argument is out of range.
    """

    format = "csv"
    suffixes = SUFFIXES["csv"]
    row_word = "line"
    part_key = "file"

    def __init__(
        self,
        paths: Paths,
        schema: Schema,
        *,
        batch_size: int,
        columns: Sequence[str] | None = None,
        delimiter: str | None = None,
        quote: str | None = '"',
        shuffle: int | None = None,
        shuffle_rows: int = SHUFFLE_ROWS,
        prefetch: int = 0,
        drop_last: bool = False,
        on_error: OnError = "raise",
        binary_labels: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        for name, value in (("delimiter", delimiter), ("quote", quote)):
            if value is not None and not _is_character(value):
                raise InputError(f"reader: {name} must be one ASCII character, got {value!r}")
        checks.integer(block_bytes, "reader: block_bytes")
        if columns is not None and not _are_names(columns):
            raise InputError(f"reader: columns must be a list of distinct names, got {columns!r}")
        self.columns = None if columns is None else list(columns)
        self.delimiter = delimiter
        self.quote = quote
        self.block_bytes = block_bytes
        super().__init__(  # it opens the first file
            paths,
            schema,
            batch_size=batch_size,
            drop_last=drop_last,
            on_error=on_error,
            binary_labels=binary_labels,
            shuffle=shuffle,
            shuffle_rows=shuffle_rows,
            prefetch=prefetch,
        )

    @property
    def num_rows(self) -> None:
        """None: the lines are not counted before they are read."""

    def _open(self) -> None:
        self._all_parts = [Part(file) for file in self.files]
        first = self.files[0]
        try:
            with open_bytes(first) as file:
                wrong = self._missing(self._header(first, file)[0], first)
        except (EOFError, OSError) as error:
            raise InputError(f"{first}: cannot be read: {error}") from error
        if wrong is not None:
            raise InputError(wrong[1])

    # ---- positions

    def _in_part(self, part: Part | None) -> Position:
        return _in_file({})

    def _has_same_rows(self, position: Position) -> bool:
        """Whether a file that was changed has as many lines before the offset of a position."""
        line, left = 1, position["offset"]
        path = self._own(position)[position["file"]].file
        if position["split"]:  # the lines of a shard depend on the sizes of all blocks
            return False
        try:
            with open_bytes(path) as file:
                data = b"\n"
                while left and (data := file.read(min(left, BLOCK_BYTES))):
                    line, left = line + data.count(b"\n"), left - len(data)
        except (EOFError, OSError):
            return False
        return left == 0 and data.endswith(b"\n") and line == max(position["line"], 1)

    def _check_in_part(self, position: Position) -> None:
        for key in ("offset", "line", "done"):
            position_integer(position, key)

    # ---- blocks

    def _read_part(self, part: Part, position: Position) -> Iterator[TableChunk]:
        path = part.file
        at = {key: x for key, x in position.items() if key not in ("shard", "epoch", "shuffled")}
        try:
            with open_bytes(path) as file:
                names, begin = self._header(path, file)
                wrong = self._missing(names, path)
                if wrong is not None:
                    sizes = (block.data.count(b"\n") for block in self._blocks(path, file, begin))
                    shares = (self._share(size, at["split"]) for size in sizes)
                    self._bad(*wrong, sum(stop - start for start, stop in shares))
                    return
                if at["offset"] > begin.offset:
                    begin = _Block(b"", at["offset"], at["line"])
                    file.seek(begin.offset)
                done = at["done"]
                for block in self._blocks(path, file, begin):
                    chunk = self._parse(path, names, block, done, at)
                    if chunk is not None:
                        yield chunk
                    done = 0
        except (EOFError, OSError) as error:  # a damaged .gz file or a failing disk
            self._bad("unreadable file", f"{path}: cannot be read to the end: {error}")

    def _header(self, path: Any, file: BinaryIO) -> tuple[list[str], _Block]:
        """The column names, and the empty block before the first row, where the file is positioned."""
        magic = file.read(4)
        if magic == b"PAR1":
            raise InputError(f"{path}: is a Parquet file: use ParquetReader (--data parquet)")
        begin = 3 if magic.startswith(b"\xef\xbb\xbf") else 0
        file.seek(begin)
        if self.columns is not None:
            return self.columns, _Block(b"", begin, 1)
        head = file.readline(MAX_LINE_BYTES)
        fields = self._fields(head.rstrip(b"\r\n"), self._delimiter(path))
        if fields is None:
            raise InputError(f"{path}: line 1 must name the columns, but has an open quote or is not text")
        names = [field.decode("utf-8", "replace") for field in fields]
        if len(set(names)) < len(names):
            doubled = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{path}: line 1 names column {doubled!r} twice")
        return names, _Block(b"", begin + len(head), 2)

    def _delimiter(self, path: Any) -> str:
        if self.delimiter is not None:
            return self.delimiter
        return "\t" if path.name.removesuffix(".gz").endswith((".tsv", ".txt")) else ","

    @property
    def _line_columns(self) -> list[str]:
        """Names of the columns to parse, if a file has them."""
        return self._columns

    def _missing(self, names: list[str], path: Any) -> tuple[str, str] | None:
        return self._columns_fault({name: arrow().binary() for name in names}, path)

    def _blocks(self, path: Any, file: BinaryIO, begin: _Block) -> Iterator[_Block]:
        """The blocks of the file from `begin`. A block depends only on its offset."""
        data, offset, line, wanted = b"", begin.offset, begin.line, self.block_bytes
        while True:
            data += file.read(wanted - len(data))
            if len(data) < wanted:
                if data:
                    yield _Block(data if data.endswith(b"\n") else data + b"\n", offset, line)
                return
            end = data.rfind(b"\n") + 1
            if end == 0:
                if wanted > MAX_LINE_BYTES:
                    raise InputError(f"{path}: line {line} has more than {MAX_LINE_BYTES} bytes; is it text?")
                wanted += self.block_bytes
                continue
            yield _Block(data[:end], offset, line)
            offset, line, data = offset + end, line + data.count(b"\n", 0, end), data[end:]
            wanted = self.block_bytes

    # ---- lines

    def _share(self, size: int, split: bool) -> tuple[int, int]:
        """The range of a block's lines that belongs to this shard."""
        if not split:
            return 0, size
        return size * self.rank // self.world_size, size * (self.rank + 1) // self.world_size

    def _parse(
        self, path: Any, names: list[str], block: _Block, done: int, at: Position
    ) -> TableChunk | None:
        """This shard's part of a block without its first `done` lines, or None if no line is left."""
        # at: a position in this file.
        data, size = block.data, block.data.count(b"\n")
        start, stop = self._share(size, at["split"])
        low = min(start + done, stop)
        if low > 0 or stop < size:
            ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
            data = data[ends[low - 1] if low else 0 : ends[stop - 1] if stop else 0]
        numbers = block.line + np.arange(low, stop)
        table, numbers = self._parsed(path, names, data, numbers)
        if not len(numbers):
            self._end_block()
            return None
        table, base = self._with_keys(table, self._keys.get(path, {})), block.line + start

        def after(number: int) -> Position:
            return _in_file(at, block.offset, block.line, number - base + 1)

        return TableChunk(path, table, numbers, after)

    def _parsed(
        self, path: Any, names: list[str], data: bytes, numbers: NDArray[np.int64]
    ) -> tuple[Any, NDArray[np.int64]]:
        """Lines as a record batch of bytes, and their numbers. Bad and empty lines are left out."""
        stray = b"\r" in data and data.count(b"\r") != data.count(b"\r\n")
        if data and not stray:
            try:
                table = self._all_lines(path, names, data)
            except arrow().ArrowInvalid:
                table = ()
            if len(table) == len(numbers):
                return table, numbers
        return self._line_by_line(path, names, data, numbers)

    def _all_lines(self, path: Any, names: list[str], data: bytes) -> Any:
        """Parse lines with Arrow. With bad lines it may raise or return another number of rows."""
        pa, csv = arrow(), arrow("pyarrow.csv")
        wanted = [name for name in self._line_columns if name in names]
        table = csv.read_csv(
            pa.BufferReader(data),
            csv.ReadOptions(column_names=names, use_threads=False, block_size=len(data) + 1),
            csv.ParseOptions(
                delimiter=self._delimiter(path), quote_char=False if self.quote is None else self.quote
            ),
            csv.ConvertOptions(
                column_types={name: pa.binary() for name in wanted},
                include_columns=wanted,
                null_values=[""],
                strings_can_be_null=True,
                check_utf8=False,
            ),
        )
        batches = table.combine_chunks().to_batches()
        return batches[0] if batches else ()

    def _line_by_line(
        self, path: Any, names: list[str], data: bytes, numbers: NDArray[np.int64]
    ) -> tuple[Any, NDArray[np.int64]]:
        """Parse lines one by one: this is slower, but finds the bad ones."""
        pa, wanted = arrow(), [name for name in self._line_columns if name in names]
        places = [names.index(name) for name in wanted]
        rows: list[list[bytes | None]] = []
        kept: list[int] = []
        for number, line in zip(numbers.tolist(), data.split(b"\n"), strict=False):
            line = line.removesuffix(b"\r")
            if not line:
                continue
            fields = self._fields(line, self._delimiter(path))
            if fields is None:
                found = f"{path}: line {number} has an open quote or a stray line end"
                self._bad("unreadable line", found, rows=np.array([number]))
            elif len(fields) != len(names):
                found = f"{path}: line {number} has {len(fields)} columns, not {len(names)}"
                self._bad("wrong number of columns", found, rows=np.array([number]))
            else:
                rows.append([fields[i] or None for i in places])
                kept.append(number)
        columns = zip(*rows, strict=True) if rows else [[] for _ in wanted]
        arrays = [pa.array(list(column), pa.binary()) for column in columns]
        return pa.RecordBatch.from_arrays(arrays, wanted), np.array(kept, np.int64)

    def _fields(self, line: bytes, delimiter: str) -> list[bytes] | None:
        """The fields of a line, or None if the line has an open quote or a stray line end."""
        if b"\r" in line:
            return None
        if self.quote is None or self.quote.encode() not in line:
            return line.split(delimiter.encode())
        reader = plain.reader([line.decode("latin-1"), ""], delimiter=delimiter, quotechar=self.quote)
        try:
            fields = next(reader)
        except plain.Error:
            return None
        return [field.encode("latin-1") for field in fields] if reader.line_num == 1 else None


def _in_file(position: Position, offset: int = 0, line: int = 0, done: int = 0) -> Position:
    """The position at a block of the same file."""
    # offset, line: of the block's first line. done: lines of this shard's part of the block that were read.
    return {**position, "offset": offset, "line": line, "done": done}


def _is_character(value: object) -> bool:
    return isinstance(value, str) and len(value) == 1 and value.isascii() and value not in "\r\n"


def _are_names(columns: object) -> bool:
    if not isinstance(columns, list | tuple) or not all(isinstance(name, str) for name in columns):
        return False
    return len(set(columns)) == len(columns)
