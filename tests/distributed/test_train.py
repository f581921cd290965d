"""Runs over ranks: the same bits on any number, ranks that die, stop or bring bad rows, who writes what."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from megalith import SyncShards, checkpoint
from megalith.data import MemoryReader, ParquetReader, Samples
from megalith.ragged import Ragged
from megalith.shards import CommReport
from megalith.training import Run, RunConfig, Watcher, evaluate, load_trained
from megalith.training.batches import RunBatches
from tests.distributed.ranks import assert_same_checkpoints, error_of, run_ranks

pytestmark = pytest.mark.usefixtures("restore_threads")
STEPS = 12
MODES = [("roundrobin", None), ("hash_roundrobin", None), ("continuous", 1 << 61)]


def config(**changes: Any) -> RunConfig:
    base = RunConfig.from_dict(
        {
            "data": {"kind": "synthetic", "batch_size": 61, "options": {"num_batches": STEPS // 2}},
            "model": {"dim": 4, "options": {"hidden": [8]}},
            "train": {"log_every": 4, "threads": 1, "epochs": 2, "timeout": 60.0},
        }
    )
    return base.changed(**changes)


def log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in log(run)]


# ---- what ranks do


def train(settings: RunConfig, folder: Path) -> float:
    run = Run(settings, folder)
    run.train()
    result = run.evaluate()
    assert result is not None
    return result.log_loss


def resume(folder: Path) -> int:
    run = Run.resume(folder)
    run.train()
    return run.step


def continue_from(base: Path, folder: Path) -> tuple[int, bool, list[dict[str, Any]]]:
    """Rank 1 is told to stop in the middle of the new data, and the run is resumed."""
    changes: dict[str, Any] = {"data_options": {"num_batches": 4, "seed": 9}, "train_progressive": "4"}
    run = Run.continue_from(base, folder, **changes)
    run.train(At(STEPS + 2, run.stop) if run.ranks.rank else None)
    at = run.step, run.stopped
    Run.resume(folder).train()
    return *at, [line for line in log(folder) if line["kind"] == "period"]


class At(Watcher):
    """Does something after a step."""

    def __init__(self, step: int, work: Any) -> None:
        self.step, self.work = step, work

    def batch(self, step: int, samples: int, loss: float) -> None:
        if step == self.step:
            self.work()


def killed(settings: RunConfig, folder: Path) -> str:
    """Rank 1 dies after step 7, in the midst of a run that saves every 3."""
    run = Run(settings, folder)
    die = At(7, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return error_of(run.train, die if dist.get_rank() == 1 else None)


def bad_label(settings: RunConfig, folder: Path) -> tuple[str, int]:
    """The last row of the third batch has no label: the others' rows are good."""
    run = Run(settings, folder)
    labels = torch.ones(24)
    labels[23] = float("nan")
    ids = torch.arange(24)
    features = {name: Ragged(ids, torch.arange(25)) for name in run.source.train.feature_names}
    run.batches = RunBatches(MemoryReader(Samples(features, labels), batch_size=8), run.ranks)
    return error_of(run.train), sum(run.rows().values())


def measured(settings: RunConfig, folder: Path) -> list[tuple[int, list[str], tuple[float, ...]]]:
    reports: list[CommReport] = []

    class Keep(Watcher):
        def communicated(self, report: CommReport) -> None:
            reports.append(report)

    Run(settings, folder).train(Keep())
    return [(r.lookups, list(r.tables), r.tables["user"]["ids"].by_rank) for r in reports]


def placed(settings: RunConfig, folder: Path) -> tuple[str, tuple[str, str], float]:
    shards = Run(settings, folder).model.embeddings.shards
    assert isinstance(shards, SyncShards)
    return shards.local["user"].stats().engine, shards.wire, shards.exchange.timeout


def validated(settings: RunConfig, folder: Path) -> tuple[int, bool, int]:
    run = Run(settings, folder)
    run.train()
    return run.step, run.stopped_early, run.best.step


