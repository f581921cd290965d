"""Models, runs and files of exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.training import RunConfig
from tests.serving.export.test_dense_program import Wide


def wide(ids: Tensor | None = None, rows: Tensor | None = None) -> Wide:
    """A model of one table of two columns, by default of ten rows of ones."""
    model = Wide()
    ids = torch.arange(10) if ids is None else ids
    model.embeddings.shards.assign({"t": (ids, torch.ones(ids.numel(), 2) if rows is None else rows)})
    return model


def files(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}


def run_config(**train: Any) -> RunConfig:
    return RunConfig.from_dict(
        {
            "data": {"kind": "synthetic", "batch_size": 64, "options": {"num_batches": 4, "num_dense": 2}},
            "model": {"dim": 4, "options": {"hidden": [8]}},
            "train": {"threads": 1, **train},
        }
    )
