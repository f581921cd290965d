"""ParquetReader: types, nulls, many files, shards, resuming, and files that are not what they should be."""

from __future__ import annotations

import datetime
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.data import CsvReader, DenseColumn, FeatureColumn, ParquetReader, Schema
from megalith.errors import InputError
from megalith.hashing import hash_strings
from megalith.ops.ids import fid
from tests.data.support import check_appended, check_resume, check_shards, labels_of, rows_of

SCHEMA = Schema(label="y", features={"f": "c"})


def write(path: Path, columns: dict[str, Any], *, group: int = 1_000_000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def ids_of(path: Path, feature: str | FeatureColumn = "c") -> list[list[int]]:
    schema = Schema(label=None, features={"f": feature})
    (batch,) = ParquetReader(path, schema, batch_size=100)
    return batch.features["f"].to_lists()


def hashes(*texts: str) -> list[int]:
    return hash_strings(list(texts)).tolist()


# ---- columns of ids


TEXTS, TEXT_IDS = (
    pa.array(["a", None, "", "ü", "a"]),
    [hashes(*row) for row in (["a"], [], [""], ["ü"], ["a"])],
)
LISTS: Any = [[1, 2], None, [], [3, None, 4], [None]]
ID_COLUMNS: list[tuple[Any, list[list[int]]]] = [
    *(
        (pa.array([1, None, 100], kind), [[1], [], [100]])
        for kind in (pa.int64(), pa.int32(), pa.int8(), pa.uint32(), pa.uint64())
    ),
    (pa.array([2**64 - 1, 2**63], pa.uint64()), [[-1], [-(2**63)]]),  # the bits stay
    (pa.array([True, False, None]), [[1], [0], []]),
    *((TEXTS.cast(kind), TEXT_IDS) for kind in (pa.large_string(), pa.binary(), pa.large_binary())),
    (TEXTS, TEXT_IDS),
    (TEXTS.dictionary_encode(), TEXT_IDS),
    *(
        (pa.array(LISTS, kind), [[1, 2], [], [], [3, 4], []])
        for kind in (pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.int16()))
    ),
    (pa.array([["x", "y"], ["x"]]), [hashes("x", "y"), hashes("x")]),
    (pa.array([[1, 2], None, [5, 6]], pa.list_(pa.int64(), 2)), [[1, 2], [], [5, 6]]),
    (pa.nulls(2), [[], []]),
]


@pytest.mark.parametrize("number", range(len(ID_COLUMNS)))
def test_integers_are_ids_and_texts_are_hashed_whatever_type_they_have(tmp_path: Path, number: int) -> None:
    array, expected = ID_COLUMNS[number]
    assert ids_of(write(tmp_path / "a.parquet", {"c": array})) == expected


def test_options_of_a_feature(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"c": [7, -1], "t": ["a|b||a", ""]})
    assert ids_of(path, FeatureColumn("c", hash=True)) == [hashes("7"), hashes("-1")]
    assert ids_of(path, FeatureColumn("c", slot=3)) == [[fid(3, 7)], [fid(3, -1)]]
    a, b = hashes("a", "b")
    assert ids_of(path, FeatureColumn("t", separator="|")) == [[a, b, a], []]
    assert ids_of(path, FeatureColumn("t", separator="|", slot=1)) == [[fid(1, a), fid(1, b), fid(1, a)], []]
    lists = write(tmp_path / "l.parquet", {"c": [[1, None, 2, 3], [], None, [4, 5], [6, 7, 8]]})
    assert ids_of(lists, FeatureColumn("c", max_length=2)) == [[1, 2], [], [], [4, 5], [6, 7]]
    assert ids_of(lists, FeatureColumn("c", max_length=2, keep="last")) == [[2, 3], [], [], [4, 5], [7, 8]]
    assert ids_of(lists, FeatureColumn("c", max_length=9)) == ids_of(lists, FeatureColumn("c"))
    path = write(tmp_path / "b.parquet", {"c": ["12", " 18446744073709551615 ", None]})
    assert ids_of(path, FeatureColumn("c", hash=False)) == [[12], [-1], []]