# ---- tests


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, four micro-batches, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(config(train_micro_batches=4), folder)
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
def test_four_micro_batches_give_the_same_bits_on_any_number_of_ranks(
    tmp_path: Path, whole: Path, ranks: int
) -> None:
    found = run_ranks(train, config(train_micro_batches=4), tmp_path / "run", world_size=ranks)

    assert_same_checkpoints(tmp_path / "run", whole)
    assert losses(tmp_path / "run") == losses(whole)
    assert [line["rows"] for line in log(tmp_path / "run")] == [line["rows"] for line in log(whole)]
    assert [line["auc"] for line in log(tmp_path / "run")] == [line["auc"] for line in log(whole)]
    expected = json.loads((whole / "evaluation.json").read_text())["log_loss"]
    assert found == pytest.approx([expected] * ranks, rel=1e-5)


def test_a_run_that_lost_a_rank_goes_on_with_the_same_bits_on_any_number(tmp_path: Path, whole: Path) -> None:
    settings = config(train_micro_batches=4, train_save_every=3)
    said, _ = run_ranks(killed, settings, tmp_path / "run", lost=[1])
    assert said.startswith("RankFailedError: SyncShards.lookup")
    assert "rank 1 has left: its process was killed, crashed or called os._exit" in said
    assert checkpoint.read_manifest(tmp_path / "run/checkpoint").progress["step"] == 6

    for ranks in (1, 2, 4):
        again = tmp_path / f"on {ranks}"
        shutil.copytree(tmp_path / "run", again)
        steps = [resume(again)] if ranks == 1 else run_ranks(resume, again, world_size=ranks)
        assert steps == [STEPS] * ranks
        assert_same_checkpoints(again, whole)
        assert losses(again)[-1] == losses(whole)[-1]


def test_ranks_continue_on_other_data_with_the_same_bits_score_rows_before_and_stop_at_one_step(
    tmp_path: Path, whole: Path
) -> None:
    *_, alone = continue_from(whole, tmp_path / "alone")
    (*at, spread), (*other, _) = run_ranks(continue_from, whole, tmp_path / "spread", world_size=2)

    assert at == other == [STEPS + 3, True]  # rank 0 learned of the stop in that step
    assert_same_checkpoints(tmp_path / "spread", tmp_path / "alone")
    for lines in (alone, spread):
        assert sum(line["samples"] for line in lines) == 4 * 61  # two epochs, of which one is scored
    assert alone[0]["period"] == spread[0]["period"] == "steps 12 to 15"


def test_ranks_validate_together_stop_early_at_the_same_step_and_keep_the_best(tmp_path: Path) -> None:
    settings = config(
        train_validate_every=2, train_patience=2, train_keep_best=True, train_table_lr=50.0, train_epochs=9
    )
    (step, early, best), other = run_ranks(validated, settings, tmp_path / "run")
    assert (step, early, best) == other
    assert early
    assert step == best + 4
    found = {line["step"]: line["loss"] for line in log(tmp_path / "run") if line["kind"] == "eval"}
    assert list(found) == list(range(2, step + 1, 2))
    assert best == min(found, key=found.__getitem__)
    model, loaded = load_trained(tmp_path / "run" / "best")
    source = Run(loaded, tmp_path / "other").source.validation
    assert source is not None
    assert evaluate(model, source).log_loss == pytest.approx(found[best], rel=1e-5)


@pytest.mark.parametrize(("batch_size", "ranks"), [(64, 2), (3, 4)])
def test_without_micro_batches_each_rank_has_one_and_the_loss_is_that_of_the_whole_batch(
    tmp_path: Path, batch_size: int, ranks: int
) -> None:
    settings = config(data_batch_size=batch_size)  # of 3 rows, one of 4 ranks gets none
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    train(settings, alone)
    run_ranks(train, settings, spread, world_size=ranks)

    assert [loss for _, loss in losses(spread)] == pytest.approx([x for _, x in losses(alone)], rel=1e-5)
    (here, _), (there, _) = load_trained(spread), load_trained(alone)
    for name, weight in there.named_parameters():
        torch.testing.assert_close(here.get_parameter(name), weight, rtol=1e-4, atol=1e-6)
    for name, table in there.embeddings.shards.local.items():
        (chunk,) = table.scan(10**6)
        rows = here.embeddings.shards.local[name].lookup(chunk.ids)
        torch.testing.assert_close(rows, chunk.rows, rtol=1e-4, atol=1e-5)
        assert len(here.embeddings.shards.local[name]) == len(table)


