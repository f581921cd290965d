"""Protowire: the protobuf wire format, read and written without protobuf.

`fields` walks a message and yields a `Field` for each field it meets; the caller knows the schema and
asks each for the type it expects: `field.text()`, `field.fixed64s()`, `field.message()`. Nothing is
copied on the way: bytes are memoryviews, packed fixed-width runs are numpy views. `Writer` is the way
back. Schemas, groups and zigzag numbers are not here.

Messages are hostile until read: whatever the bytes, what comes out is values or an InputError that
says where; no stated size is believed, and the work is in proportion to the input. Protobuf guesses
in two places where this does not: a known field of another wire type is an error rather than unknown,
and a number that does not fit its type is an error rather than cut.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megalith.errors import InputError

if TYPE_CHECKING:
    from typing_extensions import Buffer

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_DEPTH = 100
MAX_NUMBER = 2**29 - 1

_NAMES = {VARINT: "a varint", FIXED64: "8 bytes", BYTES: "length-delimited", FIXED32: "4 bytes"}


def fields(message: Buffer, *, at: int = 0) -> Iterator[Field]:
    """The fields of a message, in the order they stand in it.

    at: where the message begins in what it was cut from; positions in errors count from there.
    Raises InputError, while iterating, at the first byte that is not protobuf.
    """
    return _walk(_bytes_of(message, "message"), at, 0)


class Field:
    """A field as it stands in a message; its methods read it as the type the schema says.

    number: its field number. wire_type: VARINT, FIXED64, BYTES or FIXED32.
    value: an int (unsigned) or, for BYTES, a memoryview of the input.
    at: the position of the value's first byte. depth: how many messages are around its own.
    Every method raises InputError if the field is of another wire type, or its value not of the type.
    """

    __slots__ = ("at", "depth", "number", "value", "wire_type")

    def __init__(self, number: int, wire_type: int, value: int | memoryview, at: int, depth: int) -> None:
        self.number = number
        self.wire_type = wire_type
        self.value = value
        self.at = at
        self.depth = depth

    # ---- one value

    def uint64(self) -> int:
        """An uint64."""
        return self._int(VARINT)

    def int64(self) -> int:
        """An int64, or an enum's number."""
        value = self._int(VARINT)
        return value - (1 << 64) if value >= 1 << 63 else value

    def uint32(self) -> int:
        """An uint32."""
        return self._within(self.uint64(), 0, 2**32 - 1)

    def int32(self) -> int:
        """An int32, or an enum's number."""
        return self._within(self.int64(), -(2**31), 2**31 - 1)

    def boolean(self) -> bool:
        """A bool."""
        return self._int(VARINT) != 0

    def fixed64(self) -> int:
        """A fixed64, unsigned."""
        return self._int(FIXED64)

    def fixed32(self) -> int:
        """A fixed32, unsigned."""
        return self._int(FIXED32)

    def float32(self) -> float:
        """A float."""
        value: float = struct.unpack("<f", self._int(FIXED32).to_bytes(4, "little"))[0]
        return value

    def float64(self) -> float:
        """A double."""
        value: float = struct.unpack("<d", self._int(FIXED64).to_bytes(8, "little"))[0]
        return value

    def raw(self) -> memoryview:
        """Bytes, without copying them."""
        if isinstance(self.value, int):
            raise self._mismatch(BYTES)
        return self.value

    def text(self) -> str:
        """A string."""
        try:
            return str(self.raw(), "utf-8")
        except UnicodeDecodeError as error:
            raise _bad(f"field {self.number} is not UTF-8", self.at + error.start) from None

    def message(self) -> Iterator[Field]:
        """The fields of a message inside this one, at most MAX_DEPTH deep."""
        if self.depth + 1 >= MAX_DEPTH:
            raise _bad(f"messages are nested more than {MAX_DEPTH} deep", self.at)
        return _walk(self.raw(), self.at, self.depth + 1)

    def map_entry(self) -> tuple[Field | None, Field | None]:
        """Key and value of a map's entry; None where the entry leaves it at its default."""
        found: dict[int, Field] = {}
        for part in self.message():
            if part.number in (1, 2) and found.setdefault(part.number, part) is not part:
                raise _bad(f"field {self.number}: a map's entry has field {part.number} twice", part.at)
        return found.get(1), found.get(2)

    # ---- what one field holds of a repeated number: a packed run, or a single value

    def uint64s(self) -> NDArray[np.uint64]:
        """Of repeated uint64: [n]."""
        if self.wire_type == VARINT:
            return np.array([self.value], np.uint64)
        return _varints(self.raw(), self.at)

    def int64s(self) -> NDArray[np.int64]:
        """Of repeated int64, or of enum numbers: [n]."""
        return self.uint64s().view(np.int64)

    def int32s(self) -> NDArray[np.int32]:
        """Of repeated int32, or of enum numbers: [n]."""
        values = self.int64s()
        for value in values[values != values.astype(np.int32)][:1].tolist():
            self._within(value, -(2**31), 2**31 - 1)
        return values.astype(np.int32)

    def fixed64s(self) -> NDArray[np.uint64]:
        """Of repeated fixed64: [n], a read-only and perhaps unaligned view of the message."""
        return self._fixed("<u8", FIXED64)

    def float32s(self) -> NDArray[np.float32]:
        """Of repeated float: [n], a read-only and perhaps unaligned view of the message."""
        return self._fixed("<f4", FIXED32)

    def float64s(self) -> NDArray[np.float64]:
        """Of repeated double: [n], a read-only and perhaps unaligned view of the message."""
        return self._fixed("<f8", FIXED64)

    def __repr__(self) -> str:
        value = self.value if isinstance(self.value, int) else bytes(self.value[:32])
        return f"Field({self.number}, {_NAMES[self.wire_type]}, {value!r} at byte {self.at})"

    def _int(self, wire_type: int) -> int:
        if self.wire_type != wire_type or not isinstance(self.value, int):
            raise self._mismatch(wire_type)
        return self.value

    def _within(self, value: int, low: int, high: int) -> int:
        if not low <= value <= high:
            raise _bad(f"field {self.number}: {value} is not within {low} .. {high}", self.at)
        return value

    def _fixed(self, dtype: str, wire_type: int) -> NDArray[Any]:
        size = 8 if wire_type == FIXED64 else 4
        if self.wire_type == wire_type:
            return np.frombuffer(self._int(wire_type).to_bytes(size, "little"), dtype)
        run = self.raw()
        if len(run) % size:
            raise _bad(f"field {self.number}: {len(run)} bytes are no run of {size}-byte numbers", self.at)
        return np.frombuffer(run, dtype)

    def _mismatch(self, wire_type: int) -> InputError:
        return _bad(f"field {self.number} is {_NAMES[self.wire_type]}, not {_NAMES[wire_type]}", self.at)


