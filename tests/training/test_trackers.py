"""Trackers receive the metrics of a run under the names of docs/guides/trackers.md."""

from __future__ import annotations

import re
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megalith.errors import InputError, UsageError
from megalith.integrations import trackers
from megalith.training import Run, RunConfig, Tracker

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "trackers.md"

pytestmark = pytest.mark.usefixtures("restore_threads")


def run(directory: Path, **changes: Any) -> Run:
    settings: dict[str, Any] = {
        "data": {"kind": "synthetic", "batch_size": 64, "options": {"num_batches": 4}},
        "model": {"dim": 4, "options": {"hidden": [8]}},
        "train": {"log_every": 2, "threads": 1, "validate_every": 4},
    }
    return Run(RunConfig.from_dict(settings).changed(**changes), directory)


class Recorded(Tracker):
    """Keeps what it is given; fails from a step on."""

    def __init__(self, fail_at: int = 1000) -> None:
        self.lines: list[tuple[int, Mapping[str, float]]] = []
        self.fail_at, self.closed = fail_at, 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step >= self.fail_at:
            raise ConnectionError("no route to the service")
        self.lines.append((step, metrics))

    def close(self) -> None:
        self.closed += 1


def test_a_tracker_gets_each_line_of_the_log_and_each_validation(tmp_path: Path) -> None:
    tracker = Recorded()
    run(tmp_path / "run").train(trackers=[tracker])
    assert [step for step, _ in tracker.lines] == [2, 4, 4]
    trained, validated = tracker.lines[1][1], tracker.lines[2][1]
    assert trained["rows/user"] > 0
    assert 0 < trained["loss"] < 2
    assert validated.keys() == {"validation/loss", "validation/auc"}
    assert tracker.closed == 1

    documented = re.findall(r"^\| `([a-z_]+)[`/]", PAGE.read_text().split("## Metrics")[1], re.MULTILINE)
    logged = {name.partition("/")[0] for _, metrics in tracker.lines for name in metrics}
    only_elsewhere = {"comm", "comm_wait", "hit_rate", "device_rows", "host_rows", "period"}
    assert logged == set(documented) - only_elsewhere


def test_a_run_continues_without_a_tracker_that_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = Recorded(fail_at=4), Recorded()
    run(tmp_path / "run").train(trackers=[failing, other])
    assert [len(each.lines) for each in (failing, other)] == [1, 3]
    assert [each.closed for each in (failing, other)] == [0, 1]
    assert "Recorded gets no more metrics: no route to the service" in caplog.text


def test_prometheus_shows_the_latest_numbers_with_the_table_as_a_label() -> None:
    tracker = trackers.PrometheusTracker("127.0.0.1:0")
    for step, rows in ((2, 5.0), (4, 7.0)):
        tracker.log({"loss": 0.5, "rows/user": rows}, step)
    with urllib.request.urlopen(f"http://127.0.0.1:{tracker.port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    with pytest.raises(UsageError, match=r"cannot listen at .*: choose another port"):
        trackers.PrometheusTracker(f"127.0.0.1:{tracker.port}")
    tracker.close()
    expected = ["megalith_train_step 4.0", "megalith_train_loss 0.5", 'megalith_train_rows{name="user"} 7.0']
    assert [line for line in lines if not line.startswith("#")] == expected


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("comet", "'comet' is not a tracker: choose from wandb, mlflow, opentelemetry, prometheus"),
        ("mlflow,none", "'none' is not a tracker"),
    ],
)
def test_an_unknown_tracker_is_named(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(tmp_path / "run", train_tracker=name)


def test_a_wrong_option_is_named_before_the_first_step(tmp_path: Path) -> None:
    for name, said in (("prometheus:x", "must be HOST:PORT"), ("mlflow:x", "settings from the environment")):
        with pytest.raises(InputError, match=said):
            run(tmp_path / name, train_tracker=name).train()


def test_a_missing_package_names_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import raises ModuleNotFoundError
    with pytest.raises(UsageError, match="needs the package wandb: pip install wandb"):
        run(tmp_path / "run", train_tracker="wandb").train()
