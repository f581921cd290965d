"""Opens compressed files: gzip, and the Snappy blocks of TensorFlow's TFRecord files.

A block of such a file is a big-endian uint32 with the packed length, followed by that many bytes of raw
Snappy. Raw Snappy is the unpacked length, a varint of at most 32 bits, followed by elements: literal bytes,
or copies of bytes that are already unpacked. pyarrow unpacks it. Lengths are untrusted: they are bounded by
`max_bytes` and by the size of the block.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from megalith.errors import InputError
from megalith.ragged import arrow

_MAX_GAIN = 22
"""Maximum unpacked bytes per packed byte: a copy of 64 bytes needs at least 3."""


def max_packed(size: int) -> int:
    """Return the maximum packed size of `size` bytes."""
    return 32 + size + size // 6


def unsnap(data: bytes, max_bytes: int) -> bytes:
    length = _length(data)
    # Before pyarrow allocates the stated length: a few bytes must not ask for gigabytes.
    bound = min(max_bytes, _MAX_GAIN * len(data))
    if length > bound:
        raise InputError(f"snappy: it states {length} bytes, more than the limit of {bound}")
    try:
        unpacked: bytes = arrow().decompress(data, decompressed_size=length, codec="snappy", asbytes=True)
    except OSError:
        raise InputError(f"snappy: its elements do not unpack to the {length} bytes that it states") from None
    return unpacked


def _length(data: bytes) -> int:
    """Return the stated length, a varint of at most 32 bits."""
    value = 0
    for k, byte in enumerate(data[:5]):
        value |= (byte & 0x7F) << 7 * k
        if byte < 0x80 and value < 1 << 32:
            return value
        if byte < 0x80:
            break
    raise InputError("snappy: it does not begin with a length of 32 bits")


def open_bytes(path: Any) -> BinaryIO:
    """Open a file for reading; a name that ends in .gz is decompressed."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path.open("rb"), "rb"))
    return cast(BinaryIO, path.open("rb"))


def snappy_blocks(path: Path, *, max_bytes: int) -> Iterator[bytes]:
    """Yield the unpacked Snappy blocks of a file."""
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