class Writer:
    """Builds a message field by field; `bytes(writer)` is the message.

    Numbers and strings at their default are left out, as proto3 does, unless `always` is set (for
    members of a oneof, optional fields and map keys). Repeated numbers are packed.
    Every method raises InputError if the number or the value cannot be written.
    """

    __slots__ = ("_out",)

    def __init__(self) -> None:
        self._out = bytearray()

    def __bytes__(self) -> bytes:
        return bytes(self._out)

    def varint(self, number: int, value: int, *, always: bool = False) -> None:
        """An int32, int64, uint32, uint64, bool or enum."""
        encoded = _varint_bytes(value)
        if value or always:
            self._put(number, VARINT, encoded)

    def fixed64(self, number: int, value: int, *, always: bool = False) -> None:
        """A fixed64, or an sfixed64 if below zero."""
        encoded = _unsigned(value).to_bytes(8, "little")
        if value or always:
            self._put(number, FIXED64, encoded)

    def float32(self, number: int, value: float, *, always: bool = False) -> None:
        """A float."""
        self._put_float(number, FIXED32, "<f", value, always)

    def float64(self, number: int, value: float, *, always: bool = False) -> None:
        """A double."""
        self._put_float(number, FIXED64, "<d", value, always)

    def raw(self, number: int, value: Buffer, *, always: bool = False) -> None:
        """Bytes."""
        data = _bytes_of(value, f"field {number}")
        if len(data) or always:
            self._put(number, BYTES, _varint_bytes(len(data)), data)

    def text(self, number: int, value: str, *, always: bool = False) -> None:
        """A string."""
        try:
            self.raw(number, value.encode(), always=always)
        except UnicodeEncodeError as error:
            raise InputError(f"protobuf: field {number} cannot be UTF-8: {error}") from None

    def message(self, number: int, value: Writer) -> None:
        """A message; an empty one is written too."""
        self.raw(number, bytes(value), always=True)

    def varints(self, number: int, values: Iterable[int]) -> None:
        """Repeated int32, int64, uint32, uint64, bool or enum."""
        self.raw(number, b"".join(map(_varint_bytes, values)))

    def fixed64s(self, number: int, values: Iterable[int] | NDArray[np.integer[Any]]) -> None:
        """Repeated fixed64, from whole numbers of any sign."""
        if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
            wide = values.astype("<i8" if values.dtype.kind == "i" else "<u8")
            self.raw(number, wide.tobytes())
        else:
            self.raw(number, b"".join(_unsigned(value).to_bytes(8, "little") for value in values))

    def float32s(self, number: int, values: ArrayLike) -> None:
        """Repeated float."""
        self.raw(number, np.asarray(values, "<f4").tobytes())

    def float64s(self, number: int, values: ArrayLike) -> None:
        """Repeated double."""
        self.raw(number, np.asarray(values, "<f8").tobytes())

    def _put_float(self, number: int, wire_type: int, form: str, value: float, always: bool) -> None:
        try:
            encoded = struct.pack(form, value)
        except (OverflowError, struct.error):
            raise InputError(f"protobuf: field {number} cannot hold {value!r}") from None
        if any(encoded) or always:  # the bits decide, so -0.0 is written
            self._put(number, wire_type, encoded)

    def _put(self, number: int, wire_type: int, *parts: bytes | memoryview) -> None:
        if not 1 <= number <= MAX_NUMBER:
            raise InputError(f"protobuf: field numbers are 1 .. {MAX_NUMBER}, got {number}")
        self._out += _varint_bytes(number << 3 | wire_type)
        for part in parts:
            self._out += part


