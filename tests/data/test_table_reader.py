"""TableReader: shuffling, workers, states, Hive partitions, IPC, object stores, and tables in memory."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import FileSystem
from torch.utils.data import DataLoader

from megalith.data import (
    Batch,
    CsvReader,
    FeatureColumn,
    ParquetReader,
    Reader,
    Schema,
    TableReader,
    batch_from,
)
from megalith.errors import InputError
from megalith.hashing import hash_strings
from megalith.ops.ids import fid
from tests.data.support import check_resume, check_shards, labels_of, rows_of
from tests.storage.s3_server import KEYS, new_place, s3_server

SCHEMA = Schema(label="y", features={"f": "c"})


def columns(first: int, rows: int) -> dict[str, Any]:
    """Row i has label i and i % 3 ids that are i."""
    numbers = list(range(first, first + rows))
    return {"y": [float(n) for n in numbers], "c": [[n] * (n % 3) for n in numbers]}


def write(path: Path, content: dict[str, Any], *, group: int = 1_000_000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(content), path, row_group_size=group)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of 40 rows, in row groups of 7."""
    for number in range(3):
        write(tmp_path / "many" / f"{number}.parquet", columns(40 * number, 40), group=7)
    return tmp_path / "many"


# ---- shuffling


READERS: dict[str, Callable[[Path, dict[str, Any]], Reader]] = {
    "parquet": lambda folder, options: ParquetReader(folder, SCHEMA, batch_size=6, **options),
    "csv": lambda folder, options: CsvReader(
        as_csv(folder), Schema(label="y", features={"f": "y"}), batch_size=6, block_bytes=100, **options
    ),
}


def as_csv(folder: Path) -> Path:
    lines = "".join(f"{n}\n" for n in range(120))
    (folder / "all.csv").write_text("y\n" + lines)
    return folder / "all.csv"


@pytest.mark.parametrize("kind", READERS)
def test_a_shuffled_epoch_holds_every_row_once_in_another_order_than_the_next(
    folder: Path, kind: str
) -> None:
    reader = READERS[kind](folder, {"shuffle": 3, "shuffle_rows": 50})
    one, two = labels_of(reader), labels_of(reader)
    assert sorted(one) == sorted(two) == list(range(120))
    assert one != two
    assert min(np.std(one[:30]), np.std(two[:30])) > 5, "the rows of a batch come from far apart"
    again = READERS[kind](folder, {"shuffle": 3, "shuffle_rows": 50})
    assert labels_of(again) == one
    again.set_epoch(1)
    assert labels_of(again) == two
    assert labels_of(READERS[kind](folder, {"shuffle": 4, "shuffle_rows": 50})) != one
    assert labels_of(again.in_order()) == list(range(120))


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("options", [{"shuffle_rows": 16}, {"shuffle_rows": 1000, "prefetch": 2}])
def test_a_shuffled_reader_resumes_and_is_sharded(folder: Path, kind: str, options: dict[str, Any]) -> None:
    check_resume(lambda: READERS[kind](folder, {"shuffle": 1, **options}))
    check_shards(lambda: READERS[kind](folder, {"shuffle": 1, **options}), (2, 5))


def test_bad_rows_of_shuffled_files_are_counted_once(tmp_path: Path) -> None:
    labels = [None if i % 7 == 0 or 20 < i < 30 else float(i) for i in range(60)]
    path = write(tmp_path / "a.parquet", {"y": labels, "c": list(range(60))}, group=9)

    def make() -> Reader:
        return ParquetReader(path, SCHEMA, batch_size=4, on_error="skip", shuffle=5, shuffle_rows=11)

    check_resume(make)
    reader = make()
    first = next(iter(reader))
    rest = labels_of(reader)  # the loop that was left is continued by the next
    assert sorted([*first.labels.tolist(), *rest]) == [x for x in labels if x is not None]
    assert reader.skipped == {"no label": labels.count(None)}