def test_a_loss_that_is_not_finite_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(bad_label, config(train_epochs=1), tmp_path / "run")
    assert first == second
    assert first[0].startswith("InputError: step 2: the mean loss of all micro-batches is nan")
    assert first[1] == 4 * 16  # the rows of two good batches


def test_rank_0_alone_writes_and_counts_all(tmp_path: Path) -> None:
    settings = config(
        train_comm_metrics="user,tags",
        train_keep_last=2,
        train_save_every=5,
        train_save_async=True,
        train_admission="min_count=3",
    )
    first, second = run_ranks(measured, settings, tmp_path / "run")
    assert second == []
    assert [(lookups, tables) for lookups, tables, _ in first] == [(4, ["user", "tags"])] * 3
    assert [ids for *_, ids in first] == [(4 * 30, 4 * 31)] * 3  # 61 rows: 30 and 31

    lines = log(tmp_path / "run")
    assert [line["step"] for line in lines] == [4, 8, 12]
    assert lines[-1]["samples"] == STEPS * 61
    counts = json.loads((tmp_path / "run/frequencies.json").read_text())["features"]["context"]["counts"]
    assert sum(times * ids for times, ids in counts) == STEPS * 61
    assert len(list((tmp_path / "run/tensorboard").iterdir())) == 1
    assert checkpoint.Rotation(tmp_path / "run/checkpoints").steps() == [10, 12]
    saved = checkpoint.read_manifest(tmp_path / "run/checkpoint")
    assert lines[-1]["rows"] == {
        name.removeprefix("embeddings."): entries[-1].live for name, entries in saved.tables().items()
    }
    counters = lines[-1]["counters"]
    assert counters == saved.progress["counters"]
    assert {name: counts["created"] for name, counts in counters.items()} == lines[-1]["rows"]
    assert counters["user"]["refused"] >= counters["user"]["pending"] > 0
    assert lines[-1]["memory"] == sum(lines[-1]["memory_parts"].values())


def test_comm_metrics_reach_the_log_and_tensorboard(tmp_path: Path) -> None:
    run_ranks(measured, config(train_comm_metrics="*", train_epochs=1), tmp_path / "run")
    numbers = [(line["step"], line["comm"]["comm/item/ids/max"]) for line in log(tmp_path / "run")]
    assert numbers == [(4, 4 * 31), (6, 2 * 31)]
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "run/tensorboard"), {"histograms": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"loss", "comm/lookups", "comm/user/bytes_sent/rank1", "comm_wait/rows/max"} <= set(tags)
    assert [(e.step, e.value) for e in events.Scalars("comm/item/ids/max")] == [(4, 4 * 31), (6, 2 * 31)]
    drawn = [e.histogram_value for e in events.Histograms("comm/item/ids_splits")]
    assert [each.num for each in drawn] == [4, 4]  # a value per sender and receiver
    sent = [e.histogram_value.sum for e in events.Histograms("comm/item/ids_dist")]
    assert [each.sum for each in drawn] == sent != [0, 0]


@pytest.mark.parametrize(("mode", "block_size"), MODES[1:])  # the first is the default
def test_the_routing_mode_reaches_the_tables_and_the_checkpoint(
    tmp_path: Path, whole: Path, mode: str, block_size: int | None
) -> None:
    settings = config(train_dist_type=mode, train_block_size=block_size, train_micro_batches=4)
    run_ranks(train, settings, tmp_path / "run")

    assert_same_checkpoints(tmp_path / "run", whole)  # where rows lie is not what they are
    entry = checkpoint.read_manifest(tmp_path / "run/checkpoint").tables()["embeddings.user"][-1]
    assert (entry.routing.dist_type, entry.routing.num_shards) == (mode, 2)
    assert entry.routing.block_size == block_size
    assert {piece.shard for piece in entry.pieces} == {0, 1}
    model, _ = load_trained(tmp_path / "run")
    assert model.embeddings.shards.configs["user"].dist_type == mode


def test_engine_wire_and_timeout_reach_the_tables(tmp_path: Path) -> None:
    settings = config(train_engine="reference", train_wire="rows=int8,grads=bfloat16")
    found = run_ranks(placed, settings, tmp_path / "run")
    assert found == [("reference", ("int8", "bfloat16"), 60.0)] * 2