def _bad(problem: str, at: int) -> InputError:
    return InputError(f"protobuf: {problem} at byte {at}")


def _bytes_of(data: Buffer, name: str) -> memoryview:
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError:
        kind = type(data).__name__
        raise InputError(f"protobuf: {name} must be bytes or a contiguous buffer, got {kind}") from None


def _walk(view: memoryview, base: int, depth: int) -> Iterator[Field]:
    at, end = 0, len(view)
    while at < end:
        start = at
        key, at = _varint(view, at, base)
        number, wire_type = key >> 3, key & 7
        if not 1 <= number <= MAX_NUMBER:
            raise _bad(f"field number {number} is not within 1 .. {MAX_NUMBER}", base + start)
        value: int | memoryview
        if wire_type == VARINT:
            begin = at
            value, at = _varint(view, at, base)
        elif wire_type == BYTES:
            length, begin = _varint(view, at, base)
            at = _past(number, begin, length, end, base)
            value = view[begin:at]
        elif wire_type in (FIXED64, FIXED32):
            begin = at
            at = _past(number, begin, 8 if wire_type == FIXED64 else 4, end, base)
            value = int.from_bytes(view[begin:at], "little")
        else:
            kind = "a group, which is not supported" if wire_type in (3, 4) else f"of wire type {wire_type}"
            raise _bad(f"field {number} is {kind}", base + start)
        yield Field(number, wire_type, value, base + begin, depth)


def _past(number: int, begin: int, length: int, end: int, base: int) -> int:
    if length > end - begin:
        raise _bad(f"field {number} has {length} bytes but {end - begin} are left", base + begin)
    return begin + length


def _varint(view: memoryview, at: int, base: int) -> tuple[int, int]:
    """The varint that begins at `at`, and where it ends."""
    if at < len(view) and (short := view[at]) < 0x80:  # most are one byte
        return short, at + 1
    value = 0
    for k, byte in enumerate(view[at : at + 10]):
        value |= (byte & 0x7F) << 7 * k
        if byte < 0x80:
            if value >= 1 << 64:
                raise _bad("a varint of more than 64 bits", base + at)
            return value, at + k + 1
    what = "a varint is cut off" if len(view) - at < 10 else "a varint of more than 10 bytes"
    raise _bad(what, base + at)


def _varints(run: memoryview, base: int) -> NDArray[np.uint64]:
    """A packed run of varints, a byte position of all of them at a time."""
    raw = np.frombuffer(run, np.uint8)
    last = np.flatnonzero(raw < 0x80)
    first = np.zeros_like(last)
    first[1:] = last[:-1] + 1
    if raw.size and raw[-1] >= 0x80:
        _varint(run, int(last[-1]) + 1 if last.size else 0, base)
    extra = last - first
    values = (raw[first] & 0x7F).astype(np.uint64)
    for wrong in np.flatnonzero((extra > 9) | ((extra == 9) & (raw[last] > 1)))[:1]:
        _varint(run, int(first[wrong]), base)
    for k in range(1, int(extra.max(initial=0)) + 1):
        longer = np.flatnonzero(extra >= k)
        values[longer] |= (raw[first[longer] + k] & 0x7F).astype(np.uint64) << np.uint64(7 * k)
    return values


def _varint_bytes(value: int) -> bytes:
    rest = _unsigned(value)
    out = bytearray()
    while rest >= 0x80:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def _unsigned(value: int) -> int:
    try:
        number = index(value)
    except TypeError:
        raise InputError(f"protobuf: {value!r} is not a whole number") from None
    if not -(1 << 63) <= number < 1 << 64:
        raise InputError(f"protobuf: {number} does not fit in 64 bits")
    return number % (1 << 64)
