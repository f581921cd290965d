"""megalith checkpoint: the output and files of its commands, and their errors."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
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
)
from tests.cli import support
from tests.cli.support import megalith


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            TableConfig("user", dim=2, optimizer=Adagrad(0.1)),
            TableConfig("a/b", segments=[Segment(1, optimizer=FTRL(0.1)), Segment(2, optimizer=Adam(0.1))]),
            TableConfig("empty", dim=1, optimizer=SGD(0.1)),
        ]
        self.e = EmbeddingCollection(tables, [Feature(t.name, t.name) for t in tables])
        self.d = nn.Linear(2, 1)


@pytest.fixture
def model() -> Model:
    """With ids 0 to 9 in "user", rows [id, -id], and 5 rows in "a/b"."""
    torch.manual_seed(0)
    made = Model()
    ids = torch.arange(10)
    rows = torch.stack([ids, -ids], 1).float()
    made.e.shards.assign({"user": (ids, rows), "a/b": (ids[:5], torch.rand(5, 3))}, time=1000)
    return made


@pytest.fixture
def saved(tmp_path: Path, model: Model) -> Path:
    """A base, and a delta in which id 3 became [9, 9], 50 came, 4 and 5 went."""
    checkpoint.save(model, tmp_path / "c", progress={"step": 1, "config": {"train": {"lr": 0.1}}})
    model.e.shards.assign({"user": (torch.tensor([3, 50]), torch.full((2, 2), 9.0))}, time=2000)
    model.e.shards.remove({"user": torch.tensor([4, 5])})
    model.e.global_step = 12
    checkpoint.save_delta(model, tmp_path / "c", progress={"step": 2, "config": {"train": {"lr": 0.2}}})
    return tmp_path / "c"


def words(*arguments: object) -> str:
    return support.words("checkpoint", *arguments)


def as_json(*arguments: object, code: int = 0) -> Any:
    return support.as_json("checkpoint", *arguments, code=code)


def error(*arguments: object) -> str:
    return support.error("checkpoint", *arguments)


def test_the_directory_of_a_run_stands_for_its_checkpoint(saved: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in "ab"]
    for each in runs:
        shutil.copytree(saved, each / "checkpoint")
    assert "no problems" in words("verify", runs[0])
    assert as_json("diff", *runs)["same"] is True
    assert words("reshard", runs[0], tmp_path / "two", "--num-shards", 2)
    assert words("compact", runs[0])
    assert words("export", runs[0], tmp_path / "user.parquet", "--table", "user")
    assert support.words("table", runs[1])


def user_rows(path: Path | str) -> dict[int, list[float]]:
    """Rows of table "user" as a model loads them."""
    loaded = Model()
    checkpoint.load(loaded, path)
    (chunk,) = loaded.e.shards.local["user"].scan()
    return dict(zip(chunk.ids.tolist(), chunk.rows.tolist(), strict=True))


# ---- ls


def test_ls_shows_saves_tables_and_what_a_broken_save_left(saved: Path) -> None:
    printed = words("ls", saved)
    first, second = checkpoint.read_manifest(saved).saves
    assert "14 rows" in printed
    assert re.search(rf"{first.id} │ base │ \S+ │ 15 │ 0 │ [\d.]+ \w+ │ 0 ", printed)
    assert re.search(rf"{second.id} │ delta │ \S+ │ 2 │ 2 │ [\d.]+ \w+ │ 12 ", printed)
    assert re.search(r"e\.user │ 9 │ [\d.]+ \w+ │ 2 │ 2 adagrad │ roundrobin, 1 shard", printed)
    assert re.search(r"e\.a/b │ 5 │ [\d.]+ \w+ │ 3 │ 1 ftrl \+ 2 adam │ roundrobin, 1 shard", printed)

    (saved / "data-0123456789ab").mkdir()
    assert "data-0123456789ab belongs to an unfinished save" in words("ls", saved)
    (found,) = as_json("ls", saved)["checkpoints"]
    assert (found["path"], found["complete"], found["leftovers"]) == (str(saved), True, ["data-0123456789ab"])
    assert (found["rows"], found["steps"]) == (14, {"e": 12})
    saves = [(save["kind"], save["rows"], save["removed"]) for save in found["saves"]]
    assert saves == [("base", 15, 0), ("delta", 2, 2)]
    assert [table["rows"] for table in found["tables"]] == [9, 5, 0]
    assert found["bytes"] == sum(path.stat().st_size for path in saved.rglob("*.safetensors"))


def test_ls_of_a_directory_is_a_line_each_and_marks_what_cannot_be_read(
    saved: Path, tmp_path: Path, model: Model
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(saved, runs / "one" / "checkpoint")
    rotation = checkpoint.Rotation(runs / "one" / "checkpoints")
    for step in (100, 200):
        rotation.save(model, step)
    shutil.copytree(saved, runs / "cut")
    (runs / "cut" / "manifest.json").unlink()
    shutil.copytree(saved, runs / "odd")
    (runs / "odd" / "manifest.json").write_text("[]")
    (runs / "one" / "tensorboard").mkdir()

    printed = megalith("checkpoint", "ls", runs).stdout
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    found = {cells[1].strip(): cells[2].strip() for cells in (line.split("│") for line in lines)}
    assert found == {
        "cut": "incomplete",
        "odd": "damaged",
        "one/checkpoint": "14",
        "one/checkpoints/step-000000000100": "14",
        "one/checkpoints/step-000000000200": "14",
    }

    listed = as_json("ls", runs)["checkpoints"]
    assert [each["complete"] for each in listed] == [False, False, True, True, True]
    assert "not the manifest" in listed[1]["problem"]


# ---- verify


def test_verify_lists_all_that_is_wrong_and_exits_with_1(saved: Path, tmp_path: Path) -> None:
    assert re.fullmatch(r"no problems: 6 files, [\d.]+ \w+, 17 rows read", words("verify", saved))
    assert as_json("verify", saved)["ok"]
    first, second, *_ = (saved / file.path for file in checkpoint.read_manifest(saved).files())
    first.unlink()
    second.write_bytes(b"")

    result = megalith("checkpoint", "verify", saved)

    assert result.exit_code == 1
    problems = [line for line in result.stdout.splitlines() if line.startswith("problem: ")]
    for path, problem in zip((first, second), problems, strict=True):
        assert str(path) in problem
    assert "2 problems: 6 files" in result.stdout
    assert len(as_json("verify", saved, code=1)["problems"]) == 2
    found = as_json("verify", tmp_path, code=1)
    assert (found["ok"], "no complete checkpoint" in found["problems"][0]) == (False, True)


# ---- diff


def test_diff(saved: Path, tmp_path: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    before = tmp_path / "before"
    shutil.copytree(saved, before)
    (before / "manifest.json").write_text(json.dumps({**manifest, "deltas": []}))

    printed = words("diff", before, saved)
    assert "e.user │ 10 │ 9 │ 1 │ 2 │ 1 │ 1 │ 12 │ 3 │" in printed
    assert "e.a/b │ 5 │ 5 │ 0 │ 0 │ 0 │ 0 │ │ │" in printed
    assert "step of e: 0 → 12" in printed
    assert "progress config.train.lr: 0.1 → 0.2" in printed

    found = as_json("diff", before, saved)
    assert not found["same"]
    largest = {"id": 3, "column": 1, "before": -3.0, "after": 9.0, "amount": 12.0}
    assert found["tables"]["e.user"]["largest"] == largest
    assert found["progress"]["step"] == {"before": 1, "after": 2}


def test_diff_of_equals_and_of_runs_where_only_the_clock_differs(saved: Path, tmp_path: Path) -> None:
    assert words("diff", saved, saved) == "no differences"
    assert as_json("diff", saved, saved)["same"]
    model = Model()
    for name, time in (("a", 1000), ("b", 2000)):
        model.e.shards.assign({"user": (torch.arange(3), torch.ones(3, 2))}, time=time)
        checkpoint.save(model, tmp_path / name, progress={"seconds": time / 100})
    printed = words("diff", tmp_path / "a", tmp_path / "b")
    assert printed.startswith("no differences, except in times ")
    assert "seconds of the run: " in printed
    assert as_json("diff", tmp_path / "a", tmp_path / "b")["same"]


def test_diff_prints_neither_long_values_nor_nan_as_json(tmp_path: Path, model: Model) -> None:
    checkpoint.save(model, tmp_path / "a", progress={"rng": "x" * 1000})
    (rows,) = model.e.tables["user"].scan()
    rows.rows[rows.ids == 1] = torch.nan  # an overflow while training may leave such a row
    model.e.tables["user"].restore(rows)
    checkpoint.save(model, tmp_path / "b", progress={"rng": "y" * 1000})
    assert as_json("diff", tmp_path / "a", tmp_path / "b")["tables"]["e.user"]["largest"]["amount"] is None
    printed = words("diff", tmp_path / "a", tmp_path / "b")
    assert "│ not finite │ 1 │" in printed
    assert "progress rng: differs" in printed


# ---- reshard


def test_reshard(saved: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    done = words("reshard", saved, to, "--num-shards", 3, "--dist_type", "hash_roundrobin")  # or --dist-type
    assert "14 rows for 3 ranks" in done
    (found,) = as_json("ls", to)["checkpoints"]
    routing = found["tables"][0]["routing"]
    assert (routing["dist_type"], routing["num_shards"]) == ("hash_roundrobin", 3)
    assert len(found["saves"]) == 1
    assert as_json("verify", to)["ok"]
    assert user_rows(to) == user_rows(saved)

    assert "already holds a checkpoint" in error("reshard", saved, to, "--num-shards", 2)
    blocks = ("--num-shards", 2, "--dist-type", "continuous", "--block-size", 5)
    words("reshard", saved, to, *blocks, "--replace")
    assert user_rows(to) == user_rows(saved)
    assert "cannot be rewritten in place" in error("reshard", saved, saved, *blocks, "--replace")
    for flags, message in (
        (("--dist-type", "continuous"), "needs block_size"),
        (("--dist-type", "roundrobin", "--block-size", "5"), "--block-size is for"),
    ):
        assert message in error("reshard", saved, tmp_path / "none", "--num-shards", 2, *flags)
    assert not list((tmp_path / "none").glob("*"))


# ---- compact


def test_compact(saved: Path) -> None:
    rows = {0: [0, 0], 1: [1, -1], 2: [2, -2], 3: [9, 9], 50: [9, 9]} | {i: [i, -i] for i in (6, 7, 8, 9)}
    assert user_rows(saved) == rows
    assert re.match(r"1 delta merged: [\d.]+ \w+ before, [\d.]+ \w+ now", words("compact", saved))
    assert checkpoint.read_manifest(saved).deltas == []
    assert user_rows(saved) == rows
    assert "nothing to merge" in words("compact", saved)


# ---- export


def test_export_writes_a_file_of_each_table_or_one(saved: Path, tmp_path: Path) -> None:
    printed = words("export", saved, tmp_path / "out")
    assert f"9 rows in {tmp_path}/out/e.user.parquet" in printed
    user = parquet.read_table(tmp_path / "out" / "e.user.parquet")
    assert user.column_names == ["id", "weights", "state/0/sum", "time"]
    assert dict(zip(user["id"].to_pylist(), user["weights"].to_pylist(), strict=True)) == user_rows(saved)
    assert len(parquet.read_table(tmp_path / "out" / "e.a%2Fb.parquet")) == 5
    empty = parquet.read_table(tmp_path / "out" / "e.empty.parquet")
    assert (len(empty), empty.column_names) == (0, ["id", "weights", "time"])

    for name in ("user", "e.user"):
        words("export", saved, tmp_path / "new" / f"{name}.parquet", "--table", name, "--no-state")
        table = parquet.read_table(tmp_path / "new" / f"{name}.parquet")
        assert (len(table), table.column_names) == (9, ["id", "weights", "time"])

    unknown = error("export", saved, tmp_path, "--table", "nobody")
    assert "no table 'nobody' (known: e.user, e.a/b, e.empty)" in unknown
    assert "one file holds one table" in error("export", saved, tmp_path / "x.parquet")
    (tmp_path / "file").write_text("")
    assert "file" in error("export", saved, tmp_path / "file")


# ---- places


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an object store, backed by a directory."""
    store = pytest.importorskip("obstore.store")

    def from_url(url: str, **options: Any) -> Any:
        return store.LocalStore(tmp_path / "store" / url.removeprefix("s3://"), mkdir=True)

    monkeypatch.setattr(store, "from_url", from_url)
    return "s3://bucket"


