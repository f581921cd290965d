"""Files of length-prefixed messages, as Monolith and TensorFlow write them.

There are two framings, both little-endian:

    "length"    [header] | uint64 length | message                 Monolith; see HEADERS
    "tfrecord"  uint64 length | its crc32c | message | its crc32c  TensorFlow; checksums are masked

Messages are bytes here; their readers parse them. Lengths are untrusted: they are bounded by `max_bytes`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalith.data.compression import open_bytes
from megalith.errors import InputError
from megalith.library import native_module

Framing = Literal["length", "tfrecord"]
MAX_RECORD_BYTES = 64 << 20
HEADERS = {
    "lagrangex_header": "8 bytes of kind and data source",
    "kafka_dump_prefix": "8 bytes; 8 more if they are zero, else they are the sort id's length",
    "sort_id": "uint64 length and a sort id of that length",
    "kafka_dump": "8 bytes",
}
"""What Monolith's options of these names write before each length, in this order."""

_CRC_BLOCK = 1024


class FramedRecord(NamedTuple):
    """A message in a file. at: the offset of its first byte. end: the offset after the record."""

    number: int
    at: int
    end: int
    message: bytes


class RecordFile:
    def __init__(
        self,
        path: Path,
        framing: Framing,
        *,
        header: Sequence[str] = (),
        max_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        self.path = path
        self.framing = framing
        self.header = header
        self.max_bytes = max_bytes

    def read(self, *, offset: int = 0, number: int = 0) -> Iterator[FramedRecord]:
        """Yield the records from record `number`, which begins at byte `offset`."""
        try:
            with open_bytes(self.path) as file:
                file.seek(offset)
                cursor = _Cursor(self.path, file, offset)
                while cursor.begin_record():
                    record = self._record(cursor, number)
                    yield record
                    offset, number = record.end, number + 1
        except (EOFError, OSError) as error:
            raise InputError(f"{self.path}: cannot be read after byte {offset}: {error}") from error

    def _record(self, cursor: _Cursor, number: int) -> FramedRecord:
        if self.header:
            self._skip_header(cursor)
        start = cursor.at
        head = cursor.take(8)
        if self.framing == "tfrecord":
            cursor.check(head, "length")
        message = cursor.take(self._size(head, start))
        at = cursor.at - len(message)
        if self.framing == "tfrecord":
            cursor.check(message, "record")
        return FramedRecord(number, at, cursor.at, message)

    def _skip_header(self, cursor: _Cursor) -> None:
        sort_id = None
        if "lagrangex_header" in self.header:
            cursor.take(8)
        if "kafka_dump_prefix" in self.header:
            start, word = cursor.at, cursor.take(8)
            if any(word):
                sort_id = self._size(word, start)
            else:
                cursor.take(8)
        if "sort_id" in self.header:
            start = cursor.at
            cursor.take(self._size(cursor.take(8), start) if sort_id is None else sort_id)
        if "kafka_dump" in self.header:
            cursor.take(8)

    def _size(self, head: bytes, at: int) -> int:
        size: int = struct.unpack("<Q", head)[0]
        if size > self.max_bytes:
            raise InputError(
                f"{self.path}: the length at byte {at} is {size}, more than max_bytes={self.max_bytes}; "
                f"is the file framed as {self.framing!r}, with headers {list(self.header)}?"
            )
        return size


class _Cursor:
    """Takes bytes of a file, record after record. start, at: the first byte of the record, the next byte."""

    def __init__(self, path: Path, file: BinaryIO, at: int) -> None:
        self._path, self._file = path, file
        self._first = b""
        self.start = self.at = at

    def begin_record(self) -> bool:
        """Whether there is another record; every record begins with a word of 8 bytes."""
        self.start = self.at
        self._first = self._file.read(8)
        return bool(self._first)

    def take(self, size: int) -> bytes:
        data, self._first = self._first or self._file.read(size), b""
        if len(data) < size:
            raise InputError(
                f"{self._path}: the file ends at byte {self.at + len(data)}, within the record that begins "
                f"at byte {self.start}: it is truncated, or framed differently"
            )
        self.at += size
        return data

    def check(self, data: bytes, what: str) -> None:
        at = self.at
        stated: int = struct.unpack("<I", self.take(4))[0]
        if masked_crc32c(data) != stated:
            raise InputError(f"{self._path}: the checksum at byte {at} does not match the {what} before it")


def write_records(
    file: BinaryIO, messages: Sequence[bytes], framing: Framing, *, header: Sequence[str] = ()
) -> None:
    sizes = {"lagrangex_header": 8, "kafka_dump_prefix": 16, "sort_id": 8, "kafka_dump": 8}
    for message in messages:
        length = struct.pack("<Q", len(message))
        if framing == "tfrecord":
            file.write(length + struct.pack("<I", masked_crc32c(length)))
            file.write(message + struct.pack("<I", masked_crc32c(message)))
        else:
            file.write(bytes(sum(sizes[name] for name in header)) + length + message)


# ---- crc32c, a block of bytes at a time


def masked_crc32c(data: bytes) -> int:
    """Return TFRecord's checksum: crc32c rotated and offset, so that checksums of checksums differ."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    native = native_module()
    return crc32c_reference(data) if native is None else native.crc32c(data)


def crc32c_reference(data: bytes) -> int:
    """`crc32c` in numpy."""
    effect, places = _crc_tables()
    values = np.frombuffer(data, np.uint8)
    crc, at = 0xFFFFFFFF, len(values) % _CRC_BLOCK
    if at < 4:
        for byte in values[:at].tolist():
            crc = crc >> 8 ^ int(effect[-1, crc & 0xFF ^ byte])
    blocks = ([values[:at]] if at >= 4 else []) + list(values[at:].reshape(-1, _CRC_BLOCK))
    for block in blocks:
        mixed = block.copy()  # the CRC so far is combined with the first four bytes
        mixed[:4] ^= np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
        crc = int(np.bitwise_xor.reduce(effect[places[-len(block) :], mixed]))
    return crc ^ 0xFFFFFFFF


@cache
def _crc_tables() -> tuple[NDArray[np.uint32], NDArray[np.intp]]:
    """What byte b at index i of a block contributes to the CRC, [i, b]; and the indices, [_CRC_BLOCK]."""
    one = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        one = np.where(one & 1, one >> 1 ^ np.uint32(0x82F63B78), one >> 1).astype(np.uint32)
    effect = np.empty((_CRC_BLOCK, 256), np.uint32)
    effect[-1] = one
    for i in range(_CRC_BLOCK - 2, -1, -1):  # a byte further left is followed by one more byte
        effect[i] = effect[i + 1] >> 8 ^ one[effect[i + 1] & 0xFF]
    return effect, np.arange(_CRC_BLOCK)
