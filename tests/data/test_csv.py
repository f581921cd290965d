"""CsvReader and CriteoReader: fields, blocks, shards, resuming, and lines that are bad."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.data import CsvReader, FeatureColumn, Schema
from megalith.errors import InputError
from megalith.hashing import hash_strings
from tests.data.support import check_appended, check_resume, check_shards, labels_of, rows_of

SCHEMA = Schema(label="y", features={"f": "c"}, dense=["d"])


def write(path: Path, text: str | bytes) -> Path:
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def hashes(*texts: str) -> list[int]:
    return hash_strings(list(texts)).tolist()


def numbered(n: int, first: int = 0) -> str:
    """Rows with label i, text "id i" (every third missing) and dense i / 2."""
    lines = [f"{i},{'' if i % 3 == 0 else f'id {i}'},{i / 2}" for i in range(first, first + n)]
    return "y,c,d\n" + "\n".join(lines) + "\n"


# ---- what a good file gives


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_fields_become_columns(tmp_path: Path, name: str) -> None:
    text = b'd,unused,c,y\n1.5,x,abc,1\n,"x,y",,0\n-2e1,,"a ""b"", c",1\n 3 ,,123, 1 \n1,,\xff\xfe,0\n'
    (batch,) = CsvReader(write(tmp_path / name, text), SCHEMA, batch_size=10)
    abc, quoted, number = hashes("abc", 'a "b", c', "123")
    (odd,) = hash_strings([b"\xff\xfe"]).tolist()  # text that is not UTF-8 is hashed by its bytes
    assert batch.labels.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert batch.features["f"].to_lists() == [[abc], [], [quoted], [number], [odd]]
    assert batch.dense.tolist() == [[1.5], [0.0], [-20.0], [3.0], [1.0]]
    for empty in ("y,c,d", "y,c,d\n", "y,c,d\n\n"):
        assert list(CsvReader(write(tmp_path / name, empty), SCHEMA, batch_size=2)) == []


@pytest.mark.parametrize(
    "text",
    [
        "y,c,d\n1,a,2\n0,b,3\n",
        "y,c,d\n1,a,2\n0,b,3",
        "y,c,d\r\n1,a,2\r\n0,b,3\r\n",
        "\ufeffy,c,d\n1,a,2\n0,b,3\n",
        "y,c,d\n\n1,a,2\n\n\n0,b,3\n\n",
        "y,c,d\r\n1,a,2\r\n\r\n0,b,3\r\n\r\n",
        '"y","c","d"\n"1","a","2"\n"0","b","3"\n',
    ],
)
def test_line_ends_marks_and_blank_lines_do_not_matter(tmp_path: Path, text: str) -> None:
    a, b = hashes("a", "b")
    rows = rows_of(CsvReader(write(tmp_path / "a.csv", text), SCHEMA, batch_size=10))
    assert rows == [(1.0, (2.0,), None, (("f", (a,)),)), (0.0, (3.0,), None, (("f", (b,)),))]


def test_delimiters_names_and_options(tmp_path: Path) -> None:
    tsv = write(tmp_path / "a.tsv", "y\tc\td\n1\ta,b\t2\n")
    assert labels_of(CsvReader(tsv, SCHEMA, batch_size=2)) == [1.0]
    bare = write(tmp_path / "b.csv", "1;7|8;0.5\n0;9;\n")
    schema = Schema(label="y", features={"f": FeatureColumn("c", hash=False, separator="|")}, dense=["d"])
    (batch,) = CsvReader(bare, schema, batch_size=2, columns=["y", "c", "d"], delimiter=";")
    assert batch.features["f"].to_lists() == [[7, 8], [9]]
    raw = write(tmp_path / "c.csv", 'y,c,d\n1,"a,2\n')
    (batch,) = CsvReader(raw, SCHEMA, batch_size=2, quote=None)
    assert batch.features["f"].to_lists() == [hashes('"a')]


FIELDS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x00"), max_size=5)


@given(fields=st.lists(FIELDS, min_size=1, max_size=20), block=st.integers(1, 40))
def test_any_quoted_text_in_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, fields: list[str], block: int
) -> None:
    quoted = ['"' + field.replace('"', '""') + '"' for field in fields]
    text = "y,c\n" + "".join(f"{i},{field}\n" for i, field in enumerate(quoted))
    path = write(tmp_path_factory.mktemp("any") / "a.csv", text)
    schema = Schema(label="y", features={"f": "c"})
    batches = list(CsvReader(path, schema, batch_size=3, block_bytes=block))
    assert labels_of(batches) == list(range(len(fields)))
    ids = [row for batch in batches for row in batch.features["f"].to_lists()]
    assert ids == [hashes(field) if field else [] for field in fields]


# ---- positions and shards


@pytest.mark.parametrize("block_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_resume(tmp_path: Path, name: str, block_bytes: int) -> None:
    one = write(tmp_path / name, numbered(23))
    two = write(tmp_path / f"z{name}", numbered(9, 23))
    check_resume(lambda: CsvReader([one, two], SCHEMA, batch_size=4, block_bytes=block_bytes))


@pytest.mark.parametrize("block_bytes", [1, 64, 1 << 20])
def test_shards_of_lines_and_of_files(tmp_path: Path, block_bytes: int) -> None:
    for i in range(3):
        write(tmp_path / f"{i}.csv", numbered(15, 15 * i))
    one = tmp_path / "0.csv"
    check_shards(lambda: CsvReader(one, SCHEMA, batch_size=2, block_bytes=block_bytes), (1, 2, 3, 40))
    check_shards(lambda: CsvReader(tmp_path, SCHEMA, batch_size=2, block_bytes=block_bytes), (1, 2, 3, 5))
    for paths, expected in (
        (tmp_path, [list(range(15 * i, 15 * i + 15)) for i in range(3)]),
        (one, [list(range(5 * i, 5 * i + 5)) for i in range(3)]),  # lines are divided evenly
    ):
        shards = [CsvReader(paths, SCHEMA, batch_size=100).shard(rank, 3) for rank in range(3)]
        assert [labels_of(reader) for reader in shards] == expected
    position = next(iter(CsvReader(one, SCHEMA, batch_size=4))).position
    with pytest.raises(InputError, match=r"position is in file '0.csv', but that file is now '1.csv'"):
        CsvReader(tmp_path / "1.csv", SCHEMA, batch_size=4).seek(position)


def test_resume_and_shards_with_skipped_lines(tmp_path: Path) -> None:
    lines = numbered(30).splitlines()
    for i in (1, 2, 9, 17, 29, 30):
        lines[i] = "bad" if i % 2 else f"x,{i},1"
    path = write(tmp_path / "a.csv", "\n".join(lines))

    def make() -> CsvReader:
        return CsvReader(path, SCHEMA, batch_size=4, on_error="skip", block_bytes=50)

    reader = make()
    assert len(labels_of(reader)) == 24
    assert reader.skipped == {"wrong number of columns": 4, "wrong type": 2}
    check_resume(make)
    check_shards(make)


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("batches", [[2, 99], [99, 0], [1, 1], [99, 99]])
def test_shards_continue_with_an_appended_file(tmp_path: Path, files: int, batches: list[int]) -> None:
    for i in range(files):
        write(tmp_path / f"{i}.csv", numbered(10, 100 * i))
    check_appended(
        lambda: CsvReader(tmp_path, SCHEMA, batch_size=3, block_bytes=64),
        lambda: write(tmp_path / "9.csv", numbered(10, 900)),
        batches,
    )


# ---- bad lines


BAD_LINES: list[tuple[str, str, str]] = [
    ("1,a", "wrong number of columns", r"a.csv: line 3 has 2 columns, not 3; fix it, or pass on_error="),
    ("1,a,2,3", "wrong number of columns", r"line 3 has 4 columns, not 3"),
    ("abc,a,2", "wrong type", r"line 3, column 'y': 'abc' is not a number"),
    ("nan,a,2", "no label", r"line 3, column 'y': 'nan' is not a label"),
    ("1,a,1e39", "not finite", r"line 3, column 'd': '1e39' is not a finite number"),
    ("1,a,1_0", "wrong type", r"line 3, column 'd': '1_0' is not a number"),
    ('1,"a,2', "unreadable line", r"line 3 has an open quote or a stray line end"),
    ("1,a\r,2", "unreadable line", r"line 3 has an open quote or a stray line end"),
    ("\ufffd,\ufffd", "wrong number of columns", r"line 3 has 2 columns"),
]


@pytest.mark.parametrize(("line", "reason", "message"), BAD_LINES)
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_bad_lines_are_named_or_skipped(
    tmp_path: Path, line: str, reason: str, message: str, block_bytes: int
) -> None:
    text = f"y,c,d\n0,a,0.5\n{line}\n2,b,1.5\n".encode()
    path = write(tmp_path / "a.csv", text.replace("\ufffd".encode(), b"\xff"))
    with pytest.raises(InputError, match=message):
        list(CsvReader(path, SCHEMA, batch_size=2, block_bytes=block_bytes))
    reader = CsvReader(path, SCHEMA, batch_size=2, on_error="skip", block_bytes=block_bytes)
    assert labels_of(reader) == [0.0, 2.0]
    assert reader.skipped == {reason: 1}


def test_missing_columns_and_invalid_headers(tmp_path: Path) -> None:
    good = write(tmp_path / "a.csv", numbered(2))
    lacking = write(tmp_path / "b.csv", "y,other,d\n1,2,3\n1,2,3\n1,2,3\n")
    with pytest.raises(InputError, match=r"b.csv: column 'c' is missing; the file has y, other, d"):
        list(CsvReader([good, lacking], SCHEMA, batch_size=2))
    reader = CsvReader([good, lacking], SCHEMA, batch_size=2, on_error="skip")
    assert labels_of(reader) == [0.0, 1.0]
    assert reader.skipped == {"missing column": 3}
    with pytest.raises(InputError, match="column 'c' is missing"):
        CsvReader([lacking, good], SCHEMA, batch_size=2, on_error="skip")
    path = tmp_path / "c.csv"
    for text, words in (
        ("y,c,d,c\n", r"c.csv: line 1 names column 'c' twice"),
        ("", "column 'y' is missing"),
        ('"y,c,d\n1,2,3\n', r"line 1 must name the columns"),
    ):
        with pytest.raises(InputError, match=words):
            CsvReader(write(path, text), SCHEMA, batch_size=2)
    with pytest.raises(InputError, match="gz: cannot be read"):
        CsvReader(path.rename(tmp_path / "c.csv.gz"), SCHEMA, batch_size=2)


def test_a_cut_off_gz_file(tmp_path: Path) -> None:
    whole = gzip.compress(numbered(3000).encode())
    path = tmp_path / "a.csv.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"a.csv.gz: cannot be read to the end"):
        list(CsvReader(path, SCHEMA, batch_size=100, block_bytes=1000))
    after = write(tmp_path / "b.csv", numbered(5, 7000))
    reader = CsvReader([path, after], SCHEMA, batch_size=100, block_bytes=1000, on_error="skip")
    labels = labels_of(reader)
    assert labels[-5:] == list(range(7000, 7005))
    assert 100 < len(labels) < 3005
    assert reader.skipped == {"unreadable file": 1}


def test_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.data.csv.MAX_LINE_BYTES", 1000)
    path = write(tmp_path / "a.csv", "y,c,d\n" + "x" * 5000)
    with pytest.raises(InputError, match="line 2 has more than 1000 bytes"):
        list(CsvReader(path, SCHEMA, batch_size=2, block_bytes=100))


@given(data=st.binary(max_size=300), block=st.sampled_from([7, 1 << 20]))
def test_any_bytes_give_rows_or_an_input_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, block: int
) -> None:
    path = write(tmp_path_factory.mktemp("fuzz") / "a.csv", b"y,c,d\n1,a,2\n" + data)
    try:
        strict = labels_of(CsvReader(path, SCHEMA, batch_size=2, block_bytes=block))
    except InputError:
        strict = None
    reader = CsvReader(path, SCHEMA, batch_size=2, block_bytes=block, on_error="skip")
    lenient = labels_of(reader)
    assert (strict is None) == (sum(reader.skipped.values()) > 0)
    if strict is not None:
        assert strict == lenient
