"""Rows scored before they are trained on, and data split by time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.data import ParquetReader, Schema, SyntheticReader
from megalith.errors import InputError
from megalith.metrics import auc, log_loss
from megalith.reporting.report import write_report
from megalith.training import Run, RunConfig
from megalith.training.log import LogWindow
from megalith.training.model import score
from tests.cli.support import words
from tests.training.test_continuing import DAYS, ROWS, config, days
from tests.training.test_run import StopAt, assert_same, everything

__all__ = ["days"]
pytestmark = pytest.mark.usefixtures("restore_threads")


def lines(run: Run, kind: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_each_batch_is_scored_before_it_is_trained_on(
    tmp_path: Path, days: list[str], dropout: float
) -> None:
    chosen = config(days[:3], train_progressive="day", model_options={"hidden": [4], "dropout": dropout})
    run = Run(chosen, tmp_path / "run")
    expected: dict[str, list[Any]] = {}
    tables, take = run.model.embeddings.tables, run._steps.take

    def look(step: Any, **options: Any) -> Any:  # the plain form: score in eval mode, look for each id
        batch = step.batch
        run.model.eval()
        with torch.no_grad():
            logits = score(run.model, batch)
        run.model.train()
        day = DAYS[(batch.time - 1_793_577_600) // 86_400]
        new = {
            name: torch.tensor([any(x not in tables[name] for x in row) for row in column.to_lists()])
            for name, column in batch.features.items()
        }
        expected.setdefault(day, []).append((logits, batch.labels, new))
        return take(step, **options)

    run._steps.take = look  # type: ignore[method-assign]
    run.train()

    found = lines(run, "period")
    assert [line["period"] for line in found] == list(expected) == DAYS[:3]
    for line, batches in zip(found, expected.values(), strict=True):
        logits, labels = (torch.cat([each[i] for each in batches]) for i in (0, 1))
        assert line["samples"] == ROWS
        assert line["loss"] == pytest.approx(log_loss(logits, labels), rel=1e-5)
        assert line["auc"] == pytest.approx(auc(logits, labels), abs=0.03)  # rounded to bfloat16
        for name, numbers in line["new"].items():
            rows = torch.cat([each[2][name] for each in batches])
            assert numbers["samples"] == int(rows.sum())
            if numbers["auc"] is not None:
                assert numbers["auc"] == pytest.approx(auc(logits[rows], labels[rows]), abs=0.03)
    assert 0 < found[2]["new"]["tags"]["samples"] + 1 <= found[0]["new"]["user"]["samples"]

    page = write_report(run.directory).read_text()
    assert "Scored before training" in page
    assert all(day.replace("-", "\N{NON-BREAKING HYPHEN}") in page for day in DAYS[:3])
    (run.directory / "metrics.jsonl").write_text(
        '{"kind": "period", "new": {"a": 3, "b": {"samples": "x"}}}\n'
    )
    assert "no period has 30 rows with both labels" in write_report(run.directory).read_text()
    without = Run(config(days[:3], model_options={"hidden": [4], "dropout": 0.0}), tmp_path / "without")
    without.train()
    if not dropout:
        assert_same(everything(run), everything(without))
    assert "Scored before training" not in write_report(without.directory).read_text()


def test_periods_of_batches_and_two_lines_after_a_stop(tmp_path: Path, days: list[str]) -> None:
    run = Run(config(days[:2], train_progressive="3", train_epochs=2, train_log_every=2), tmp_path / "run")
    run.train(StopAt(run, 4))
    Run.resume(tmp_path / "run").train()
    found = lines(run, "period")
    assert [line["period"] for line in found] == [
        "steps 0 to 2",
        "steps 3 to 5",
        "steps 3 to 5",
        "steps 6 to 8",
    ]
    assert [line["samples"] for line in found] == [24, 8, 16, 16]  # one pass; the second pass is not scored


def test_windows_of_ranks_are_added() -> None:
    logits, labels = (
        torch.randn(40, generator=torch.Generator().manual_seed(1)),
        torch.tensor([0.0, 1.0] * 20),
    )
    whole, parts = LogWindow(), [LogWindow(), LogWindow()]
    whole.add_rows(logits, labels)
    for window, rows in zip(parts, (slice(0, 12), slice(12, 40)), strict=True):
        window.add_rows(logits[rows], labels[rows])
    total = LogWindow.sum([*parts, LogWindow()]).numbers
    assert total == {**whole.numbers, "loss": pytest.approx(whole.numbers["loss"])}
    assert LogWindow().numbers == {"samples": 0, "loss": None, "auc": None}


def test_rows_after_a_time_are_not_trained_on_but_validate_and_evaluate(
    tmp_path: Path, days: list[str]
) -> None:
    chosen = config(days, data_split_time=DAYS[5], train_validate_every=10)
    run = Run(chosen, tmp_path / "run")
    run.train()
    result = run.evaluate()
    before = Run(config(days[:5]), tmp_path / "before")
    before.train()

    assert_same(everything(run), everything(before))
    assert result is not None
    assert result.samples == 2 * ROWS
    assert [line["samples"] for line in lines(run, "eval")] == [2 * ROWS] * 2
    page = write_report(run.directory).read_text()
    assert f"Held-out data: 64 samples of rows since {DAYS[5]}." in page
    said = words("eval", tmp_path / "run")
    assert "64 samples" in said
    unfitted = {**chosen.data.schema, "dense": [{"column": "price", "normalise": "standard"}]}
    fitted, expected = (
        Run(config(paths, data_schema=unfitted, data_split_time=time), tmp_path / f"fit{len(paths)}")
        for paths, time in ((days, DAYS[5]), (days[:5], None))
    )
    assert fitted.config.data.schema["dense"] == expected.config.data.schema["dense"]  # of these rows alone
    other = Run(config(days, data_split_time=DAYS[5], data_test_path=days[0]), tmp_path / "other")
    assert other.evaluate().samples == ROWS  # type: ignore[union-attr]


def test_a_reader_between_times_continues_at_its_positions(days: list[str]) -> None:
    schema = Schema(features=["user"], label="click", time="at")
    plain = list(ParquetReader(days[:2], schema, batch_size=ROWS))
    first = plain[0].time
    assert first is not None
    start, end = first - 5, first + 86_400 - 9

    def part() -> ParquetReader:
        return ParquetReader(days[:2], schema, batch_size=7).between(start, end)

    batches = list(part())
    users = [user for batch in batches for user in batch.features["user"].values.tolist()]
    every = [user for batch in plain for user in batch.features["user"].values.tolist()]
    assert users == every[ROWS - 6 : 2 * ROWS - 10]
    for number, batch in enumerate(batches[:-1]):
        again = part()
        again.seek(batch.position)
        assert torch.equal(next(iter(again)).labels, batches[number + 1].labels)
    with pytest.raises(InputError, match="the rows have no times; name the time column"):
        list(ParquetReader(days, Schema(features=["user"], label="click"), batch_size=7).between(1, None))
    with pytest.raises(InputError, match="SyntheticReader: its rows have no times"):
        SyntheticReader(batch_size=2).between(1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_split_time": "soon"}, "data.split_time must be a time such as 2026-11-08"),
        ({"train_progressive": "month"}, "train.progressive must be hour, day, week or a number of batches"),
        ({"train_progressive": "0"}, "train.progressive must be hour"),
        ({"data_path": 3}, "data.path must be str or list or nothing, got 3"),
        ({"data_path": ["a", 3]}, "data.path must be a list of texts"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RunConfig().changed(**changes)


def test_what_contradicts_the_data_is_named(tmp_path: Path, days: list[str]) -> None:
    both = config(days, data_split_time="5", data_validation_path=days[0])
    with pytest.raises(
        InputError, match=r"validation_path and data\.split_time both name data to validate on"
    ):
        Run(both, tmp_path / "both")
    timeless = config(days, train_progressive="day", data_schema={"label": "click", "features": ["user"]})
    run = Run(timeless, tmp_path / "timeless")
    with pytest.raises(InputError, match=r"the data has no times: name the time column \(--time"):
        run.train()
    assert run.step == sum(run.rows().values()) == 0
    with pytest.raises(InputError, match=r"data\.split_time: synthetic data validates on its held-out part"):
        Run(RunConfig().changed(data_kind="synthetic", data_split_time="7"), tmp_path / "synthetic")
