"""Records decoded by native code, against protobuf: the same columns, and refused where protobuf refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.compat.monolith.example_reader import FLOATS, IDS, KINDS, NO_VALUES, Kind, decode_records
from megalith.compat.monolith.feature_configs import message_type
from megalith.errors import InputError
from megalith.hashing import hash_strings
from megalith.ops.ids import fid_v1_to_v2

IO = "monolith.io.proto"
TYPES = {
    "example": f"{IO}.Example",
    "example_batch": f"{IO}.ExampleBatch",
    "instance": "parser.proto.Instance",
}
NAMES = ["f", "d", "fc_slot_1", "fc_slot_900", "value", "é"]
Cell = tuple[int, list[Any]]
Row = tuple[list[Cell], float, float, int | None]

# ---- the oracle: what protobuf reads


class Refused(Exception):
    """A record that is a protobuf message, but not a good record."""


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def flat(feature: Any, member: str) -> list[Any]:
    value = getattr(feature, member)
    if member.endswith("_lists"):
        return [each for inner in value.list for each in inner.value]
    return list(value.value) if member.endswith("_list") else [value]


def cell_of(values: list[Any], is_v1: bool, is_fid: bool) -> Cell:
    if not values:
        return IDS, []
    if isinstance(values[0], bytes):
        return IDS, hash_strings(values).tolist()
    if isinstance(values[0], float):
        with np.errstate(over="ignore"):
            return FLOATS, np.array(values).astype(np.float32).tolist()
    if is_v1:
        return IDS, [fid_v1_to_v2(signed(value)) for value in values]
    return IDS, [signed(value) if is_fid else value for value in values]


def feature_cell(feature: Any) -> Cell:
    member = feature.WhichOneof("type")
    if member is None:
        return NO_VALUES, []
    kind, values = cell_of(flat(feature, member), "v1" in member, "fid" in member)
    return (FLOATS if "float" in member or "double" in member else kind), values


def line_id_of(feature: Any) -> int | None:
    member = feature.WhichOneof("type")
    if member not in ("bytes_list", "bytes_lists", "bytes_value"):
        raise Refused
    for value in flat(feature, member)[:1]:
        line = parsed("idl.matrix.proto.LineId", value)
        return line.req_time if line.HasField("req_time") else None
    return None


class RowOracle:
    def __init__(self) -> None:
        self.cells: dict[str, Cell] = {}
        self.labels: list[float] = []
        self.weight, self.time = 1.0, None

    def put(self, name: str, feature: Any) -> None:
        if name == "__LINE_ID__":
            time = line_id_of(feature)
            self.time = self.time if time is None else time
        elif name in ("__LABEL__", "instance_weight"):
            kind, values = feature_cell(feature)
            if kind != FLOATS:
                raise Refused
            if name == "__LABEL__":
                self.labels += values
            else:
                self.weight = values[0] if values else 1.0
        else:
            self.cells[name] = feature_cell(feature)

    def fields(self, record: Any) -> None:
        self.labels += record.label
        if record.HasField("instance_weight"):
            self.weight = record.instance_weight
        if record.line_id.HasField("req_time"):
            self.time = record.line_id.req_time

    def row(self, label_index: int) -> Row:
        label = self.labels[label_index] if label_index < len(self.labels) else math.nan
        return [self.cells.get(name, (NO_VALUES, [])) for name in NAMES], label, self.weight, self.time


def example_rows(record: Any) -> list[RowOracle]:
    row = RowOracle()
    for named in record.named_feature:
        if named.HasField("feature"):
            row.put(named.name, named.feature)
    row.fields(record)
    return [row]


def example_batch_rows(record: Any, size: int) -> list[RowOracle]:
    count = record.batch_size
    if not 0 <= count <= size:
        raise Refused
    rows = [RowOracle() for _ in range(count)]
    for column in record.named_feature_list:
        if column.name not in (*NAMES, "__LABEL__", "__LINE_ID__", "instance_weight"):
            continue
        values = list(column.feature)
        if not values if column.type == 1 else len(values) != count:
            raise Refused
        for i, row in enumerate(rows):
            row.put(column.name, values[0 if column.type == 1 else i])
    return rows


def instance_rows(record: Any) -> list[RowOracle]:
    row = RowOracle()
    for feature in record.feature:
        for number in range(2, 10):
            field = feature.DESCRIPTOR.fields_by_number[number].name
            values = list(getattr(feature, field))
            if values:
                inner = [each for value in values for each in value.value] if number >= 6 else values
                kind, read = cell_of(inner, False, "fid" in field)
                row.cells[feature.name] = FLOATS if "float" in field else kind, read
                break
    if record.value:
        row.cells["value"] = FLOATS, list(record.value)
    for slot in {fid >> 54 for fid in record.fid}:
        row.cells[f"fc_slot_{slot}"] = cell_of([x for x in record.fid if x >> 54 == slot], True, True)
    row.fields(record)
    return [row]


def parsed(name: str, data: bytes) -> Any:
    message = message_type(name).FromString(data)
    if has_mismatch(message):
        raise Refused
    return message


def has_mismatch(message: Any) -> bool:
    """Whether a known field has another wire type, or there is a group: refused, but accepted by protobuf."""
    known = message.DESCRIPTOR.fields_by_number
    if any(field.field_number in known or field.wire_type == 3 for field in UnknownFieldSet(message)):
        return True
    for field, value in message.ListFields():
        inner = value if field.is_repeated else [value]
        if field.message_type is not None and any(map(has_mismatch, inner)):
            return True
        names = [each for each in inner if field.name == "name"]
        if any(isinstance(name, bytes) for name in names):  # proto2 accepts a string that is not UTF-8
            return True
    return False


def oracle(kind: Kind, data: bytes, label_index: int) -> list[Row] | None:
    """The rows of a record, or None if it is refused."""
    try:
        record = parsed(TYPES[kind], data)
        if kind == "example_batch":
            rows = example_batch_rows(record, len(data))
        else:
            rows = example_rows(record) if kind == "example" else instance_rows(record)
    except (DecodeError, Refused):
        return None
    return [row.row(label_index) for row in rows]


# ---- native code, in the same form


def decoded(kind: Kind, messages: list[bytes], label_index: int = 0) -> list[list[Row] | str]:
    """The rows of each record, or why it is refused."""
    got = decode_records(kind, messages, NAMES, label_index=label_index)
    values = [
        {IDS: iter(column.ids.tolist()), FLOATS: iter(column.floats.tolist())} for column in got.columns
    ]
    kinds, lengths = ([column[i].tolist() for column in got.columns] for i in (2, 3))
    rows: list[Row] = []
    for i in range(len(got.labels)):
        cells = [
            (kinds[c][i], [next(values[c][kinds[c][i]]) for _ in range(lengths[c][i])])
            for c in range(len(NAMES))
        ]
        time = int(got.times[i]) if got.has_time[i] else None
        rows.append((cells, float(got.labels[i]), float(got.weights[i]), time))
    assert all(next(left, None) is None for each in values for left in each.values())
    assert sum(got.rows) == len(rows)
    problems = {error.record: error for error in got.errors}
    out: list[list[Row] | str] = []
    for record, count in enumerate(got.rows.tolist()):
        if record in problems:
            assert count == 0
            assert 0 <= problems[record].byte <= len(messages[record])
            out.append(problems[record].problem)
        else:
            out.append(rows[:count])
            rows = rows[count:]
    return out


def same(one: object, other: object) -> bool:
    return repr(one) == repr(other)  # NaN equals NaN, and 0.0 is not -0.0


# ---- valid messages

FIDS = st.lists(
    st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 99).map(lambda x: 1 << 54 | x), st.just(900 << 54)),
    max_size=3,
)
FLOAT = st.floats(width=32)
INT64S = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3)
VALUES: dict[str, Any] = {
    "fid": FIDS,
    "float": st.lists(FLOAT, max_size=3),
    "double": st.lists(st.floats(), max_size=3),
    "int64": INT64S,
    "bytes": st.lists(st.binary(max_size=40), max_size=3),
}
COLUMN_NAMES = st.sampled_from([*NAMES, "unwanted", ""])
LINE_ID = st.integers(-(2**63), 2**63 - 1).map(
    lambda time: message_type("idl.matrix.proto.LineId")(req_time=time)
)


@st.composite
def features(draw: Any) -> Any:
    member = draw(st.sampled_from([f.name for f in message_type(f"{IO}.Feature").DESCRIPTOR.fields] + [""]))
    feature = message_type(f"{IO}.Feature")()
    if not member:
        return feature
    values = VALUES[member.split("_")[0]]
    if member.endswith("_lists"):
        getattr(feature, member).SetInParent()
        for each in draw(st.lists(values, max_size=3)):
            getattr(feature, member).list.add(value=each)
    elif member.endswith("_list"):
        getattr(feature, member).SetInParent()
        getattr(feature, member).value.extend(draw(values))
    else:
        setattr(feature, member, draw(values.filter(bool))[0])
    return feature


def special_features(name: str) -> Any:
    feature = message_type(f"{IO}.Feature")
    if name == "__LINE_ID__":
        lines = message_type(f"{IO}.BytesList")
        return LINE_ID.map(lambda line: feature(bytes_list=lines(value=[line.SerializeToString()])))
    floats = message_type(f"{IO}.FloatList")
    return st.lists(FLOAT, max_size=3).map(lambda values: feature(float_list=floats(value=values)))


SPECIAL = ["__LABEL__", "__LINE_ID__", "instance_weight"]


@st.composite
def examples(draw: Any) -> bytes:
    example = message_type(f"{IO}.Example")()
    for _ in range(draw(st.integers(0, 5))):
        example.named_feature.add(name=draw(COLUMN_NAMES), feature=draw(features()))
    for name in draw(st.lists(st.sampled_from(SPECIAL), max_size=2)):
        example.named_feature.add(name=name, feature=draw(special_features(name)))
    put_fields(draw, example)
    return bytes(example.SerializeToString())


def put_fields(draw: Any, record: Any) -> None:
    record.label.extend(draw(st.lists(FLOAT, max_size=3)))
    if draw(st.booleans()):
        record.instance_weight = draw(FLOAT)
    if draw(st.booleans()):
        record.line_id.CopyFrom(draw(LINE_ID))


@st.composite
def example_batches(draw: Any) -> bytes:
    count = draw(st.integers(0, 4))
    batch = message_type(f"{IO}.ExampleBatch")(batch_size=count)
    for name in draw(st.lists(st.one_of(COLUMN_NAMES, st.sampled_from(SPECIAL)), max_size=4)):
        shared = draw(st.booleans())
        kind = special_features(name) if name in SPECIAL else features()
        values = draw(st.lists(kind, min_size=1 if shared else count, max_size=2 if shared else count))
        batch.named_feature_list.add(name=name, feature=values, type=int(shared))
    padding = b"\xfa\x01\x04    " if count else b""  # honest rows need bytes
    return bytes(batch.SerializeToString()) + padding


@st.composite
def instances(draw: Any) -> bytes:
    record = message_type("parser.proto.Instance")()
    record.fid.extend(draw(FIDS))
    record.value.extend(draw(VALUES["float"]))
    for _ in range(draw(st.integers(0, 3))):
        feature = record.feature.add(name=draw(COLUMN_NAMES))
        field = draw(st.sampled_from(["fid", "float_value", "int64_value", "bytes_value"]))
        getattr(feature, field).extend(draw(VALUES[field.split("_")[0]]))
        field = draw(st.sampled_from(["fid_list", "float_list", "int64_list", "bytes_list"]))
        for values in draw(st.lists(VALUES[field.split("_")[0]], max_size=2)):
            getattr(feature, field).add(value=values)
    put_fields(draw, record)
    return bytes(record.SerializeToString())


RECORDS: dict[Kind, Any] = dict(zip(KINDS, (examples(), example_batches(), instances()), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50)
@given(data=st.data(), label_index=st.integers(0, 2))
def test_valid_records_give_the_columns_that_protobuf_reads(kind: Kind, data: Any, label_index: int) -> None:
    messages = data.draw(st.lists(RECORDS[kind], min_size=1, max_size=3))
    expected = [oracle(kind, message, label_index) for message in messages]
    assert None not in expected
    assert same(decoded(kind, messages, label_index), expected)
    merged = b"".join(messages[:2])  # protobuf merges concatenated messages
    (got,), wanted = decoded(kind, [merged], label_index), oracle(kind, merged, label_index)
    assert isinstance(got, str) if wanted is None else same(got, wanted)


# ---- any bytes

STRICTER = ("more than 64 bits", "does not fit in 32 bits")
"""Refused, where protobuf cuts the number off."""


def check_damaged(kind: Kind, good: bytes, damaged: bytes) -> None:
    expected = oracle(kind, damaged, 0)
    before, got, after = decoded(kind, [good, damaged, good])
    assert same(before, after)
    if isinstance(got, str):
        assert expected is None or any(text in got for text in STRICTER), got
    else:
        assert same(got, expected)


@pytest.mark.parametrize("kind", KINDS)
@given(
    data=st.data(),
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 60),
    insert=st.tuples(st.integers(0, 300), st.binary(max_size=8)),
)
def test_damaged_records_are_refused_or_read_as_protobuf_reads_them(
    kind: Kind, data: Any, edits: list[tuple[int, int]], cut: int, insert: tuple[int, bytes]
) -> None:
    good = data.draw(RECORDS[kind])
    damaged = bytearray(good[: insert[0]] + insert[1] + good[insert[0] :])
    damaged = damaged[: len(damaged) - (cut if cut < 20 else 0)]
    for place, byte in edits if damaged else []:
        damaged[place % len(damaged)] = byte
    check_damaged(kind, good, bytes(damaged))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.binary(max_size=80))
def test_any_bytes_are_refused_or_read_as_protobuf_reads_them(kind: Kind, data: bytes) -> None:
    check_damaged(kind, b"", data)


@pytest.mark.parametrize(
    ("message", "problem", "byte"),
    [
        ("80", "a varint is truncated", 0),
        ("08", "a varint is truncated", 1),
        ("40 01 40 ff ff ff ff ff ff ff ff ff ff 01", "a varint has more than 64 bits", 3),
        ("40 ff ff ff ff ff ff ff ff ff 02", "a varint has more than 64 bits", 1),
        ("ff " * 20, "a varint has more than 5 bytes", 0),
        ("42 05 61", "field 8 has 5 bytes, but 1 are left", 2),
        ("42 ff ff ff ff 7f 61", "field 8 has 34359738367 bytes, but 1 are left", 6),
        ("41 01 02", "field 8 has 8 bytes, but 2 are left", 1),
        ("43 44", "field 8 is a group, which is not supported", 0),
        ("46", "field 8 is of wire type 6", 0),
        ("00 01", "field number 0 is out of range", 0),
        ("80 80 80 80 10 01", "field number 536870912 is out of range", 0),
        ("08 01", "field 1 is a varint, not length-delimited", 1),
        ("0a 02 08 01", "field 1 is a varint, not length-delimited", 3),
        ("0a 04 0a 02 61 ff", "field 1 is not UTF-8", 4),
        ("0a 05 0a 03 ed a0 80", "field 1 is not UTF-8", 4),
        ("0a 06 12 04 12 02 0a 00", None, 0),
        ("0a 07 12 05 12 03 0a 01 61", "field 1 has 1 bytes, not a multiple of 8", 8),
        ("0a 08 12 06 2a 04 0a 02 01 80", "a varint is truncated", 9),
        ("aa 06 05 00 00 00 00 00", "field 101 has 5 bytes, not a multiple of 4", 3),
        ("b0 06 01", "field 102 is a varint, not 4 bytes", 2),
    ],
)
def test_problems_are_reported_with_their_byte(message: str, problem: str | None, byte: int) -> None:
    errors = decode_records("example", [bytes.fromhex(message)], NAMES).errors
    assert errors == ([] if problem is None else [(0, byte, problem)])


@pytest.mark.parametrize(
    ("column", "values", "rows", "problem"),
    [
        ("f", 1 << 17, 1 << 18, "column 'f' repeats 131072 values for 262144 rows"),
        ("__LABEL__", 1 << 13, 1 << 14, "column '__LABEL__' repeats 8192 values for 16384 rows"),
        ("f0", 1 << 13, 1 << 15, "repeats 4096 values for 32768 rows"),  # of many columns
    ],
)
def test_shared_columns_cannot_expand_without_bound(
    column: str, values: int, rows: int, problem: str
) -> None:
    feature = message_type(f"{IO}.Feature")()
    feature.float_list.value.extend([0.0] * values)
    batch = message_type(f"{IO}.ExampleBatch")(batch_size=rows)
    batch.named_feature_list.add(name=column, feature=[feature], type=1)
    names = [f"f{i}" for i in range(4096)] if column == "f0" else NAMES
    (error,) = decode_records("example_batch", [batch.SerializeToString()], names).errors
    assert problem in error.problem


def test_slots_of_an_instance_are_named_by_plain_numbers() -> None:
    instance = message_type("parser.proto.Instance")()
    instance.fid.extend([17 << 54 | 5])
    names = ["fc_slot_17", "fc_slot_017", "fc_slot_1x", "fc_slot_", "fc_slot_1024"]
    columns = decode_records("instance", [instance.SerializeToString()], names).columns
    assert [int(column.lengths.sum()) for column in columns] == [1, 0, 0, 0, 0]


def test_arguments_of_the_native_function_are_checked() -> None:
    with pytest.raises(InputError, match="label_index"):
        decode_records("example", [], [], label_index=-1)
