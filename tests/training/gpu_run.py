"""Tests of training runs that need a GPU. `make test-gpu` runs them."""

from __future__ import annotations

from pathlib import Path

import torch

from megalith.training import Run, RunConfig


def config(device: str) -> RunConfig:
    return RunConfig.from_dict(
        {
            "data": {"kind": "synthetic", "batch_size": 256, "options": {"num_batches": 12}},
            "model": {"dim": 8, "options": {"hidden": [16]}},
            "train": {"log_every": 4, "epochs": 2, "device": device},
        }
    )


def test_a_run_on_a_gpu_learns_what_a_run_on_the_cpu_learns(tmp_path: Path) -> None:
    results = {}
    for device in ("cuda", "cpu"):
        run = Run(config(device), tmp_path / device)
        run.train()
        found = run.evaluate()
        assert found is not None
        results[device] = (found.auc, found.log_loss)
        engines = {table.engine for table in run.model.embeddings.shards.local.values()}
        assert engines == {"cuda" if device == "cuda" else run.config.train.engine}
    for got, expected in zip(*results.values(), strict=True):
        assert abs(got - expected) < 0.01


def test_a_run_is_continued_on_another_device(tmp_path: Path) -> None:
    run = Run(config("cuda").changed(train_epochs=1), tmp_path / "run")
    run.train()
    run.save()
    resumed = Run.resume(tmp_path / "run", {"device": "cpu", "epochs": 2})
    before, after = (r.model.embeddings.shards.local for r in (run, resumed))
    for name, table in before.items():
        ids = torch.cat([chunk.ids for chunk in table.scan(1 << 20)])
        assert torch.equal(table.lookup(ids).cpu(), after[name].lookup(ids))
    resumed.train()
