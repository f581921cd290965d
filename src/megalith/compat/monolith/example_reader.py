"""MonolithReader: batches out of Monolith's Example, ExampleBatch and Instance records.

Fids, whole numbers and bytes (hashed) become features, floats become dense columns. How records are
framed is in `records.py`, what they say in `messages.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megalith.compat.monolith.examples import ExampleRow, Value, example, example_batch, instance
from megalith.data.batch import Position, Samples
from megalith.data.files import Paths, list_files
from megalith.data.formats.record_files import HEADERS, MAX_RECORD_BYTES, FramedRecord, Framing, RecordFile
from megalith.data.reader import OnError, Reader, RowBlock, check_file, position_integer
from megalith.errors import InputError
from megalith.ops.ids import hash_strings
from megalith.ragged import Ragged

Kind = Literal["example", "example_batch", "instance"]
_PARSE: dict[str, Callable[[bytes, int, Collection[str]], list[ExampleRow]]] = {
    "example": example,
    "example_batch": example_batch,
    "instance": instance,
}


class _Sample(NamedTuple):
    """A row's wanted columns, in the reader's order."""

    ids: list[NDArray[np.int64]]
    dense: list[NDArray[np.float32]]
    label: float
    weight: float
    time: int


class MonolithReader(Reader):
    """Batches out of files of Monolith records (.gz accepted), a directory of them or a pattern.

    kind: which message the records are. features: names, or our name -> Monolith's; a feature that a record
    lacks is an empty row. In an Instance, fids stand under fc_slot_<slot>, and `value` is a list of floats.
    dense: name -> width; they become `Batch.dense` side by side, and each must have its width in every row.
    label_index: which of several labels. weights: whether to give instance weights (1 if not stated).
    time: whether to give times, the line id's req_time. header: before lengths, some of `records.HEADERS`.
    A shard is every world_size-th record. Raises InputError, naming file, record and byte, where a record
    is not what it should be; with on_error="skip" it is counted, and a file is left where its framing breaks.
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
        max_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        super().__init__(batch_size=batch_size, drop_last=drop_last, on_error=on_error)
        if kind not in _PARSE:
            raise InputError(f"monolith: kind must be one of {', '.join(_PARSE)}, got {kind!r}")
        if framing not in ("length", "tfrecord") or (framing == "tfrecord" and header):
            raise InputError('monolith: framing must be "length" (which may have headers) or "tfrecord"')
        if isinstance(header, str) or not set(header) <= set(HEADERS):
            raise InputError(f"monolith: header must be some of {', '.join(HEADERS)}, got {header!r}")
        if isinstance(features, str) or label_index < 0:
            raise InputError("monolith: features must be a list or dict of names, label_index 0 or above")
        self.kind = kind
        self.features = dict(features) if isinstance(features, Mapping) else {x: x for x in features}
        self.dense = dict(dense or {})
        self.label_index = label_index
        self.weights, self.time = weights, time
        paths = list_files(paths, self.suffixes)
        self.files = [RecordFile(x, framing, header=header, max_bytes=max_bytes) for x in paths]
        self._wanted = {*self.features.values(), *self.dense}

    @property
    def feature_names(self) -> list[str]:
        """See `Reader.feature_names`."""
        return list(self.features)

    @property
    def num_dense(self) -> int:
        """See `Reader.num_dense`."""
        return sum(self.dense.values())

    def _start(self) -> Position:
        return self._position(0, 0, 0, 0)

    def _position(self, file: int, offset: int, record: int, row: int) -> Position:
        """row: how many rows of record number `record`, which begins at `offset`, are behind."""
        name = self.files[file].path.name
        return {"file": file, "offset": offset, "record": record, "row": row, "name": name}

    def _check(self, position: Position) -> None:
        for key in ("offset", "record", "row"):
            position_integer(position, key)
        check_file(position, "file", [file.path for file in self.files])

    # ---- records to rows to tensors

    def _row_blocks(self, position: Position) -> Iterator[RowBlock]:
        rows: list[_Sample] = []
        after: list[Position] = []
        for row, behind in self._rows(position):
            rows.append(row)
            after.append(behind)
            if len(rows) == self.batch_size:
                yield RowBlock(self._samples(rows), partial(_position_after, after))
                rows, after = [], []
        if rows:
            yield RowBlock(self._samples(rows), partial(_position_after, after))

    def _rows(self, position: Position) -> Iterator[tuple[_Sample, Position]]:
        """The good rows from `position` on, each with the position behind it."""
        for i in range(position["file"], len(self.files)):
            at = position if i == position["file"] else self._position(i, 0, 0, 0)
            offset, done = at["offset"], at["row"]
            records = self.files[i].read(offset=offset, number=at["record"])
            while (record := self._next(records)) is not None:
                if record.number % self.world_size == self.rank:
                    for number, row in enumerate(self._parse(i, record)):
                        if number >= done:
                            sample = self._sample(i, record, number, row)
                            if sample is not None:
                                yield sample, self._position(i, offset, record.number, number + 1)
                offset, done = record.end, 0

    def _next(self, records: Iterator[FramedRecord]) -> FramedRecord | None:
        try:
            return next(records, None)
        except InputError as error:
            self._bad("broken framing", str(error))
            return None

    def _parse(self, file: int, record: FramedRecord) -> list[ExampleRow]:
        try:
            return _PARSE[self.kind](record.message, record.at, self._wanted)
        except InputError as error:
            self._bad("unreadable record", f"{self._where(file, record)}: {error}")
            return []

    def _where(self, file: int, record: FramedRecord) -> str:
        return f"{self.files[file].path}: record {record.number} at byte {record.at}"

    def _sample(self, file: int, record: FramedRecord, number: int, row: ExampleRow) -> _Sample | None:
        """A row's columns, or None if it is bad."""
        reason, problem, name = "", "", ""
        if len(row.labels) <= self.label_index or math.isnan(row.labels[self.label_index]):
            reason, problem = "no label", f"has no label {self.label_index}"
        elif not math.isfinite(row.labels[self.label_index]):
            reason, problem = "not finite", "has an infinite label"
        elif not (math.isfinite(row.weight) and row.weight >= 0):
            reason, problem = "no weight", f"has the weight {row.weight}, not 0 or above"
        elif self.time and row.time is None:
            reason, problem = "no time", "has no line id with a req_time"
        else:
            try:
                ids, dense = [], []
                for name in self.features.values():
                    ids.append(_as_ids(row.features.get(name)))
                for name, width in self.dense.items():
                    dense.append(_as_floats(row.features.get(name), width))
                return _Sample(ids, dense, row.labels[self.label_index], row.weight, row.time or 0)
            except InputError as error:
                reason, problem = "wrong type", f"column {name!r} {error}"
        self._bad(reason, f"{self._where(file, record)}: row {number} of it: {problem}")
        return None

    def _samples(self, rows: list[_Sample]) -> Samples:
        features = {}
        for i, name in enumerate(self.features):
            lists = [row.ids[i] for row in rows]
            lengths = torch.tensor([len(x) for x in lists])
            features[name] = Ragged.from_lengths(torch.from_numpy(np.concatenate(lists)), lengths)
        dense = None
        if self.dense:
            flat = np.concatenate([values for row in rows for values in row.dense])
            dense = torch.from_numpy(flat).view(len(rows), -1)
        return Samples(
            features,
            torch.tensor([row.label for row in rows], dtype=torch.float32),
            dense,
            torch.tensor([row.weight for row in rows], dtype=torch.float32) if self.weights else None,
            torch.tensor([row.time for row in rows], dtype=torch.int64) if self.time else None,
        )


def _position_after(after: list[Position], k: int) -> Position:
    return after[k - 1]


def _as_ids(value: Value | None) -> NDArray[np.int64]:
    if value is None:
        return np.empty(0, np.int64)
    if isinstance(value, list):
        hashed: NDArray[np.int64] = hash_strings(value).numpy()
        return hashed
    if value.dtype != np.int64:
        raise InputError("holds floats, not ids; is it a dense column?")
    return value.astype(np.int64, copy=False)


def _as_floats(value: Value | None, width: int) -> NDArray[np.float32]:
    if value is None or isinstance(value, list) or value.dtype != np.float32:
        raise InputError("is missing, or holds no floats; is it a feature?")
    if len(value) != width or not np.isfinite(value).all():
        raise InputError(f"holds {len(value)} floats where {width} finite ones are needed")
    return value.astype(np.float32, copy=False)
