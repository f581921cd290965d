"""Snappy: limits of stated lengths, damage, files of blocks; pyarrow unpacks the elements."""

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
    """An element of up to 256 bytes as they are."""
    size = len(data) - 1
    return (bytes([size << 2]) if size < 60 else bytes([60 << 2, size])) + data


def copy(offset: int, size: int) -> bytes:
    """An element of up to 64 bytes that repeats the bytes `offset` before it."""
    return bytes([(size - 1) << 2 | 2]) + struct.pack("<H", offset)


def varint(n: int) -> bytes:
    out = b""
    while n >= 0x80:
        out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
    return out + bytes([n])


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (b"", "does not begin with a length of 32 bits"),
        (b"\x80\x80", "does not begin with a length"),
        (b"\xff\xff\xff\xff\x1f", "does not begin with a length"),
        (b"\xff\xff\xff\xff\xff\x01", "does not begin with a length"),
        (varint(4) + b"\x0cab", "do not unpack to the 4 bytes that it states"),
        (varint(2) + literal(b"abc"), "do not unpack to the 2 bytes that it states"),
        (varint(9) + literal(b"abc"), "do not unpack to the 9 bytes that it states"),
        (varint(9) + literal(b"abc") + copy(4, 4), "do not unpack to the 9 bytes that it states"),
    ],
)
def test_damage(block: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        unsnap(block, 1 << 20)


def test_the_stated_length_is_bounded_by_the_caller_and_by_the_block() -> None:
    block = varint(11) + literal(b"hello world")
    assert unsnap(block, 11) == b"hello world"
    with pytest.raises(InputError, match="states 11 bytes, more than the limit of 10"):
        unsnap(block, 10)
    most = varint(6_401) + literal(b"a") + copy(1, 64) * 100  # no block gains more
    assert unsnap(most, 1 << 20) == b"a" * 6_401
    with pytest.raises(InputError, match="more than the limit of 132"):
        unsnap(varint(2**32 - 1) + b"\0", 2**32)  # a few bytes must not ask for gigabytes


@given(parts=st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.integers(1, 50)), max_size=30))
def test_any_packed_bytes_fit_the_bounds(parts: list[tuple[bytes, int]]) -> None:
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
    good = varint(3) + literal(b"abc")
    for data, said in (
        (struct.pack(">I", 2**32 - 1) + b"abc", "at byte 0 states 4294967295 bytes, more than 100"),
        (
            struct.pack(">I", len(good)) + good + struct.pack(">I", 2) + b"\x09\x05",
            "at byte 9 is damaged: snappy: its elements do not unpack to the 9 bytes",
        ),
    ):
        path.write_bytes(data)
        with pytest.raises(InputError, match=f"a: the Snappy block {said}"):
            list(snappy_blocks(path, max_bytes=100))
