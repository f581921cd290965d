"""Opens compressed files: gzip, and the Snappy blocks of TensorFlow's TFRecord files.

A Snappy block is a big-endian uint32 with the packed length, followed by that many bytes of raw Snappy.
Lengths are untrusted: they are bounded by `max_bytes`.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from megalith.data.formats.snappy import max_packed, unsnap
from megalith.errors import InputError


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
