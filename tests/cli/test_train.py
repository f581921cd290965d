"""train, eval, predict: from a file on disk to a file of probabilities, with Ctrl-C on the way."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from megalith.cli import output
from megalith.cli.main import app
from megalith.data import SyntheticReader
from megalith.models import DeepFM
from megalith.serving.export.signature import Signature
from megalith.training import Run
from tests import forked
from tests.forked import Forked

pytestmark = pytest.mark.usefixtures("restore_threads")
COMMANDS = ("train", "eval", "predict", "report", "table", "plan")


def megalith(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def write_clicks(path: Path, first: int, batches: int) -> None:
    reader = SyntheticReader(batch_size=64)
    rows = [reader.batch(first + i) for i in range(batches)]
    columns = {name: [r for b in rows for r in b.features[name].to_lists()] for name in rows[0].features}
    labels = torch.cat([b.labels for b in rows]).tolist()
    parquet.write_table(pa.table({"click": labels, **columns}), path)


def write_config(folder: Path, batch_size: int, train: str, data: str = "") -> Path:
    """Writes run.toml for train.parquet of the folder; `train` and `data` are lines of these sections."""
    path = folder / "run.toml"
    path.write_text(
        f"""
[data]
kind = "parquet"
path = "{folder}/train.parquet"
batch_size = {batch_size}
schema = {{ label = "click", features = {{ user = "user", item = "item", tags = "tags" }} }}
{data}
[model]
dim = 4
options = {{ hidden = [8] }}
[train]
threads = 1
{train}
"""
    )
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_clicks(tmp_path / "train.parquet", 0, 20)
    write_clicks(tmp_path / "test.parquet", 20, 3)
    return write_config(tmp_path, 64, "log_every = 5", f'test_path = "{tmp_path}/test.parquet"')


def test_help_shows_an_example_for_every_command() -> None:
    for command in COMMANDS:
        result = megalith(command, "--help")
        assert result.exit_code == 0
        assert f"Example: megalith {command}" in re.sub(r"\s+", " ", result.output)
    assert megalith("--version").output.startswith("megalith 0.")


def test_train_eval_predict(tmp_path: Path, config: Path) -> None:
    run = tmp_path / "run"
    trained = megalith("train", "--config", config, "--run", run)
    assert trained.exit_code == 0, trained.output
    assert re.search(r"AUC +0\.\d{4}", trained.output)
    assert re.search(r"log loss +0\.\d{4}", trained.output)
    assert (run / "report.html").exists()

    held_back = json.loads(megalith("eval", run, "--json").output)
    assert held_back["samples"] == 3 * 64
    on_file = json.loads(megalith("eval", run, tmp_path / "test.parquet", "--json").output)
    assert {"step": 20, **on_file} == {"step": 20, **held_back} == evaluation_of(run)
    assert "calibration" in megalith("eval", run).output

    for out in (tmp_path / "scores.parquet", tmp_path / "scores.csv"):
        assert megalith("predict", run, tmp_path / "test.parquet", out).exit_code == 0
    scores = parquet.read_table(tmp_path / "scores.parquet")["probability"].to_pylist()
    with open(tmp_path / "scores.csv") as file:
        written = [float(row["probability"]) for row in csv.DictReader(file)]
    assert scores == pytest.approx(written, rel=1e-7)
    assert len(scores) == 3 * 64
    mean = sum(b["predicted"] * b["count"] for b in held_back["calibration"]) / len(scores)
    assert sum(scores) / len(scores) == pytest.approx(mean, rel=1e-5)


def test_flags_and_sections_give_tables_policies(tmp_path: Path, config: Path) -> None:
    run = tmp_path / "run"
    item = '[tables.item]\nadmission = ""\neviction = "ttl=1e6"\nprecision = "float32"\n'
    config.write_text(config.read_text() + item + 'serving = "one_bit=0.5"\n')
    flags = ("--admission", "min_count=2", "--eviction", "capacity=70,capacity.score=step")
    flags += ("--precision", "bfloat16", "--rounding", "stochastic", "--serving", "fixed_point=0.5")

    trained = megalith("train", "--config", config, "--run", run, "--max-steps", 10, *flags)

    assert trained.exit_code == 0, trained.output
    assert re.search(r"evicted +[1-9][0-9,]* +rows", trained.output)
    assert re.search(r"refused +[1-9][0-9,]* +ids", trained.output)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["rows"]["user"] <= 70 < last["rows"]["item"]
    assert last["counters"]["item"]["refused"] == 0
    shown = megalith("table", run / "checkpoint", "--table", "user").output
    assert re.search(r"in memory +about .* rows .* state .* index .* counters", shown.replace("\n", " "))
    assert re.search(r"pending +[1-9][0-9,]* ids", shown)
    assert "bfloat16 stochastic, served as FixedPoint(range=0.5)" in " ".join(shown.split())
    assert "min_count(n=2" in shown
    assert "score=step" in megalith("checkpoint", "ls", run / "checkpoint").output.replace("\n", "")
    resumed = megalith("train", "--run", run, "--resume", "--max-steps", 11, "--admission", "")
    assert "was saved with policies min_count(n=2" in resumed.output.replace("\n", " ")
    assert "stochastic" not in megalith("table", run / "checkpoint", "--table", "item").output
    listed = json.loads(megalith("checkpoint", "ls", run / "checkpoint", "--json").output)
    segments = {table["name"]: table["segments"][-1] for table in listed["checkpoints"][0]["tables"]}
    assert (segments["user"]["precision"], segments["user"]["rounding"]) == ("bfloat16", "stochastic")
    assert (segments["item"]["precision"], segments["item"]["rounding"]) == ("float32", "nearest")
    exported = megalith("export", run, tmp_path / "out", "--version", 1)
    assert exported.exit_code == 0, exported.output
    kinds = {name: table.kinds for name, table in Signature.read(tmp_path / "out" / "1").tables.items()}
    assert (kinds["user"], kinds["item"]) == (("float32", "fixed_point"), ("float32", "one_bit"))
    wrong = megalith("train", "--config", config, "--run", run, "--eviction", "lru=5")
    assert wrong.exit_code == 1
    assert "unknown policy 'lru'" in wrong.output


def evaluation_of(run: Path) -> Any:
    return json.loads((run / "evaluation.json").read_text())


def plain(result: Result) -> str:
    """The output without line breaks."""
    return " ".join(result.output.split())


def csv_flags(folder: Path, text: str, dense: str = "") -> tuple[object, ...]:
    """Write c.csv and a config for it; return the flags of train."""
    (folder / "c.csv").write_text(text)
    schema = f'{{ label = "click", features = {{ user = "user" }}{dense} }}'
    (folder / "c.toml").write_text(f'[data]\nkind = "csv"\nschema = {schema}\n[train]\nthreads = 1\n')
    return ("--config", folder / "c.toml", "--path", folder / "c.csv", "--run", folder / "run")


def test_eval_and_predict_use_the_threads_of_the_run(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 features of 64 rows are little work: one thread, unless the run names a number."""
    used: list[int] = []
    forward = DeepFM.forward

    def looking(self: DeepFM, *args: Any, **options: Any) -> Any:
        used.append(torch.get_num_threads())
        return forward(self, *args, **options)

    monkeypatch.setattr(DeepFM, "forward", looking)
    config.write_text(config.read_text().replace("threads = 1\n", ""))
    for flags, expected in (((), 1), (("--threads", 3), 3)):
        run = tmp_path / f"run{expected}"
        megalith("train", "--config", config, "--run", run, "--max-steps", 1, *flags)
        for command in (["eval", run], ["predict", run, tmp_path / "test.parquet", tmp_path / "out.csv"]):
            torch.set_num_threads(4)
            used.clear()
            assert megalith(*command).exit_code == 0
            assert set(used) == {expected}


