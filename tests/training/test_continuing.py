"""Runs that continue other runs with other data: `Run.continue_from` and `megalith train --from`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megalith import checkpoint
from megalith.errors import InputError, UsageError
from megalith.training import Run, RunConfig, Watcher
from tests.cli.support import error, words
from tests.training.test_run import StopAt, assert_same, everything

pytestmark = pytest.mark.usefixtures("restore_threads")

DAYS = [f"2026-11-{day:02}" for day in range(2, 9)]
ROWS = 32


def write_day(folder: Path, day: int, **changes: Any) -> Path:
    """A directory with the clicks of a day: some ids are new, times are of that day."""
    generator = torch.Generator().manual_seed(day)
    users = torch.randint(10 * day, 10 * day + 40, (ROWS,), generator=generator).tolist()
    columns = {
        "click": [(user + i) % 2 for i, user in enumerate(users)],
        "user": users,
        "tags": [[user % 7, user % 5] for user in users],
        "price": [float(user) for user in users],
        "at": [1_793_577_600 + 86_400 * day + i for i in range(ROWS)],  # 2026-11-02 00:00 UTC and later
        **changes,
    }
    path = folder / DAYS[day]
    path.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({k: v for k, v in columns.items() if v is not None}), path / "part.parquet")
    return path


@pytest.fixture
def days(tmp_path: Path) -> list[str]:
    return [str(write_day(tmp_path / "days", day)) for day in range(len(DAYS))]


def config(paths: list[str], **changes: Any) -> RunConfig:
    schema = {
        "label": "click",
        "features": {"user": "user", "tags": "tags"},
        "dense": [{"column": "price", "normalise": "standard", "mean": 50.0, "std": 20.0}],
        "time": "at",
    }
    given = {
        "data": {"kind": "parquet", "path": paths, "batch_size": 8, "schema": schema},
        "model": {"dim": 4, "options": {"hidden": [4], "dropout": 0.1}},
        "train": {
            "threads": 1,
            "log_every": 3,
            "table_optimizer": "adam",
            "admission": "min_count=2",
            "table_lr": 0.1,
        },
    }
    return RunConfig.from_dict(given).changed(**changes)


def test_a_run_over_seven_days_has_the_bits_of_seven_runs_that_continue_each_other(
    tmp_path: Path, days: list[str]
) -> None:
    whole = Run(config(days), tmp_path / "whole")
    whole.train()

    run = Run(config(days[:1]), tmp_path / DAYS[0])
    run.train()
    for number, day in enumerate(days[1:], start=1):
        in_place = number % 2 == 0
        place = None if in_place else tmp_path / DAYS[number]
        run = Run.continue_from(run.directory, place, data_path=day)
        if number == 4:  # stopped and resumed in the middle
            run.train(StopAt(run, run.step + 2))
            run = Run.resume(run.directory)
        run.train()
        assert run.step == (number + 1) * ROWS // 8

    assert_same(everything(run), everything(whole))
    assert (run.samples, run.model.embeddings.global_step) == (7 * ROWS, 7 * ROWS // 8)
    assert run.counters() == whole.counters()
    counted, expected = (json.loads((r.directory / "frequencies.json").read_text()) for r in (run, whole))
    assert counted == expected
    assert run.config.data.path == days[-1]
    assert run.config.changed(data_path=days) == whole.config
    log = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [21, 24, 27, 28]  # the last two days, in one directory


def test_epochs_steps_and_the_best_validation_begin_again_with_new_data(
    tmp_path: Path, days: list[str]
) -> None:
    limits: dict[str, Any] = {"train_max_steps": 3, "train_validate_every": 1, "data_test_path": days[6]}
    base = Run(config(days[:1], **limits, train_patience=1, train_table_lr=5.0), tmp_path / "base")
    base.train()
    steps = base.step
    run = Run.continue_from(tmp_path / "base", tmp_path / "next", data_path=days[1], train_epochs=2)
    assert not run.finished
    run.train()
    assert steps < run.step <= steps + 3
    changes = {"max_steps": 6, "patience": None, "epochs": 2, "validate_every": None}
    longer = Run.resume(tmp_path / "next", changes)
    longer.train()
    assert (longer.step, longer.first_step) == (steps + 6, steps)

    lower = Run.continue_from(tmp_path / "next", data_path=days[2], train_lr=0.5, train_table_lr=0.25)
    assert lower.optimizer.param_groups[0]["lr"] == 0.5
    assert lower.model.embeddings.tables["user"].config.segments[1].optimizer.lr == 0.25


def test_a_run_that_has_not_ended_is_continued_only_from_its_checkpoint(
    tmp_path: Path, days: list[str]
) -> None:
    base = Run(config(days[:2], train_save_every=1, train_keep_last=9), tmp_path / "base")
    base.train(StopAt(base, 2))
    with pytest.raises(
        UsageError, match=r"base has not ended: finish it first \(--resume\), or .*checkpoint"
    ):
        Run.continue_from(tmp_path / "base", data_path=days[2])
    run = Run.continue_from(tmp_path / "base" / "checkpoint", tmp_path / "next", data_path=days[2])
    assert run.step == 2
    kept = tmp_path / "base" / "checkpoints" / "step-000000000001"
    with pytest.raises(UsageError, match=r"is not the newest checkpoint of .*base: choose a directory"):
        Run.continue_from(kept, data_path=days[2])
    assert Run.continue_from(kept, tmp_path / "again", data_path=days[2]).step == 1
    run.train()
    with pytest.raises(UsageError, match="already holds a run"):
        Run.continue_from(kept, tmp_path / "next", data_path=days[2])


def test_other_columns_and_settings_of_the_model_are_named_before_anything_is_trained(
    tmp_path: Path, days: list[str]
) -> None:
    base = Run(config(days[:1]), tmp_path / "base")
    base.train()
    step = checkpoint.read_manifest(tmp_path / "base/checkpoint").tip

    def refused(day: str, **changes: Any) -> str:
        with pytest.raises(InputError) as caught:
            Run.continue_from(tmp_path / "base", data_path=day, **changes)
        return str(caught.value)

    renamed = str(write_day(tmp_path / "renamed", 1, user=None, user_id=list(range(ROWS))))
    found = refused(renamed)
    assert "part.parquet: column 'user' is missing; the file has click, tags, price, at, user_id" in found
    assert "--features user=COLUMN" in found
    assert "part.parquet: label column 'click' is missing" in refused(
        str(write_day(tmp_path / "unlabelled", 1, click=None))
    )
    text = str(write_day(tmp_path / "text", 1, user=[str(i) for i in range(ROWS)]))
    assert "part.parquet: column 'user' holds string" in refused(text)
    words = str(write_day(tmp_path / "words", 1, price=[[1.0]] * ROWS))
    assert "part.parquet: column 'price' holds list" in refused(words)
    for changes, message in (
        ({"model_dim": 8}, "model.dim is 4 in the run that is continued and 8 now"),
        ({"train_table_optimizer": "sgd"}, "train.table_optimizer is 'adam' in the run"),
        ({"data_schema": {"label": "click", "features": ["user"]}}, "has the features user, but the run"),
        (
            {
                "data_schema": {
                    "label": "click",
                    "features": {"user": {"column": "user", "slot": 1}, "tags": "tags"},
                }
            },
            "feature 'user' has slot 1, but slot None",
        ),
        ({"data_schema": {"label": "click", "features": ["user", "tags"]}}, "other dense columns"),
    ):
        assert message in refused(days[1], **changes)
    with pytest.raises(
        InputError, match=r"base was trained on parquet files .*: name the new data \(--path\)"
    ):
        Run.continue_from(tmp_path / "base")
    assert checkpoint.read_manifest(tmp_path / "base/checkpoint").tip == step

    columns = {"user": "user_id", "tags": "tags"}  # a column of another name for the same feature
    schema = {**base.config.data.schema, "features": columns}
    run = Run.continue_from(tmp_path / "base", data_path=renamed, data_schema=schema)
    saved = run.config.data.schema["features"]["user"]
    assert saved == {"column": "user_id", "ids": "integer"}


def test_the_command_continues_a_run_and_may_be_repeated(tmp_path: Path, days: list[str]) -> None:
    first, live, second = tmp_path / "first", tmp_path / "live", tmp_path / "second"
    flags = ("--batch-size", 8, "--dim", 4, "--threads", 1)
    columns = ("--label", "click", "--features", "user,tags", "--dense", "price", "--time", "at")
    words("train", "--path", days[0], "--path", days[1], *columns, *flags, "--run", live)
    said = words("train", "--from", live, "--path", days[2], "--run", first)
    assert f"continues {live} at step 8" in said
    assert "parquet files" in said
    before = checkpoint.read_manifest(first / "checkpoint").tip
    assert "already holds a run" in error("train", "--from", live, "--path", days[2], "--run", first)
    again = words("train", "--from", live, "--path", days[2], "--run", first, "--resume")
    assert "nothing was left to do: the run ended at step 12" in again
    assert checkpoint.read_manifest(first / "checkpoint").tip == before

    for step in (12, 12):  # in its own directory: the second call finds it done
        words("train", "--from", live, "--path", days[2], "--resume")
        assert checkpoint.read_manifest(live / "checkpoint").progress["step"] == step
    found = checkpoint.diff(live / "checkpoint", first / "checkpoint")
    assert [table.weights for table in found.tables.values()] == [0, 0]
    assert found.dense == {}

    moved = write_day(tmp_path / "moved", 3, user=None, user_id=list(range(ROWS)))
    assert "column 'user' is missing" in error("train", "--from", live, "--path", moved)
    words("train", "--from", live, "--path", moved, "--features", "user=user_id,tags", "--run", second)
    assert "name the new data (--path)" in error("train", "--from", live)
    assert "model.dim is 4 in the run that is continued" in error(
        "train", "--from", live, "--path", days[3], "--dim", 8
    )
    assert "no complete checkpoint" in error("train", "--from", tmp_path / "none", "--path", days[3])


class Kill(Exception):
    pass


class KillAt(Watcher):
    def __init__(self, step: int) -> None:
        self.step = step

    def batch(self, step: int, samples: int, loss: float) -> None:
        if step == self.step:
            raise Kill


@pytest.mark.parametrize("save_every", [100, 1])
def test_a_killed_run_that_continues_another_one_is_resumed_or_started_again(
    tmp_path: Path, days: list[str], save_every: int
) -> None:
    base, flags = tmp_path / "base", ("--save-every", save_every)
    Run(config(days[:1]), base).train()
    whole = Run.continue_from(base, tmp_path / "whole", data_path=days[1])
    whole.train()
    run = Run.continue_from(base, data_path=days[1], train_save_every=save_every)
    with pytest.raises(Kill):
        run.train(KillAt(6))
    words("train", "--from", base, "--path", days[1], "--resume", *flags)  # the same command again
    found = checkpoint.diff(base / "checkpoint", tmp_path / "whole/checkpoint")
    assert [table.changed + table.added + table.removed for table in found.tables.values()] == [0, 0]
    assert (found.dense, found.optimizer) == ({}, False)


def test_a_run_that_met_a_bad_row_continues_with_the_corrected_file(tmp_path: Path, days: list[str]) -> None:
    good = pq.read_table(Path(days[1]) / "part.parquet").to_pydict()
    bad = [2 if row == 20 else label for row, label in enumerate(good["click"])]
    write_day(tmp_path / "days", 1, click=bad)
    with pytest.raises(InputError, match=r"row 20, column 'click'.* fix it"):
        Run(config(days[:3], train_save_every=1), tmp_path / "run").train()

    write_day(tmp_path / "days", 1)
    run = Run.resume(tmp_path / "run")
    assert 4 <= run.step <= 6  # it stopped before the batch of that row
    run.train()
    whole = Run(config(days[:3]), tmp_path / "whole")
    whole.train()
    assert run.step == whole.step
    assert_same(everything(run), everything(whole))
