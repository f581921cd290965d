"""Snappy: elements by hand, blocks of other implementations, damage."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.data.compression import max_packed, snappy_blocks, unsnap
from megalith.errors import InputError

# Three records of 51 bytes, as TensorFlow 2.21's record writer packs them: a block's length, then the block.
TENSORFLOW = bytes.fromhex(
    "0000002cc9010433000901200ca7205668656c6c6fb2050010008226d9d3f64300100155cad4d9f643001002b4e43c73"
)


def literal(data: bytes) -> bytes:
    n = len(data) - 1
    if n < 60:
        return bytes([n << 2]) + data
    size = (n.bit_length() + 7) // 8
    return bytes([(59 + size) << 2]) + n.to_bytes(size, "little") + data


def copy(offset: int, size: int) -> bytes:
    """A copy in the shortest of the three forms that holds it."""
    if 4 <= size <= 11 and offset < 1 << 11:
        return bytes([offset >> 8 << 5 | (size - 4) << 2 | 1, offset & 0xFF])
    if offset < 1 << 16:
        return bytes([(size - 1) << 2 | 2]) + struct.pack("<H", offset)
    return bytes([(size - 1) << 2 | 3]) + struct.pack("<I", offset)


def varint(n: int) -> bytes:
    out = b""
    while n >= 0x80:
        out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
    return out + bytes([n])


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        (b"", b""),
        (literal(b"abc"), b"abc"),
        (literal(b"x" * 60), b"x" * 60),
        (literal(b"y" * 61), b"y" * 61),
        (literal(b"z" * 300), b"z" * 300),
        (literal(bytes(70_000)), bytes(70_000)),
        (literal(b"abc") + copy(3, 4), b"abcabca"),
        (literal(b"a") + copy(1, 64), b"a" * 65),
        (literal(b"abcdef") + copy(6, 3) + copy(2, 2), b"abcdefabcbc"),
        (literal(b"ab" * 1000) + copy(2000, 5), b"ab" * 1000 + b"ababa"),
        (literal(b"q" + bytes(69_999)) + copy(70_000, 3), b"q" + bytes(69_999) + b"q\0\0"),
    ],
    ids=str,
)
def test_elements(elements: bytes, expected: bytes) -> None:
    assert unsnap(varint(len(expected)) + elements, 1 << 20) == expected


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (b"", "does not begin with a length of 32 bits"),
        (b"\x80\x80", "does not begin with a length"),
        (b"\xff\xff\xff\xff\x1f", "does not begin with a length"),
        (b"\xff\xff\xff\xff\xff\x01", "does not begin with a length"),
        (varint(4) + b"\x0cab", "do not unpack to the 4 bytes that it states"),
        (varint(4) + b"\xf0", "do not unpack to the 4 bytes that it states"),
        (varint(4) + b"\x05", "do not unpack to the 4 bytes that it states"),
        (varint(4) + b"\xfc\xff\xff\xff\xff", "do not unpack to the 4 bytes that it states"),
        (varint(2) + literal(b"abc"), "do not unpack to the 2 bytes that it states"),
        (varint(5) + literal(b"abc") + copy(1, 4), "do not unpack to the 5 bytes that it states"),
        (varint(9) + literal(b"abc"), "do not unpack to the 9 bytes that it states"),
        (varint(9) + copy(1, 4), "do not unpack to the 9 bytes that it states"),
        (varint(9) + literal(b"abc") + copy(4, 4), "do not unpack to the 9 bytes that it states"),
        (varint(9) + literal(b"abc") + copy(0, 4), "do not unpack to the 9 bytes that it states"),
    ],
)
def test_damage(block: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        unsnap(block, 1 << 20)


def test_the_stated_length_is_bounded() -> None:
    block = varint(11) + literal(b"hello world")
    assert unsnap(block, 11) == b"hello world"
    with pytest.raises(InputError, match="states 11 bytes, more than the limit of 10"):
        unsnap(block, 10)


def test_a_few_bytes_cannot_ask_for_gigabytes() -> None:
    with pytest.raises(InputError, match="more than the limit of 132"):
        unsnap(varint(2**32 - 1) + b"\0", 2**32)


@given(parts=st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.integers(1, 50)), max_size=30))
def test_what_another_implementation_packed(parts: list[tuple[bytes, int]]) -> None:
    data = b"".join(piece * times for piece, times in parts)
    packed = pa.compress(data, codec="snappy", asbytes=True)
    assert len(packed) <= max_packed(len(data))
    assert unsnap(packed, len(data)) == data


@given(
    length=st.integers(0, 100),
    body=st.lists(
        st.binary(max_size=6)
        | st.binary(min_size=1, max_size=80).map(literal)
        | st.builds(copy, st.integers(0, 90), st.integers(1, 64)),
        max_size=8,
    ).map(b"".join),
)
def test_any_bytes_give_the_stated_length_or_an_error(length: int, body: bytes) -> None:
    block = varint(length) + body
    with contextlib.suppress(InputError):
        assert len(unsnap(block, 90)) == length <= min(90, 22 * len(block))


# ---- files of blocks


def test_a_file_that_tensorflow_wrote(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(TENSORFLOW)
    (block,) = snappy_blocks(path, max_bytes=1000)
    assert len(block) == 3 * (12 + 51 + 4)
    assert [block[67 * k + 12 :][:51] for k in range(3)] == [b"hello" * 10 + bytes([k]) for k in range(3)]


def test_a_file_of_several_blocks_cut_off_anywhere(tmp_path: Path) -> None:
    path, cuts = tmp_path / "a", []
    blocks = [b"first block", b"", b"third" * 20]
    data = b""
    for block in blocks:
        packed = pa.compress(block, codec="snappy", asbytes=True)
        data += struct.pack(">I", len(packed)) + packed
        cuts.append(len(data))
    path.write_bytes(data)
    assert list(snappy_blocks(path, max_bytes=100)) == blocks
    for cut in set(range(1, len(data))) - set(cuts):
        path.write_bytes(data[:cut])
        with pytest.raises(InputError, match=rf"a: the file ends at byte {cut}, within the Snappy block"):
            list(snappy_blocks(path, max_bytes=100))


def test_damaged_blocks_name_file_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(struct.pack(">I", 2**32 - 1) + b"abc")
    with pytest.raises(
        InputError, match="a: the Snappy block at byte 0 states 4294967295 bytes, more than 100"
    ):
        list(snappy_blocks(path, max_bytes=100))
    good = varint(3) + literal(b"abc")
    path.write_bytes(struct.pack(">I", len(good)) + good + struct.pack(">I", 2) + b"\x09\x05")
    with pytest.raises(
        InputError,
        match="a: the Snappy block at byte 9 is damaged: snappy: its elements do not unpack to the 9 bytes",
    ):
        list(snappy_blocks(path, max_bytes=100))
