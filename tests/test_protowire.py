"""Protowire: bytes written out by hand, protobuf's own bytes, round trips, and hostile messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megalith.errors import InputError
from megalith.protowire import BYTES, FIXED32, FIXED64, MAX_DEPTH, VARINT, Field, Writer, fields

UINT64 = st.one_of(st.sampled_from([0, 1, 127, 128, 2**63 - 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
INT64 = UINT64.map(lambda x: x - 2**63)
INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)


def only(message: bytes) -> Field:
    (field,) = fields(message)
    return field


def written(method: str, *args: Any, **options: Any) -> bytes:
    writer = Writer()
    getattr(writer, method)(*args, **options)
    return bytes(writer)


# ---- by hand


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        ("varint", (1, 1), "08 01"),
        ("varint", (1, 150), "08 96 01"),
        ("varint", (1, -1), "08 ff ff ff ff ff ff ff ff ff 01"),
        ("varint", (16, 2**64 - 1), "80 01 ff ff ff ff ff ff ff ff ff 01"),
        ("varint", (2**29 - 1, 1), "f8 ff ff ff 0f 01"),
        ("fixed64", (2, 1), "11 01 00 00 00 00 00 00 00"),
        ("fixed64", (2, -2), "11 fe ff ff ff ff ff ff ff"),
        ("float32", (3, 1.0), "1d 00 00 80 3f"),
        ("float32", (3, -0.0), "1d 00 00 00 80"),
        ("float64", (4, 1.0), "21 00 00 00 00 00 00 f0 3f"),
        ("text", (5, "né"), "2a 03 6e c3 a9"),
        ("raw", (6, b"\x00\xff"), "32 02 00 ff"),
        ("varints", (7, [1, 300, -1]), "3a 0d 01 ac 02 ff ff ff ff ff ff ff ff ff 01"),
        ("fixed64s", (8, [1, -1]), "42 10 01 00 00 00 00 00 00 00 ff ff ff ff ff ff ff ff"),
        ("float32s", (9, [1.0, 0.0]), "4a 08 00 00 80 3f 00 00 00 00"),
        ("float64s", (10, [1.0]), "52 08 00 00 00 00 00 00 f0 3f"),
        ("message", (11, Writer()), "5a 00"),
    ],
)
def test_the_writer_by_hand(method: str, args: tuple[Any, ...], message: str) -> None:
    assert written(method, *args).hex(" ") == message


@pytest.mark.parametrize(
    ("method", "zero", "message"),
    [
        ("varint", 0, "08 00"),
        ("fixed64", 0, "09 00 00 00 00 00 00 00 00"),
        ("float32", 0.0, "0d 00 00 00 00"),
        ("float64", 0.0, "09 00 00 00 00 00 00 00 00"),
        ("text", "", "0a 00"),
        ("raw", b"", "0a 00"),
    ],
)
def test_defaults_are_left_out_unless_wanted(method: str, zero: Any, message: str) -> None:
    assert written(method, 1, zero) == b""
    assert written(method, 1, zero, always=True).hex(" ") == message


@pytest.mark.parametrize("method", ["varints", "fixed64s", "float32s", "float64s"])
def test_an_empty_run_is_left_out(method: str) -> None:
    assert written(method, 1, []) == b""


def test_fields_by_hand() -> None:
    message = bytes.fromhex("08 96 01  11 01 00 00 00 00 00 00 80  1d 00 00 80 3f  22 02 68 69")
    assert [(f.number, f.wire_type, f.at, f.depth) for f in fields(message)] == [
        (1, VARINT, 1, 0),
        (2, FIXED64, 4, 0),
        (3, FIXED32, 13, 0),
        (4, BYTES, 19, 0),
    ]
    one, two, three, four = fields(memoryview(message))
    assert one.int64() == one.uint64() == one.int32() == one.uint32() == 150
    assert one.boolean() is True
    assert two.fixed64() == 2**63 + 1
    assert three.float32() == 1.0
    assert three.fixed32() == 0x3F800000
    assert four.text() == "hi"
    assert isinstance(four.raw(), memoryview)
    assert repr(four) == "Field(4, length-delimited, b'hi' at byte 19)"


def test_positions_of_inner_messages_count_from_the_outermost() -> None:
    inner = next(fields(bytes.fromhex("12 04 1a 02 08 05"), at=100)).message()
    (field,) = inner
    (innermost,) = field.message()
    assert (field.at, innermost.at) == (104, 105)
    assert innermost.depth == 2


def test_a_repeated_number_may_be_packed_or_not() -> None:
    packed = only(bytes.fromhex("0a 03 01 ac 02"))
    assert packed.int32s().tolist() == packed.int64s().tolist() == packed.uint64s().tolist() == [1, 300]
    apart = list(fields(bytes.fromhex("08 01 08 ac 02")))
    assert [x for f in apart for x in f.int32s().tolist()] == [1, 300]
    assert only(bytes.fromhex("09 01 00 00 00 00 00 00 00")).fixed64s().tolist() == [1]
    assert only(bytes.fromhex("0d 00 00 80 3f")).float32s().tolist() == [1.0]
    assert only(bytes.fromhex("09 00 00 00 00 00 00 f0 3f")).float64s().tolist() == [1.0]
    for read in (Field.int32s, Field.fixed64s, Field.float32s, Field.float64s):
        assert read(only(b"\x0a\x00")).tolist() == []


def test_packed_runs_are_views_of_the_message() -> None:
    message = written("fixed64s", 1, [3, 4])
    run = only(message).fixed64s()
    assert np.shares_memory(run, np.frombuffer(message, np.uint8))
    assert not run.flags.writeable


def test_a_maps_entry() -> None:
    key, value = only(bytes.fromhex("0a 05 0a 01 61 10 07")).map_entry()
    assert key is not None
    assert value is not None
    assert (key.text(), value.int32()) == ("a", 7)
    assert only(b"\x0a\x00").map_entry() == (None, None)


# Made by protobuf 7.36.2 from a message with one field of each kind: a to l singular (int32, int64, uint32,
# uint64, bool, fixed64, fixed32, float, double, string, bytes, message), then repeated int32, int64, fixed64,
# float, double, the same unpacked, and a oneof's int64 of 0.
ALL = bytes.fromhex(
    "08ffffffffffffffffff01108080808080808080800118ffffffff0f20ffffffffffffffffff01280131ffffffffffffffff"
    "3dffffffff450000008049000000000000f83f52036ec3a95a0200ff62006a0d01ffffffffffffffffff01ac027214ffffffff"
    "ffffffff7f80808080808080808001007a10000000000000000000000000000000808201080000c03f000000808a0108000000"
    "0000000a409001059001faffffffffffffffff019901070000000000000099010000000000000080a5010000003fa80100"
)


def test_protobufs_own_bytes_are_read() -> None:
    read: dict[int, Callable[[Field], Any]] = {
        1: Field.int32,
        2: Field.int64,
        3: Field.uint32,
        4: Field.uint64,
        5: Field.boolean,
        6: Field.fixed64,
        7: Field.fixed32,
        8: Field.float32,
        9: Field.float64,
        10: Field.text,
        11: lambda f: bytes(f.raw()),
        12: lambda f: list(f.message()),
        13: lambda f: f.int32s().tolist(),
        14: lambda f: f.int64s().tolist(),
        15: lambda f: f.fixed64s().tolist(),
        16: lambda f: f.float32s().tolist(),
        17: lambda f: f.float64s().tolist(),
        18: lambda f: f.int32s().tolist(),
        19: lambda f: f.fixed64s().tolist(),
        20: lambda f: f.float32s().tolist(),
        21: Field.int64,
    }
    assert [(f.number, read[f.number](f)) for f in fields(ALL)] == [
        (1, -1),
        (2, -(2**63)),
        (3, 2**32 - 1),
        (4, 2**64 - 1),
        (5, True),
        (6, 2**64 - 1),
        (7, 2**32 - 1),
        (8, -0.0),
        (9, 1.5),
        (10, "né"),
        (11, b"\0\xff"),
        (12, []),
        (13, [1, -1, 300]),
        (14, [2**63 - 1, -(2**63), 0]),
        (15, [0, 2**63]),
        (16, [1.5, -0.0]),
        (17, [3.25]),
        (18, [5]),
        (18, [-6]),
        (19, [7]),
        (19, [2**63]),
        (20, [0.5]),
        (21, 0),
    ]


def test_protobufs_own_bytes_are_written() -> None:
    writer = Writer()
    writer.varint(1, -1)
    writer.varint(2, -(2**63))
    writer.varint(3, 2**32 - 1)
    writer.varint(4, 2**64 - 1)
    writer.varint(5, True)
    writer.fixed64(6, 2**64 - 1)
    expected = bytes(writer)
    assert ALL.startswith(expected)
    writer = Writer()
    writer.float32(8, -0.0)
    writer.float64(9, 1.5)
    writer.text(10, "né")
    writer.raw(11, bytearray(b"\0\xff"))
    writer.message(12, Writer())
    writer.varints(13, np.array([1, -1, 300], np.int32))
    writer.varints(14, [2**63 - 1, -(2**63), 0])
    writer.fixed64s(15, [0, 2**63])
    writer.float32s(16, [1.5, -0.0])
    writer.float64s(17, [3.25])
    assert bytes(writer) in ALL


# ---- round trips


@given(number=st.integers(1, 2**29 - 1), unsigned=UINT64, signed=INT64, real=st.floats(allow_nan=False))
def test_single_values_come_back(number: int, unsigned: int, signed: int, real: float) -> None:
    assert only(written("varint", number, unsigned, always=True)).uint64() == unsigned
    assert only(written("varint", number, signed, always=True)).int64() == signed
    assert only(written("fixed64", number, unsigned, always=True)).fixed64() == unsigned
    assert only(written("float64", number, real, always=True)).float64() == real
    assert only(written("varint", number, unsigned, always=True)).number == number


@given(text=st.text(), data=st.binary(), real=FLOAT32)
def test_strings_bytes_and_floats_come_back(text: str, data: bytes, real: float) -> None:
    assert only(written("text", 1, text, always=True)).text() == text
    assert bytes(only(written("raw", 1, data, always=True)).raw()) == data
    assert only(written("float32", 1, real, always=True)).float32() == real


@given(unsigned=st.lists(UINT64, min_size=1), small=st.lists(INT32, min_size=1))
def test_runs_of_whole_numbers_come_back(unsigned: list[int], small: list[int]) -> None:
    assert only(written("varints", 1, unsigned)).uint64s().tolist() == unsigned
    assert only(written("varints", 1, small)).int64s().tolist() == small
    assert only(written("varints", 1, small)).int32s().tolist() == small
    assert only(written("fixed64s", 1, np.array(unsigned, np.uint64))).fixed64s().tolist() == unsigned
    assert only(written("fixed64s", 1, small)).fixed64s().view(np.int64).tolist() == small


@given(values=st.lists(FLOAT32, min_size=1))
def test_runs_of_floats_come_back(values: list[float]) -> None:
    assert only(written("float32s", 1, values)).float32s().tolist() == values
    assert only(written("float64s", 1, values)).float64s().tolist() == values


# ---- what is refused


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("80", "a varint is cut off at byte 0"),
        ("08", "a varint is cut off at byte 1"),
        ("08 80 80", "a varint is cut off at byte 1"),
        ("08 01 08 ff ff ff ff ff ff ff ff ff ff 01", "more than 10 bytes at byte 3"),
        ("08 ff ff ff ff ff ff ff ff ff 02", "more than 64 bits at byte 1"),
        ("ff " * 20, "more than 10 bytes at byte 0"),
        ("0a 05 61", "field 1 has 5 bytes but 1 are left at byte 2"),
        ("0a ff ff ff ff ff ff ff ff ff 01 61", "has 18446744073709551615 bytes but 1 are left"),
        ("0a", "a varint is cut off at byte 1"),
        ("09 01 02", "field 1 has 8 bytes but 2 are left at byte 1"),
        ("0d 01", "field 1 has 4 bytes but 1 are left at byte 1"),
        ("0b 0c", "field 1 is a group, which is not supported at byte 0"),
        ("0c", "field 1 is a group"),
        ("0e", "field 1 is of wire type 6"),
        ("0f", "field 1 is of wire type 7"),
        ("00 01", "field number 0 is not within 1 .. 536870911 at byte 0"),
        ("80 80 80 80 10 01", "field number 536870912 is not within"),
    ],
)
def test_what_is_not_protobuf(message: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        list(fields(bytes.fromhex(message)))


@pytest.mark.parametrize(
    ("message", "read", "said"),
    [
        ("08 01", Field.text, "field 1 is a varint, not length-delimited at byte 1"),
        ("08 01", Field.message, "not length-delimited"),
        ("08 01", Field.fixed64, "field 1 is a varint, not 8 bytes"),
        ("08 01", Field.fixed64s, "not length-delimited"),
        ("0a 01 61", Field.int32, "field 1 is length-delimited, not a varint at byte 2"),
        ("0d 00 00 00 00", Field.float64, "field 1 is 4 bytes, not 8 bytes"),
        ("0d 00 00 00 00", Field.int64s, "not length-delimited"),
        ("09 00 00 00 00 00 00 00 00", Field.float32s, "not length-delimited"),
        ("0a 06 0a 01 61 0a 01 62", Field.map_entry, "a map's entry has field 1 twice at byte 7"),
        ("0a 04 12 00 12 00", Field.map_entry, "a map's entry has field 2 twice at byte 6"),
        ("0a 02 61 ff", Field.text, "field 1 is not UTF-8 at byte 3"),
        ("0a 03 ed a0 80", Field.text, "field 1 is not UTF-8"),
        ("0a 07 00 00 00 00 00 00 00", Field.fixed64s, "7 bytes are no run of 8-byte numbers at byte 2"),
        ("0a 05 00 00 00 00 00", Field.float32s, "5 bytes are no run of 4-byte numbers"),
        ("0a 02 01 80", Field.int64s, "cut off at byte 3"),
        ("0a 01 80", Field.int64s, "cut off at byte 2"),
        ("0a 0c 05 ff ff ff ff ff ff ff ff ff ff 01", Field.int64s, "more than 10 bytes at byte 3"),
        ("0a 0c 05 ff ff ff ff ff ff ff ff ff ff ff", Field.int64s, "more than 10 bytes at byte 3"),
        ("0a 0b 05 ff ff ff ff ff ff ff ff ff 02", Field.int64s, "more than 64 bits at byte 3"),
        ("08 80 80 80 80 08", Field.int32, "field 1: 2147483648 is not within -2147483648 .. 2147483647"),
        ("0a 06 01 80 80 80 80 08", Field.int32s, "field 1: 2147483648 is not within"),
        ("08 80 80 80 80 10", Field.uint32, "field 1: 4294967296 is not within 0 .. 4294967295"),
    ],
)
def test_a_field_that_is_not_of_its_type(message: str, read: Callable[[Field], Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(only(bytes.fromhex(message)))


def nested(depth: int) -> bytes:
    message = b""
    for _ in range(depth):
        message = written("raw", 1, message, always=True)
    return message


def depth_of(message: Iterator[Field]) -> int:
    return max((1 + depth_of(field.message()) for field in message), default=0)


def test_nesting_has_a_limit() -> None:
    assert depth_of(fields(nested(MAX_DEPTH - 1))) == MAX_DEPTH - 1
    with pytest.raises(InputError, match=f"nested more than {MAX_DEPTH} deep"):
        depth_of(fields(nested(5000)))


@pytest.mark.parametrize("message", ["text", 5, None, np.zeros((4, 4), np.uint8)[:, ::2]])
def test_messages_that_are_no_bytes(message: Any) -> None:
    with pytest.raises(InputError, match="must be bytes or a contiguous buffer"):
        fields(message)


@pytest.mark.parametrize("message", [b"", bytearray(), np.zeros(0, np.uint8), np.zeros((0, 3), np.int64)])
def test_an_empty_message_has_no_fields(message: Any) -> None:
    assert list(fields(message)) == []


@pytest.mark.parametrize(
    ("method", "args", "said"),
    [
        ("varint", (0, 1), "field numbers are 1 .. 536870911, got 0"),
        ("varint", (2**29, 1), "got 536870912"),
        ("varint", (1, 2**64), "18446744073709551616 does not fit in 64 bits"),
        ("varint", (1, -(2**63) - 1), "does not fit in 64 bits"),
        ("varints", (1, [2**64]), "does not fit in 64 bits"),
        ("fixed64", (1, 2**64), "does not fit in 64 bits"),
        ("fixed64s", (1, [0.5]), "0.5 is not a whole number"),
        ("fixed64s", (1, np.array([0.5])), "is not a whole number"),
        ("fixed64s", (1, [2**64]), "does not fit in 64 bits"),
        ("float32", (1, 1e300), r"field 1 cannot hold 1e\+300"),
        ("text", (1, "\ud800"), "field 1 cannot be UTF-8"),
        ("raw", (3, "text"), "field 3 must be bytes"),
    ],
)
def test_what_cannot_be_written(method: str, args: tuple[Any, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        written(method, *args)


READERS: list[Callable[[Field], Any]] = [
    getattr(Field, name)
    for name in (
        *("uint64", "int64", "uint32", "int32", "boolean", "fixed64", "fixed32", "float32", "float64"),
        *("raw", "text", "map_entry", "uint64s", "int64s", "int32s", "fixed64s", "float32s", "float64s"),
    )
]


def complaints(message: Iterator[Field]) -> list[str]:
    """What is said when every field, down to the innermost, is read in every way."""
    said = []
    try:
        for field in message:
            for read in READERS:
                try:
                    read(field)
                except InputError as error:
                    said.append(str(error))
            if field.wire_type == BYTES and field.depth < MAX_DEPTH - 1:
                said += complaints(field.message())
    except InputError as error:
        said.append(str(error))
    return said


@given(message=st.binary(max_size=200))
@example(message=ALL)
@example(message=nested(150))
def test_random_bytes_give_values_or_errors_with_a_position(message: bytes) -> None:
    assert all(" at byte " in said for said in complaints(fields(message)))


@given(place=st.integers(0, len(ALL) - 1), byte=st.integers(0, 255), end=st.integers(0, len(ALL)))
def test_mutated_messages_give_values_or_errors_with_a_position(place: int, byte: int, end: int) -> None:
    message = bytearray(ALL)
    message[place] = byte
    assert all(" at byte " in said for said in complaints(fields(message[:end])))


@given(run=st.binary(max_size=40))
def test_packed_varints_are_read_as_one_by_one(run: bytes) -> None:
    def one_by_one() -> list[int]:
        apart = b"".join(b"\x08" + part for part in split(run))
        return [field.uint64() for field in fields(apart)]

    try:
        wanted = one_by_one()
    except InputError:
        with pytest.raises(InputError, match="varint"):
            only(written("raw", 1, run, always=True)).uint64s()
    else:
        assert only(written("raw", 1, run, always=True)).uint64s().tolist() == wanted


def split(run: bytes) -> list[bytes]:
    """The run after each byte below 128."""
    parts, begin = [], 0
    for end, byte in enumerate(run, 1):
        if byte < 128 or end == len(run):
            parts.append(run[begin:end])
            begin = end
    return parts