@given(
    rows=st.lists(st.none() | st.lists(st.none() | st.text(max_size=4), max_size=4), min_size=1, max_size=30)
)
def test_any_lists_of_text_are_hashed_like_hash_strings(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str | None] | None]
) -> None:
    path = tmp_path_factory.mktemp("any") / "a.parquet"
    write(path, {"c": pa.array(rows, pa.list_(pa.string()))}, group=7)
    expected = [hashes(*(text for text in row or [] if text is not None)) for row in rows]
    schema = Schema(label=None, features={"f": "c"})
    batches = list(ParquetReader(path, schema, batch_size=4))
    assert [row for batch in batches for row in batch.features["f"].to_lists()] == expected


# ---- labels, dense columns, weights, times


def test_all_columns_together(tmp_path: Path) -> None:
    moment = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    columns = {
        "y": pa.array([1, 0], pa.int8()),
        "c": [5, 6],
        "d": pa.array([1.5, None]),
        "e": pa.array([math.e - 1, 0.0], pa.float32()),
        "w": pa.array([2, 0]),
        "t": pa.array([moment, moment + datetime.timedelta(milliseconds=2500)], pa.timestamp("ms", "UTC")),
    }
    schema = Schema(
        label="y", features={"f": "c"}, dense=["d", DenseColumn("e", "log1p")], weight="w", time="t"
    )
    (batch,) = ParquetReader(write(tmp_path / "a.parquet", columns), schema, batch_size=8)
    assert len(batch) == 2
    assert batch.labels.tolist() == [1.0, 0.0]
    assert batch.dense.tolist() == [pytest.approx([1.5, 1.0]), [0.0, 0.0]]
    assert batch.weights.tolist() == [2.0, 0.0]
    assert batch.time == int(moment.timestamp()) + 2


@pytest.mark.parametrize(
    ("array", "seconds"),
    [
        (pa.array([1, 2], pa.date32()), 2 * 86_400),
        (pa.array([1.9, 7.9]), 7),
        (pa.array(["5", "6"]), 6),
        (pa.array([10**18, 2 * 10**18], pa.timestamp("ns")), 2 * 10**9),
    ],
    ids=["date", "float", "text", "nanoseconds"],
)
def test_times_of_other_types_and_no_labels(tmp_path: Path, array: Any, seconds: int) -> None:
    path = write(tmp_path / "a.parquet", {"c": [1, 2], "t": array})
    (batch,) = ParquetReader(path, Schema(label=None, features={"f": "c"}, time="t"), batch_size=8)
    assert batch.time == seconds
    assert all(math.isnan(label) for label in batch.labels.tolist())


def test_fitting_reads_all_rows_or_the_first_and_bad_values_do_not_count(tmp_path: Path) -> None:
    values = [1.0, 3.0, None, 1.0, 3.0, 1e9]
    known = np.array(values, float)
    path = write(tmp_path / "a.parquet", {"y": [0.0] * 6, "d": values}, group=2)
    schema = Schema(label="y", features={}, dense=[DenseColumn("d", "standard")])
    reader = ParquetReader(path, schema, batch_size=3)
    whole = reader.fit().dense_columns[0]
    assert (whole.mean, whole.std) == pytest.approx((np.nanmean(known), np.nanstd(known)))
    reader = reader.with_schema(reader.fit(rows=5))
    fitted = DenseColumn("d", "standard", mean=2.0, std=1.0)
    assert reader.schema.dense_columns[0] == fitted
    assert next(iter(reader)).dense.tolist() == [[-1.0], [1.0], [0.0]]
    assert reader.fit() is reader.schema

    write(path, {"y": [0.0] * 4, "d": [1.0, 3.0, math.inf, math.nan]}, group=1)
    for rank in range(3):  # every rank fits the same
        reader = ParquetReader(path, schema, batch_size=3, on_error="skip").shard(rank, 3)
        assert reader.fit().dense_columns[0] == fitted
        assert reader.skipped == {}


