"""What a run checks and records about its data: fitted columns, kinds of ids, shared tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megalith.training import Run, RunConfig, load_trained, open_source

pytestmark = pytest.mark.usefixtures("restore_threads")


def write(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def config(path: Path, schema: dict[str, Any], **changes: Any) -> RunConfig:
    base = RunConfig.from_dict(
        {
            "data": {"kind": "parquet", "path": str(path), "batch_size": 4, "schema": schema},
            "model": {"dim": 2, "options": {"hidden": [2]}},
            "train": {"threads": 1},
        }
    )
    return base.changed(**changes)


def test_fitted_values_are_shown_and_saved_with_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", y=[0, 1] * 4, c=list(range(8)), price=[1.0, 3.0] * 4)
    schema = {"label": "y", "features": {"f": "c"}, "dense": [{"column": "price", "normalise": "standard"}]}
    run = Run(config(path, schema), tmp_path / "run")
    assert run.source.title.splitlines()[1] == "normalised by price mean 2 std 1"
    run.train()

    write(path, y=[0, 1] * 4, c=list(range(8)), price=[100.0, 300.0] * 4)
    _, saved = load_trained(tmp_path / "run")
    assert saved.data.schema["dense"] == [
        {"column": "price", "normalise": "standard", "mean": 2.0, "std": 1.0}
    ]
    assert open_source(saved).title == run.source.title, "an evaluation does not fit again"