def test_predict_needs_no_label_and_eval_no_training_data(tmp_path: Path, config: Path) -> None:
    run, new = tmp_path / "run", tmp_path / "new.parquet"
    megalith("train", "--config", config, "--run", run, "--max-steps", 2)
    parquet.write_table(parquet.read_table(tmp_path / "test.parquet").drop_columns(["click"]), new)
    (tmp_path / "train.parquet").unlink()
    assert "192 probabilities" in megalith("predict", run, new, tmp_path / "out.csv").output
    assert "click" in _error(megalith("eval", run, new))
    result = megalith("eval", run, "--json")
    assert result.exit_code == 0, result.output
    assert {"step": 2, **json.loads(result.output)} == evaluation_of(run)


def test_resume_continues_and_flags_that_would_change_the_model_are_refused(
    tmp_path: Path, config: Path
) -> None:
    run = tmp_path / "run"
    megalith("train", "--config", config, "--run", run, "--max-steps", 7)
    resumed = megalith("train", "--run", run, "--resume", "--max-steps", 1000)
    assert resumed.exit_code == 0, resumed.output
    whole = tmp_path / "whole"
    megalith("train", "--config", config, "--run", whole)
    assert (run / "evaluation.json").read_text() == (whole / "evaluation.json").read_text()

    for flags in (("--dim", 8), ("--lr", 0.1)):
        assert "resumed" in _error(megalith("train", "--run", run, "--resume", *flags))


