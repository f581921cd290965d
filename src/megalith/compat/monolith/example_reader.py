"""MonolithReader: batches from files of Monolith's Example, ExampleBatch and Instance records.

Fids, integers and bytes (hashed) become features, floats become dense columns. `record_files` defines how
records are framed in a file; native code decodes them into columns: v1 fids are converted to v2, lists of
lists are flattened, and raw features are not read. `MonolithReader` checks each row and builds the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from megalith.data.batch import Position, Samples
from megalith.data.files import FilePositions, Paths, list_files, position_integer
from megalith.data.reader import SHUFFLE_ROWS, OnError, Reader, RowBlock
from megalith.data.record_files import HEADERS, MAX_RECORD_BYTES, FramedRecord, Framing, RecordFile
from megalith.errors import InputError, NativeMissingError
from megalith.library import native_module
from megalith.ops import checks
from megalith.ragged import Ragged

# ---- records to columns

Kind = Literal["example", "example_batch", "instance"]
KINDS: tuple[Kind, ...] = get_args(Kind)
NO_VALUES, IDS, FLOATS = 0, 1, 2
"""The kinds of a cell: without values (or missing), ids, or floats."""


class RecordColumn(NamedTuple):
    """The cells of one name: kinds uint8 [rows], lengths int64 [rows], and the values of all cells.

    A cell has its values in `ids` (int64) or in `floats` (float32), by its kind.
    """

    ids: NDArray[np.int64]
    floats: NDArray[np.float32]
    kinds: NDArray[np.uint8]
    lengths: NDArray[np.int64]


class RecordError(NamedTuple):
    """Why a record cannot be read. record: its index in the call. byte: the position in the record."""

    record: int
    byte: int
    problem: str


class DecodedRecords(NamedTuple):
    """The rows of some records.

    columns: one for each wanted name. labels, weights: float32 [rows]; a missing label is NaN, a missing
    weight 1. times: int64 [rows], the req_time of the line id where has_time, uint8 [rows], is 1.
    rows: int64 [records], the number of rows of each record. errors: the records that cannot be read; they
    have no rows.
    """

    columns: list[RecordColumn]
    labels: NDArray[np.float32]
    weights: NDArray[np.float32]
    times: NDArray[np.int64]
    has_time: NDArray[np.uint8]
    rows: NDArray[np.int64]
    errors: list[RecordError]


def decode_records(
    kind: Kind, messages: Sequence[bytes], names: Sequence[str], *, label_index: int = 0
) -> DecodedRecords:
    """Decode serialized messages into columns; the GIL is released meanwhile."""
    native = native_module()
    if native is None:
        raise NativeMissingError("Monolith records need megalith's native module, which is not built here")
    decoded = DecodedRecords(
        *native.decode_records(KINDS.index(kind), list(messages), list(names), label_index)
    )
    return decoded._replace(
        columns=[RecordColumn(*column) for column in decoded.columns],
        errors=[RecordError(*error) for error in decoded.errors],
    )


# ---- the reader

_GROUP_RECORDS, _GROUP_BYTES = 256, 4 << 20
"""Records that are decoded in one call: a batch of them, at least this many, at most this many bytes."""


class _RecordGroup(NamedTuple):
    """Records of one file. offsets: where each begins, its header included."""

    file: int
    offsets: list[int]
    records: list[FramedRecord]


class _BadRow(NamedTuple):
    """Why a row, or the record before it, is left out."""

    row: int
    reason: str
    problem: str


class MonolithReader(Reader):
    """Reads batches from files of Monolith records (.gz accepted), a directory of them or a pattern.

    A shard is every world_size-th record.

    Args:
        paths: Files, directories or patterns.
        kind: The message of a record: "example", "example_batch" or "instance".
        features: Names, or a dict of our name -> Monolith's name. A feature that a record lacks is an empty
            row. The fids of an Instance are named `fc_slot_<slot>`, its floats `value`.
        batch_size: Number of rows of a batch.
        dense: Name -> width. The columns are concatenated to `Batch.dense`, float32 [batch, sum of widths];
            each must have its width in every row.
        framing: "length" or "tfrecord", see `record_files`.
        header: What precedes each length, some of `record_files.HEADERS`.
        label_index: Which of several labels to use.
        weights: Whether to read instance weights (1 where a record has none).
        time: Whether to read times, the req_time of the line id.
        drop_last: Whether to leave out a last batch that is not full.
        on_error: "raise", or "skip" to count bad records and rows in `skipped`. A file is left where its
            framing breaks.
        binary_labels: See `Reader`.
        shuffle: See `Reader`.
        shuffle_rows: See `Reader`.
        prefetch: See `Reader`.
        max_bytes: The maximum length of a record.

    Raises:
        InputError: An argument is wrong; or, while iterating, a record is wrong. The message names the file,
            the record and the byte.
    """

    suffixes = (".pb", ".tfrecord", ".tfrecords", ".records", ".pb.gz", ".tfrecord.gz", ".tfrecords.gz")

    def __init__(
        self,
        paths: Paths,
        kind: Kind,
        *,
        features: Sequence[str] | Mapping[str, str],
        batch_size: int,
        dense: Mapping[str, int] | None = None,
        framing: Framing = "length",
        header: Sequence[str] = (),
        label_index: int = 0,
        weights: bool = False,
        time: bool = False,
        drop_last: bool = False,
        on_error: OnError = "raise",
        binary_labels: bool = False,
        shuffle: int | None = None,
        shuffle_rows: int = SHUFFLE_ROWS,
        prefetch: int = 0,
        max_bytes: int = MAX_RECORD_BYTES,
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
        checks.one_of(kind, KINDS, "monolith: kind")
        if not isinstance(header, list | tuple) or not all(
            isinstance(x, str) and x in HEADERS for x in header
        ):
            raise InputError(f"monolith: header must be some of {', '.join(HEADERS)}, got {header!r}")
        known = isinstance(framing, str) and framing in ("length", "tfrecord")
        if not known or (framing == "tfrecord" and header):
            raise InputError('monolith: framing must be "length" (which may have headers) or "tfrecord"')
        checks.integer(label_index, "monolith: label_index", least=0)
        names = list(features.values()) if isinstance(features, Mapping) else features
        if not isinstance(names, list | tuple) or not all(isinstance(x, str) for x in [*features, *names]):
            raise InputError(f"monolith: features must be a list or dict of names, got {features!r}")
        sizes = {} if dense is None else dense
        if not isinstance(sizes, Mapping) or not all(isinstance(x, str) for x in sizes):
            raise InputError(f"monolith: dense must map names to numbers of values, got {dense!r}")
        for name, size in sizes.items():
            checks.integer(size, f"monolith: dense {name!r}")
        self.kind = kind
        self.features = dict(features) if isinstance(features, Mapping) else {x: x for x in features}
        self.dense = dict(dense or {})
        self.label_index = label_index
        self.weights, self.time = weights, time
        found = list_files(paths, self.suffixes)
        self.files = [RecordFile(x, framing, header=header, max_bytes=max_bytes) for x in found]
        self._files_at = FilePositions.of_files("file", found, paths)
        self._names = list(dict.fromkeys([*self.features.values(), *self.dense]))

    @property
    def feature_names(self) -> list[str]:
        return list(self.features)

    @property
    def num_dense(self) -> int:
        return sum(self.dense.values())

    def _start(self) -> Position:
        return self._position(0, 0, 0, 0)

    def _position(self, file: int, offset: int, record: int, row: int) -> Position:
        """The position after the first `row` rows of record number `record`, which begins at `offset`."""
        return {**self._files_at.at(file), "offset": offset, "record": record, "row": row}

    def _check(self, position: Position) -> None:
        for key in ("offset", "record", "row"):
            position_integer(position, key)
        self._files_at.check(position)

    # ---- files to groups of records to rows

    def _row_blocks(self, position: Position) -> Iterator[RowBlock]:
        for i in range(position["file"], len(self.files)):
            at = position if i == position["file"] else self._position(i, 0, 0, 0)
            for group in self._groups(i, at["offset"], at["record"]):
                done = at["row"] if group.records[0].number == at["record"] else 0
                yield from self._blocks(group, done)

    def _groups(self, file: int, offset: int, number: int) -> Iterator[_RecordGroup]:
        """The records of this shard from record `number` on, which begins at byte `offset`."""
        most = max(self.batch_size, _GROUP_RECORDS) if self.kind != "example_batch" else 1
        group, size, failure = _RecordGroup(file, [], []), 0, None
        try:
            for record in self.files[file].read(offset=offset, number=number):
                if record.number % self.world_size == self.rank:
                    group.offsets.append(offset)
                    group.records.append(record)
                    size += len(record.message)
                    if len(group.records) == most or size >= _GROUP_BYTES:
                        yield group
                        group, size = _RecordGroup(file, [], []), 0
                offset = record.end
        except InputError as error:
            failure = str(error)
        if group.records:
            yield group
        if failure is not None:
            self._bad("broken framing", failure)

    def _blocks(self, group: _RecordGroup, done: int) -> Iterator[RowBlock]:
        """The good rows of a group, without the first `done` of its first record."""
        messages = [record.message for record in group.records]
        decoded = decode_records(self.kind, messages, self._names, label_index=self.label_index)
        good = np.ones(len(decoded.labels), bool)
        good[: min(done, int(decoded.rows[0]))] = False
        bad = self._check_rows(group, decoded, good)
        if bad and self.on_error == "raise":
            good[bad[0].row :] = False  # rows before the error still make batches
        else:
            for row in bad:
                self._bad(row.reason, row.problem, rows=np.array([row.row]) if good.any() else None)
        if good.any():
            places = np.flatnonzero(good)
            after = partial(self._after, group, decoded.rows, places)
            yield RowBlock(self._samples(decoded, good), after, places)
        if bad and self.on_error == "raise":
            self._bad(bad[0].reason, bad[0].problem)

    def _after(
        self, group: _RecordGroup, rows: NDArray[np.int64], places: NDArray[np.int64], k: int
    ) -> Position:
        """The position after the k-th row of a block. places: int64 [block], rows of the group."""
        place = int(places[k - 1])
        ends = np.cumsum(rows)
        record = int(np.searchsorted(ends, place, side="right"))
        number = group.records[record].number
        row = place - int(ends[record] - rows[record])
        return self._position(group.file, group.offsets[record], number, row + 1)

    # ---- checks

    def _check_rows(
        self, group: _RecordGroup, decoded: DecodedRecords, good: NDArray[np.bool_]
    ) -> list[_BadRow]:
        """Clear `good` of bad rows and return them in order, along with unreadable records."""
        ends = np.cumsum(decoded.rows)
        bad = [
            _BadRow(
                int(ends[each.record]),
                "unreadable record",
                f"{self._where(group, each.record)}: cannot be read: {each.problem} at byte "
                f"{group.records[each.record].at + each.byte}",
            )
            for each in decoded.errors
        ]
        for is_bad, reason, problem in self._row_checks(decoded):
            if not is_bad.any():
                continue
            for row in np.flatnonzero(is_bad & good).tolist():
                record = int(np.searchsorted(ends, row, side="right"))
                number = row - int(ends[record] - decoded.rows[record])
                found = problem if isinstance(problem, str) else problem(row)
                where = f"{self._where(group, record)}: row {number} of it"
                bad.append(_BadRow(row, reason, f"{where}: {found}"))
            good &= ~is_bad
        return sorted(bad, key=lambda each: each.row)

    def _row_checks(self, decoded: DecodedRecords) -> Iterator[_Check]:
        """What makes a row bad; the first that applies is reported."""
        labels, weights = decoded.labels, decoded.weights
        yield np.isnan(labels), "no label", f"has no label {self.label_index}"
        yield np.isinf(labels), "not finite", "has an infinite label"
        if self.binary_labels:
            wrong = (labels != 0) & (labels != 1)
            yield wrong, "label not 0 or 1", lambda row: f"has the label {labels[row]}, not 0 or 1"
        unweighted = ~(np.isfinite(weights) & (weights >= 0))
        yield unweighted, "no weight", lambda row: f"has the weight {weights[row]}, not 0 or above"
        if self.time:
            yield decoded.has_time == 0, "no time", "has no line id with a req_time"
        columns = dict(zip(self._names, decoded.columns, strict=True))
        for name in self.features.values():
            problem = f"column {name!r} holds floats, not ids; is it a dense column?"
            yield columns[name].kinds == FLOATS, "wrong type", problem
        for name, width in self.dense.items():
            problem = f"column {name!r} is missing or does not hold floats; is it a feature?"
            yield columns[name].kinds != FLOATS, "wrong type", problem
            wrong = partial(_wrong_width, name, width, columns[name].lengths)
            yield _not_finite(columns[name], width), "wrong type", wrong

    def _where(self, group: _RecordGroup, record: int) -> str:
        framed = group.records[record]
        return f"{self.files[group.file].path}: record {framed.number} at byte {framed.at}"

    # ---- columns to tensors

    def _samples(self, decoded: DecodedRecords, good: NDArray[np.bool_]) -> Samples:
        columns = dict(zip(self._names, decoded.columns, strict=True))
        keep = slice(None) if good.all() else good
        features = {ours: _ragged(columns[name], keep) for ours, name in self.features.items()}
        dense = [_dense(columns[name], keep, width) for name, width in self.dense.items()]
        return Samples(
            features,
            torch.from_numpy(decoded.labels[keep]),
            torch.from_numpy(np.concatenate(dense, axis=1)) if dense else None,
            torch.from_numpy(decoded.weights[keep]) if self.weights else None,
            torch.from_numpy(decoded.times[keep]) if self.time else None,
        )


_Check = tuple[NDArray[np.bool_], str, str | Callable[[int], str]]
_Rows = slice | NDArray[np.bool_]


def _wrong_width(name: str, width: int, lengths: NDArray[np.int64], row: int) -> str:
    return f"column {name!r} holds {lengths[row]} floats where {width} finite ones are needed"


def _not_finite(column: RecordColumn, width: int) -> NDArray[np.bool_]:
    """Which cells do not hold `width` finite floats."""
    bad: NDArray[np.bool_] = column.lengths != width
    finite = np.isfinite(column.floats)
    if not finite.all():
        rows = np.repeat(np.arange(len(column.kinds)), _lengths(column, FLOATS))
        bad[rows[~finite]] = True
    return bad


def _lengths(column: RecordColumn, kind: int) -> NDArray[np.int64]:
    return np.where(column.kinds == kind, column.lengths, 0)


def _ragged(column: RecordColumn, keep: _Rows) -> Ragged:
    ids, lengths = column.ids, _lengths(column, IDS)
    if not isinstance(keep, slice):
        ids, lengths = ids[np.repeat(keep, lengths)], lengths[keep]
    row_splits = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=row_splits[1:])
    return Ragged.trusted(torch.from_numpy(ids), torch.from_numpy(row_splits))


def _dense(column: RecordColumn, keep: _Rows, width: int) -> NDArray[np.float32]:
    floats = column.floats
    if not isinstance(keep, slice):
        floats = floats[np.repeat(keep, _lengths(column, FLOATS))]
    return floats.reshape(-1, width)