def test_a_directory_with_a_run_is_refused_by_all_ranks(tmp_path: Path, whole: Path) -> None:
    first, second = run_ranks(error_of, Run, config(), whole)
    assert first.startswith("UsageError: ")
    assert "already holds a run" in first
    assert second == f"RankFailedError: rank 0: {first}"


# ---- files: each rank reads its own shard

ROWS = 250


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("files") / "clicks.parquet"
    columns = {
        "row": list(range(ROWS)),
        "user": [i * 7 % 13 for i in range(ROWS)],
        "click": [i % 3 % 2 for i in range(ROWS)],
        "weight": [1.0 + i % 2 for i in range(ROWS)],
        "time": list(range(1_700_000_000, 1_700_000_000 + ROWS)),
    }
    pq.write_table(pa.table(columns), path, row_group_size=100)
    return str(path)


def of_files(path: str, **changes: Any) -> RunConfig:
    features = {"row": "row", "user": "user"}
    schema = {"label": "click", "weight": "weight", "time": "time", "features": features}
    data = {"kind": "parquet", "path": path, "test_path": path, "batch_size": 20, "schema": schema}
    return RunConfig.from_dict({**config().to_dict(), "data": data}).changed(train_epochs=1, **changes)


def read_shards(settings: RunConfig, folder: Path) -> tuple[list[int], int, int, float]:
    """Trains and evaluates. Returns the rows decoded while training, all samples, steps, and the log loss."""
    decoded: list[int] = []
    decode = ParquetReader._decode

    def counting(self: ParquetReader, chunk: Any) -> Any:
        decoded.extend(chunk.numbers.tolist())
        return decode(self, chunk)

    ParquetReader._decode = counting  # type: ignore[assignment, method-assign]
    run = Run(settings, folder)
    run.train()
    rows = list(decoded)
    result = run.evaluate()
    assert result is not None
    assert result.samples == ROWS
    return rows, run.samples, run.step, result.log_loss


def stop_and_resume(settings: RunConfig, folder: Path) -> tuple[int, int]:
    run = Run.resume(folder) if (folder / "checkpoint").exists() else Run(settings, folder)
    run.train(At(6, run.stop))
    return run.step, run.samples


def test_each_rank_decodes_its_own_row_groups_only(tmp_path: Path, file: str) -> None:
    """Rank 0 has 150 rows in 15 batches of 10, rank 1 has 100 rows and then 5 empty batches."""
    first, second = run_ranks(read_shards, of_files(file), tmp_path / "run")

    assert (first[0], second[0]) == ([*range(100), *range(200, ROWS)], list(range(100, 200)))
    assert first[1:] == second[1:] == (ROWS, 15, first[3])
    assert [line["samples"] for line in log(tmp_path / "run")] == [80, 160, 220, ROWS]
    model, _ = load_trained(tmp_path / "run")
    assert sorted(next(model.embeddings.shards.local["row"].scan(1000)).ids.tolist()) == list(range(ROWS))
    alone = Run.resume(tmp_path / "run")
    result = alone.evaluate()
    assert result is not None
    assert result.log_loss == pytest.approx(first[3], rel=1e-6)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
def test_shards_are_continued_on_any_number_of_ranks_without_a_row_lost_or_repeated(
    tmp_path: Path, file: str, before: int, after: int
) -> None:
    settings, folder = of_files(file), tmp_path / "run"
    for ranks in (before, after):
        done = (
            [stop_and_resume(settings, folder)]
            if ranks == 1
            else run_ranks(stop_and_resume, settings, folder, world_size=ranks)
        )
    assert {samples for _, samples in done} == {ROWS}
    model, _ = load_trained(folder)
    assert len(model.embeddings.shards.local["row"]) == ROWS


