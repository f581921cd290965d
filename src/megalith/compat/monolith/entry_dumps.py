"""Rows from Monolith's EntryDumps: files of TFRecords, parsed by native code.

    message EntryDump { sfixed64 id = 1; repeated float num = 2; OptimizerDump opt = 3;
                        int64 last_update_ts_sec = 4; }
    message OptimizerDump { repeated SingleOptimizerDump dump = 1; }     one for each segment
    message SingleOptimizerDump { oneof: a message of floats for each kind of optimizer }

A file is a stream of TFRecords, plain or in Snappy blocks. Files are untrusted until validated: checksums are
checked, lengths are bounded, and each entry must have exactly the floats of the table's rows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.checkpoint.importers import chunk_rows
from megalith.data.compression import snappy_blocks
from megalith.data.record_files import MAX_RECORD_BYTES, masked_crc32c
from megalith.errors import CheckpointError, InputError, NativeMissingError
from megalith.library import native_module

_READ = 1 << 20
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class SegmentLayout:
    """The optimizer state of a segment.

    kind: its field of SingleOptimizerDump. optional: an empty SingleOptimizerDump is accepted.
    pieces: for each field inside, (field, first float of the row, number of floats).
    """

    kind: int
    optional: bool
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class EntryLayout:
    """The place of an entry's floats in a row of `width` floats; the `dim` weights come first.

    reads_state: False ignores optimizer state. needs_state: an entry without optimizer state is an error.
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
    """Rows: ids int64 [n], floats float32 [n, width], times int64 [n] in seconds (0 where unknown)."""

    ids: Tensor
    floats: Tensor
    times: Tensor


class EntryFile:
    """Reads the entries of a file in order; several tables may be concatenated in it.

    Its methods raise CheckpointError, with the file and the byte of the unpacked stream, if the file is
    damaged or ends too early, or an entry does not have the expected layout.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._blocks = _blocks(path)
        self._data = b""
        self._at = 0

    def read(self, layout: EntryLayout, limit: int | None = None) -> Iterator[Entries]:
        """Yield the next entries, in pieces."""
        left = _NO_LIMIT if limit is None else limit
        while left > 0:
            room = min(chunk_rows(layout.width), left)
            rows = Entries(
                torch.empty(room, dtype=torch.int64, device="cpu"),
                torch.empty(room, layout.width, device="cpu"),
                torch.empty(room, dtype=torch.int64, device="cpu"),
            )
            n = self._fill(room, layout, rows)
            if n:
                yield Entries(*(column[:n] for column in rows))
            left -= n
            if n < room:
                self._check_end(None if limit is None else limit - left, limit)
                return

    def skip(self, count: int) -> None:
        """Skip the next entries."""
        n = self._fill(count, None, None)
        if n < count:
            self._check_end(n, count)

    def finish(self) -> None:
        """Raise CheckpointError if there is another entry."""
        if self._data or self._more():
            raise self._wrong(f"there are more entries at byte {self._at} than its .meta file lists")

    def _fill(self, room: int, layout: EntryLayout | None, rows: Entries | None) -> int:
        """Read up to `room` entries; fewer at the end of the file."""
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
        """Read at least as much as is buffered, so that a long record is copied only a few times."""
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
            raise self._wrong(f"the file ends within the record at byte {self._at}: it is truncated")
        if found is not None:
            raise self._wrong(f"the file ends after {found} of {expected} entries that its .meta file lists")

    def _wrong(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, unpacked if it is a file of Snappy blocks."""
    with path.open("rb") as file:
        head = file.read(12)
        plain = len(head) < 12 or masked_crc32c(head[:8]) == struct.unpack("<I", head[8:])[0]
        if plain:
            while head:
                yield head
                head = file.read(_READ)
    if not plain:
        yield from snappy_blocks(path, max_bytes=MAX_RECORD_BYTES)


def read_entries(
    data: bytes, at: int, limit: int, layout: EntryLayout | None, into: Entries | None
) -> tuple[int, int]:
    """Read complete records."""
    native = native_module()
    if native is None:
        raise NativeMissingError(
            "Monolith checkpoints need megalith's native module, which is not built here"
        )
    rows: int
    used: int
    if layout is None or into is None:
        rows, used = native.skip_entries(data, at, limit, MAX_RECORD_BYTES)
    else:
        rows, used = native.entries(data, at, limit, MAX_RECORD_BYTES, layout.native, *into)
    return rows, used
