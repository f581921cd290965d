"""Opens compressed files: gzip, and the Snappy blocks of TensorFlow's TFRecord files.

A block of such a file is a big-endian uint32 with the packed length, followed by that many bytes of raw
Snappy. Raw Snappy is the unpacked length, a varint of at most 32 bits, followed by elements: literal bytes,
or copies of bytes that are already unpacked. It is unpacked in native code or by a reference implementation
in Python. Lengths are untrusted: they are bounded by `max_bytes` and by the size of the block.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from megalith.errors import InputError
from megalith.library import native_module

_MAX_GAIN = 22
"""Maximum unpacked bytes per packed byte: a copy of 64 bytes needs at least 3."""


def max_packed(size: int) -> int:
    """Return the maximum packed size of `size` bytes."""
    return 32 + size + size // 6


def unsnap(data: bytes, max_bytes: int) -> bytes:
    """Unpacks a raw Snappy block."""
    bound = min(max_bytes, _MAX_GAIN * len(data))
    native = native_module()
    return unsnap_reference(data, bound) if native is None else native.unsnap(data, bound)


def unsnap_reference(data: bytes, max_bytes: int) -> bytes:
    """`unsnap` in pure Python."""
    length, at = _length(data)
    if length > max_bytes:
        raise InputError(f"snappy: it states {length} bytes, more than the limit of {max_bytes}")
    out = bytearray()
    while at < len(data):
        tag, kind = data[at], data[at] & 3
        extra = max(0, (tag >> 2) - 59) if kind == 0 else (1, 2, 4)[kind - 1]
        number = int.from_bytes(data[at + 1 : at + 1 + extra], "little")
        end = at + 1 + extra
        if end > len(data):
            raise _bad("truncated element", at)
        if kind == 0:
            size = number + 1 if extra else (tag >> 2) + 1
            if size > len(data) - end:
                raise _bad("truncated element", at)
            if size > length - len(out):
                raise _bad("there is more than the stated length", at)
            out += data[end : end + size]
            end += size
        else:
            size = (tag >> 2 & 7) + 4 if kind == 1 else (tag >> 2) + 1
            offset = (tag >> 5) << 8 | number if kind == 1 else number
            if not 0 < offset <= len(out):
                raise _bad("a copy reaches back before the beginning", at)
            if size > length - len(out):
                raise _bad("there is more than the stated length", at)
            piece = out[-offset:][:size]  # shorter than `size` if the copy overlaps its own output
            out += (piece * (size // len(piece) + 1))[:size]
        at = end
    if len(out) < length:
        raise _bad("output is shorter than the stated length", at)
    return bytes(out)


def _length(data: bytes) -> tuple[int, int]:
    """The stated length, and the position of the first element."""
    value = 0
    for k, byte in enumerate(data[:5]):
        value |= (byte & 0x7F) << 7 * k
        if byte < 0x80 and value < 1 << 32:
            return value, k + 1
        if byte < 0x80:
            break
    raise _bad("it does not begin with a length of 32 bits", 0)


def _bad(problem: str, at: int) -> InputError:
    return InputError(f"snappy: {problem}, at byte {at}")


def open_bytes(path: Path) -> BinaryIO:
    """Opens a file for reading; a name that ends in .gz is decompressed."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def snappy_blocks(path: Path, *, max_bytes: int) -> Iterator[bytes]:
    """Yields the unpacked Snappy blocks of a file."""
    at = 0
    with path.open("rb") as file:
        while head := file.read(4):
            size = struct.unpack(">I", head)[0] if len(head) == 4 else 0
            if size > max_packed(max_bytes):
                raise InputError(
                    f"{path}: the Snappy block at byte {at} states {size} bytes, more than {max_bytes} "
                    "unpacked bytes can need: the file is damaged, or is not a file of Snappy blocks"
                )
            packed = file.read(size)
            if len(head) < 4 or len(packed) < size:
                raise InputError(
                    f"{path}: the file ends at byte {at + len(head) + len(packed)}, within the Snappy block "
                    f"that begins at byte {at}: it is truncated"
                )
            try:
                block = unsnap(packed, max_bytes)
            except InputError as error:
                raise InputError(f"{path}: the Snappy block at byte {at} is damaged: {error}") from None
            yield block
            at += 4 + size
