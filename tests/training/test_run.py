"""Runs: their files, stopping and resuming, and errors of wrong data."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import Adam, Capacity, MinCount, checkpoint
from megalith.data import MemoryReader, Samples
from megalith.errors import CheckpointError, InputError, MegalithError, UsageError
from megalith.ragged import Ragged
from megalith.reporting.report import write_report
from megalith.training import Run, RunConfig, Watcher, evaluate, load_trained, open_reader
from megalith.training.directory import RunLock

pytestmark = pytest.mark.usefixtures("restore_threads")


def config(**changes: Any) -> RunConfig:
    base = RunConfig.from_dict(
        {
            "data": {"kind": "synthetic", "batch_size": 64, "options": {"num_batches": 12}},
            "model": {"dim": 4, "options": {"hidden": [8]}},
            "train": {"log_every": 4, "threads": 1, "epochs": 2},
        }
    )
    return base.changed(**changes)


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def kept(run: Path) -> list[int]:
    return checkpoint.Rotation(run / "checkpoints").steps()


class StopAt(Watcher):
    """Stops a run at a step."""

    def __init__(self, run: Run, step: int) -> None:
        self.run, self.step = run, step

    def batch(self, step: int, samples: int, loss: float) -> None:
        if step == self.step:
            self.run.stop()


def everything(run: Run) -> dict[str, Tensor]:
    state = {k: v for k, v in run.model.state_dict().items() if isinstance(v, Tensor)}
    for name, table in run.model.embeddings.shards.local.items():
        (chunk,) = table.scan(10**6)
        order = torch.argsort(chunk.ids)
        state |= {f"{name}.ids": chunk.ids[order], f"{name}.rows": chunk.rows[order]}
        state |= {f"{name}.{k}": v[order] for k, v in chunk.state.items()}
    return state


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [key for key in a if not torch.equal(a[key], b[key])] == []


def test_a_run_leaves_its_config_metrics_checkpoint_and_evaluation(tmp_path: Path) -> None:
    run = Run(config(), tmp_path / "run")
    run.train()
    result = run.evaluate()

    assert result is not None
    assert 0.5 < result.auc < 1
    assert json.loads((run.directory / "evaluation.json").read_text())["samples"] == 64
    lines = log_of(run.directory)
    assert [line["step"] for line in lines] == [4, 8, 12, 16, 20, 24]
    assert lines[-1]["samples"] == 24 * 64
    assert lines[-1]["rows"]["user"] == len(run.model.embeddings.shards.local["user"])
    assert lines[-1]["memory"] > 0
    counts = json.loads((run.directory / "frequencies.json").read_text())["features"]["context"]["counts"]
    assert sum(times * ids for times, ids in counts) == 24 * 64
    assert RunConfig.from_dict(json.loads((run.directory / "config.json").read_text())) == run.config
    assert list((run.directory / "tensorboard").iterdir())

    model, loaded = load_trained(tmp_path / "run")
    assert evaluate(model, Run(loaded, tmp_path / "other").source.test) == result  # type: ignore[arg-type]


VALIDATING = {"train_validate_every": 3, "train_keep_best": True}
SAVING = {"train_save_every": 1, "train_save_async": True, "train_keep_last": 100}


@pytest.mark.parametrize(
    ("stop_at", "changes"), [(3, {}), (8, {}), (12, {}), (17, {}), (5, SAVING), (17, SAVING), (8, VALIDATING)]
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_by_bit(
    tmp_path: Path, stop_at: int, changes: dict[str, Any]
) -> None:
    whole = Run(config(), tmp_path / "whole")
    whole.train()

    first = Run(config(**changes), tmp_path / "parts")
    first.train(StopAt(first, stop_at))
    assert first.step == stop_at
    assert kept(first.directory) == (list(range(1, stop_at + 1)) if changes is SAVING else [])
    torch.rand(100)  # random numbers drawn in between
    second = Run.resume(tmp_path / "parts")
    second.train()

    assert second.step == whole.step == 24
    assert_same(everything(second), everything(whole))
    parts, complete = ((tmp_path / name / "frequencies.json").read_text() for name in ("parts", "whole"))
    assert parts == complete
    steps = [line["step"] for line in log_of(tmp_path / "parts") if line["kind"] == "train"]
    assert steps == sorted({stop_at, 4, 8, 12, 16, 20, 24})  # the part before the stop has its own line


def test_a_run_that_was_killed_before_it_kept_its_best_checkpoint_keeps_it_when_it_resumes(
    tmp_path: Path,
) -> None:
    run = Run(config(**VALIDATING), tmp_path / "run")
    run.train(StopAt(run, 3))
    shutil.rmtree(tmp_path / "run" / "best")
    Run.resume(tmp_path / "run").close()
    assert checkpoint.read_manifest(tmp_path / "run" / "best").progress["step"] == 3


def test_a_run_that_has_ended_is_not_validated_again(tmp_path: Path) -> None:
    run = Run(config(train_max_steps=5, **VALIDATING), tmp_path / "run")
    run.train()
    for _ in range(2):
        run = Run.resume(tmp_path / "run")
        run.train()
    steps = [line["step"] for line in log_of(tmp_path / "run") if line["kind"] == "eval"]
    assert steps == [3, 5]


def test_policies_act_in_a_run_and_are_counted_also_after_a_resume(tmp_path: Path) -> None:
    limited = replace(
        config(train_admission="min_count=2", train_max_steps=12),
        tables={"user": {"eviction": "capacity=70"}},
    )
    Run(limited, tmp_path / "run").train()
    run = Run.resume(tmp_path / "run", {"max_steps": 20})
    run.train()

    tables = run.model.embeddings.tables
    assert tables["user"].config.eviction == (Capacity(70),)
    assert tables["item"].config.eviction == ()
    assert tables["user"].config.admission == tables["item"].config.admission == MinCount(2)
    lines = log_of(run.directory)
    for line in lines:
        for name, counts in line["counters"].items():
            assert line["rows"][name] == counts["created"] - counts["evicted"] - counts["removed"]
        assert sum(line["memory_parts"].values()) == line["memory"]
    for key in ("created", "evicted", "refused"):
        values = [line["counters"]["user"][key] for line in lines]
        assert values == sorted(values)
        assert values[-1] > values[0]
    assert lines[-1]["counters"]["item"]["evicted"] == 0
    assert lines[-1]["counters"]["user"]["pending"] == tables["user"].pending()[0].numel()
    page = write_report(run.directory).read_text()
    assert "Rows created, evicted and refused" in page
    assert f'<td>user</td><td class="value">{lines[-1]["counters"]["user"]["created"]:,}</td>' in page


def test_a_table_that_is_not_trained_and_settings_of_the_optimizer(tmp_path: Path) -> None:
    frozen = replace(
        config(
            train_max_steps=3,
            train_table_optimizer="adam",
            train_table_options="bias_correction=row, betas=0.8:0.9",
            train_huge_pages=False,
        ),
        tables={"user": {"trainable": False, "huge_pages": True}},
    )
    run = Run(frozen, tmp_path / "run")
    run.train()

    tables = run.model.embeddings.tables
    assert len(tables["user"]) == 0 < len(tables["item"])
    assert tables["item"].config.segments[0].optimizer == Adam(0.05, betas=(0.8, 0.9), bias_correction="row")
    assert (tables["user"].config.huge_pages, tables["item"].config.huge_pages) == (True, False)


def test_the_hit_rate_of_gpu_memory_is_in_the_log_and_the_report(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    limited = config(
        data_batch_size=24,
        data_options={"num_batches": 5},  # ids that have rows in host memory occur again
        model_dim=2,
        model_features=["user"],
        model_options={"hidden": [2]},
        train_engine="cuda",
        train_device_bytes=64,
        train_max_steps=4,
        train_log_every=1,
    )
    run = Run(limited, tmp_path / "run")
    run.train()

    lines = log_of(run.directory)
    total = run.host_tier()
    assert set(total) == set(run.model.embeddings.tables)
    assert sum(use.misses for use in total.values()) > 0
    for name, use in total.items():
        assert sum(line["host_tier"][name]["hits"] for line in lines) == use.hits
        last = lines[-1]["host_tier"][name]
        assert (last["device_rows"], last["host_rows"]) == (use.device_rows, use.host_rows)
        assert last["hit_rate"] == pytest.approx(last["hits"] / max(1, last["hits"] + last["misses"]))
    assert "Hit rate of GPU memory" in write_report(run.directory).read_text()


def test_rows_expire_in_a_run(tmp_path: Path) -> None:
    # Synthetic data has no times, so rows get the time of the clock; at the end of a pass of 25 steps
    # min_norm has visited every row.
    run = Run(config(train_eviction="min_norm=1e9", train_evict_every=1, train_epochs=3), tmp_path / "run")
    run.train()

    counts = run.counters()
    assert all(each["evicted"] > 0 for each in counts.values())
    assert run.rows() == {name: each["created"] - each["evicted"] for name, each in counts.items()}


def test_a_second_process_does_not_train_in_the_directory(tmp_path: Path) -> None:
    run = Run(config(train_max_steps=1), tmp_path / "run")
    with RunLock(run.directory), pytest.raises(UsageError, match="another process trains in"):
        run.train()
    run.train()
    assert run.step == 1


def test_a_run_saves_by_the_clock_unless_save_every_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(0, 100_000, 100))  # each look at the clock is 100 seconds later
    monkeypatch.setattr("megalith.training.run.clock.monotonic", lambda: float(next(times)))
    run = Run(config(train_max_steps=10, train_save_interval=400.0, train_keep_last=10), tmp_path / "a")
    run.train()
    assert kept(run.directory) == [4, 8, 10]
    assert RunConfig().train.save_interval == 600.0
    run = Run(config(train_max_steps=10, train_save_every=7, train_keep_last=10), tmp_path / "b")
    run.train()
    assert kept(run.directory) == [7, 10]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_options": {"hiden": [8]}}, r"model\.options: unknown option 'hiden' \(known: hidden, drop"),
        ({"data_options": {"batches": 3}}, r"data\.options: unknown option 'batches' \(known: .*num_batches"),
        ({"data_options": {"num_batches": "ten"}}, r"options\.num_batches must be an integer, got 'ten"),
        ({"model_options": {"dropout": 2.0}}, r"dropout must be from 0 to below 1, got 2\.0"),
        ({"model_options": {"hidden": 8}}, r"DeepFM: hidden must be a list, got int"),
        ({"model_name": "dlrm", "model_options": {"bottom": [-3]}}, r"DLRM: bottom.* must be .*got -3"),
        ({"model_options": {"weight_optimizer": "adam"}}, r"optimizer must be .*'?adam"),
        ({"model_tables": {"user": 3}}, r"tables must map features to tables, got \{'user': 3\}"),
        ({"data_options": {"features": 3}}, r"synthetic data: features must be a list of SyntheticFeature"),
        ({"model_name": "din", "model_options": {}}, r"options: option 'target' is required \(known: "),
        ({"data_kind": "parquet"}, r"data\.path must name"),
        ({"data_kind": "csv", "data_path": "x.csv", "data_options": {}}, r"\[data.schema\]"),
        ({"model_features": ["user", "shoe"]}, "no feature 'shoe'"),
    ],
)
def test_wrong_options_list_the_known_ones(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MegalithError, match=words) as caught:
        Run(config(**changes), tmp_path / "run")
    assert "__init__" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "batch_size", "expected"),
    [(None, 16_383, 1), (None, 16_384, 2), (None, 65_536, 4), (3, 1024, 3)],
)
def test_the_number_of_threads_follows_the_ids_of_a_step(
    tmp_path: Path, given: int | None, batch_size: int, expected: int
) -> None:
    settings = config(data_batch_size=batch_size, data_options={"num_batches": 1})  # 4 features
    settings = replace(settings, train=replace(settings.train, threads=given, epochs=1))
    torch.set_num_threads(4)
    run = Run(settings, tmp_path / "run")
    used = []
    look = Watcher()
    look.batch = lambda *_: used.append(torch.get_num_threads())  # type: ignore[method-assign]
    run.train(look)
    run.evaluate(lambda samples: used.append(torch.get_num_threads()))
    assert (run.threads, used) == (expected, [expected, expected])
    assert torch.get_num_threads() == (4 if given is None else given)  # the caller's, unless it is given


def test_a_checkpoint_saved_while_training_continues_is_of_its_step(tmp_path: Path) -> None:
    run = Run(config(train_save_every=5, train_save_async=True, train_keep_last=2), tmp_path / "a")
    run.train()
    Run(config(train_max_steps=20), tmp_path / "b").train()
    found = checkpoint.diff(tmp_path / "a/checkpoints/step-000000000020", tmp_path / "b/checkpoint")
    assert all(table.weights == table.added == table.removed == 0 for table in found.tables.values())
    assert (found.dense, found.optimizer, found.steps) == ({}, False, {})
    assert set(found.progress) <= {"seconds", *(f"config.train.{k}" for k in run.config.to_dict()["train"])}


def test_earlier_checkpoints_are_kept_by_the_rules(tmp_path: Path) -> None:
    Run(config(train_save_every=2, train_keep_last=2, train_keep_every=8), tmp_path).train()
    assert kept(tmp_path) == [8, 16, 22, 24]
    for step in (8, 16, 22, 24):
        assert checkpoint.verify(tmp_path / f"checkpoints/step-{step:012}").problems == []
    model, _ = load_trained(tmp_path / "checkpoints/step-000000000008")
    assert model.embeddings.global_step == 8

    newest = checkpoint.read_manifest(tmp_path / "checkpoint")
    assert newest == checkpoint.read_manifest(tmp_path / "checkpoints/step-000000000024")
    for file in newest.all_files():  # one file, two names
        assert (tmp_path / "checkpoint" / file.path).stat().st_nlink == 2

    Run(config(train_save_every=5, train_keep_every=10), tmp_path, start_over=True).train()
    assert kept(tmp_path) == [10, 20, 24]
    Run(config(train_save_every=5), tmp_path, start_over=True).train()
    assert not (tmp_path / "checkpoints").exists()


def test_without_hard_links_checkpoints_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr("os.link", refuse)
    Run(config(train_save_every=12, train_keep_last=2), tmp_path).train()
    assert kept(tmp_path) == [12, 24]
    assert checkpoint.verify(tmp_path / "checkpoints/step-000000000012").problems == []


def test_a_run_that_is_started_over_drops_what_the_old_one_left(tmp_path: Path) -> None:
    run = Run(config(train_max_steps=8, train_save_every=4, train_keep_last=9), tmp_path)
    run.train()
    run.evaluate()
    write_report(tmp_path)
    run = Run(config(train_max_steps=3, train_keep_last=9), tmp_path, start_over=True)
    found = [path.name for path in tmp_path.iterdir() if path.name != "checkpoints"]
    assert sorted(found) == [".lock", "checkpoint", "config.json", "metrics.jsonl"]
    run.train()
    assert kept(tmp_path) == [3]


def test_the_report_counts_every_sample_and_names_the_step_of_an_earlier_evaluation(tmp_path: Path) -> None:
    run = Run(config(train_max_steps=5), tmp_path)
    run.train()
    assert [(line["step"], line["samples"]) for line in log_of(tmp_path)] == [(4, 256), (5, 320)]
    run.evaluate()
    page = write_report(tmp_path).read_text()
    assert "samples trained</span><b>320</b>" in page
    assert "held-out AUC</span>" in page
    run = Run.resume(tmp_path, {"max_steps": 9})
    run.train()
    page = write_report(tmp_path).read_text()
    for text in ("held-out AUC, step 5 of 9</span>", "held-out log loss, step 5 of 9</span>"):
        assert text in page
    assert "Evaluated at step 5 of 9." in page


def test_a_watcher_receives_the_progress_of_a_save(tmp_path: Path) -> None:
    events: list[tuple[str, int]] = []
    note = Watcher()
    note.saving = lambda rows: events.append(("saving", rows))  # type: ignore[method-assign]
    note.wrote = lambda rows: events.append(("wrote", rows))  # type: ignore[method-assign]
    note.saved = lambda: events.append(("saved", 0))  # type: ignore[method-assign]
    run = Run(config(train_max_steps=2), tmp_path)
    run.train(note)
    rows = sum(run.rows().values())
    assert events[0] == ("saving", rows)
    assert events[-2:] == [("wrote", rows), ("saved", 0)]


def test_a_save_that_fails_while_training_continues_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(config(train_save_every=5, train_save_async=True), tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("megalith.storage.store.LocalStore.write", full)
    with pytest.raises(OSError, match="disk full"):
        run.train()


def test_directories_without_a_run_or_with_one_and_changes_a_resumed_run_refuses(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load_trained(tmp_path)
    run = Run(config(train_epochs=1), tmp_path)
    run.train()
    checkpoint.save(run.model, tmp_path / "plain")
    with pytest.raises(CheckpointError, match="megalith train"):
        load_trained(tmp_path / "plain")
    with pytest.raises(UsageError, match=r"--resume.*--start-over"):
        Run(config(), tmp_path)
    with pytest.raises(InputError, match=r"train\.lr cannot change"):
        Run.resume(tmp_path, {"lr": 1.0})
    run = Run.resume(tmp_path, {"epochs": 2})
    run.train()
    assert run.step == 24
    with pytest.raises(InputError, match="not read from files"):
        open_reader(config().data, Path("x.parquet"))


def test_evaluation_counts_weights_and_refuses_data_without_labels() -> None:
    class Ones(torch.nn.Module):
        def forward(self, features: Any, dense: Any = None, time: Any = None) -> Tensor:
            return features["x"].values.float()

    column = Ragged.from_lists([[0], [2], [2]])
    weighted = Samples({"x": column}, torch.tensor([1.0, 0.0, 1.0]), weights=torch.tensor([1.0, 3.0, 0.0]))
    result = evaluate(Ones(), MemoryReader(weighted, batch_size=2))
    expected = (0.6931472 + 3 * 2.1269280) / 4  # log 2, and log(1 + e^2)
    assert result.log_loss == pytest.approx(expected)
    assert result.samples == 3
    assert result.auc == 0.0

    without = Samples({"x": column}, torch.full((3,), float("nan")))
    with pytest.raises(InputError, match="no labels"):
        evaluate(Ones(), MemoryReader(without, batch_size=2))


def test_a_run_computes_on_the_device_of_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = Run(config(train_device="auto"), tmp_path / "auto")  # there is no GPU
    assert {parameter.device.type for parameter in run.model.parameters()} == {"cpu"}
    assert {table.engine for table in run.model.embeddings.shards.local.values()} == {"cpu"}
    with pytest.raises(UsageError, match="--device cuda needs an NVIDIA GPU"):
        Run(config(train_device="cuda"), tmp_path / "cuda")
    with pytest.raises(InputError, match=r"train\.device must be one of"):
        config(train_device="tpu")