def test_a_bar_shows_while_saving_if_that_takes_long(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=200)
    monkeypatch.setattr("megalith.cli.output.console", lambda: screen)
    flags = ("--config", config, "--max-steps", 1)
    megalith("train", "--run", tmp_path / "a", *flags)
    assert not re.search(r" saving .* rows", screen.file.getvalue())  # type: ignore[attr-defined]
    monkeypatch.setattr(output, "PATIENCE", -1.0)
    megalith("train", "--run", tmp_path / "b", *flags)
    assert re.search(r" saving .* rows", screen.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "--config", "none.toml"), "none.toml cannot be read"),
        (("train", "--keep-last", "0"), "train.keep_last must be at least 1"),
        (("train", "--data", "nope"), "data.kind must be one of"),
        (("train", "--data", "csv", "--path", "none.csv"), "none.csv"),
        (("eval", "nowhere"), "no complete checkpoint"),
        (("predict", "nowhere", "in.parquet", "out.txt"), "out.txt: write to a file named .csv or .parquet"),
    ],
)
def test_wrong_input_prints_one_line_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = megalith(*arguments)
    assert words in _error(result)
    assert "Traceback" not in result.output


def test_a_bad_row_is_named_or_skipped_and_counted_and_warnings_are_one_line(tmp_path: Path) -> None:
    flags = csv_flags(tmp_path, "click,user\n1,1 2\nmaybe,3 4\n" + "0,5 6\n" * 8)
    refused = megalith("train", *flags)
    assert refused.exit_code == 1
    error = refused.stderr.partition("error: ")[2]
    assert all(word in error for word in ("c.csv", "line 3", "--on-error skip"))
    result = megalith("train", *flags, "--on-error", "skip")
    assert result.exit_code == 0, result.output
    assert "skipped 1 row: wrong type; first: " in result.output
    assert "c.csv: line 3, column 'click': 'maybe' is not a number" in plain(result)
    shown = [line for line in result.stderr.splitlines() if "looks like several ids" in line]
    assert [line.startswith("warning: ") for line in shown] == [True]
    assert "UserWarning" not in result.stderr


def test_data_without_a_valid_row_is_an_error(tmp_path: Path, config: Path) -> None:
    table = parquet.read_table(tmp_path / "test.parquet")
    wrong = table.set_column(0, "click", pa.array([5.0] * len(table)))
    parquet.write_table(wrong, tmp_path / "wrong.parquet")
    flags = ("train", "--config", config, "--on-error", "skip")
    error = _error(megalith(*flags, "--run", tmp_path / "none", "--path", tmp_path / "wrong.parquet"))
    assert "the training data has no valid row; skipped 192 rows: label not 0 or 1 (first: " in error
    assert "wrong.parquet: row 0, column 'click': 5.0 is not 0 or 1" in error
    assert not (tmp_path / "none" / "checkpoint").exists()
    megalith(*flags, "--run", tmp_path / "run", "--max-steps", 1)
    error = _error(megalith("eval", tmp_path / "run", tmp_path / "wrong.parquet", "--on-error", "skip"))
    assert "there is no valid row to evaluate; skipped 192 rows: label not 0 or 1; first: " in error


