"""Entries out of files: streams, limits, damage; native parser and twin alike on any bytes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith.compat.monolith import entry_dumps as entries
from megalith.compat.monolith.entry_dumps import (
    Entries,
    EntryFile,
    EntryLayout,
    SegmentLayout,
    read_entries,
    read_entries_twin,
)
from megalith.errors import CheckpointError, InputError
from tests.compat.importing import (
    ADAGRAD,
    adagrad,
    adam,
    checksum,
    entry,
    floats,
    message,
    packed,
    record,
    sgd,
    snappy,
    tfrecords,
    varint,
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
    assert read(path, ADAGRAD) == expected(300)


def test_an_empty_file(tmp_path: Path) -> None:
    assert read(write(tmp_path / "t", b""), ADAGRAD) == []


def test_ids_are_signed_and_may_be_any(tmp_path: Path) -> None:
    ids = [0, -1, -(2**63), 2**63 - 1]
    path = write(tmp_path / "t", tfrecords(*(entry(i, (1, 2)) for i in ids)))
    assert [row[0] for row in read(path, WEIGHTS)] == ids


def test_packed_floats_unknown_fields_and_any_order(tmp_path: Path) -> None:
    body = (
        varint(4 << 3) + varint(7)
        + message(3, message(1, message(1, packed(1, 3, 4), message(9, b"new"))), floats(5, 1))
        + packed(2, 1)
        + message(1000, b"later")
        + floats(2, 2)
        + varint(1 << 3 | 1) + struct.pack("<q", 5)
    )  # fmt: skip
    path = write(tmp_path / "t", tfrecords(body))
    assert read(path, ADAGRAD) == [(5, [1, 2, 3, 4], 7)]


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
    with pytest.raises(CheckpointError, match=r"t: there is more at byte \d+ than its .meta file lists"):
        file.finish()
    with pytest.raises(CheckpointError, match=r"t: it ends after 5 of 6 entries"):
        read(path, ADAGRAD, 6)
    with pytest.raises(CheckpointError, match=r"t: it ends after 5 of 9 entries"):
        EntryFile(path).skip(9)


# ---- what is wrong with a record

GOOD = entry(1, (1, 2), adagrad(3, 4))
TWO_SEGMENTS = EntryLayout(
    2, 3, True, True, (SegmentLayout(1, False, ((1, 2, 1),)), SegmentLayout(2, True, ()))
)


@pytest.mark.parametrize(
    ("body", "layout", "said"),
    [
        (entry(1, (1,), adagrad(3, 4)), ADAGRAD, "it has 1 weights, the table's rows have 2"),
        (entry(1, (1, 2, 3), adagrad(3, 4)), ADAGRAD, "field 2 has more than 2 weights"),
        (GOOD[9:], ADAGRAD, "it has no id"),
        (entry(1, (1, 2)), ADAGRAD, "optimizer state of 0 segments, the table has 1"),
        (GOOD, TWO_SEGMENTS, "field 1 has more than 1 numbers"),
        (entry(1, (1, 2), adagrad(3)), TWO_SEGMENTS, "optimizer state of 1 segments, the table has 2"),
        (entry(1, (1, 2), adagrad(3), sgd(), sgd()), TWO_SEGMENTS, "more segments than the table's 2"),
        (
            entry(1, (1, 2), adam((1, 2), (3, 4), 0.9, 0.99)),
            ADAGRAD,
            "segment 0 holds the state of adam, the table keeps that of adagrad; drop_optimizer_state=True",
        ),
        (entry(1, (1, 2), message(99)), ADAGRAD, "holds the state of unknown kind 99"),
        (entry(1, (1, 2), adagrad(3, 4) + adagrad(5, 6)), ADAGRAD, "holds the state of adagrad too"),
        (entry(1, (1, 2), b""), ADAGRAD, "segment 0 holds no state, the table keeps that of adagrad"),
        (entry(1, (1, 2), adagrad(3)), ADAGRAD, "field 1 of adagrad has 1 numbers, not 2"),
        (GOOD + b"\x0b", ADAGRAD, "is a group, which is not supported"),
        (GOOD + b"\x20", ADAGRAD, "a varint is cut off"),
        (message(1, b"12345678"), ADAGRAD, "field 1 is length-delimited, not 8 bytes"),
        (GOOD + varint(3 << 3) + b"\x01", WEIGHTS, "field 3 is a varint, not length-delimited"),
        (GOOD + message(2, b"123"), ADAGRAD, "3 bytes are no run of 4-byte numbers"),
    ],
)
def test_wrong_entries_are_explained(tmp_path: Path, body: bytes, layout: EntryLayout, said: str) -> None:
    path = write(
        tmp_path / "t",
        tfrecords(entry(0, (1, 2), adagrad(1), sgd()) if layout is TWO_SEGMENTS else GOOD, body),
    )
    with pytest.raises(CheckpointError, match=rf"t: the entry at byte \d+: .*{said}"):
        read(path, layout)


def test_a_file_cut_off_anywhere(tmp_path: Path) -> None:
    data = tfrecords(*some(2))
    half = len(data) // 2
    for cut in set(range(1, len(data))) - {half}:
        path = write(tmp_path / "t", data[:cut])
        with pytest.raises(
            CheckpointError, match=rf"t: it ends within the record at byte {half if cut > half else 0}"
        ):
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
    path = write(tmp_path / "t", length + checksum(length) + b"abc")
    with pytest.raises(CheckpointError, match="the length at byte 0 is 1099511627776, over"):
        read(path, ADAGRAD)
    with pytest.raises(CheckpointError, match="the Snappy block at byte 0 states"):
        read(write(tmp_path / "t", b"\xff" * 20), ADAGRAD)


# ---- native code and twin

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


def outcome(reader: Any, data: bytes, layout: EntryLayout, limit: int) -> object:
    into = room(4, layout.width)
    try:
        n, used = reader(data, 0, limit, layout, into)
    except InputError as error:
        return str(error)
    return (
        n,
        used,
        [column[:n].tolist() for column in (into.ids, into.times)],
        into.floats[:n].view(torch.int32).tolist(),
    )


@given(
    body=st.sampled_from(BODIES),
    layout=st.sampled_from(LAYOUTS),
    edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3),
    cut=st.integers(0, 200),
    insert=st.tuples(st.integers(0, 60), st.binary(max_size=12)),
    limit=st.integers(0, 4),
)
def test_both_agree_on_any_message(
    body: bytes,
    layout: EntryLayout,
    edits: list[tuple[int, int]],
    cut: int,
    insert: tuple[int, bytes],
    limit: int,
) -> None:
    damaged = bytearray(body[: insert[0]] + insert[1] + body[insert[0] :])
    for at, byte in edits:
        damaged[at % len(damaged)] = byte
    data = record(body) + record(bytes(damaged[:cut])) + record(body)
    assert outcome(read_entries, data, layout, limit) == outcome(read_entries_twin, data, layout, limit)


@given(data=st.binary(max_size=60), keep=st.integers(0, 100))
def test_both_agree_on_any_bytes(data: bytes, keep: int) -> None:
    stream = record(GOOD)[:keep] + data
    assert outcome(read_entries, stream, ADAGRAD, 4) == outcome(read_entries_twin, stream, ADAGRAD, 4)
