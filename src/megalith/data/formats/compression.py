"""Streams: the bytes of a file, whatever they are packed in.

`open_bytes` opens plain and gzip files; `snappy_blocks` unpacks the blocks that TensorFlow writes
into TFRecord files with Snappy: a big-endian uint32 of the packed length, then that many bytes of raw
Snappy, to the end of the file. Stated lengths are not believed beyond `max_bytes`.
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
    """A file's bytes, unpacked if its name ends in .gz."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def snappy_blocks(path: Path, *, max_bytes: int) -> Iterator[bytes]:
    """What a file of Snappy blocks holds, a block at a time.

    Raises InputError, naming the file and the byte, where a block is cut off, damaged or over max_bytes.
    """
    at = 0
    with path.open("rb") as file:
        while head := file.read(4):
            size = struct.unpack(">I", head)[0] if len(head) == 4 else 0
            if size > max_packed(max_bytes):
                raise InputError(
                    f"{path}: the Snappy block at byte {at} states {size} bytes, more than {max_bytes} can "
                    "take packed: the file is damaged, or is no file of Snappy blocks"
                )
            packed = file.read(size)
            if len(head) < 4 or len(packed) < size:
                raise InputError(
                    f"{path}: the file ends at byte {at + len(head) + len(packed)}, within the Snappy block "
                    f"that begins at byte {at}: it is cut off"
                )
            try:
                block = unsnap(packed, max_bytes)
            except InputError as error:
                raise InputError(f"{path}: the Snappy block at byte {at} is damaged: {error}") from None
            yield block
            at += 4 + size
