"""Monolith's EntryDumps: rows out of TFRecords, in native code and in a Python twin that says what is wrong.

    message EntryDump { sfixed64 id = 1; repeated float num = 2; OptimizerDump opt = 3;
                        int64 last_update_ts_sec = 4; }
    message OptimizerDump { repeated SingleOptimizerDump dump = 1; }     one for each segment
    message SingleOptimizerDump { oneof: a message of floats for each kind of optimizer }

A file is a stream of TFRecords, plain or in Snappy blocks. Files are hostile: checksums are checked, lengths
bounded, and each record must have exactly the floats that the table's rows are made of.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.checkpoint.importers.row_import import chunk_rows
from megalith.data.formats.compression import snappy_blocks
from megalith.data.formats.record_files import MAX_RECORD_BYTES, masked_crc32c
from megalith.errors import CheckpointError, InputError
from megalith.library import native_module
from megalith.protowire import Field, fields

KINDS = {
    1: "adagrad",
    2: "sgd",
    3: "ftrl",
    4: "dynamic_wd_adagrad",
    6: "adadelta",
    7: "adam",
    8: "amsgrad",
    9: "momentum",
    11: "rmsprop",
    12: "rmspropv2",
    13: "group_ftrl",
    14: "batch_softmax",
    15: "group_adagrad",
}
"""What each field of SingleOptimizerDump is the state of."""

_READ = 1 << 20
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class SegmentLayout:
    """A segment's state: its field of SingleOptimizerDump, and what lies in there.

    pieces: (field, first float of the row, floats). optional: a dump with no field at all will do.
    """

    kind: int
    optional: bool
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class EntryLayout:
    """Which floats of an entry go where in a row of `width` floats; the weights come first.

    reads_state: False leaves optimizer state alone. needs_state: an entry without any is wrong.
    """

    dim: int
    width: int
    reads_state: bool
    needs_state: bool
    segments: tuple[SegmentLayout, ...]

    @property
    def native(self) -> tuple[object, ...]:
        """The form the native parser takes."""
        segments = [(s.kind, s.optional, list(s.pieces)) for s in self.segments]
        return self.dim, self.width, self.reads_state, self.needs_state, segments


class Entries(NamedTuple):
    """Rows: ids int64 [n], floats float32 [n, width], times int64 [n] in seconds, 0 where unknown."""

    ids: Tensor
    floats: Tensor
    times: Tensor


class EntryFile:
    """The entries of a file, from the first to the last, table after table.

    Raises CheckpointError, naming the file and the byte (of the unpacked stream), where it is damaged, ends
    too early, or an entry does not have the layout asked for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._blocks = _blocks(path)
        self._data = b""
        self._at = 0

    def read(self, layout: EntryLayout, limit: int | None = None) -> Iterator[Entries]:
        """The next `limit` entries (None: all that follow), in pieces."""
        left = _NO_LIMIT if limit is None else limit
        while left > 0:
            room = min(chunk_rows(layout.width), left)
            rows = Entries(
                torch.empty(room, dtype=torch.int64),
                torch.empty(room, layout.width),
                torch.empty(room, dtype=torch.int64),
            )
            n = self._fill(room, layout, rows)
            if n:
                yield Entries(*(column[:n] for column in rows))
            left -= n
            if n < room:
                self._check_end(None if limit is None else limit - left, limit)
                return

    def skip(self, count: int) -> None:
        """Passes over the next `count` entries."""
        n = self._fill(count, None, None)
        if n < count:
            self._check_end(n, count)

    def finish(self) -> None:
        """Raises CheckpointError if there is another entry."""
        if self._data or self._more():
            raise self._wrong(f"there is more at byte {self._at} than its .meta file lists")

    def _fill(self, room: int, layout: EntryLayout | None, rows: Entries | None) -> int:
        """Reads up to `room` entries; fewer at the end of the file."""
        n = 0
        while n < room:
            into = None if rows is None else Entries(*(column[n:] for column in rows))
            try:
                read, used = read_entries(self._data, self._at, room - n, layout, into)
            except InputError as error:
                raise self._wrong(str(error)) from None
            n += read
            self._data, self._at = self._data[used:], self._at + used
            if n < room and not self._more():
                break
        return n

    def _more(self) -> bool:
        """Takes more of the file; as much as is there already, so that a long record is not copied often."""
        parts, size = [self._data], 0
        try:
            while size < max(_READ, len(self._data)) and (block := next(self._blocks, None)) is not None:
                parts.append(block)
                size += len(block)
        except (InputError, OSError) as error:
            raise CheckpointError(str(error)) from None
        self._data = b"".join(parts)
        return size > 0

    def _check_end(self, found: int | None, expected: int | None) -> None:
        if self._data:
            raise self._wrong(f"it ends within the record at byte {self._at}: it is cut off")
        if found is not None:
            raise self._wrong(f"it ends after {found} of {expected} entries that its .meta file lists")

    def _wrong(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")


def _blocks(path: Path) -> Iterator[bytes]:
    """A file's bytes, unpacked if it is a file of Snappy blocks."""
    with path.open("rb") as file:
        head = file.read(12)
        plain = len(head) < 12 or masked_crc32c(head[:8]) == struct.unpack("<I", head[8:])[0]
        if plain:
            while head:
                yield head
                head = file.read(_READ)
    if not plain:
        yield from snappy_blocks(path, max_bytes=MAX_RECORD_BYTES)


# ---- records to rows


def read_entries(
    data: bytes, at: int, limit: int, layout: EntryLayout | None, into: Entries | None
) -> tuple[int, int]:
    """Reads complete records, at most `limit`: how many there were, and their bytes.

    at: where data begins in the stream, for errors. Without a layout records are passed over.
    Raises InputError, saying what is wrong, at the first wrong record.
    """
    native = native_module()
    if native is None:
        return read_entries_twin(data, at, limit, layout, into)
    if layout is None or into is None:
        rows, used, end = native.skip_entries(data, limit, MAX_RECORD_BYTES)
    else:
        rows, used, end = native.entries(data, limit, MAX_RECORD_BYTES, layout.native, *into)
    if end == 2:
        read_entries_twin(data[used:], at + used, 1, layout, into)
        raise AssertionError(f"native code refused the record at byte {at + used}, its twin did not")
    return rows, used


def read_entries_twin(
    data: bytes, at: int, limit: int, layout: EntryLayout | None, into: Entries | None
) -> tuple[int, int]:
    """`read_entries` in plain Python."""
    rows, used = 0, 0
    while rows < limit and len(data) - used >= 12:
        head, where = data[used : used + 8], at + used
        if masked_crc32c(head) != struct.unpack_from("<I", data, used + 8)[0]:
            raise InputError(f"the checksum at byte {where + 8} is not that of the length before it")
        length = struct.unpack("<Q", head)[0]
        if length > MAX_RECORD_BYTES:
            raise InputError(f"the length at byte {where} is {length}, over {MAX_RECORD_BYTES}")
        begin, end = used + 12, used + 12 + length
        if len(data) < end + 4:
            break
        message = data[begin:end]
        if masked_crc32c(message) != struct.unpack_from("<I", data, end)[0]:
            raise InputError(f"the checksum at byte {at + end} is not that of the record before it")
        if layout is not None and into is not None:
            try:
                _entry(message, at + begin, layout, Entries(*(column[rows] for column in into)))
            except InputError as error:
                raise InputError(f"the entry at byte {at + begin}: {error}") from None
        rows, used = rows + 1, end + 4
    return rows, used


def _entry(message: bytes, at: int, layout: EntryLayout, row: Entries) -> None:
    floats = row.floats.numpy()
    id: int | None = None
    weights, dumps, time = 0, 0, 0
    for field in fields(message, at=at):
        if field.number == 1:
            id = field.fixed64()
        elif field.number == 2:
            weights = _append(floats[: layout.dim], weights, field, "weights")
        elif field.number == 3:
            field.raw()
            if layout.reads_state:
                dumps = _optimizers(field, dumps, layout, floats)
        elif field.number == 4:
            time = field.int64()
    if id is None:
        raise InputError("it has no id")
    if weights != layout.dim:
        raise InputError(f"it has {weights} weights, the table's rows have {layout.dim}")
    if layout.reads_state and dumps != len(layout.segments) and (layout.needs_state or dumps):
        raise InputError(f"it has optimizer state of {dumps} segments, the table has {len(layout.segments)}")
    row.ids.fill_(id - (1 << 64) if id >= 1 << 63 else id)
    row.times.fill_(time)


def _optimizers(opt: Field, dumps: int, layout: EntryLayout, floats: NDArray[np.float32]) -> int:
    for dump in opt.message():
        if dump.number != 1:
            continue
        if dumps == len(layout.segments):
            raise InputError(f"it has optimizer state of more segments than the table's {dumps}")
        _segment(dump, dumps, layout.segments[dumps], floats)
        dumps += 1
    return dumps


def _segment(dump: Field, number: int, layout: SegmentLayout, floats: NDArray[np.float32]) -> None:
    found = False
    for kind in dump.message():
        if kind.number != layout.kind or found:
            held = KINDS.get(kind.number, f"unknown kind {kind.number}")
            raise InputError(
                f"segment {number} holds the state of {held}"
                + (" too" if found else "")
                + ", the table keeps "
                f"that of {KINDS[layout.kind]}; drop_optimizer_state=True lets it start fresh"
            )
        _state(kind, layout, floats)
        found = True
    if not found and not layout.optional:
        raise InputError(
            f"segment {number} holds no state, the table keeps that of {KINDS[layout.kind]}; "
            "drop_optimizer_state=True lets it start fresh"
        )


def _state(kind: Field, layout: SegmentLayout, floats: NDArray[np.float32]) -> None:
    done = dict.fromkeys(layout.pieces, 0)
    for field in kind.message():
        for piece in layout.pieces:
            number, start, size = piece
            if field.number == number:
                done[piece] = _append(floats[start : start + size], done[piece], field, "numbers")
    for (number, _, size), n in done.items():
        if n != size:
            raise InputError(f"field {number} of {KINDS[layout.kind]} has {n} numbers, not {size}")


def _append(to: NDArray[np.float32], done: int, field: Field, what: str) -> int:
    values = field.float32s()
    if len(values) > len(to) - done:
        raise InputError(f"field {field.number} has more than {len(to)} {what}")
    to[done : done + len(values)] = values
    return done + len(values)