def test_eval_and_predict_have_the_data_flags_of_train_and_report_dropped_rows(tmp_path: Path) -> None:
    dense = ', dense = ["price"]'
    flags = csv_flags(tmp_path, "click,user,price\n" + "1,ann,1.5\n0,bob,2\n" * 8, dense)
    run, bad, out, skip = tmp_path / "run", tmp_path / "bad.csv", tmp_path / "out.csv", ("--on-error", "skip")
    bad.write_text("click,user,price\n1,ann,1\nmaybe,bob,2\n0,cid,x\n0,dan,4\n")
    trained = megalith("train", *flags)
    assert trained.exit_code == 0, trained.output

    assert "line 3" in _error(megalith("eval", run, bad))
    evaluated = megalith("eval", run, bad, *skip, "--batch-size", 2)
    assert evaluated.exit_code == 0, evaluated.output
    assert "skipped 2 rows: wrong type" in evaluated.output
    assert "2 samples" in evaluated.output
    as_json = json.loads(megalith("eval", run, bad, *skip, "--json").output)
    assert as_json["skipped"] == {"wrong type": 2}

    assert "line 4" in _error(megalith("predict", run, bad, out))
    assert not out.exists()
    predicted = megalith("predict", run, bad, out, *skip)
    assert predicted.exit_code == 0, predicted.output
    for words in ("skipped 1 row: ", "3 probabilities", "skipped rows have no line in it"):
        assert words in plain(predicted)

    (tmp_path / "more").mkdir()
    flags = csv_flags(tmp_path / "more", bad.read_text(), dense)
    both = megalith("train", *flags, "--test-path", bad, *skip)
    assert "skipped 2 rows of the test data: wrong type" in both.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_the_run_can_be_resumed(tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    config = tmp_path / "run.toml"
    config.write_text(
        '[data]\nkind = "synthetic"\nbatch_size = 32\noptions = { num_batches = 50 }\n'
        "[train]\nepochs = 100000\nlog_every = 1\nthreads = 1\n"
    )
    log = run / "metrics.jsonl"
    with Forked(tmp_path / "output", forked.megalith, "train", "--config", config, "--run", run) as process:
        process.wait_for(lambda: log.exists() and log.read_text().count("\n") >= 3)
        assert process.end(number) == 130, process.output

    assert "stopped after step" in process.output
    step = json.loads((run / "checkpoint/manifest.json").read_text())["progress"]["step"]
    resumed = megalith("train", "--run", run, "--resume", "--max-steps", step + 2)
    assert resumed.exit_code == 0, resumed.output


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path, config: Path) -> None:
    run = tmp_path / "run"
    megalith("train", "--config", config, "--run", run, "--max-steps", 3)
    before = (run / "checkpoint/manifest.json").read_text()
    again = megalith("train", "--run", run, "--resume")
    assert again.exit_code == 0, again.output
    assert "nothing was left to do: the run ended at step 3" in plain(again)
    assert (run / "checkpoint/manifest.json").read_text() == before


@pytest.mark.parametrize(
    ("save_every", "words"),
    [
        (100, "steps 1 to 3 are not saved: there is no checkpoint"),
        (2, "steps 3 to 3 are not saved; continue from step 2 with `--resume --run "),
    ],
)
def test_a_second_ctrl_c_says_what_is_saved(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch, save_every: int, words: str
) -> None:
    step, save = Run._train_batch, Run.save

    def interrupted_step(self: Run, *arguments: Any) -> float:
        loss = step(self, *arguments)
        if self.step == 3:
            signal.raise_signal(signal.SIGINT)
        return loss

    def interrupted_save(self: Run, *arguments: Any, **options: Any) -> None:
        if self.stop_requested:
            signal.raise_signal(signal.SIGINT)
        save(self, *arguments, **options)

    monkeypatch.setattr(Run, "_train_batch", interrupted_step)
    monkeypatch.setattr(Run, "save", interrupted_save)
    result = megalith("train", "--config", config, "--run", tmp_path / "run", "--save-every", save_every)
    assert result.exit_code == 130, result.output
    assert words in " ".join(result.output.split())


def _error(result: Result) -> str:
    assert result.exit_code == 1, result.output
    text: str = result.stderr
    assert text.startswith("error:"), result.output
    return text


def test_servers_without_ray_and_workers_of_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    monkeypatch.setitem(sys.modules, "ray", None)
    result = megalith("train", "--data", "synthetic", "--servers", 1, "--run", run)
    assert result.exit_code == 1
    assert "parameter servers need ray" in result.output
    assert ".[servers]" in result.output
    assert not (run / "checkpoint").exists()
    killed = run / "servers" / "1" / "log"  # what a run that was killed leaves
    killed.mkdir(parents=True)
    (run / ".lock").write_text("1\n")
    result = megalith("workers", run, 2)
    assert result.exit_code == 1
    assert list(killed.parents[1].iterdir()) == [killed.parent]
    assert "does not train on parameter servers now: start it with --servers" in plain(result)
