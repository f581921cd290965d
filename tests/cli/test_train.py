"""train, eval, predict: from a file on disk to a file of probabilities, with Ctrl-C on the way."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from megalith import checkpoint
from megalith.cli.main import COMMANDS, import_command
from megalith.cli.train import PANELS, _kind_of
from megalith.data import ParquetReader, Schema, SyntheticReader
from megalith.errors import InputError
from megalith.models import DeepFM
from megalith.serving.export.signature import Signature
from megalith.training import DataConfig, Run, TrainConfig
from tests import forked
from tests.cli.support import as_json, megalith, plain, words
from tests.forked import Forked

pytestmark = pytest.mark.usefixtures("restore_threads")


def write_clicks(path: Path, first: int, batches: int) -> None:
    reader = SyntheticReader(batch_size=64)
    rows = [reader.batch(first + i) for i in range(batches)]
    columns = {name: [r for b in rows for r in b.features[name].to_lists()] for name in rows[0].features}
    labels = torch.cat([b.labels for b in rows]).tolist()
    parquet.write_table(pa.table({"click": labels, **columns}), path)


def test_the_kind_of_data_is_that_of_the_names_of_its_files(tmp_path: Path) -> None:
    for name, kind in {"a.pq": "parquet", "a.feather": "ipc", "a.tsv": "csv", "a.csv.gz": "csv"}.items():
        (tmp_path / name).touch()
        assert _kind_of(str(tmp_path / name)) == kind
    assert _kind_of("s3://bucket/clicks/*.parquet") == "parquet"
    with pytest.raises(InputError, match=r"the kind of data cannot be told .*: add --data, one of"):
        _kind_of(["s3://bucket/clicks"])


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


def commands(path: str, command: Any) -> Iterator[str]:
    inner = getattr(command, "commands", None)
    yield from [path] if inner is None else (f"{path} {name}" for name in inner)


def test_help_shows_an_example_for_every_command() -> None:
    found = [command for name in COMMANDS for command in commands(f"megalith {name}", import_command(name))]
    assert len(found) > 20
    for command in found:
        assert f"Example: {command} " in words(*command.split()[1:], "--help")
    assert words("--version").startswith("megalith 0.")


def test_the_list_of_commands_has_their_own_first_sentences_and_imports_no_torch() -> None:
    for name, summary in COMMANDS.items():
        assert plain(import_command(name).help or "").startswith(summary.rstrip(".")), name
    code = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); "
    code += "from megalith.cli.main import app; app(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "checkpoint" in done.stdout
    assert done.stdout.endswith("False\n")


def test_the_options_of_train_are_grouped_with_the_common_ones_first() -> None:
    lines = megalith("train", "--help").output.splitlines()
    headings = [line.strip("╭─╮ ") for line in lines if line.startswith("╭")]
    assert headings == ["Options", *sorted(PANELS, key=headings.index)]
    options = {name for names in PANELS.values() for name in names}
    known = {field.name for section in (DataConfig, TrainConfig) for field in fields(section)}
    assert options <= known
    first = lines[: next(i for i, line in enumerate(lines) if line.startswith("╭") and "Options" not in line)]
    assert any("--epochs" in line for line in first)
    assert not any("│ --publish" in line for line in first)


def test_predict_keeps_columns_of_the_file_with_the_rows_that_it_skips_left_out(tmp_path: Path) -> None:
    flags = csv_flags(tmp_path, "click,user\n" + "1,ann\n0,bob\n" * 8)
    words("train", *flags)
    run, new = tmp_path / "run", tmp_path / "new.csv"
    new.write_text("row,user,item\n7,ann,x y\nbad line\n8,bob,\n9,ann,ü\n")
    out = tmp_path / "out.csv"
    words("predict", run, new, out, "--keep", "item, row", "--on-error", "skip", "--batch-size", 2)
    with open(out, encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [(row["item"], row["row"]) for row in found] == [("x y", "7"), ("", "8"), ("ü", "9")]
    assert found[0]["probability"] == found[2]["probability"] != found[1]["probability"]

    words("predict", run, new, tmp_path / "out.parquet", "--keep", "row", "--on-error", "skip")
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["row", "probability"]
    assert table["row"].to_pylist() == ["7", "8", "9"]
    assert "column 'none' is missing; the file has row, user, item" in error(
        "predict", run, new, out, "--keep", "none"
    )


def test_columns_that_predict_keeps_have_one_type_and_are_text(tmp_path: Path) -> None:
    words("train", *csv_flags(tmp_path, "click,user\n" + "1,ann\n0,bob\n" * 8))
    new, out = tmp_path / "new.csv", tmp_path / "out.csv"
    new.write_bytes("row,user\n7,ann\nß,bob\n".encode("latin-1"))
    keep = "predict", tmp_path / "run", new, out, "--keep"
    words(*keep, "user,user")
    assert [line.partition(",")[0] for line in out.read_text().splitlines()] == ["user", "ann", "bob"]
    assert "predict: column 'row' has text that is not UTF-8, so it cannot be kept" in error(*keep, "row")

    folder = tmp_path / "days"
    folder.mkdir()
    for number, kind in enumerate((pa.int32(), pa.int64(), pa.string())):
        columns = {"user": ["ann", "bob"], "row": pa.array([1, 2]).cast(kind)}
        parquet.write_table(pa.table(columns), folder / f"{number}.parquet")
    schema = Schema(features={"user": "user"}, label=None)
    reader = ParquetReader(folder, schema, batch_size=2).carrying(["row"])
    assert len(list(reader)) == 3
    with pytest.raises(InputError, match=r"'row' has types that cannot be joined \(int32, int64, string\)"):
        reader.carried_column("row")
    (folder / "2.parquet").unlink()
    reader = ParquetReader(folder, schema, batch_size=2).carrying(["row"])
    assert len(list(reader)) == 2
    assert reader.carried_column("row").to_pylist() == [1, 2, 1, 2]


def test_validation_stops_the_run_early_keeps_the_best_and_is_a_curve_of_the_report(
    tmp_path: Path, config: Path
) -> None:
    run = tmp_path / "run"
    flags = ("--validate-every", 5, "--patience", 2, "--keep-best", "--table-lr", 2.0, "--epochs", 9)
    said = words("train", "--config", config, "--run", run, *flags)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["loss"] for line in lines if line["kind"] == "eval"}
    best = min(found, key=found.__getitem__)
    assert f"stopped early at step {best + 10}: 2 validations without a better log_loss than at step" in said
    assert list(found) == list(range(5, best + 11, 5))
    assert checkpoint.read_manifest(run / "best").progress["step"] == best
    assert as_json("eval", run / "best")["log_loss"] == found[best]
    assert "validation: " in (run / "report.html").read_text()
    assert "nothing" not in words("train", "--run", run, "--resume")
    more = words("train", "--run", run, "--resume", "--patience", 9, "--max-steps", best + 15)
    assert "stopped early" not in more
    assert checkpoint.read_manifest(run / "checkpoint").progress["step"] == best + 15
    assert "set train.validate_every (--validate-every)" in error("train", "--patience", 2)


def test_train_eval_predict(tmp_path: Path, config: Path) -> None:
    run = tmp_path / "run"
    trained = words("train", "--config", config, "--run", run)
    assert re.search(r"AUC +0\.\d{4}", trained)
    assert re.search(r"log loss +0\.\d{4}", trained)
    assert (run / "report.html").exists()

    held_back = as_json("eval", run)
    assert held_back["samples"] == 3 * 64
    on_file = as_json("eval", run, tmp_path / "test.parquet")
    assert {"step": 20, **on_file} == {"step": 20, **held_back} == evaluation_of(run)
    assert "calibration" in words("eval", run)

    for out in (tmp_path / "scores.parquet", tmp_path / "scores.csv"):
        words("predict", run, tmp_path / "test.parquet", out)
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

    trained = words("train", "--config", config, "--run", run, "--max-steps", 10, *flags)
    assert re.search(r"evicted +[1-9][0-9,]* +rows", trained)
    assert re.search(r"refused +[1-9][0-9,]* +ids", trained)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["rows"]["user"] <= 70 < last["rows"]["item"]
    assert last["counters"]["item"]["refused"] == 0
    shown = words("table", run / "checkpoint", "--table", "user")
    assert re.search(r"in memory +about .* rows .* state .* index .* counters", shown)
    assert re.search(r"pending +[1-9][0-9,]* ids", shown)
    assert "bfloat16 stochastic, served as FixedPoint(range=0.5)" in shown
    assert "min_count(n=2" in shown
    assert "score=step" in words("checkpoint", "ls", run / "checkpoint").replace(" ", "")
    resumed = words("train", "--run", run, "--resume", "--max-steps", 11, "--admission", "")
    assert "was saved with policies min_count(n=2" in resumed
    assert "stochastic" not in words("table", run / "checkpoint", "--table", "item")
    listed = as_json("checkpoint", "ls", run / "checkpoint")
    segments = {table["name"]: table["segments"][-1] for table in listed["checkpoints"][0]["tables"]}
    assert (segments["user"]["precision"], segments["user"]["rounding"]) == ("bfloat16", "stochastic")
    assert (segments["item"]["precision"], segments["item"]["rounding"]) == ("float32", "nearest")
    words("export", run, tmp_path / "out", "--version", 1)
    kinds = {name: table.kinds for name, table in Signature.read(tmp_path / "out" / "1").tables.items()}
    assert (kinds["user"], kinds["item"]) == (("float32", "fixed_point"), ("float32", "one_bit"))
    wrong = ("--config", config, "--run", run, "--eviction", "lru=5")
    assert "unknown policy 'lru'" in error("train", *wrong)


def evaluation_of(run: Path) -> Any:
    return json.loads((run / "evaluation.json").read_text())


def error(*arguments: object) -> str:
    """The error of a command that fails; it may have printed what it did before."""
    result = megalith(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error:"), result.output
    return str(result.stderr)


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
            words(*command)
            assert set(used) == {expected}


def test_predict_needs_no_label_and_eval_no_training_data(tmp_path: Path, config: Path) -> None:
    run, new = tmp_path / "run", tmp_path / "new.parquet"
    megalith("train", "--config", config, "--run", run, "--max-steps", 2)
    parquet.write_table(parquet.read_table(tmp_path / "test.parquet").drop_columns(["click"]), new)
    (tmp_path / "train.parquet").unlink()
    assert "192 probabilities" in words("predict", run, new, tmp_path / "out.csv")
    assert "click" in error("eval", run, new)
    assert {"step": 2, **as_json("eval", run)} == evaluation_of(run)


def test_resume_continues_and_flags_that_would_change_the_model_are_refused(
    tmp_path: Path, config: Path
) -> None:
    run = tmp_path / "run"
    megalith("train", "--config", config, "--run", run, "--max-steps", 7)
    words("train", "--run", run, "--resume", "--max-steps", 1000)
    whole = tmp_path / "whole"
    megalith("train", "--config", config, "--run", whole)
    assert (run / "evaluation.json").read_text() == (whole / "evaluation.json").read_text()

    for flags in (("--dim", 8), ("--lr", 0.1)):
        assert "resumed" in error("train", "--run", run, "--resume", *flags)


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
    assert words in error(*arguments)


def test_a_bad_row_is_named_or_skipped_and_counted_and_warnings_are_one_line(tmp_path: Path) -> None:
    flags = csv_flags(tmp_path, "click,user\n1,1 2\nmaybe,3 4\n" + "0,5 6\n" * 8)
    refused = megalith("train", *flags)
    assert refused.exit_code == 1
    error = refused.stderr.partition("error: ")[2]
    assert all(word in error for word in ("c.csv", "line 3", "--on-error skip"))
    result = megalith("train", *flags, "--on-error", "skip")
    assert result.exit_code == 0, result.output
    assert "skipped 1 row: wrong type; first: " in result.output
    assert "c.csv: line 3, column 'click': 'maybe' is not a number" in plain(result.output)
    shown = [line for line in result.stderr.splitlines() if "looks like several ids" in line]
    assert [line.startswith("warning: ") for line in shown] == [True]
    assert "UserWarning" not in result.stderr


def test_data_without_a_valid_row_is_an_error(tmp_path: Path, config: Path) -> None:
    table = parquet.read_table(tmp_path / "test.parquet")
    wrong = table.set_column(0, "click", pa.array([5.0] * len(table)))
    parquet.write_table(wrong, tmp_path / "wrong.parquet")
    flags = ("train", "--config", config, "--on-error", "skip")
    found = error(*flags, "--run", tmp_path / "none", "--path", tmp_path / "wrong.parquet")
    assert "the training data has no valid row; skipped 192 rows: label not 0 or 1 (first: " in found
    assert "wrong.parquet: row 0, column 'click': 5.0 is not 0 or 1" in found
    assert not (tmp_path / "none" / "checkpoint").exists()
    megalith(*flags, "--run", tmp_path / "run", "--max-steps", 1)
    found = error("eval", tmp_path / "run", tmp_path / "wrong.parquet", "--on-error", "skip")
    assert "there is no valid row to evaluate; skipped 192 rows: label not 0 or 1; first: " in found


def test_eval_and_predict_have_the_data_flags_of_train_and_report_dropped_rows(tmp_path: Path) -> None:
    dense = ', dense = ["price"]'
    flags = csv_flags(tmp_path, "click,user,price\n" + "1,ann,1.5\n0,bob,2\n" * 8, dense)
    run, bad, out, skip = tmp_path / "run", tmp_path / "bad.csv", tmp_path / "out.csv", ("--on-error", "skip")
    bad.write_text("click,user,price\n1,ann,1\nmaybe,bob,2\n0,cid,x\n0,dan,4\n")
    words("train", *flags)

    assert "line 3" in error("eval", run, bad)
    evaluated = words("eval", run, bad, *skip, "--batch-size", 2)
    assert "skipped 2 rows: wrong type" in evaluated
    assert "2 samples" in evaluated
    assert as_json("eval", run, bad, *skip)["skipped"] == {"wrong type": 2}

    assert "line 4" in error("predict", run, bad, out)
    assert not out.exists()
    predicted = words("predict", run, bad, out, *skip)
    for text in ("skipped 1 row: ", "3 probabilities", "skipped rows have no line in it"):
        assert text in predicted

    (tmp_path / "more").mkdir()
    flags = csv_flags(tmp_path / "more", bad.read_text(), dense)
    both = words("train", *flags, "--test-path", bad, *skip)
    assert "skipped 2 rows of the test data: wrong type" in both


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
    words("train", "--run", run, "--resume", "--max-steps", step + 2)


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path, config: Path) -> None:
    run = tmp_path / "run"
    megalith("train", "--config", config, "--run", run, "--max-steps", 3)
    before = (run / "checkpoint/manifest.json").read_text()
    again = words("train", "--run", run, "--resume")
    assert "nothing was left to do: the run ended at step 3" in again
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
    assert words in plain(result.output)


def test_servers_without_ray_and_workers_of_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    monkeypatch.setitem(sys.modules, "ray", None)
    found = error("train", "--data", "synthetic", "--servers", 1, "--run", run)
    assert "parameter servers need ray" in found
    assert ".[servers]" in found
    assert not (run / "checkpoint").exists()
    killed = run / "servers" / "1" / "log"  # what a run that was killed leaves
    killed.mkdir(parents=True)
    (run / ".lock").write_text("1\n")
    found = plain(error("workers", run, 2))
    assert list(killed.parents[1].iterdir()) == [killed.parent]
    assert "does not train on parameter servers now: start it with --servers" in found
