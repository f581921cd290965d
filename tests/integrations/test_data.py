"""Readers with torchdata's StatefulDataLoader, and with datasets of Hugging Face, offline."""

from __future__ import annotations

import json
import runpy
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megalith import Ragged
from megalith.data import ParquetReader, Schema, TableReader, batch_from
from tests.data.support import check_resume, labels_of, rows_of

ROWS = 300
EXAMPLE = Path(__file__).parents[2] / "examples" / "hugging_face.py"
SCHEMA = Schema(label="y", features={"f": "c", "t": "t"})


def columns() -> dict[str, Any]:
    numbers = list(range(ROWS))
    return {
        "y": [float(n) for n in numbers],
        "c": [[n] * (n % 3) for n in numbers],
        "t": [f"text {n % 7}" for n in numbers],
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pq.write_table(pa.table(columns()), tmp_path / "a.parquet", row_group_size=23)
    return tmp_path / "a.parquet"


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"shuffle": 1, "shuffle_rows": 40, "prefetch": 1}])
def test_a_stateful_data_loader_continues_at_any_batch(
    path: Path, workers: int, options: dict[str, Any]
) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        reader = ParquetReader(path, SCHEMA, batch_size=16, **options)
        return torchdata.StatefulDataLoader(
            reader, batch_size=None, num_workers=workers, timeout=60 * bool(workers)
        )

    whole = list(loader())
    assert sorted(labels_of(whole)) == list(range(ROWS))
    for done in (1, 7, len(whole) - 1):
        first = loader()
        read = list(islice(first, done))
        state = json.loads(json.dumps(first.state_dict()))
        second = loader()
        second.load_state_dict(state)
        rest = list(second)
        assert rows_of([*read, *rest]) == rows_of(whole)
        assert sorted(labels_of(second)) == list(range(ROWS)), "the next epoch is a whole one"


def test_datasets_of_hugging_face_are_tables_and_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict(columns())
    dataset.save_to_disk(str(tmp_path / "saved"))
    expected = rows_of(TableReader(pa.table(columns()), SCHEMA, batch_size=50))
    for source in (dataset, datasets.load_from_disk(str(tmp_path / "saved"))):
        assert rows_of(TableReader(source, SCHEMA, batch_size=50)) == expected
    check_resume(lambda: TableReader(dataset, SCHEMA, batch_size=64, shuffle=2, shuffle_rows=100))
    assert rows_of([batch_from(dataset.select(range(50)), SCHEMA)]) == expected[:50]
    runpy.run_path(str(EXAMPLE))["main"](300)
    assert float(capsys.readouterr().out.split()[-1]) < 0.4
    tensors = dataset.with_format("torch")[:5]
    assert Ragged.from_lists(tensors["c"]).to_lists() == columns()["c"][:5]
    assert torch.equal(tensors["y"], torch.arange(5.0))
