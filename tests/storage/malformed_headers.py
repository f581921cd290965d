"""Malformed safetensors files, each with a word of the error it must cause.

A recipe is the bytes of a file. All of them come with the right length and checksum, so the damage reaches
the parser.
"""

from __future__ import annotations

import json
import struct
from typing import Any

ZERO_32 = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}


def raw(header: Any, body: bytes = bytes(32), length: int | None = None) -> bytes:
    """A file of a header (JSON data, or raw bytes) and a body."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def one(**change: Any) -> bytes:
    """A file of one tensor with a changed entry; None removes a field."""
    entry = {key: value for key, value in {**ZERO_32, **change}.items() if value is not None}
    return raw({"x": entry})


def two(first: list[int], second: list[int], body: int = 32) -> bytes:
    """A file of two float32 vectors at these offsets."""

    def entry(begin: int, end: int) -> dict[str, Any]:
        return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}

    return raw({"x": entry(*first), "y": entry(*second)}, bytes(body))


HEADERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it has only 0 bytes"),
    "seven bytes": (bytes(7), "it has only 7 bytes"),
    "length of nothing": (raw(b"", b""), "is not valid JSON"),
    "length past the end": (raw({}, b"", length=100), "header would have 100 bytes"),
    "length of 2^63": (raw({}, length=2**63), "header would have"),
    "length of 2^64 - 1": (raw({}, length=2**64 - 1), "header would have"),
    "not JSON": (raw(b"x" * 16), "is not valid JSON"),
    "half a JSON": (raw(b'{"x": {"dtype": "F32"'), "is not valid JSON"),
    "two JSONs": (raw(b"{} {}", b""), "is not valid JSON"),
    "not UTF-8": (raw(b'{"\xff": 1}'), "is not valid JSON"),
    "UTF-16": (raw("{}".encode("utf-16"), b""), "is not valid JSON"),
    "a list": (raw([], b""), "is not a JSON object"),
    "a number": (raw(7, b""), "is not a JSON object"),
    "NaN": (raw(b'{"__metadata__": NaN}', b""), "NaN"),
    "a key twice": (
        raw(b'{"x":' + json.dumps(ZERO_32).encode() + b',"x":' + json.dumps(ZERO_32).encode() + b"}"),
        "key twice",
    ),
    "nested too deep to read": (raw(b"[" * 100_000 + b"]" * 100_000, b""), "nested"),
    "nested deep": (raw({"x": json.loads("[" * 150 + "]" * 150)}), "nested"),
    "metadata of numbers": (raw({"__metadata__": {"a": 1}}, b""), "metadata"),
    "metadata as a list": (raw({"__metadata__": []}, b""), "metadata"),
    "an entry that is not an object": (raw({"x": [1]}), "'x' is not valid"),
    "no dtype": (one(dtype=None), "'x' is not valid"),
    "no shape": (one(shape=None), "'x' is not valid"),
    "no offsets": (one(data_offsets=None), "'x' is not valid"),
    "unknown dtype": (one(dtype="F31"), "'x' is not valid"),
    "dtype as a list": (one(dtype=["F32"]), "'x' is not valid"),
    "three offsets": (one(data_offsets=[0, 32, 32]), "'x' is not valid"),
    "one offset": (one(data_offsets=[32]), "'x' is not valid"),
    "negative offset": (one(data_offsets=[-32, 0]), "'x' is not valid"),
    "offsets backwards": (one(data_offsets=[32, 0]), "'x' is not valid"),
    "offsets of 2^70": (one(data_offsets=[2**70, 2**70 + 32]), "'x' is not valid"),
    "offsets that wrap around": (one(data_offsets=[2**64 - 16, 2**64 + 16]), "'x' is not valid"),
    "offsets as floats": (one(data_offsets=[0.0, 32.0]), "'x' is not valid"),
    "offsets as texts": (one(data_offsets=["0", "32"]), "'x' is not valid"),
    "offsets true and false": (one(shape=[], dtype="U8", data_offsets=[False, True]), "'x' is not valid"),
    "another dtype than bytes": (one(dtype="F64"), "'x' is not valid"),
    "another shape than bytes": (one(shape=[2, 5]), "'x' is not valid"),
    "negative shape": (one(shape=[-2, -4]), "'x' is not valid"),
    "shape as a number": (one(shape=8), "'x' is not valid"),
    "shape whose product wraps to 8": (one(shape=[2**32, 2**32, 8]), "'x' is not valid"),
    "shape whose product wraps to 0": (one(shape=[2**33, 2**33], data_offsets=[0, 0]), "'x' is not valid"),
    "no rows of endless length": (
        raw({"x": {"dtype": "F32", "shape": [0, 2**39, 2**39], "data_offsets": [0, 0]}}, b""),
        "'x' is not valid",
    ),
    "sixty-five dimensions": (one(shape=[2, 4] + [1] * 63), "'x' is not valid"),
    "overlap": (two([0, 20], [16, 32]), "'y' begins at byte"),
    "the same place twice": (two([0, 32], [0, 32]), "'y' begins at byte"),
    "a gap": (two([0, 12], [16, 32]), "'y' begins at byte"),
    "a gap in front": (two([4, 16], [16, 32]), "'x' begins at byte"),
    "extra bytes at the end": (two([0, 12], [12, 28]), "4 bytes at the end belong to no tensor"),
    "a tensor past the end": (two([0, 16], [16, 36]), "after the end of the file"),
    "no tensors, but bytes": (raw({}), "32 bytes at the end belong to no tensor"),
}
