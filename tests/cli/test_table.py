"""megalith table: its output for a checkpoint, and its errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megalith import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    EmbeddingCollection,
    Feature,
    Segment,
    TableConfig,
    checkpoint,
    hash_strings,
)
from tests.cli import support

OLD = 1_000_000_000


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Tables "user" (five rows, of the year 2001), "item" (two segments, one row) and "empty"."""
    tables = [
        TableConfig("user", dim=2, optimizer=Adagrad(0.1)),
        TableConfig(
            "item",
            segments=[
                Segment(1, optimizer=FTRL(0.1)),
                Segment(2, optimizer=Adam(0.1, bias_correction="row")),
            ],
        ),
        TableConfig("empty", dim=1, optimizer=SGD(0.1)),
    ]
    features = [Feature("u", "user"), Feature("i", "item"), Feature("e", "empty")]
    collection = EmbeddingCollection(tables, features)
    ids = torch.tensor([1, 2, -3, int(hash_strings(["Comedy"])[0]), -1])
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.6, 0.8], [1.5, 2.0], [0.0, 1.0]])
    for i in range(len(ids)):
        collection.shards.local["user"].assign(ids[i : i + 1], rows[i : i + 1], time=OLD - 3600 * i)
    collection.shards.local["item"].apply_gradients(torch.tensor([7]), torch.ones(1, 3), step=0, time=OLD)
    checkpoint.save(collection, tmp_path / "c")
    return tmp_path / "c"


def words(*arguments: object) -> str:
    return support.words("table", *arguments)


def as_json(*arguments: object) -> Any:
    return support.as_json("table", *arguments)


def error(*arguments: object) -> str:
    return support.error("table", *arguments)


def test_all_tables(saved: Path) -> None:
    printed = words(saved)
    assert "6 rows" in printed
    assert re.search(r"user │ 5 │ [\d,.]+ (bytes|KiB) │ 2 │ 2 adagrad │ roundrobin, 1 shard │ 0", printed)
    assert "1 ftrl + 2 adam" in printed
    assert "--table NAME" in printed
    assert "collection" not in printed


def test_collections_are_shown_where_tables_have_them(tmp_path: Path) -> None:
    def part() -> EmbeddingCollection:
        return EmbeddingCollection([TableConfig("t", dim=1, optimizer=SGD(1.0))], [Feature("f", "t")])

    both = nn.ModuleDict({"left": part(), "right": part()})
    checkpoint.save(both, tmp_path)
    printed = words(tmp_path)
    assert "collection" in printed
    assert "left" in printed
    assert "name one (known: 'left', 'right')" in error(tmp_path, "--table", "t")
    assert "table t of collection right" in words(tmp_path, "--table", "t", "--collection", "right")


def test_one_table(saved: Path) -> None:
    printed = words(saved, "--table", "user", "--top", "2")
    assert "Adagrad(lr=0.1" in printed
    assert "min 0.5, median 1, max 5" in printed
    assert "largest rows id norm 1 5 " in printed
    assert printed.count("over 3 years 5 █") == 1
    assert "from 2001-09-08 21:46:40 UTC to 2001-09-09 01:46:40 UTC" in printed
    assert "--now newest shows ages" in printed


def test_ages_count_from_the_moment_asked_for(saved: Path) -> None:
    newest = words(saved, "--table", "user", "--now", "newest")
    assert "under 10 seconds 1 █" in newest
    assert "1 to 6 hours 4 █" in newest
    assert "shows ages" not in newest
    assert "1 to 7 days 5 █" in words(saved, "--table", "user", "--now", str(OLD + 5 * 86_400))
    assert '"clock", "newest" or seconds' in error(saved, "--table", "user", "--now", "yesterday")


def test_a_table_without_rows(saved: Path) -> None:
    assert "The table has no rows." in words(saved, "--table", "empty")
    data = as_json(saved, "--table", "empty")
    assert (data["norms"]["median"], data["ages"]["bins"]) == (None, [])


@pytest.mark.parametrize("id", ["-1", str(2**64 - 1), "0xffffffffffffffff"])
def test_one_id_signed_or_not(saved: Path, id: str) -> None:
    printed = words(saved, "--table", "user", "--id", id, "--now", "newest")
    assert "id -1 of table user" in printed
    assert "weights 0 1 " in printed
    assert "state 0/sum 0 0" in printed
    assert "2001-09-08 21:46:40 UTC (4 hours ago)" in printed


def test_a_row_of_two_segments_shows_their_parts(saved: Path) -> None:
    printed = words(saved, "--table", "item", "--id", "7")
    assert re.search(r"weights 0 \S+ weights 1 \S+ \S+ state 0/sum", printed)
    assert "state 1/count 1 " in printed


def test_a_text_is_hashed(saved: Path) -> None:
    assert "weights 1.5 2 " in words(saved, "--table", "user", "--string", "Comedy")


def test_json_is_all_of_it(saved: Path) -> None:
    everything = as_json(saved)
    assert [(t["name"], t["rows"]) for t in everything["tables"]] == [("user", 5), ("item", 1), ("empty", 0)]
    one = as_json(saved, "--table", "user", "--top", "1", "--now", "newest")
    assert one["norms"]["top"] == [{"id": 1, "norm": 5.0}]
    assert one["ages"]["bins"][0] == {"age": "under 10 seconds", "rows": 1}
    row = as_json(saved, "--table", "user", "--id", "1")
    assert (row["weights"], row["time"], row["norm"]) == ([3.0, 4.0], OLD, 5.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "users"], "no table 'users' (known: user, item, empty)"),
        (["--id", "1"], "several tables; name one (known: user, item, empty)"),
        (["--collection", "x"], "no collection 'x'"),
        (["--table", "user", "--id", "99"], "table 'user' has no row for id 99; it has 5 rows"),
        (["--table", "user", "--id", "Comedy"], "use --string for text"),
        (["--table", "user", "--id", str(2**64)], "64 bits"),
        (["--table", "user", "--id", "1", "--string", "x"], "not both"),
    ],
)
def test_wrong_questions_get_an_answer_and_exit_code_1(
    saved: Path, arguments: list[str], message: str
) -> None:
    assert message in error(saved, *arguments)


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    assert "no complete checkpoint" in error(tmp_path)