def test_positions_of_shuffled_files_that_changed_are_refused(folder: Path) -> None:
    reader = ParquetReader(folder, SCHEMA, batch_size=6, shuffle=1)
    position = next(iter(reader)).position
    with pytest.raises(InputError, match="the position is of a shuffled reader; pass shuffle="):
        ParquetReader(folder, SCHEMA, batch_size=6).seek(position)
    with pytest.raises(InputError, match="'shuffled' of the position is 6, above 5"):
        ParquetReader(folder, SCHEMA, batch_size=6, shuffle=1, shuffle_rows=5).seek(position)
    write(folder / "3.parquet", columns(120, 5))
    with pytest.raises(InputError, match="files of the shuffled position have changed"):
        ParquetReader(folder, SCHEMA, batch_size=6, shuffle=1).seek(position)


def test_reading_ahead_gives_the_same_batches_and_counts(tmp_path: Path) -> None:
    labels = [None if i % 5 == 0 else float(i) for i in range(60)]
    path = write(tmp_path / "a.parquet", {"y": labels, "c": list(range(60))}, group=9)
    check_resume(lambda: ParquetReader(path, SCHEMA, batch_size=4, on_error="skip", prefetch=3))
    reader = ParquetReader(path, SCHEMA, batch_size=4, prefetch=1)
    with pytest.raises(InputError, match="row 0, column 'y'"):
        list(reader)


# ---- files that are corrected


def with_a_bad_row(path: Path, bad: bool) -> Path:
    """Row 47 has a label that is not a number, or one with more digits."""
    labels = [str(n) for n in range(60)]
    labels[47] = "?" if bad else "47.000000"
    if path.suffix == ".csv":
        path.write_text("y,c\n" + "".join(f"{y},{n}\n" for n, y in enumerate(labels)))
        return path
    return write(path, {"y": labels, "c": list(range(60))}, group=12)


