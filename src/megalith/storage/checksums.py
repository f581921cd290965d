"""CRC-32, the checksum of files in manifests: zlib's, or a native one if this CPU has the instructions."""

from __future__ import annotations

import zlib
from typing import Any

from megalith.library import native_module

_crc32: Any = getattr(native_module(), "crc32", zlib.crc32)


def crc32(data: Any, value: int = 0) -> int:
    """Compute the CRC-32 of bytes."""
    crc: int = _crc32(data, value)
    return crc
