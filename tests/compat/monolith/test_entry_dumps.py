"""Entries from files: streams, limits, damage; native code and protobuf agree on any bytes."""

from __future__ import annotations

import struct
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from megalith.compat.monolith import importer as entries
from megalith.compat.monolith.feature_configs import message_type
from megalith.compat.monolith.importer import Entries, EntryFile, EntryLayout, SegmentLayout, read_entries
from megalith.errors import CheckpointError, InputError, NativeMissingError
from tests.compat import importing as wire
from tests.compat.importing import (
    ADAGRAD,
    adagrad,
    adam,
    entry,
    message,
    record,
    sgd,
    snappy,
    tfrecords,
    write,
)

WEIGHTS = EntryLayout(2, 2, False, False, ())
Row = tuple[int, list[float], int]


def room(n: int, width: int) -> Entries:
    return Entries(
        torch.zeros(n, dtype=torch.int64), torch.zeros(n, width), torch.zeros(n, dtype=torch.int64)
    )


def read(path: Path, layout: EntryLayout, limit: int | None = None) -> list[Row]:
    return [row for part in EntryFile(path).read(layout, limit) for row in listed(part)]


def listed(part: Entries) -> list[Row]:
    return list(zip(*(column.tolist() for column in part), strict=True))


def some(n: int, start: int = 0) -> list[bytes]:
    return [entry(i, (i, i + 0.5), adagrad(1, 2), time=100 + i) for i in range(start, start + n)]


def expected(n: int, start: int = 0) -> list[Row]:
    return [(i, [i, i + 0.5, 1, 2], 100 + i) for i in range(start, start + n)]


