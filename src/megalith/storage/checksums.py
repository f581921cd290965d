"""CRC-32, the checksum of files in manifests: zlib's, or a native one if this CPU has the instructions."""

from __future__ import annotations

import zlib
from typing import Any

from megalith.library import native_module

_crc32: Any = getattr(native_module(), "crc32", zlib.crc32)


def crc32(data: Any, value: int = 0) -> int:
    """Compute the CRC-32 of bytes.

    Args:
        data: A contiguous buffer, such as bytes, a memoryview or a numpy array.
        value: The CRC-32 of the bytes before, to continue it.

    Returns:
        What `zlib.crc32` returns.
    """
    crc: int = _crc32(data, value)
    return crc
