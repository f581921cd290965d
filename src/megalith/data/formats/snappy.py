"""Snappy: raw blocks unpacked, in native code and in a Python twin that defines the result.

A block is its unpacked length, a varint of at most 32 bits, and elements: literal bytes, or copies of
what was unpacked before. Blocks are hostile: the stated length is bounded by the caller and by what the
block's size can unpack to.
"""

from __future__ import annotations

from megalith.errors import InputError
from megalith.library import native_module

_MAX_GAIN = 22
"""A copy of 64 bytes takes at least 3."""


def max_packed(size: int) -> int:
    """How many bytes `size` bytes can take in a block."""
    return 32 + size + size // 6


def unsnap(data: bytes, max_bytes: int) -> bytes:
    """What a raw Snappy block holds.

    Raises InputError, saying where, if the block is damaged or holds more than max_bytes.
    """
    bound = min(max_bytes, _MAX_GAIN * len(data))
    native = native_module()
    return unsnap_twin(data, bound) if native is None else native.unsnap(data, bound)


def unsnap_twin(data: bytes, max_bytes: int) -> bytes:
    """`unsnap` in plain Python."""
    length, at = _length(data)
    if length > max_bytes:
        raise InputError(f"snappy: it states {length} bytes, over the bound of {max_bytes}")
    out = bytearray()
    while at < len(data):
        tag, kind = data[at], data[at] & 3
        extra = max(0, (tag >> 2) - 59) if kind == 0 else (1, 2, 4)[kind - 1]
        number = int.from_bytes(data[at + 1 : at + 1 + extra], "little")
        behind = at + 1 + extra
        if behind > len(data):
            raise _bad("an element is cut off", at)
        if kind == 0:
            size = number + 1 if extra else (tag >> 2) + 1
            if size > len(data) - behind:
                raise _bad("an element is cut off", at)
            if size > length - len(out):
                raise _bad("there is more than the stated length", at)
            out += data[behind : behind + size]
            behind += size
        else:
            size = (tag >> 2 & 7) + 4 if kind == 1 else (tag >> 2) + 1
            offset = (tag >> 5) << 8 | number if kind == 1 else number
            if not 0 < offset <= len(out):
                raise _bad("a copy reaches back before the beginning", at)
            if size > length - len(out):
                raise _bad("there is more than the stated length", at)
            piece = out[-offset:][:size]  # shorter than `size` where the copy overlaps what it makes
            out += (piece * (size // len(piece) + 1))[:size]
        at = behind
    if len(out) < length:
        raise _bad("there is less than the stated length", at)
    return bytes(out)


def _length(data: bytes) -> tuple[int, int]:
    """The stated length, and where the elements begin."""
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