@pytest.mark.parametrize(
    "pack", [bytes, snappy, lambda data: snappy(data, 50)], ids=["plain", "snappy", "small"]
)
def test_a_file_plain_and_packed(tmp_path: Path, pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t", pack(tfrecords(*some(300))))
    assert read(path, ADAGRAD) == expected(300)
    monkeypatch.setattr(entries, "_READ", 7)  # records in many parts
    monkeypatch.setattr(entries, "chunk_rows", lambda _: 13)
    assert read(path, ADAGRAD) == expected(300)
    monkeypatch.setattr(entries, "native_module", lambda: None)
    with pytest.raises(NativeMissingError, match="native module"):
        read(path, ADAGRAD)


def test_packed_floats_unknown_fields_any_order_and_any_id(tmp_path: Path) -> None:
    body = (
        wire.varint(4 << 3) + wire.varint(7)
        + message(3, message(1, message(1, wire.packed(1, 3, 4), message(9, b"new"))), wire.floats(5, 1))
        + wire.packed(2, 1)
        + message(1000, b"later")
        + wire.floats(2, 2)
        + wire.varint(1 << 3 | 1) + struct.pack("<q", 5)
    )  # fmt: skip
    path = write(tmp_path / "t", tfrecords(body))
    assert read(path, ADAGRAD) == [(5, [1, 2, 3, 4], 7)]
    assert read(write(tmp_path / "t", b""), ADAGRAD) == []
    ids = [0, -1, -(2**63), 2**63 - 1]
    path = write(tmp_path / "t", tfrecords(*(entry(i, (1, 2)) for i in ids)))
    assert [row[0] for row in read(path, WEIGHTS)] == ids


def test_tables_one_after_the_other(tmp_path: Path) -> None:
    path = write(tmp_path / "t", snappy(tfrecords(*some(5), *some(3, 50), *some(2, 90))))
    file = EntryFile(path)
    first = [row for part in file.read(ADAGRAD, 5) for row in listed(part)]
    file.skip(3)
    last = [row for part in file.read(ADAGRAD, 2) for row in listed(part)]
    file.finish()
    assert (first, last) == (expected(5), expected(2, 90))


def test_more_or_less_than_was_promised(tmp_path: Path) -> None:
    path = write(tmp_path / "t", tfrecords(*some(5)))
    file = EntryFile(path)
    list(file.read(ADAGRAD, 4))
    with pytest.raises(CheckpointError, match=r"t: there are more entries at byte \d+ than its .meta file"):
        file.finish()
    with pytest.raises(CheckpointError, match=r"t: the file ends after 5 of 6 entries"):
        read(path, ADAGRAD, 6)
    with pytest.raises(CheckpointError, match=r"t: the file ends after 5 of 9 entries"):
        EntryFile(path).skip(9)


# ---- what is wrong with a record

GOOD = entry(1, (1, 2), adagrad(3, 4))
TWO_SEGMENTS = EntryLayout(
    2, 3, True, True, (SegmentLayout(1, False, ((1, 2, 1),)), SegmentLayout(2, True, ()))
)


@pytest.mark.parametrize(
    ("body", "layout", "said"),
    [
        (entry(1, (1,), adagrad(3, 4)), ADAGRAD, "it has 1 weights, but the rows of the table have 2"),
        (entry(1, (1, 2, 3), adagrad(3, 4)), ADAGRAD, "field 2 has more than 2 weights"),
        (GOOD[9:], ADAGRAD, "it has no id"),
        (entry(1, (1, 2)), ADAGRAD, "optimizer state for 0 segments, but the table has 1"),
        (GOOD, TWO_SEGMENTS, "field 1 has more than 1 numbers"),
        (entry(1, (1, 2), adagrad(3)), TWO_SEGMENTS, "state for 1 segments, but the table has 2"),
        (entry(1, (1, 2), adagrad(3), sgd(), sgd()), TWO_SEGMENTS, "for more than the 2 segments"),
        (
            entry(1, (1, 2), adam((1, 2), (3, 4), 0.9, 0.99)),
            ADAGRAD,
            "segment 0 holds the state of adam, but the table keeps that of adagrad; pass drop_opt",
        ),
        (entry(1, (1, 2), message(99)), ADAGRAD, "holds the state of unknown kind 99"),
        (entry(1, (1, 2), adagrad(3, 4) + adagrad(5, 6)), ADAGRAD, "holds the state of adagrad as well"),
        (entry(1, (1, 2), b""), ADAGRAD, "segment 0 holds no state, but the table keeps that of adagrad"),
        (entry(1, (1, 2), adagrad(3)), ADAGRAD, "field 1 of adagrad has 1 numbers, not 2"),
        (GOOD + b"\x0b", ADAGRAD, "is a group, which is not supported"),
        (GOOD + b"\x20", ADAGRAD, "a varint is truncated"),
        (message(1, b"12345678"), ADAGRAD, "field 1 is length-delimited, not 8 bytes"),
        (GOOD + wire.varint(3 << 3) + b"\x01", WEIGHTS, "field 3 is a varint, not length-delimited"),
        (GOOD + message(2, b"123"), ADAGRAD, "field 2 has 3 bytes, not a multiple of 4"),
    ],
)
def test_wrong_entries_are_explained(tmp_path: Path, body: bytes, layout: EntryLayout, said: str) -> None:
    good = entry(0, (1, 2), adagrad(1), sgd()) if layout is TWO_SEGMENTS else GOOD
    path = write(tmp_path / "t", tfrecords(good, body))
    with pytest.raises(CheckpointError, match=rf"t: the entry at byte \d+: .*{said}"):
        read(path, layout)


def test_a_file_cut_off_anywhere(tmp_path: Path) -> None:
    data = tfrecords(*some(2))
    half = len(data) // 2
    for cut in set(range(1, len(data))) - {half}:
        path = write(tmp_path / "t", data[:cut])
        start = half if cut > half else 0
        with pytest.raises(CheckpointError, match=rf"t: the file ends within the record at byte {start}"):
            read(path, ADAGRAD)


def test_a_flipped_bit_anywhere(tmp_path: Path) -> None:
    data = tfrecords(*some(2))
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError, match="/t: "):
            read(write(tmp_path / "t", bytes(damaged)), ADAGRAD)


def test_lengths_are_not_believed(tmp_path: Path) -> None:
    length = struct.pack("<Q", 2**40)
    path = write(tmp_path / "t", length + wire.checksum(length) + b"abc")
    with pytest.raises(CheckpointError, match="the length at byte 0 is 1099511627776, over the limit"):
        read(path, ADAGRAD)
    with pytest.raises(CheckpointError, match="the Snappy block at byte 0 states"):
        read(write(tmp_path / "t", b"\xff" * 20), ADAGRAD)