@pytest.mark.parametrize("name", ["b.parquet", "b.csv"])
def test_no_row_is_lost_or_repeated_after_a_bad_row_was_corrected(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = with_a_bad_row(tmp_path / name, bad=True)
    kind = ParquetReader if name.endswith("parquet") else CsvReader
    options: dict[str, Any] = {} if kind is ParquetReader else {"block_bytes": 64}
    read: list[float] = []
    positions: list[Any] = []

    def train() -> None:
        for batch in kind(path, SCHEMA, batch_size=4, **options):
            read.extend(labels_of([batch]))
            positions.append(json.loads(json.dumps(batch.position)))

    with pytest.raises(
        InputError, match=rf"{name}: (row 47|line 49), column 'y': .* fix it, or pass on_error"
    ):
        train()
    assert read == list(range(len(read))), "nothing after the bad row was read"
    assert 30 < len(read) < 48

    with_a_bad_row(path, bad=False)
    reader = kind(path, SCHEMA, batch_size=4, **options)
    reader.seek(positions[-1])
    assert read + labels_of(reader) == list(range(60))
    assert "has changed since the position was saved; reading continues in it at the same row" in caplog.text


# ---- workers of a DataLoader


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("options", [{}, {"shuffle": 1, "shuffle_rows": 20, "prefetch": 1}])
def test_workers_read_every_row_once(folder: Path, workers: int, options: dict[str, Any]) -> None:
    reader = ParquetReader(folder, SCHEMA, batch_size=6, **options)
    for epoch in range(2):
        reader.set_epoch(epoch)
        batches = list(DataLoader(reader, batch_size=None, num_workers=workers, timeout=60))
        assert sorted(labels_of(batches)) == list(range(120))
    shard = reader.shard(1, 2)
    batches = list(DataLoader(shard, batch_size=None, num_workers=workers, timeout=60))
    assert sorted(labels_of(batches)) == sorted(labels_of(shard.shard(1, 2)))


class _Info:
    """What torch's get_worker_info returns in a worker."""

    def __init__(self, id: int, num_workers: int) -> None:
        self.id, self.num_workers = id, num_workers


@pytest.mark.parametrize("before", [0, 1, 2, 4])
@pytest.mark.parametrize("after", [0, 2, 3])
@pytest.mark.parametrize("shuffle", [None, 2])
def test_states_of_all_workers_are_continued_by_any_number_of_workers(
    folder: Path, before: int, after: int, shuffle: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers run in this process here, one after the other."""
    read: list[float] = []

    def workers(count: int, work: Callable[[Reader, int], None]) -> None:
        for number in range(max(count, 1)):
            info = _Info(number, count) if count else None
            monkeypatch.setattr("megalith.data.reader.get_worker_info", lambda info=info: info)
            work(ParquetReader(folder, SCHEMA, batch_size=4, shuffle=shuffle, shuffle_rows=10), number)

    states: list[dict[str, Any]] = []

    def begin(reader: Reader, number: int) -> None:
        for batch in islice(reader, [3, 0, 99, 1][number]):
            read.extend(labels_of([batch]))
        states.append(json.loads(json.dumps(reader.state_dict())))

    def rest(reader: Reader, number: int) -> None:
        reader.load_state_dict(states)
        if before == after:
            assert before < 2 or reader.state_dict()["positions"] is not None
        read.extend(labels_of(reader))

    workers(before, begin)
    workers(after, rest)
    assert sorted(read) == list(range(120))


@pytest.mark.parametrize("shuffle", [None, 2])
@pytest.mark.parametrize("state", [False, True])
def test_a_continued_reader_of_workers_reads_all_rows_of_the_next_epoch(
    folder: Path, shuffle: int | None, state: bool
) -> None:
    """A worker reads a copy, so that the reader itself stays at its position."""
    begun = ParquetReader(folder, SCHEMA, batch_size=4, shuffle=shuffle)
    begun.set_epoch(3)
    next(iter(begun))
    reader = ParquetReader(folder, SCHEMA, batch_size=4, shuffle=shuffle)
    if state:
        reader.load_state_dict(begun.state_dict())
    else:
        reader.seek(begun.position)
    found = []
    for epoch in (3, 4, 5):
        reader.set_epoch(epoch)
        found.append(len(labels_of(copy.copy(reader))))
    assert found == [116, 120, 120]


def test_a_state_that_is_none_is_refused() -> None:
    reader = TableReader(pa.table({"y": [0.0], "c": [1]}), SCHEMA, batch_size=1)
    for state in (None, {}, [{"positions": 3}], {"positions": [1], "epoch": 0, "worker": None}):
        with pytest.raises(InputError, match="state must be what state_dict returned"):
            reader.load_state_dict(state)  # type: ignore[arg-type]


# ---- other sources of tables


def test_keys_of_directories_are_columns(tmp_path: Path) -> None:
    for week in (9, 10):
        for country in ("de", "__HIVE_DEFAULT_PARTITION__"):
            write(
                tmp_path / f"week={week}" / f"country={country}" / "a.parquet", {"y": [float(week)], "c": [1]}
            )
    schema = Schema(label="y", features={"w": "week", "country": "country"}, time="week")
    for paths in (tmp_path, str(tmp_path / "week=*/*/*.parquet")):
        batch = next(iter(TableReader(paths, schema, batch_size=8)))
        assert batch.labels.tolist() == [10.0, 10.0, 9.0, 9.0]
        assert batch.features["w"].to_lists() == [[10], [10], [9], [9]]
        assert batch.features["country"].to_lists() == [[], hash_strings(["de"]).tolist()] * 2
        assert batch.time == 10
    (batch,) = TableReader(tmp_path / "week=9" / "country=de", schema, batch_size=8)
    assert batch.features["w"].to_lists() == [[9]]
    (tmp_path / "csv" / "week=3").mkdir(parents=True)
    (tmp_path / "csv" / "week=3" / "a.csv").write_text("y\n1\n0\n")
    (batch,) = CsvReader(tmp_path / "csv", Schema(label="y", features={"w": "week"}), batch_size=8)
    assert batch.features["w"].to_lists() == [[3], [3]]


def test_ipc_files_and_tables_in_memory_give_the_rows_of_parquet(folder: Path, tmp_path: Path) -> None:
    expected = rows_of(ParquetReader(folder, SCHEMA, batch_size=50))
    table = pa.table(columns(0, 120))
    (tmp_path / "ipc").mkdir()
    feather.write_feather(table, str(tmp_path / "ipc" / "a.feather"), chunksize=9)
    frames = (pd.DataFrame(columns(0, 120)), pl.DataFrame(columns(0, 120)), table, table.to_batches()[0])
    for source in (tmp_path / "ipc", *frames):
        assert rows_of(TableReader(source, SCHEMA, batch_size=50)) == expected
        check_resume(lambda source=source: TableReader(source, SCHEMA, batch_size=50, shuffle=1))
        check_shards(lambda source=source: TableReader(source, SCHEMA, batch_size=30), (2, 5))


def test_uris_of_object_stores_are_listed_like_paths(folder: Path) -> None:
    (folder / "_hidden.parquet").write_text("no data")
    expected = rows_of(ParquetReader(folder, SCHEMA, batch_size=50))
    for pattern in ("", "/*.parquet", "/**/*.parquet", "/[0-9].parquet"):
        uri = f"{folder.as_uri()}{pattern}"
        assert rows_of(TableReader(uri, SCHEMA, batch_size=50)) == expected
        check_resume(lambda uri=uri: TableReader(uri, SCHEMA, batch_size=50))
    position = next(iter(TableReader(folder.as_uri(), SCHEMA, batch_size=50))).position
    assert position == next(iter(TableReader(folder, SCHEMA, batch_size=50))).position
    assert rows_of(TableReader(f"{folder.as_uri()}/1.parquet", SCHEMA, batch_size=50)) == expected[40:80]
    schema = Schema(label="y", features={"f": "y"})
    assert labels_of(CsvReader(as_csv(folder).as_uri(), schema, batch_size=50)) == list(range(120))
    for uri, message in (
        (f"{folder.as_uri()}/x*.parquet", "no such object"),
        ("nosuch://bucket/a", "cannot be listed"),
    ):
        with pytest.raises(InputError, match=message):
            TableReader(uri, SCHEMA, batch_size=50)


def test_a_bucket_is_read_like_a_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with s3_server() as address:
        place, options = new_place(), f"?scheme=http&endpoint_override={address.removeprefix('http://')}"
        filesystem, key = FileSystem.from_uri(place + options)
        for path in folder.iterdir():
            with filesystem.open_output_stream(f"{key}/{path.name}") as file:
                file.write(path.read_bytes())
        expected = rows_of(ParquetReader(folder, SCHEMA, batch_size=50))
        for uri in (place + options, f"{place}/[0-2].parquet{options}"):
            assert rows_of(TableReader(uri, SCHEMA, batch_size=50)) == expected
            check_resume(lambda uri=uri: TableReader(uri, SCHEMA, batch_size=50, shuffle=1))
        with pytest.raises(InputError, match="no such object"):
            TableReader(f"{place}/x*.parquet{options}", SCHEMA, batch_size=50)


# ---- several labels, texts, and whole tables


TABLE = {
    "click": [1, 0, 1],
    "buy": [0.0, 0.0, 1.0],
    "user": ["ann", "bob", "ann"],
    "tags": [["a", "b"], [], None],
    "price": [1.5, 20.0, None],
}
FULL = Schema(
    label=["click", "buy"],
    features={"user": "user", "tags": FeatureColumn("tags", slot=2)},
    dense=["price"],
)


@pytest.mark.parametrize(
    "make",
    [
        pd.DataFrame,
        pl.DataFrame,
        pa.table,
        lambda table: pa.table(table).to_batches()[0],
        lambda table: {**table, "click": np.array(table["click"])},
    ],
    ids=["pandas", "polars", "table", "record batch", "mapping"],
)
def test_a_batch_from_a_whole_table(make: Callable[[dict[str, Any]], Any]) -> None:
    texts: dict[str, dict[int, str]] = {}
    batch = batch_from(make(TABLE), FULL, texts=texts)
    ann, bob = hash_strings(["ann", "bob"]).tolist()
    a, b = (fid(2, x) for x in hash_strings(["a", "b"]).tolist())
    assert isinstance(batch, Batch)
    assert batch.labels.tolist() == [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert batch.features["user"].to_lists() == [[ann], [bob], [ann]]
    assert batch.features["tags"].to_lists() == [[a, b], [], []]
    assert batch.dense is not None
    assert batch.dense.tolist() == [[1.5], [20.0], [0.0]]
    assert texts == {"user": {ann: "ann", bob: "bob"}, "tags": {a: "a", b: "b"}}


def test_a_table_that_does_not_match_the_schema() -> None:
    for change, message in (
        ({"user": [1.5, 2.0, 3.0]}, r"batch_from: column 'user' holds double; ids are .*astype\(\"Int64\"\)"),
        ({"click": [1, None, 0]}, "batch_from: row 1, column 'click': None is not a label"),
        ({"price": ["1", "2", "cheap"]}, "batch_from: row 2, column 'price': 'cheap' is not a number"),
        ({"click": [1, 2, 0]}, "row 1, column 'click': 2 is not 0 or 1"),
    ):
        with pytest.raises(InputError, match=message):
            batch_from({**TABLE, **change}, FULL, binary_labels=True)
    renamed = {("users" if name == "user" else name): column for name, column in TABLE.items()}
    with pytest.raises(
        InputError,
        match=r"column 'user' is missing; .*; is it 'users' now.; name its column in the schema",
    ):
        batch_from(renamed, FULL)
    for wrong in (3, "a.parquet", None, [1]):
        with pytest.raises(InputError, match="batch_from: table must be an Arrow Table or RecordBatch"):
            batch_from(wrong, FULL)


def test_several_labels_and_the_texts_of_ids_from_files(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / f"{number}.parquet", {**TABLE, "user": [f"u{number}", "bob", None]}, group=2)
    reader = TableReader(tmp_path, FULL, batch_size=4, shuffle=1)
    assert [tuple(batch.labels.shape) for batch in reader] == [(4, 2), (2, 2)]
    assert sorted(reader.texts("user").values()) == ["bob", "u0", "u1"]
    assert sorted(reader.texts("tags").values()) == ["a", "b"]
    assert Counter(map(type, reader.texts("user"))) == {int: 3}
    with pytest.raises(InputError, match="feature must be one of user, tags, got 'item'"):
        reader.texts("item")
    assert Schema.from_dict(json.loads(json.dumps(FULL.to_dict()))).labels == ["click", "buy"]


@pytest.mark.parametrize(
    ("values", "form"),
    [
        ([1_414_368_000_123, 1_414_371_600_999], "ms"),
        ([14102700, 14102701], "%y%m%d%H"),
        (["2014-10-27", "2014-10-27"], "%Y-%m-%d"),
    ],
)
def test_times_of_a_given_format(tmp_path: Path, values: list[Any], form: str) -> None:
    path = write(tmp_path / "a.parquet", {"c": [1, 2], "t": values})
    schema = Schema(label=None, features={"f": "c"}, time="t", time_format=form)
    assert Schema.from_dict(schema.to_dict()).time_format == form
    (batch,) = TableReader(path, schema, batch_size=8)
    assert batch.time == 1_414_368_000 + (0 if form == "%Y-%m-%d" else 3600)
    bad = write(tmp_path / "b.parquet", {"c": [1, 2], "t": ["2014-10-27", "soon"]})
    if form != "ms":
        with pytest.raises(InputError, match=r"row [01], column 't': .* is not a time of the form"):
            list(
                TableReader(
                    bad,
                    Schema(label=None, features={"f": "c"}, time="t", time_format="%y%m%d%H"),
                    batch_size=8,
                )
            )
