"""megalith plan: ids out of each kind of source, the tables printed, and the warnings."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megalith import SGD, EmbeddingCollection, Feature, TableConfig, checkpoint, hash_strings
from megalith.checkpoint import saved_rows
from megalith.errors import InputError
from megalith.reporting.planning import read_sample
from tests.cli.support import as_json, error, words


def lines(path: Path, items: list[Any]) -> Path:
    path.write_text("".join(f"{item}\n" for item in items))
    return path


def table(root: Path, ids: torch.Tensor) -> Path:
    collection = EmbeddingCollection([TableConfig("t", dim=2, optimizer=SGD(1.0))], [Feature("f", "t")])
    collection.shards.assign({"t": (ids, torch.zeros(len(ids), 2))})
    checkpoint.save(collection, root)
    return root


# ---- what is printed


def test_a_pattern_is_warned_of_and_cured(tmp_path: Path) -> None:
    printed = words("plan", lines(tmp_path / "ids.txt", [8 * i for i in range(2000)]), "--ranks", 8)
    assert "2,000 distinct ids in 2,000 occurrences, over 8 ranks" in printed
    assert "│ roundrobin │ rows │ 250 │ 0 │ 2,000 │ 8.00 │ 8.00 │" in printed
    assert "│ 0 │ 2,000 (2,000) │" in printed
    assert "warning: the ids follow a pattern (all are 0 mod 8)" in printed
    assert 'use: hash_roundrobin (TableConfig(..., dist_type="hash_roundrobin")' in printed
    assert "hottest" not in printed
    assert "rows per rank" in printed
    assert "rows per rank" not in words("plan", tmp_path / "ids.txt", "--ranks", 64)


def test_bytes_are_shown_when_the_dim_is_known(tmp_path: Path) -> None:
    source = lines(tmp_path / "ids.txt", [*range(1000), *range(1000)])
    printed = words("plan", source, "--ranks", 1, "--dim", 64, "--batch-size", 1000)
    assert "roundrobin │ rows │ 1,000 │ 1,000 │ 1,000 │ 1.00 │ 0.00 │ 250.0 KiB │" in printed  # 1000 * 256
    assert "sent │ 2,000 │ 2,000 │ 2,000 │ 1.00 │ 0.00 │ 515.6 KiB │" in printed  # 2000 * 264


def test_json(tmp_path: Path) -> None:
    found = as_json("plan", lines(tmp_path / "ids.txt", [0, 2, 4, 4]), "--ranks", 2, "--batch-size", 2)
    assert (found["num_distinct"], found["occurrences"], found["ranks"]) == (3, 4, 2)
    plain = found["modes"]["roundrobin"]
    assert plain["rows"] == {"per_rank": [3, 0], "imbalance": 2.0, "max_over_mean": 2.0}
    assert plain["traffic"]["per_rank"] == [4, 0]
    assert plain["sent"]["per_rank"] == [3, 0]
    assert found["hottest"][0] == {"id": 4, "occurrences": 2, "share": 0.5}


# ---- sources


def test_a_checkpoint_has_rows_and_no_traffic(tmp_path: Path) -> None:
    root = table(tmp_path / "c", torch.arange(1000) * 4)
    found = as_json("plan", root, "--ranks", "4")
    assert found["source"] == "1,000 of 1,000 rows of table t"
    assert found["modes"]["roundrobin"]["rows"]["per_rank"] == [1000, 0, 0, 0]
    assert "traffic" not in found["modes"]["roundrobin"]
    assert found["occurrences"] is None
    assert found["recommended"] == "hash_roundrobin"
    assert error("plan", root, "--ranks", 4, "--table", "x") == "error: no table 'x' (known: t)\n"


def test_a_part_of_a_checkpoint_makes_no_pattern_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_rows, "PIECE_BYTES", 100_000)
    root = table(tmp_path / "c", torch.arange(40_000))
    found = as_json("plan", root, "--ranks", "4", "--sample", "10000")
    assert 10_000 <= found["num_distinct"] <= 10_100
    assert found["recommended"] == "roundrobin"
    assert all(mode["rows"]["max_over_mean"] < 1.1 for mode in found["modes"].values())


def test_parquet_columns_of_numbers_texts_and_lists(tmp_path: Path) -> None:
    path = tmp_path / "day.parquet"
    columns = {
        "user": [1, 2, None, 2**63 - 1],
        "genre": ["a", "b", "a", "c"],
        "history": [[1, 2], [], None, [3]],
    }
    pq.write_table(pa.table(columns), path)
    assert read_sample(path, size=10, column="user").ids.tolist() == [1, 2, 2**63 - 1]
    assert read_sample(tmp_path, size=10, column="history").ids.tolist() == [1, 2, 3]
    genres = read_sample(path, size=10, column="genre")
    assert torch.equal(genres.ids, hash_strings(["a", "b", "a", "c"]))
    assert genres.source == "4 ids of column genre (4 rows in total)"
    assert as_json("plan", path, "--feature", "genre", "--ranks", "2")["num_distinct"] == 3


def test_a_sample_of_parquet_is_from_all_over_the_files(tmp_path: Path) -> None:
    for day in range(4):
        ids = pa.array(range(day * 1000, day * 1000 + 1000))
        pq.write_table(pa.table({"id": ids}), tmp_path / f"{day}.parquet", row_group_size=100)
    ids = read_sample(tmp_path, size=500, column="id").ids
    assert len(ids) == 500
    assert set((ids // 1000).tolist()) == {0, 1, 2, 3}


def test_text_files_of_ids_and_of_texts(tmp_path: Path) -> None:
    numbers = lines(tmp_path / "n.txt", ["-1", "", " 5 ", 2**64 - 1])
    assert read_sample(numbers, size=9).ids.tolist() == [-1, 5, -1]
    assert torch.equal(read_sample(numbers, size=1, hash=True).ids, hash_strings(["-1"]))
    mixed = lines(tmp_path / "m.txt", ["12", "abc"])
    assert torch.equal(read_sample(mixed, size=9).ids, hash_strings(["12", "abc"]))
    (tmp_path / "z.txt.gz").write_bytes(gzip.compress(b"1\n2\n"))
    assert read_sample(tmp_path / "z.txt.gz", size=9).ids.tolist() == [1, 2]


def test_csv_columns(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.csv", ["user,genre", "8,a", "16,b"])
    assert read_sample(path, size=9, column="user").ids.tolist() == [8, 16]
    assert torch.equal(read_sample(path, size=9, column="genre").ids, hash_strings(["a", "b"]))
    assert torch.equal(read_sample(path, size=9, column="user", hash=True).ids, hash_strings(["8", "16"]))


def test_unreadable_sources_raise(tmp_path: Path) -> None:
    parquet = tmp_path / "p.parquet"
    pq.write_table(pa.table({"a": [1], "b": [1.5]}), parquet)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 no")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (tmp_path / "none", {}, "no such file"),
        (parquet, {}, r"with --column \(the file has a, b\)"),
        (parquet, {"column": "c"}, "column 'c' is missing"),
        (parquet, {"column": "b"}, "ids are integers or text"),
        (parquet, {"column": "a", "table": "t"}, "is not a checkpoint"),
        (broken, {}, "cannot be read as Parquet"),
        (lines(tmp_path / "e.txt", []), {}, "contains no ids"),
        (lines(tmp_path / "big.txt", [2**64]), {}, "64 bits"),
        (lines(tmp_path / "t.txt", ["x"]), {"hash": False}, "is not an integer"),
        (lines(tmp_path / "l.txt", ["x" * 2_000_000]), {}, "a line has more than"),
        (lines(tmp_path / "c.csv", ["a", "1"]), {}, "--column"),
        (lines(tmp_path / "i.txt", [1]), {"column": "a"}, "one id per line"),
    ]
    for source, options, message in cases:
        with pytest.raises(InputError, match=message):
            read_sample(source, size=10, **options)
    assert "no such file" in error("plan", tmp_path / "none", "--ranks", 2)
    empty = table(tmp_path / "c", torch.empty(0, dtype=torch.int64))
    assert "table 't' has no rows" in error("plan", empty, "--ranks", 2)