def test_every_command_takes_addresses(saved: Path, bucket: str, tmp_path: Path) -> None:
    words("reshard", saved, f"{bucket}/models/a", "--num-shards", 2)
    words("reshard", f"{bucket}/models/a", f"{bucket}/models/b", "--num-shards", 3)
    assert re.search(r"│ a │ 14 │.*│ b │ 14 │", words("ls", f"{bucket}/models"))
    assert as_json("verify", f"{bucket}/models/b")["ok"]
    assert as_json("diff", saved, f"{bucket}/models/b")["tables"]["e.user"]["changed"] == 0
    assert "nothing to merge" in words("compact", f"{bucket}/models/a")
    words("export", f"{bucket}/models/a", f"{bucket}/out/user.parquet", "--table", "user")
    assert len(parquet.read_table(tmp_path / "store" / "bucket" / "out" / "user.parquet")) == 9
    assert "s3://bucket/none holds no complete checkpoint" in error("compact", f"{bucket}/none")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "nowhere"), "nowhere holds no checkpoint"),
        (("diff", "nowhere", "nowhere"), "nowhere holds no complete checkpoint"),
        (("ls", "odd://place"), "odd://place does not name an object store"),
        (("ls", "file"), "file holds no checkpoint"),
        (("compact", "file"), "Not a directory"),
    ],
)
def test_wrong_places_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert message in error(*arguments)