def test_a_reader_with_another_schema(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"y": [0.0, 1.0], "c": [1, 2], "d": [5.0, 6.0]})
    reader = ParquetReader(path, Schema(label="y", features={"f": "c"}, dense=["d"]), batch_size=1)
    next(iter(reader))

    other = reader.with_schema(Schema(label="y", features={"g": "c"}))

    assert other.feature_names == ["g"]
    assert [batch.features["g"].to_lists() for batch in other] == [[[1]], [[2]]], "it starts at the start"
    assert reader.feature_names == ["f"], "the first reader is unchanged"
    with pytest.raises(
        InputError, match=r"column 'e' of the new schema is not one of this reader's \(y, d, c\)"
    ):
        reader.with_schema(Schema(label="y", features={"f": "e"}))


# ---- files, positions, shards


def many(tmp_path: Path, *, files: int = 3, rows: int = 11, group: int = 4) -> Path:
    for i in range(files):
        numbers = list(range(i * rows, (i + 1) * rows))
        lists = [[n] * (n % 3) for n in numbers]
        columns = {"y": [float(n) for n in numbers], "c": lists, "t": [n // 2 for n in numbers]}
        write(tmp_path / "many" / f"part-{i}.parquet", columns, group=group)
    return tmp_path / "many"


TIMED = Schema(label="y", features={"f": "c"}, time="t")


def test_files_directories_and_patterns(tmp_path: Path) -> None:
    folder = many(tmp_path)
    (folder / "notes.txt").write_text("no data")
    (folder / ".hidden.parquet").write_text("no data")
    (folder / "_temporary").mkdir()
    (folder / "_temporary" / "a.parquet").write_text("no data")
    everything = [float(n) for n in range(33)]
    for paths in (folder, str(folder), folder / "part-*.parquet", sorted(folder.glob("part*"))):
        assert labels_of(ParquetReader(paths, TIMED, batch_size=5)) == everything
    two = [folder / "part-2.parquet", folder / "part-0.parquet"]
    assert labels_of(ParquetReader(two, TIMED, batch_size=5)) == everything[22:] + everything[:11]
    assert ParquetReader(folder, TIMED, batch_size=5).num_rows == 33
    with pytest.raises(InputError, match=r"nothing.parquet: no such file"):
        ParquetReader(tmp_path / "nothing.parquet", TIMED, batch_size=5)


def test_files_of_another_format_are_named(tmp_path: Path) -> None:
    folder = many(tmp_path)
    message = r"no file in this directory ends in .csv, .* it holds .parquet: use the reader \(--data\) of"
    with pytest.raises(InputError, match=message):
        CsvReader(folder, TIMED, batch_size=5)
    with pytest.raises(InputError, match=r"part-0.parquet: is a Parquet file: use ParquetReader"):
        CsvReader(folder / "part-0.parquet", TIMED, batch_size=5)


@pytest.mark.parametrize("batch_size", [1, 5, 32])
def test_resume(tmp_path: Path, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = many(tmp_path)
    check_resume(lambda: ParquetReader(folder, TIMED, batch_size=batch_size))
    monkeypatch.setattr("megalith.data.table_reader.CHUNK_ROWS", 6)
    folder = many(tmp_path / "large groups", files=1, rows=50, group=50)
    check_resume(lambda: ParquetReader(folder, TIMED, batch_size=min(batch_size, 4)))


@pytest.mark.parametrize("group", [1, 4, 100])
def test_shards(tmp_path: Path, group: int) -> None:
    folder = many(tmp_path, group=group)
    check_shards(lambda: ParquetReader(folder, TIMED, batch_size=4), (1, 2, 3, 4, 10, 50))
    sizes = [ParquetReader(folder, TIMED, batch_size=4).shard(rank, 4).num_rows for rank in range(4)]
    assert sum(sizes) == 33
    folder = many(tmp_path / "one", files=1, rows=40, group=100)  # few row groups are divided evenly
    shards = [ParquetReader(folder, TIMED, batch_size=100).shard(rank, 4) for rank in range(4)]
    assert [labels_of(shard) for shard in shards] == [list(range(i, i + 10)) for i in (0, 10, 20, 30)]


def test_a_position_of_other_files_is_refused(tmp_path: Path) -> None:
    folder = many(tmp_path)
    position = list(ParquetReader(folder, TIMED, batch_size=5))[2].position
    (folder / "part-1.parquet").rename(folder / "renamed.parquet")
    reader = ParquetReader(folder, TIMED, batch_size=5)
    with pytest.raises(InputError, match=r"position is in file 'part-1.parquet', but .* is now 'part-2.parq"):
        reader.seek(position)
    with pytest.raises(InputError, match="'row' of the position is 99"):
        reader.seek({**reader.position, "row": 99})
    unsplit = {key: value for key, value in reader.position.items() if key != "split"}
    for old in (unsplit, {"group": 0, "row": 9, "name": "part-0.parquet", "shard": [0, 1]}):
        with pytest.raises(InputError, match="saved by an earlier version; start over"):
            reader.seek(old)


def week(folder: Path, number: int, first: int, *, rows: int = 10, group: int = 1_000_000) -> None:
    ids = list(range(first, first + rows))
    write(folder / f"week={number:02}" / "part-0.parquet", {"y": ids, "c": ids}, group=group)


@pytest.mark.parametrize("group", [1_000_000, 4])
@pytest.mark.parametrize("paths", ["", "*/part-0.parquet", "**/*.parquet"])
def test_a_file_added_before_the_position_is_noticed(tmp_path: Path, paths: str, group: int) -> None:
    """Files of different weeks have the same name, and row groups of one file do too."""
    given = tmp_path / paths
    week(tmp_path, 10, 0, group=group)
    week(tmp_path, 12, 20, group=group)
    positions = [batch.position for batch in ParquetReader(given, SCHEMA, batch_size=3)]

    week(tmp_path, 13, 30, group=group)  # after all positions: reading continues into it
    reader = ParquetReader(given, SCHEMA, batch_size=3)
    reader.seek(positions[4])
    assert labels_of(reader) == [25, 26, 27, 28, 29, *range(30, 40)]

    week(tmp_path, 11, 10, group=group)
    reader = ParquetReader(given, SCHEMA, batch_size=3)
    with pytest.raises(InputError, match=r"in file 'week=12/part-0.parquet', but .* 'week=1[01]/part-0"):
        reader.seek(positions[4])
    week(tmp_path, 9, -10, group=5)
    reader = ParquetReader(given, SCHEMA, batch_size=3)
    with pytest.raises(InputError, match=r"read the same files in the same order, or start over"):
        reader.seek(positions[2])


@pytest.mark.parametrize("files", [0, 1, 3])
@pytest.mark.parametrize("batches", [[2, 99], [99, 0], [1, 1], [99, 99]])
def test_shards_continue_with_an_appended_file(tmp_path: Path, files: int, batches: list[int]) -> None:
    """One file is split between the shards, and stays so if there are two in the midst of the epoch."""
    write(tmp_path / "empty.parquet", {"y": pa.array([], pa.int64()), "c": pa.array([], pa.int64())})
    for number in range(files):
        week(tmp_path, 10 + number, 100 * number)
    check_appended(
        lambda: ParquetReader(tmp_path, SCHEMA, batch_size=3), lambda: week(tmp_path, 99, 9900), batches
    )


def test_a_file_that_was_replaced_is_noticed_and_moved_data_is_not(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    week(here, 10, 0)
    week(here, 11, 10)
    position = list(ParquetReader(here, SCHEMA, batch_size=4))[3].position
    here.rename(there)

    def seek(paths: Any = there) -> ParquetReader:
        reader = ParquetReader(paths, SCHEMA, batch_size=4)
        reader.seek(position)
        return reader

    assert labels_of(seek()) == [16, 17, 18, 19]
    week(there, 11, 10, rows=12)
    with pytest.raises(InputError, match=r"'week=11/part-0.parquet' .* had \d+ bytes and now has \d+"):
        seek()
    week(there, 11, 10)
    week(there, 10, 0, rows=12)
    with pytest.raises(InputError, match=r"the files before 'week=11/part-0.parquet' .* have changed"):
        seek()


def test_a_list_of_paths_may_grow(tmp_path: Path) -> None:
    week(tmp_path / "a", 10, 0)
    week(tmp_path / "b", 10, 10)
    paths = [tmp_path / name / "week=10" / "part-0.parquet" for name in "ab"]
    position = next(iter(ParquetReader(paths[:1], SCHEMA, batch_size=6))).position
    reader = ParquetReader(paths, SCHEMA, batch_size=6)
    reader.seek(position)
    assert labels_of(reader) == list(range(6, 20))
    with pytest.raises(InputError, match=r"in file '../../b/week=10/part-0.parquet', but that file is now"):
        ParquetReader(paths[::-1], SCHEMA, batch_size=6).seek(list(reader)[-1].position)


# ---- labels and missing dense values


def test_labels_other_than_0_and_1(tmp_path: Path) -> None:
    labels = [0.0, 1.0, 2.0, -1.0, 0.5, None, math.inf, math.nan]
    path = write(tmp_path / "a.parquet", {"y": labels, "c": list(range(8))})
    reader = ParquetReader(path, SCHEMA, batch_size=8, on_error="skip")
    assert labels_of(reader) == [0.0, 1.0, 2.0, -1.0, 0.5], "by default, labels are any numbers"
    assert reader.skipped == {"no label": 2, "not finite": 1}

    reader = ParquetReader(path, SCHEMA, batch_size=1, binary_labels=True)
    with pytest.raises(InputError, match=r"a.parquet: row 2, column 'y': 2.0 is not 0 or 1"):
        next(iter(reader))  # the first bad row, although others are bad in another way
    reader = ParquetReader(path, SCHEMA, batch_size=8, on_error="skip", binary_labels=True)
    assert labels_of(reader) == [0.0, 1.0]
    assert reader.skipped == {"no label": 2, "not finite": 1, "label not 0 or 1": 3}


def test_nan_as_a_missing_value_with_an_indicator(tmp_path: Path) -> None:
    values = pa.array([1.0, math.nan, None, 3.0])
    path = write(tmp_path / "a.parquet", {"d": values, "e": [5.0] * 4, "t": ["1", "nan", None, "inf"]})
    columns = [DenseColumn("d", "standard", nan="missing", indicator=True), "e"]
    schema = Schema(label=None, features={}, dense=columns)
    reader = ParquetReader(path, schema, batch_size=4)
    reader = reader.with_schema(reader.fit())
    assert reader.num_dense == 3
    (batch,) = reader
    assert batch.dense is not None
    assert batch.dense.tolist() == [[-1, 0, 5], [0, 1, 5], [0, 1, 5], [1, 0, 5]]
    assert Schema.from_dict(json.loads(json.dumps(reader.schema.to_dict()))) == reader.schema

    text = Schema(label=None, features={}, dense=[DenseColumn("t", nan="missing")])
    with pytest.raises(InputError, match=r"row 3, column 't': 'inf' is not a finite number"):
        list(ParquetReader(path, text, batch_size=4))
    plain = Schema(label=None, features={}, dense=["d"])
    with pytest.raises(InputError, match=r'row 1, column .d.: nan is .* nan="missing" of the dense column'):
        list(ParquetReader(path, plain, batch_size=4))


# ---- columns that are not what they look like


def test_times_in_milliseconds_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"y": [0, 1], "c": [1, 2], "at": [1_600_000_000, 1_600_000_000_000]})
    schema = Schema(label="y", features={"f": "c"}, time="at")
    message = r"row 1, column 'at': 1600000000000 is not a time in seconds .* is the column in milliseconds\?"
    with pytest.raises(InputError, match=message):
        list(ParquetReader(path, schema, batch_size=2))
    reader = ParquetReader(path, schema, batch_size=2, on_error="skip")
    assert [batch.time for batch in reader.shard(0, 1)] == [1_600_000_000]
    assert [batch.time for batch in reader] == [1_600_000_000]
    assert reader.skipped == {"not a time": 1}
    assert list(reader.first_skipped) == ["not a time"]
    assert re.search(message, reader.first_skipped["not a time"])


@pytest.mark.parametrize(
    ("texts", "hint"),
    [
        (["1 2 3", "4"], r"'1 2 3' looks like several ids, but is read as one; separator=' ' splits it"),
        (["7", "8,9", "1,2"], r"separator=','"),
        ([b"Comedy|Action", b"Drama"], r"'Comedy\|Action' .* separator='\|'"),
        (["[1, 2]", None], r"'\[1, 2\]' looks like a list, but is read as one id"),
    ],
)
def test_texts_that_look_like_lists_of_ids(tmp_path: Path, texts: list[Any], hint: str) -> None:
    path = write(tmp_path / "a.parquet", {"c": texts})
    schema = Schema(label=None, features={"f": "c"})
    with pytest.warns(UserWarning, match=rf"a.parquet: column 'c': .*{hint}") as warned:
        assert len(list(ParquetReader(path, schema, batch_size=1))) == len(texts)
    assert len(warned) == 1
    strict = Schema(label=None, features={"f": FeatureColumn("c", hash=False)})
    with pytest.raises(InputError, match=rf"is not a 64-bit integer; .*{hint}"):
        list(ParquetReader(path, strict, batch_size=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in (["New York", "a, b"], ["-1", "+2"], ["68fd1e64"], ["1 2"] + ["x"] * 30):
            list(ParquetReader(write(path, {"c": other}), schema, batch_size=9))


# ---- bad rows and files


BAD_ROWS = [
    ("y", [1.0, math.nan, 2.0], "no label", r"a.parquet: row 1, column 'y': nan is not a label; .*on_error="),
    ("y", [1.0, math.inf, 2.0], "not finite", r"row 1, column 'y': inf is not a finite number"),
    ("y", ["1", "yes", "2"], "wrong type", r"row 1, column 'y': 'yes' is not a number"),
    ("d", [1.0, math.nan, 2.0], "not finite", r"row 1, column 'd': nan is not a finite number"),
    ("w", [1.0, -0.5, 2.0], "no weight", r"row 1, column 'w': -0.5 is not a weight"),
    ("w", [1.0, None, 2.0], "no weight", r"row 1, column 'w': None is not a weight"),
    ("t", [1, None, 2], "no time", r"row 1, column 't': None is missing"),
    ("t", [1, 2**60, 2], "not a time", r"row 1, column 't': 1152921504606846976 is not a time"),
    ("c", ["1", "2.5", "3"], "wrong type", r"row 1, column 'c': '2.5' is not a 64-bit integer"),
    ("c", ["1", "18446744073709551616", "3"], "wrong type", r"column 'c'"),
]


@pytest.mark.parametrize(("column", "values", "reason", "message"), BAD_ROWS)
def test_bad_rows_are_named_or_skipped(
    tmp_path: Path, column: str, values: list[Any], reason: str, message: str
) -> None:
    good = {"y": [0.0, 1.0, 2.0], "d": [0.5, 1.5, 2.5], "w": [1.0] * 3, "t": [1, 2, 3], "c": ["1", "2", "3"]}
    schema = Schema(
        label="y", features={"f": FeatureColumn("c", hash=False)}, dense=["d"], weight="w", time="t"
    )
    path = write(tmp_path / "a.parquet", {**good, column: values})
    with pytest.raises(InputError, match=message):
        list(ParquetReader(path, schema, batch_size=2))
    reader = ParquetReader(path, schema, batch_size=2, on_error="skip")
    assert [ids for *_, ids in rows_of(reader)] == [(("f", (1,)),), (("f", (3,)),)]
    assert reader.skipped == {reason: 1}


def test_a_bad_row_is_counted_once_and_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"y": [float(i) for i in range(20)], "d": [0.0] * 20}
    columns["y"][13], columns["d"][13] = None, math.inf
    path = write(tmp_path / "a.parquet", columns, group=6)
    schema = Schema(label="y", features={}, dense=["d"])
    with pytest.raises(InputError, match=r"row 13, column 'y'"):
        list(ParquetReader(path, schema, batch_size=4))
    reader = ParquetReader(path, schema, batch_size=4, on_error="skip")
    assert [len(batch) for batch in reader] == [4, 4, 4, 4, 3]
    assert reader.skipped == {"no label": 1}


def test_resume_and_shards_with_skipped_rows(tmp_path: Path) -> None:
    labels = [None if i % 3 == 0 or 20 < i < 30 else float(i) for i in range(40)]  # also whole row groups
    path = write(tmp_path / "a.parquet", {"y": pa.array(labels), "c": list(range(40))}, group=4)
    check_resume(lambda: ParquetReader(path, SCHEMA, batch_size=5, on_error="skip"))
    check_shards(lambda: ParquetReader(path, SCHEMA, batch_size=5, on_error="skip"))


def test_missing_columns_and_wrong_types(tmp_path: Path) -> None:
    good = write(tmp_path / "a.parquet", {"y": [0.0], "c": [1]})
    lacking = write(tmp_path / "b.parquet", {"y": [0.0, 1.0], "other": [1, 2]})
    wrong = write(tmp_path / "c.parquet", {"y": [0.0] * 3, "c": [0.5] * 3})
    with pytest.raises(InputError, match=r"b.parquet: column 'c' is missing; the file has y, other"):
        ParquetReader([good, lacking], SCHEMA, batch_size=2)
    with pytest.raises(InputError, match=r"c.parquet: column 'c' holds double; ids are integers or text"):
        ParquetReader([good, wrong], SCHEMA, batch_size=2)
    reader = ParquetReader([good, lacking, wrong], SCHEMA, batch_size=2, on_error="skip")
    assert labels_of(reader) == [0.0]
    assert reader.skipped == {"missing column": 2, "wrong type": 3}
    with pytest.raises(InputError, match="column 'c' is missing"):
        ParquetReader([lacking, good], SCHEMA, batch_size=2, on_error="skip")
    with pytest.raises(InputError, match=r"d.parquet: label column 'y' is missing; the file has c"):
        ParquetReader(write(tmp_path / "d.parquet", {"c": [1]}), SCHEMA, batch_size=1)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.struct([("a", pa.int64())]), [{"a": 1}]),
        (pa.list_(pa.list_(pa.int64())), [[[1]]]),
        (pa.date32(), [1]),
    ],
)
def test_columns_that_hold_no_ids(tmp_path: Path, kind: Any, values: list[Any]) -> None:
    path = write(tmp_path / "a.parquet", {"y": [0.0], "c": pa.array(values, kind)})
    with pytest.raises(InputError, match="column 'c' holds"):
        ParquetReader(path, SCHEMA, batch_size=2)
    with pytest.raises(InputError, match=r"column 'c' holds .*, not numbers"):
        ParquetReader(path, Schema(label="y", features={}, dense=["c"]), batch_size=2)


