"""MonolithReader: batches from Example, ExampleBatch and Instance records, positions, and bad records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.compat.monolith import MonolithReader
from megalith.compat.monolith.example_reader import Kind
from megalith.data.record_files import Framing, write_records
from megalith.errors import InputError
from megalith.hashing import hash_strings
from megalith.ops.ids import fid_v1_to_v2
from tests.compat import importing as wire
from tests.data.support import check_resume, check_shards, labels_of

Encode = Callable[[int], bytes]

# ---- the messages, as Monolith's protos number their fields


def message(*parts: tuple[int, Any]) -> bytes:
    """(number, value): a message or bytes, text, an int (varint), or a function that encodes the field."""
    out = b""
    for number, value in parts:
        if callable(value):
            out += value(number)
        elif isinstance(value, int):
            out += wire.varint(number << 3) + wire.varint(value)
        else:
            out += wire.message(number, value.encode() if isinstance(value, str) else value)
    return out


def fixed64s(*values: int) -> Encode:
    return lambda number: wire.message(number, *((value % 2**64).to_bytes(8, "little") for value in values))


def floats(*values: float) -> Encode:
    return lambda number: wire.packed(number, *values)


def varints(*values: int) -> Encode:
    return lambda number: wire.message(number, *map(wire.varint, values))


def float_(value: float) -> Encode:
    return lambda number: wire.floats(number, value)


def fids(*values: int, v1: bool = False) -> bytes:
    return message((1 if v1 else 2, message((1, fixed64s(*values)))))


def float_list(*values: float) -> bytes:
    return message((3, message((1, floats(*values)))))


def bytes_list(*values: bytes) -> bytes:
    return message((6, message(*((1, value) for value in values))))


def an_example(features: dict[str, bytes], *labels: float, more: Sequence[tuple[int, Any]] = ()) -> bytes:
    named = [(1, message((1, name), (2, feature))) for name, feature in features.items()]
    return message(*named, (101, floats(*labels)), *more)


def a_batch(columns: dict[str, list[bytes]], size: int, shared: Sequence[str] = ()) -> bytes:
    lists = [
        (1, message((1, name), *((2, value) for value in values), (3, int(name in shared))))
        for name, values in columns.items()
    ]
    return message(*lists, (3, size))


def write(path: Path, messages: Sequence[bytes], framing: Framing = "length") -> Path:
    with path.open("wb") as out:
        write_records(out, messages, framing)
    return path


def examples(path: Path, **options: Any) -> MonolithReader:
    """A reader of Examples with the feature "f"."""
    return MonolithReader(path, "example", **({"features": ["f"], "batch_size": 4} | options))


def batches(path: Path, **options: Any) -> MonolithReader:
    """A reader of ExampleBatches with the feature "f"."""
    return MonolithReader(path, "example_batch", **({"features": ["f"], "batch_size": 4} | options))


def ids_of(reader: MonolithReader) -> list[list[int]]:
    (batch,) = reader
    (column,) = batch.features.values()
    return column.to_lists()


# ---- records to batches


def test_an_example_written_out_by_hand(tmp_path: Path) -> None:
    raw = bytes.fromhex(
        "0a1c 0a04 75736572"  # named_feature, 28 bytes: name "user"
        "1214 1212"  # feature, 20 bytes: fid_v2_list, 18 bytes
        "0a10 0100000000000700 ffffffffffff0700"  # value, packed, 16 bytes
        "aa0604 0000803f"  # label 1.0, packed
    )
    path = write(tmp_path / "a.pb", [raw])
    assert ids_of(examples(path, features=["user"])) == [[7 << 48 | 1, 7 << 48 | (2**48 - 1)]]


V1 = 900 << 54 | 12345
V2_LISTS = message((1, message((1, fixed64s(1, 2)))), (1, message((1, fixed64s(3)))))
TYPES = [
    (fids(V1, v1=True), [900 << 48 | 12345]),
    (fids(5, 2**64 - 1), [5, -1]),
    (message((5, message((1, varints(1, -2))))), [1, -2]),
    (bytes_list(b"a", b"b"), hash_strings(["a", "b"]).tolist()),
    (message((7, V2_LISTS)), [1, 2, 3]),
    (message((10, message((1, message((1, varints(4))))))), [4]),
    (message((11, message((1, message((1, b"a")))))), hash_strings(["a"]).tolist()),
    (message((12, -9)), [-9]),
    (message((15, b"a")), hash_strings(["a"]).tolist()),
    (message((16, message((1, message((1, fixed64s(V1))))))), [900 << 48 | 12345]),
    (message(), []),
]


@pytest.mark.parametrize(("feature", "expected"), TYPES)
def test_every_type_that_holds_ids(tmp_path: Path, feature: bytes, expected: list[int]) -> None:
    path = write(tmp_path / "a.pb", [an_example({"f": feature}, 1.0)])
    assert ids_of(examples(path)) == [expected]
    path = write(tmp_path / "b.pb", [a_batch({"f": [feature], "__LABEL__": [float_list(1.0)]}, 1)])
    assert ids_of(batches(path)) == [expected]


def test_labels_weights_and_times_of_examples(tmp_path: Path) -> None:
    line_id = message((2, 77), (3, 1_600_000_000))
    one = an_example({}, 0.0, 1.0, more=[(102, float_(2.0)), (100, line_id)])
    two = an_example({"__LABEL__": float_list(5.0, 6.0), "__LINE_ID__": bytes_list(message((3, 9)))})
    path = write(tmp_path / "a.pb", [one, two])
    (batch,) = examples(path, label_index=1, weights=True, time=True)
    assert (batch.labels.tolist(), batch.weights.tolist()) == ([1.0, 6.0], [2.0, 1.0])
    assert (batch.time, batch.features["f"].to_lists()) == (1_600_000_000, [[], []])
    (plain,) = examples(path, features={"ours": "f"})
    assert (plain.weights, plain.time, list(plain.features)) == (None, None, ["ours"])


def test_example_batches_stand_column_by_column(tmp_path: Path) -> None:
    columns = {
        "f": [fids(1), fids(), fids(2, 3)],
        "user": [fids(V1, v1=True)],
        "__LABEL__": [float_list(x) for x in (0.0, 1.0, 0.0)],
        "instance_weight": [float_list(0.5)],
        "__LINE_ID__": [bytes_list(message((3, 10 + i))) for i in range(3)],
        "unwanted": [fids(1)] * 3,
    }
    path = write(tmp_path / "a.pb", [a_batch(columns, 3, shared=["user", "instance_weight"])])
    (batch,) = batches(path, features=["f", "user"], weights=True, time=True)
    found = {name: column.to_lists() for name, column in batch.features.items()}
    assert found == {"f": [[1], [], [2, 3]], "user": [[fid_v1_to_v2(V1)]] * 3}
    assert (batch.labels.tolist(), batch.weights.tolist(), batch.time) == ([0.0, 1.0, 0.0], [0.5] * 3, 12)


def test_instances_have_fids_by_slot(tmp_path: Path) -> None:
    lists = message((1, "seq"), (6, message((1, fixed64s(8)))), (6, message((1, fixed64s(9)))))
    raw = message(
        (1, fixed64s(1 << 54 | 5, 900 << 54 | 6)),
        (1, fixed64s(1 << 54 | 7)),
        (2, floats(0.25, 0.75)),
        (3, floats(1.0)),
        (4, float_(3.0)),
        (5, message((3, 42))),
        (9, message((1, "named"), (2, fixed64s(11)), (4, varints(99)))),
        (9, message((1, "word"), (5, b"a"))),
        (9, message((1, "price"), (3, floats(2.0)))),
        (9, lists),
        (9, message((1, "unwanted"), (2, fixed64s(1)))),
    )
    path = write(tmp_path / "a.pb", [raw])
    expected = {
        "fc_slot_1": [1 << 48 | 5, 1 << 48 | 7],
        "fc_slot_900": [900 << 48 | 6],
        "named": [11],
        "word": hash_strings(["a"]).tolist(),
        "seq": [8, 9],
        "absent": [],
    }
    options: dict[str, Any] = {"features": [*expected], "dense": {"value": 2, "price": 1}}
    (batch,) = MonolithReader(path, "instance", **options, batch_size=2, weights=True, time=True)
    assert {name: column.to_lists()[0] for name, column in batch.features.items()} == expected
    assert batch.dense.tolist() == [[0.25, 0.75, 2.0]]
    assert (batch.labels.tolist(), batch.weights.tolist(), batch.time) == ([1.0], [3.0], 42)


# ---- positions and shards


def numbered(n: int, first: int = 0) -> list[bytes]:
    return [an_example({"f": fids(*[i] * (i % 3))}, float(i)) for i in range(first, first + n)]


@pytest.mark.parametrize("framing", ["length", "tfrecord"])
def test_resume_and_shards_of_examples(tmp_path: Path, framing: Framing) -> None:
    write(tmp_path / "a.pb", numbered(13), framing)
    write(tmp_path / "b.pb", numbered(6, 13), framing)
    make = partial(examples, tmp_path, framing=framing)
    assert labels_of(make()) == list(range(19))
    check_resume(make)
    check_shards(make)


def test_resume_and_shards_of_batches(tmp_path: Path) -> None:
    records = []
    for start, size in ((0, 5), (5, 1), (6, 0), (6, 9), (15, 3)):
        numbers = range(start, start + size)
        columns = {"f": [fids(i) for i in numbers], "__LABEL__": [float_list(float(i)) for i in numbers]}
        records.append(a_batch(columns, size))
    make = partial(batches, write(tmp_path / "a.pb", records))
    assert labels_of(make()) == list(range(18))
    check_resume(make)
    check_shards(make)


def test_a_position_of_other_files_is_refused(tmp_path: Path) -> None:
    one, two = (examples(write(tmp_path / name, numbered(9))) for name in ("a.pb", "b.pb"))
    with pytest.raises(InputError, match=r"position is in file 'a.pb', but that file is now 'b.pb'"):
        two.seek(next(iter(one)).position)


# ---- bad records


GOOD = an_example({"f": fids(1), "d": float_list(1.0)}, 1.0)
BAD = [
    (an_example({"d": float_list(1.0)}), "no label", "row 0 of it: has no label 0"),
    (an_example({"d": float_list(1.0)}, math.inf), "not finite", "has an infinite label"),
    (an_example({"d": float_list(1.0)}, 1.0, more=[(102, float_(-1.0))]), "no weight", "the weight -1.0"),
    (an_example({"d": float_list(1.0, 2.0)}, 1.0), "wrong type", "column 'd' holds 2 floats where 1 finite"),
    (an_example({"d": float_list(math.nan)}, 1.0), "wrong type", "column 'd' holds 1 floats"),
    (an_example({"d": fids(1)}, 1.0), "wrong type", "column 'd' is missing or does not hold floats"),
    (an_example({"f": float_list(1.0), "d": float_list(1.0)}, 1.0), "wrong type", "column 'f' holds floats"),
    (an_example({"__LABEL__": fids(1)}), "unreadable record", "column '__LABEL__' does not hold floats"),
    (GOOD[:-1], "unreadable record", "cannot be read: .* at byte "),
    (b"\xff" * 30, "unreadable record", "cannot be read: a varint"),
]


@pytest.mark.parametrize(("record", "reason", "problem"), BAD)
def test_bad_records_are_named_or_skipped(tmp_path: Path, record: bytes, reason: str, problem: str) -> None:
    path = write(tmp_path / "a.pb", [GOOD, record, GOOD])
    at = 8 + len(GOOD) + 8
    with pytest.raises(InputError, match=rf"a.pb: record 1 at byte {at}: .*{problem}"):
        list(examples(path, dense={"d": 1}, batch_size=2))
    reader = examples(path, dense={"d": 1}, batch_size=2, on_error="skip")
    assert labels_of(reader) == [1.0, 1.0]
    assert reader.skipped == {reason: 1}


def test_bad_rows_of_a_batch_are_skipped_alone(tmp_path: Path) -> None:
    labels = [float_list(0.0), float_list(), float_list(2.0)]
    path = write(tmp_path / "a.pb", [a_batch({"f": [fids(1)] * 3, "__LABEL__": labels}, 3)])
    with pytest.raises(InputError, match="record 0 at byte 8: row 1 of it: has no label 0"):
        list(batches(path))
    reader = batches(path, batch_size=2, on_error="skip")
    assert labels_of(reader) == [0.0, 2.0]
    assert reader.skipped == {"no label": 1}
    check_resume(partial(batches, path, batch_size=1, on_error="skip"))


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (a_batch({"f": [fids(1)] * 2}, 3), "column 'f' has 2 values in a batch of 3"),
        (a_batch({"f": []}, 3, shared=["f"]), "column 'f' has 0 values in a batch of 3"),
        (a_batch({"f": [fids(1)]}, 2**31 - 1, shared=["f"]), "batch_size is 2147483647 in a message of"),
        (a_batch({}, -1), "batch_size is -1"),
    ],
)
def test_batches_that_do_not_add_up(tmp_path: Path, record: bytes, problem: str) -> None:
    path = write(tmp_path / "a.pb", [record])
    with pytest.raises(InputError, match=problem):
        list(batches(path))


def test_broken_framing_ends_a_file_but_not_the_reading(tmp_path: Path) -> None:
    cut = write(tmp_path / "a.pb", numbered(5))
    cut.write_bytes(cut.read_bytes()[:-3])
    write(tmp_path / "b.pb", numbered(2, 5))
    with pytest.raises(InputError, match=r"a.pb: the file ends at byte"):
        list(examples(tmp_path))
    reader = examples(tmp_path, batch_size=2, on_error="skip")
    assert labels_of(reader) == [0.0, 1.0, 2.0, 3.0, 5.0, 6.0]
    assert reader.skipped == {"broken framing": 1}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": "tweet"}, "kind must be one of example, example_batch, instance"),
        ({"framing": "tfrecord", "header": ["sort_id"]}, "framing must be"),
        ({"header": "sort_id"}, "header must be some of lagrangex_header"),
        ({"label_index": -1}, "label_index must be an integer of at least 0"),
    ],
)
def test_arguments_that_are_refused(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    arguments = {"kind": "example", "features": ["f"], "batch_size": 2, **options}
    with pytest.raises(InputError, match=problem):
        MonolithReader(write(tmp_path / "a.pb", [GOOD]), **arguments)


# ---- damaged bytes

SEEDS = [GOOD, a_batch({"f": [fids(1), fids(2)], "__LABEL__": [float_list(1.0)] * 2}, 2), *numbered(2)]


@given(
    seed=st.sampled_from(SEEDS),
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.integers(0, 200),
    kind=st.sampled_from(["example", "example_batch", "instance"]),
)
def test_damaged_records_are_read_or_skipped(
    tmp_path_factory: pytest.TempPathFactory, seed: bytes, edits: list[tuple[int, int]], cut: int, kind: Kind
) -> None:
    damaged = bytearray(seed[: max(len(seed) - cut, 1)])
    for place, byte in edits:
        damaged[place % len(damaged)] = byte
    path = write(tmp_path_factory.mktemp("fuzz") / "a.pb", [bytes(damaged)])
    options: dict[str, Any] = {"features": ["f", "fc_slot_1"], "dense": {"d": 1}, "batch_size": 2}
    strict = message = None
    try:
        strict = labels_of(MonolithReader(path, kind, **options))
    except InputError as error:
        message = str(error)
    assert message is None or "a.pb: record 0 at byte 8" in message
    reader = MonolithReader(path, kind, **options, on_error="skip")
    lenient = labels_of(reader)
    assert (strict is None) == (sum(reader.skipped.values()) > 0)
    assert strict is None or strict == lenient
