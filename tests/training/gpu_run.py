"""Tests of training runs that need a GPU. `make test-gpu` runs them."""

from __future__ import annotations

from pathlib import Path

from megalith.training import Run, RunConfig
from tests.distributed.ranks import run_ranks


def config(device: str, engine: str) -> RunConfig:
    return RunConfig.from_dict(
        {
            "data": {"kind": "synthetic", "batch_size": 64, "options": {"num_batches": 6}},
            "model": {"dim": 4, "options": {"hidden": [8]}},
            "train": {"log_every": 4, "epochs": 1, "device": device, "engine": engine},
        }
    )


def test_a_run_on_a_gpu_learns_what_a_run_on_the_cpu_learns(tmp_path: Path) -> None:
    results = {}
    for device, engine in (("cuda", "cpu"), ("cpu", "reference")):  # the native module is not needed
        run = Run(config(device, engine), tmp_path / device)
        run.train()
        found = run.evaluate()
        assert found is not None
        results[device] = (found.auc, found.log_loss)
        assert {parameter.device.type for parameter in run.model.parameters()} == {device}
        engines = {table.engine for table in run.model.embeddings.shards.local.values()}
        assert engines == {"cuda" if device == "cuda" else "reference"}
    for got, expected in zip(*results.values(), strict=True):
        assert abs(got - expected) < 0.01


def rank_of_run(folder: str) -> tuple[float, str, str]:
    run = Run(config("cuda", "cpu"), Path(folder))
    run.train()
    found = run.evaluate()
    assert found is not None
    shards = run.model.embeddings.shards
    return found.log_loss, shards.device.type, next(run.model.parameters()).device.type


def test_ranks_that_share_a_gpu_learn_what_one_process_learns(tmp_path: Path) -> None:
    alone = Run(config("cpu", "reference"), tmp_path / "alone")
    alone.train()
    expected = alone.evaluate()
    assert expected is not None
    for loss, *devices in run_ranks(rank_of_run, str(tmp_path / "ranks")):
        assert devices == ["cuda", "cuda"]
        assert abs(loss - expected.log_loss) < 0.01
