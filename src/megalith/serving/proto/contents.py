"""Cuts the contents of large tensors out of a serialized PredictRequest before protobuf parses the rest.

Protobuf copies a tensor's bytes when it parses a request, and again at each access. A push from training is
megabytes of tensors, so they are copied once, directly from the received bytes. The scanner below is slow for
many small fields. A push has few fields, so a request with more is left to protobuf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from megalith.errors import InputError

LARGE = 1 << 16
"""Minimum number of bytes of a tensor that is cut out."""
MAX_FIELDS = 4096
"""Maximum number of fields that are scanned, including those of nested messages."""
_MODEL_SPEC, _INPUTS, _SIGNATURE_NAME, _TENSOR_CONTENT = 1, 2, 3, 4
_VARINT, _BYTES = 0, 2


def cut_contents(
    data: bytes, wanted: Callable[[str], bool] = lambda signature: True
) -> tuple[bytes, dict[str, memoryview]]:
    """Cut the `tensor_content` of large inputs out of a serialized PredictRequest."""
    kept: list[bytes | memoryview] = []
    contents: dict[str, memoryview] = {}
    scanner = _Scanner()
    try:
        for field in scanner.fields(memoryview(data)):
            if field.number == _MODEL_SPEC and not wanted(_signature(field, scanner)):
                return data, {}
            if field.number != _INPUTS:
                kept.append(field.encoded)
                continue
            name, tensor = _entry(field, scanner)
            small, content = _cut(tensor, scanner)
            contents.pop(_text(name), None)  # of two entries with the same name, the last counts
            if content is not None:
                contents[_text(name)] = content
            entry = bytes(name.encoded) + field_prefix(2, len(small)) + small
            kept += [field_prefix(_INPUTS, len(entry)), entry]
    except InputError:
        return data, {}
    return b"".join(kept), contents


class _WireField(NamedTuple):
    """A varint or a length-delimited field. payload: None for a varint. encoded: with its key."""

    number: int
    payload: memoryview | None
    encoded: memoryview

    def message(self) -> memoryview:
        if self.payload is None:
            raise InputError(f"field {self.number} is not length-delimited")
        return self.payload


class _Scanner:
    """Scans the fields of messages; raises InputError after MAX_FIELDS, or for what protobuf must judge."""

    def __init__(self) -> None:
        self._left = MAX_FIELDS

    def fields(self, data: memoryview) -> Iterator[_WireField]:
        start, end = 0, len(data)
        while start < end:
            self._left -= 1
            key, at = _varint(data, start)
            if self._left < 0 or not key >> 3:
                raise InputError(f"more than {MAX_FIELDS} fields, or a field number of 0")
            payload = None
            if key & 7 == _BYTES:
                size, begin = _varint(data, at)
                at = begin + size
                payload = data[begin:at]
            elif key & 7 == _VARINT:
                _, at = _varint(data, at)
            else:
                raise InputError(f"field {key >> 3} is not a varint or length-delimited")
            if at > end:
                raise InputError(f"field {key >> 3} is truncated")
            yield _WireField(key >> 3, payload, data[start:at])
            start = at


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The varint at `at`, of at most 35 bits, and its end. Longer ones are left to protobuf."""
    value = 0
    for k, byte in enumerate(data[at : at + 5]):
        value |= (byte & 0x7F) << 7 * k
        if byte < 0x80:
            return value, at + k + 1
    raise InputError("a varint is truncated or has more than 5 bytes")


def _signature(spec: _WireField, scanner: _Scanner) -> str:
    name = ""
    for field in scanner.fields(spec.message()):
        if field.number == _SIGNATURE_NAME:
            name = _text(field)
    return name


def _entry(entry: _WireField, scanner: _Scanner) -> tuple[_WireField, _WireField]:
    """The name and the tensor of an input."""
    found = sorted(scanner.fields(entry.message()), key=lambda field: field.number)
    if [field.number for field in found] != [1, 2]:
        raise InputError("an input must have one name and one tensor")
    return found[0], found[1]


def _cut(tensor: _WireField, scanner: _Scanner) -> tuple[bytes, memoryview | None]:
    """A TensorProto without its content if that is large, and the content."""
    kept: list[memoryview] = []
    content = None
    for field in scanner.fields(tensor.message()):
        if field.number == _TENSOR_CONTENT and len(field.message()) >= LARGE and content is None:
            content = field.message()
        else:
            kept.append(field.encoded)
    return b"".join(kept), content


def _text(field: _WireField) -> str:
    try:
        return str(field.message(), "utf-8")
    except UnicodeDecodeError:
        raise InputError(f"field {field.number} is not UTF-8") from None


def field_prefix(number: int, length: int) -> bytes:
    """Encode the key and the length of a length-delimited protobuf field; its payload follows them."""
    out = bytearray([number << 3 | _BYTES])
    while length >= 0x80:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    out.append(length)
    return bytes(out)
