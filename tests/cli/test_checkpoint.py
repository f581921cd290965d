"""megalith checkpoint: the output and files of its commands, and their errors."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

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
from megalith.cli.main import app

COMMANDS = ("ls", "verify", "diff", "reshard", "compact", "export")


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


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def test_the_directory_of_a_run_stands_for_its_checkpoint(saved: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in "ab"]
    for each in runs:
        shutil.copytree(saved, each / "checkpoint")
    assert "no problems" in words(run("verify", runs[0]))
    assert as_json("diff", *runs)["same"] is True
    assert words(run("reshard", runs[0], tmp_path / "two", "--num-shards", 2))
    assert words(run("compact", runs[0]))
    assert words(run("export", runs[0], tmp_path / "user.parquet", "--table", "user"))
    shown = CliRunner().invoke(app, ["table", str(runs[1])])
    assert shown.exit_code == 0, shown.output
    assert run("verify", tmp_path / "nothing").exit_code == 1


def words(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return re.sub(r"\s+", " ", result.stdout)


def as_json(*arguments: object, code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def error(result: Result) -> str:
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    text: str = result.stderr
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text


def user_rows(path: Path | str) -> dict[int, list[float]]:
    """Rows of table "user" as a model loads them."""
    loaded = Model()
    checkpoint.load(loaded, path)
    return {
        int(id): row.tolist()
        for chunk in loaded.e.shards.local["user"].scan()
        for id, row in zip(chunk.ids, chunk.rows, strict=True)
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str) -> None:
    printed = words(run(command, "--help"))
    assert f"Example: megalith checkpoint {command} " in printed


# ---- ls


def test_ls_shows_saves_and_tables_of_a_checkpoint(saved: Path) -> None:
    printed = words(run("ls", saved))
    first, second = checkpoint.read_manifest(saved).saves
    assert "14 rows" in printed
    assert re.search(rf"{first.id} │ base │ \S+ │ 15 │ 0 │ [\d.]+ \w+ │ 0 ", printed)
    assert re.search(rf"{second.id} │ delta │ \S+ │ 2 │ 2 │ [\d.]+ \w+ │ 12 ", printed)
    assert re.search(r"e\.user │ 9 │ [\d.]+ \w+ │ 2 │ 2 adagrad │ roundrobin, 1 shard", printed)
    assert re.search(r"e\.a/b │ 5 │ [\d.]+ \w+ │ 3 │ 1 ftrl \+ 2 adam │ roundrobin, 1 shard", printed)


def test_ls_as_json(saved: Path) -> None:
    (found,) = as_json("ls", saved)["checkpoints"]
    assert found["path"] == str(saved)
    assert found["complete"]
    assert (found["rows"], found["steps"]) == (14, {"e": 12})
    assert [(save["kind"], save["rows"], save["removed"]) for save in found["saves"]] == [
        ("base", 15, 0),
        ("delta", 2, 2),
    ]
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

    printed = run("ls", runs).stdout
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


def test_ls_names_what_a_broken_save_left(saved: Path) -> None:
    (saved / "data-0123456789ab").mkdir()
    assert "data-0123456789ab belongs to an unfinished save" in words(run("ls", saved))
    assert as_json("ls", saved)["checkpoints"][0]["leftovers"] == ["data-0123456789ab"]


# ---- verify


def test_verify(saved: Path) -> None:
    printed = words(run("verify", saved))
    assert re.fullmatch(r"no problems: 6 files, [\d.]+ \w+, 17 rows read ", printed)
    assert as_json("verify", saved)["ok"]


def test_verify_lists_all_that_is_wrong_and_exits_with_1(saved: Path) -> None:
    manifest = checkpoint.read_manifest(saved)
    first, second, *_ = (saved / file.path for file in manifest.files())
    first.unlink()
    second.write_bytes(b"")

    result = run("verify", saved)
    assert result.exit_code == 1
    problems = [line for line in result.stdout.splitlines() if line.startswith("problem: ")]
    assert [str(path) in problem for path, problem in zip((first, second), problems, strict=True)] == [
        True,
        True,
    ]
    assert "2 problems: 6 files" in result.stdout
    assert len(as_json("verify", saved, code=1)["problems"]) == 2


def test_verify_of_nothing(tmp_path: Path) -> None:
    found = as_json("verify", tmp_path, code=1)
    assert not found["ok"]
    assert "no complete checkpoint" in found["problems"][0]


# ---- diff


def test_diff(saved: Path, tmp_path: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    before = tmp_path / "before"
    shutil.copytree(saved, before)
    (before / "manifest.json").write_text(json.dumps({**manifest, "deltas": []}))

    printed = words(run("diff", before, saved))
    assert "e.user │ 10 │ 9 │ 1 │ 2 │ 1 │ 1 │ 12 │ 3 │" in printed
    assert "e.a/b │ 5 │ 5 │ 0 │ 0 │ 0 │ 0 │ │ │" in printed
    assert "step of e: 0 → 12" in printed
    assert "progress config.train.lr: 0.1 → 0.2" in printed

    found = as_json("diff", before, saved)
    assert not found["same"]
    assert found["tables"]["e.user"]["largest"] == {
        "id": 3,
        "column": 1,
        "before": -3.0,
        "after": 9.0,
        "amount": 12.0,
    }
    assert found["progress"]["step"] == {"before": 1, "after": 2}


def test_diff_of_equals(saved: Path) -> None:
    assert words(run("diff", saved, saved)) == "no differences "
    assert as_json("diff", saved, saved)["same"]


def test_diff_of_runs_that_are_equal_bit_by_bit(tmp_path: Path) -> None:
    """Given the same run twice, on data without a time column, only the clock differs."""
    data = tmp_path / "data.parquet"
    ids, labels = list(range(64)), [i % 2 for i in range(64)]
    parquet.write_table(pyarrow.table({"user": ids, "label": labels}), data)
    (tmp_path / "run.toml").write_text(
        '[data]\nkind = "parquet"\n[data.schema]\nfeatures = { user = "user" }\nlabel = "label"\n'
    )
    for name in ("a", "b"):
        options = ["--config", str(tmp_path / "run.toml"), "--path", str(data), "--batch-size", "16"]
        done = CliRunner().invoke(app, ["train", *options, "--run", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
    sides = (tmp_path / "a/checkpoint", tmp_path / "b/checkpoint")
    printed = words(run("diff", *sides))
    assert printed.startswith("no differences, except in times ")
    assert "seconds of the run: " in printed
    assert as_json("diff", *sides)["same"]


def test_diff_reports_long_values_without_printing_them(tmp_path: Path, model: Model) -> None:
    for name, text in (("a", "x"), ("b", "y")):
        checkpoint.save(model, tmp_path / name, progress={"rng": text * 1000})
    printed = words(run("diff", tmp_path / "a", tmp_path / "b"))
    assert "progress rng: differs" in printed


def test_diff_prints_no_nan_as_json(tmp_path: Path, model: Model) -> None:
    checkpoint.save(model, tmp_path / "a")
    (rows,) = model.e.tables["user"].scan()
    rows.rows[rows.ids == 1] = torch.nan  # an overflow while training may leave such a row
    model.e.tables["user"].restore(rows)
    checkpoint.save(model, tmp_path / "b")
    assert as_json("diff", tmp_path / "a", tmp_path / "b")["tables"]["e.user"]["largest"]["amount"] is None
    assert "│ not finite │ 1 │" in words(run("diff", tmp_path / "a", tmp_path / "b"))


# ---- reshard


def test_reshard(saved: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    assert "14 rows for 3 ranks" in words(
        run("reshard", saved, to, "--num-shards", 3, "--dist-type", "hash_roundrobin")
    )
    (found,) = as_json("ls", to)["checkpoints"]
    assert found["tables"][0]["routing"]["dist_type"] == "hash_roundrobin"
    assert found["tables"][0]["routing"]["num_shards"] == 3
    assert len(found["saves"]) == 1
    assert as_json("verify", to)["ok"]
    assert user_rows(to) == user_rows(saved)

    assert "already holds a checkpoint" in error(run("reshard", saved, to, "--num-shards", 2))
    words(run("reshard", saved, to, "--num-shards", 2, "--replace"))
    assert user_rows(to) == user_rows(saved)


def test_reshard_into_blocks(saved: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    words(run("reshard", saved, to, "--num-shards", 2, "--dist-type", "continuous", "--block-size", 5))
    shards = [piece.shard for piece in checkpoint.read_manifest(to).tables()["e.user"][0].pieces]
    assert sorted(shards) == [0, 1]
    assert as_json("verify", to)["ok"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-shards", "2", "--dist-type", "diagonal"), "unknown routing mode 'diagonal'"),
        (("--num-shards", "2", "--dist-type", "continuous"), "needs block_size"),
        (("--num-shards", "2", "--dist-type", "roundrobin", "--block-size", "5"), "--block-size is for"),
    ],
)
def test_reshard_to_what_cannot_be(saved: Path, tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    assert message in error(run("reshard", saved, tmp_path / "to", *flags))
    assert not (tmp_path / "to" / "manifest.json").exists()
    assert not list((tmp_path / "to").glob("data-*"))


def test_reshard_in_place_is_refused(saved: Path) -> None:
    done = run("reshard", saved, saved, "--num-shards", 2, "--replace")
    assert "cannot be rewritten in place" in error(done)


# ---- compact


def test_compact(saved: Path) -> None:
    before = user_rows(saved)
    assert re.match(r"1 delta merged: [\d.]+ \w+ before, [\d.]+ \w+ now", words(run("compact", saved)))
    assert checkpoint.read_manifest(saved).deltas == []
    assert (
        user_rows(saved)
        == before
        == {0: [0, 0], 1: [1, -1], 2: [2, -2], 3: [9, 9], 50: [9, 9]} | {i: [i, -i] for i in (6, 7, 8, 9)}
    )
    assert "nothing to merge" in words(run("compact", saved))


# ---- export


def test_export_writes_a_file_of_each_table(saved: Path, tmp_path: Path) -> None:
    printed = words(run("export", saved, tmp_path / "out"))
    assert f"9 rows in {tmp_path}/out/e.user.parquet" in printed
    user = parquet.read_table(tmp_path / "out" / "e.user.parquet")
    assert user.column_names == ["id", "weights", "state/0/sum", "time"]
    assert dict(zip(user["id"].to_pylist(), user["weights"].to_pylist(), strict=True)) == user_rows(saved)
    odd = parquet.read_table(tmp_path / "out" / "e.a%2Fb.parquet")
    assert len(odd) == 5
    empty = parquet.read_table(tmp_path / "out" / "e.empty.parquet")
    assert (len(empty), empty.column_names) == (0, ["id", "weights", "time"])


@pytest.mark.parametrize("name", ["user", "e.user"])
def test_export_of_one_table_to_one_file(saved: Path, tmp_path: Path, name: str) -> None:
    words(run("export", saved, tmp_path / "new" / "u.parquet", "--table", name, "--no-state"))
    table = parquet.read_table(tmp_path / "new" / "u.parquet")
    assert table.column_names == ["id", "weights", "time"]
    assert len(table) == 9


def test_export_of_what_cannot_be(saved: Path, tmp_path: Path) -> None:
    unknown = error(run("export", saved, tmp_path, "--table", "nobody"))
    assert "no table 'nobody' (known: e.user, e.a/b, e.empty)" in unknown
    assert "one file holds one table" in error(run("export", saved, tmp_path / "x.parquet"))
    (tmp_path / "file").write_text("")
    assert "file" in error(run("export", saved, tmp_path / "file"))


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
    words(run("reshard", saved, f"{bucket}/models/a", "--num-shards", 2))
    words(run("reshard", f"{bucket}/models/a", f"{bucket}/models/b", "--num-shards", 3))
    assert re.search(r"│ a │ 14 │.*│ b │ 14 │", words(run("ls", f"{bucket}/models")))
    assert as_json("verify", f"{bucket}/models/b")["ok"]
    assert as_json("diff", saved, f"{bucket}/models/b")["tables"]["e.user"]["changed"] == 0
    assert "nothing to merge" in words(run("compact", f"{bucket}/models/a"))
    words(run("export", f"{bucket}/models/a", f"{bucket}/out/user.parquet", "--table", "user"))
    assert len(parquet.read_table(tmp_path / "store" / "bucket" / "out" / "user.parquet")) == 9
    assert "s3://bucket/none holds no complete checkpoint" in error(run("compact", f"{bucket}/none"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "nowhere"), "nowhere holds no checkpoint"),
        (("diff", "nowhere", "nowhere"), "nowhere holds no complete checkpoint"),
        (("compact", "nowhere"), "nowhere holds no complete checkpoint"),
        (("export", "nowhere", "out"), "nowhere holds no complete checkpoint"),
        (("reshard", "nowhere", "there", "--num-shards", "2"), "nowhere holds no complete checkpoint"),
        (("ls", "odd://place"), "odd://place does not name an object store"),
    ],
)
def test_wrong_places_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error(run(*arguments))


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file holds no checkpoint" in error(run("ls", tmp_path / "file"))
    assert "Not a directory" in error(run("compact", tmp_path / "file"))