# ---- native code and protobuf

LAYOUTS = [
    ADAGRAD,
    WEIGHTS,
    TWO_SEGMENTS,
    EntryLayout(2, 2, True, False, (SegmentLayout(2, True, ()),)),
    EntryLayout(2, 8, True, True, (SegmentLayout(7, False, ((1, 2, 2), (2, 4, 2), (3, 6, 1), (4, 7, 1))),)),
]
BODIES = [
    GOOD,
    entry(-3, (0.5, -1), time=-5),
    entry(1, (1, 2), sgd()),
    entry(1, (1, 2), adagrad(3), sgd(), time=2**40),
    entry(1, (1, 2), adam((1, 2), (3, 4), 0.9, 0.99)),
]


def protobuf_row(body: bytes, layout: EntryLayout) -> Row | None:
    """The row that protobuf reads, or None if it refuses the entry or the entry does not fit the layout."""
    try:
        dump = message_type("monolith.hash_table.EntryDump").FromString(body)
    except DecodeError:
        return None
    floats = list(dump.num)
    dumps = list(dump.opt.dump) if layout.reads_state else []
    if not dump.HasField("id") or len(floats) != layout.dim:
        return None
    if layout.reads_state and len(dumps) != len(layout.segments) and (dumps or layout.needs_state):
        return None
    for segment, state in zip(layout.segments, dumps, strict=False):
        for number, start, size in segment.pieces:
            kind = state.DESCRIPTOR.fields_by_number[segment.kind]
            if not state.HasField(kind.name):
                return None
            inner = getattr(state, kind.name)
            field = inner.DESCRIPTOR.fields_by_number[number]
            value = getattr(inner, field.name)
            values = list(value) if field.is_repeated else [value]
            if len(values) != size or len(floats) != start:
                return None
            floats += values
    return dump.id, floats, dump.last_update_ts_sec


def native_row(body: bytes, layout: EntryLayout) -> Row | str:
    into = room(1, layout.width)
    data = record(body)
    try:
        assert read_entries(data, 0, 1, layout, into) == (1, len(data))
    except InputError as error:
        return str(error)
    stateless = layout.reads_state and not layout.needs_state
    (row,) = listed(into)
    return row[0], row[1][: layout.dim] if stateless else row[1], row[2]


@given(
    body=st.sampled_from(BODIES),
    layout=st.sampled_from([layout for layout in LAYOUTS if layout.reads_state]),
    edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3),
    cut=st.integers(0, 200),
    insert=st.tuples(st.integers(0, 60), st.binary(max_size=12)),
)
def test_what_is_read_is_what_protobuf_reads(
    body: bytes, layout: EntryLayout, edits: list[tuple[int, int]], cut: int, insert: tuple[int, bytes]
) -> None:
    damaged = bytearray(body[: insert[0]] + insert[1] + body[insert[0] :])
    for at, byte in edits:
        damaged[at % len(damaged)] = byte
    got = native_row(bytes(damaged[:cut]), layout)
    if isinstance(got, str):
        assert got.startswith("the entry at byte 12: ")
    else:
        assert repr(got) == repr(protobuf_row(bytes(damaged[:cut]), layout))


def test_good_entries_are_read_if_and_only_if_they_fit() -> None:
    for layout, body in product(LAYOUTS, BODIES):
        expected, got = protobuf_row(body, layout), native_row(body, layout)
        if not isinstance(got, str):
            assert repr(got) == repr(expected)
        elif expected is not None:  # refused only because the state of another optimizer would be dropped
            assert "holds" in got


@given(data=st.binary(max_size=60), keep=st.integers(0, 100))
def test_any_bytes_are_read_or_refused(data: bytes, keep: int) -> None:
    stream = record(GOOD)[:keep] + data
    into = room(4, ADAGRAD.width)
    try:
        rows, used = read_entries(stream, 7, 4, ADAGRAD, into)
    except InputError:
        return
    assert used == rows * len(record(GOOD)) <= len(stream)
    assert listed(Entries(*(column[:rows] for column in into))) == [(1, [1, 2, 3, 4], 0)] * rows
