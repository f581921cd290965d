"""Framed records: both framings, Monolith's headers, checksums, and hostile bytes."""

from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.data.record_files import (
    Framing,
    RecordFile,
    crc32c,
    crc32c_reference,
    masked_crc32c,
    write_records,
)
from megalith.errors import InputError

MESSAGES = [b"one", b"", b"three" * 1000, b"\x00" * 9]


def framed(messages: Sequence[bytes], framing: Framing, header: Sequence[str] = ()) -> bytes:
    out = io.BytesIO()
    write_records(out, messages, framing, header=header)
    return out.getvalue()


def read(path: Path, framing: Framing, **options: object) -> list[bytes]:
    return [record.message for record in RecordFile(path, framing, **options).read()]  # type: ignore[arg-type]


def test_the_known_values_of_crc32c() -> None:
    # RFC 3720, B.4
    for each in (crc32c, crc32c_reference):
        assert each(b"") == 0
        assert each(bytes(32)) == 0x8A9136AA
        assert each(b"\xff" * 32) == 0x62A8AB43
        assert each(bytes(range(32))) == 0x46DD794E
        assert each(b"123456789") == 0xE3069283


@settings(max_examples=30)
@given(data=st.binary(max_size=2500))
def test_crc32c_equals_its_definition(data: bytes) -> None:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    assert crc32c(data) == crc32c_reference(data) == crc ^ 0xFFFFFFFF


def test_a_tfrecord_byte_by_byte(tmp_path: Path) -> None:
    # As TensorFlow's record writer frames b"x".
    path = tmp_path / "a.tfrecord"
    path.write_bytes(framed([b"x"], "tfrecord"))
    assert path.read_bytes()[:8] == b"\x01" + bytes(7)
    assert struct.unpack("<I", path.read_bytes()[8:12])[0] == masked_crc32c(b"\x01" + bytes(7))
    assert len(path.read_bytes()) == 8 + 4 + 1 + 4
    assert read(path, "tfrecord") == [b"x"]


@pytest.mark.parametrize("framing", ["length", "tfrecord"])
@pytest.mark.parametrize("name", ["a.records", "a.records.gz"])
def test_records_and_where_they_stand(tmp_path: Path, framing: Framing, name: str) -> None:
    path = tmp_path / name
    data = framed(MESSAGES, framing)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    records = list(RecordFile(path, framing).read())
    assert [record.message for record in records] == MESSAGES
    assert [data[record.at : record.at + len(record.message)] for record in records] == MESSAGES
    assert records[-1].end == len(data)
    rest = list(RecordFile(path, framing).read(offset=records[1].end, number=2))
    assert rest == records[2:]


HEADERS = [
    ["lagrangex_header"],
    ["sort_id"],
    ["kafka_dump"],
    ["kafka_dump_prefix"],
    ["kafka_dump_prefix", "sort_id", "kafka_dump"],
]


@pytest.mark.parametrize("header", HEADERS)
def test_monoliths_headers(tmp_path: Path, header: list[str]) -> None:
    path = tmp_path / "a.pb"
    path.write_bytes(framed(MESSAGES, "length", header))
    assert read(path, "length", header=header) == MESSAGES


def test_sort_ids_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.pb"
    one = struct.pack("<Q", 5) + b"sort!" + struct.pack("<Q", 3) + b"abc"
    path.write_bytes(one * 2)
    assert read(path, "length", header=["sort_id"]) == [b"abc", b"abc"]
    # With a prefix that is not zero, the prefix is the sort id's length.
    assert read(path, "length", header=["kafka_dump_prefix", "sort_id"]) == [b"abc", b"abc"]


@pytest.mark.parametrize("framing", ["length", "tfrecord"])
def test_a_file_cut_off_anywhere(tmp_path: Path, framing: Framing) -> None:
    data = framed([b"first", b"second"], framing)
    second = len(framed([b"first"], framing))
    path = tmp_path / "a.records"
    for cut in range(1, len(data)):
        path.write_bytes(data[:cut])
        if cut == second:
            assert read(path, framing) == [b"first"]
            continue
        begin = second if cut > second else 0
        with pytest.raises(InputError, match=rf"a.records: the file ends at byte {cut}, .* at byte {begin}"):
            read(path, framing)


def test_a_flipped_bit_anywhere_in_a_tfrecord(tmp_path: Path) -> None:
    data = framed([b"first", b"second"], "tfrecord")
    path = tmp_path / "a.tfrecord"
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="checksum at byte"):
            read(path, "tfrecord")


def test_lengths_are_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "a.pb"
    path.write_bytes(struct.pack("<Q", 2**63) + b"abc")
    with pytest.raises(InputError, match=r"length at byte 0 is 9223372036854775808, more than max_bytes"):
        read(path, "length")
    path.write_bytes(framed([b"x" * 101], "length"))
    with pytest.raises(InputError, match="more than max_bytes=100"):
        read(path, "length", max_bytes=100)


def test_a_damaged_gz(tmp_path: Path) -> None:
    path = tmp_path / "a.pb.gz"
    path.write_bytes(gzip.compress(framed(MESSAGES, "length"))[:-20])
    with pytest.raises(InputError, match=r"a.pb.gz: cannot be read after byte \d+"):
        read(path, "length")


@given(
    data=st.binary(max_size=200),
    framing=st.sampled_from(["length", "tfrecord"]),
    header=st.sampled_from([[], *HEADERS]),
)
def test_any_bytes_give_records_or_an_input_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, framing: Framing, header: list[str]
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.pb"
    path.write_bytes(data)
    messages, problem = [], "a.pb"
    try:
        messages = read(path, framing, header=header)
    except InputError as error:
        problem = str(error)
    assert "a.pb" in problem
    assert sum(map(len, messages)) <= len(data)