def test_files_that_are_cut_off_or_no_parquet(tmp_path: Path) -> None:
    numbers = list(range(1000))
    whole = write(tmp_path / "a.parquet", {"y": numbers, "c": numbers}, group=100)
    cut = tmp_path / "b.parquet"
    cut.write_bytes(whole.read_bytes()[:-100])
    empty = tmp_path / "c.parquet"
    empty.write_bytes(b"")
    for bad in (cut, empty):
        with pytest.raises(InputError, match=rf"{bad.name}: cannot be read as Parquet"):
            ParquetReader([whole, bad], SCHEMA, batch_size=64)
    reader = ParquetReader([empty, whole, cut], SCHEMA, batch_size=64, on_error="skip")
    assert labels_of(reader) == numbers
    assert reader.skipped == {"unreadable file": 2}


def test_a_damaged_page_costs_its_row_group(tmp_path: Path) -> None:
    columns = {"y": [float(i) for i in range(300)], "c": [f"text {i}" for i in range(300)]}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=100, compression="gzip", use_dictionary=False)
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[start : start + 60] = b"\xff" * 60
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"a.parquet: row 100: cannot be read from this row"):
        list(ParquetReader(path, SCHEMA, batch_size=64))
    reader = ParquetReader(path, SCHEMA, batch_size=64, on_error="skip")
    assert labels_of(reader) == [float(i) for i in (*range(100), *range(200, 300))]
    assert reader.skipped == {"unreadable file": 100}
    check_resume(lambda: ParquetReader(path, SCHEMA, batch_size=64, on_error="skip"))


def test_without_pyarrow_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", {"y": [0.0], "c": [1]})
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.dataset", None)
    with pytest.raises(ImportError, match=r"pip install '.\[data\]'"):
        ParquetReader(path, SCHEMA, batch_size=2)