@pytest.mark.parametrize(
    ("files", "stop_at", "after"), [(3, 7, 1), (3, 7, 2), (1, 2, 1), (1, 2, 2), (1, 3, 2)]
)
def test_shards_read_a_file_that_is_appended_in_the_midst_of_an_epoch(
    tmp_path: Path, files: int, stop_at: int, after: int
) -> None:
    """3 files: rank 1 has read its only one after 5 steps. 1 file: each rank reads half of it in 3 steps."""
    data, folder = tmp_path / "data", tmp_path / "run"
    for number in range(files):
        rows_file(data, number)
    settings = of_files(str(data), train_max_steps=stop_at)
    run_ranks(train, settings, folder)

    rows_file(data, 9)
    run_ranks(finish, folder, world_size=after)
    model, _ = load_trained(folder)
    expected = [1000 * number + i for number in (*range(files), 9) for i in range(50)]
    assert sorted(next(model.embeddings.shards.local["row"].scan(1000)).ids.tolist()) == expected
    assert log(folder)[-1]["samples"] == len(expected)


def rows_file(folder: Path, number: int) -> None:
    folder.mkdir(exist_ok=True)
    rows = [1000 * number + i for i in range(50)]
    columns = {"row": rows, "user": rows, "click": [i % 2 for i in rows]}
    columns |= {"weight": [1.0] * 50, "time": rows}
    pq.write_table(pa.table(columns), folder / f"{number}.parquet")


def finish(folder: Path) -> None:
    run = Run.resume(folder, {"max_steps": 1000})
    run.train()
    assert run.finished


def test_files_with_micro_batches_give_the_same_bits_on_any_number_of_ranks(
    tmp_path: Path, file: str
) -> None:
    settings = of_files(file, train_micro_batches=2)
    train(settings, tmp_path / "alone")
    run_ranks(train, settings, tmp_path / "spread")
    assert_same_checkpoints(tmp_path / "spread", tmp_path / "alone")


def normalised(settings: RunConfig, folder: Path) -> tuple[int, Any]:
    """The number of chunks that this rank reads to fit the schema, and the fitted schema."""
    parts = ParquetReader._raw_parts
    chunks = []

    def counting(self: ParquetReader, rows: int | None) -> Any:
        for part in parts(self, rows):
            chunks.append(len(part))
            yield part

    ParquetReader._raw_parts = counting  # type: ignore[method-assign]
    run = Run(settings, folder)
    return len(chunks), run.config.data.schema


def test_rank_0_fits_the_schema_for_all(tmp_path: Path, file: str) -> None:
    settings = of_files(file)
    schema = {**settings.data.schema, "dense": [{"column": "weight", "normalise": "standard"}]}
    settings = settings.changed(data_schema=schema)
    (first, fitted), (second, other) = run_ranks(normalised, settings, tmp_path / "run")
    assert (first > 0, second) == (True, 0)
    assert fitted == other
    assert fitted["dense"][0]["mean"] == 1.5


def test_a_bad_row_of_one_rank_names_its_file_there_and_stops_the_others(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    labels = [0.0] * 30 + [None] + [1.0] * 9
    pq.write_table(pa.table({"user": list(range(40)), "click": labels}), path, row_group_size=20)
    data = {"kind": "parquet", "path": str(path), "schema": {"label": "click", "features": {"user": "user"}}}
    settings = RunConfig.from_dict({**config().to_dict(), "data": {**data, "batch_size": 20}})

    first, second = run_ranks(trained_or_refused, settings, tmp_path / "run")
    assert second.startswith(f"InputError: {path}: row 30, column 'click': None is not a label")
    assert first.startswith("RankFailedError: ")
    assert "rank 1 failed to read it" in first
    skipping = settings.changed(data_on_error="skip", train_epochs=1)
    assert run_ranks(trained_or_refused, skipping, tmp_path / "skip") == ["{'no label': 1}"] * 2


def trained_or_refused(settings: RunConfig, folder: Path) -> str:
    run = Run(settings, folder)
    return error_of(run.train) or str(dict(run.batches.skipped()))


# ---- the start


def started_with_another_rate(folder: str) -> Any:
    """Ranks whose optimizers begin with different learning rates."""
    make, rank = torch.optim.Adam, dist.get_rank()
    torch.optim.Adam = lambda parameters, lr, **options: make(  # type: ignore[assignment,misc]
        parameters, lr * (1 + rank), **options
    )
    return Run(config(), folder).optimizer.param_groups[0]["lr"]


def test_the_optimizer_of_rank_0_is_part_of_the_start(tmp_path: Path) -> None:
    assert run_ranks(started_with_another_rate, str(tmp_path / "run")) == [config().train.lr] * 2
