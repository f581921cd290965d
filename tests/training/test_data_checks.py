"""What a run checks and records about its data: fitted columns, kinds of ids, shared tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megalith.data import ParquetReader, Schema
from megalith.errors import InputError
from megalith.training import Run, RunConfig, evaluate, load_trained, open_reader, open_source

TEXT = ["1", "2", "3", "4"] * 2
SCHEMA = {"label": "y", "features": {"f": "c"}}
LABELS = [0, 1] * 4

pytestmark = pytest.mark.usefixtures("restore_threads")


def write(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def config(path: Path, schema: dict[str, Any], **changes: Any) -> RunConfig:
    data = {"kind": "parquet", "path": str(path), "batch_size": 4, "schema": schema}
    model = {"dim": 2, "options": {"hidden": [2]}}
    return RunConfig.from_dict({"data": data, "model": model, "train": {"threads": 1}}).changed(**changes)


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


# ---- labels


def test_labels_that_are_not_0_and_1_are_named_before_the_step(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", y=[0, 1, 1, 5], c=[1, 2, 3, 4])
    run = Run(config(path, SCHEMA), tmp_path / "run")
    with pytest.raises(InputError, match=r"a.parquet: row 3, column 'y': 5 is not 0 or 1; .*on_error"):
        run.train()
    assert sum(run.rows().values()) == 0
    skipping = Run(config(path, SCHEMA, data_on_error="skip"), tmp_path / "skipping")
    skipping.train()
    assert skipping.samples == 3
    with pytest.raises(InputError, match="column 'y': 5 is not 0 or 1"):
        list(open_reader(run.config.data, path))
    (batch,) = open_reader(run.config.data, path, labelled=False)
    assert len(batch) == 4
    with pytest.raises(InputError, match=r"\[data.schema\] has no label: name the label .*a.parquet"):
        Run(config(path, {"features": {"f": "c"}}), tmp_path / "none")


def test_a_model_is_trained_with_indicators_of_missing_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", y=LABELS, c=TEXT, d=[1.0, float("nan")] * 4)
    schema = {**SCHEMA, "dense": [{"column": "d", "nan": "missing", "indicator": True}]}
    Run(config(path, schema), tmp_path / "run").train()
    model, saved = load_trained(tmp_path / "run")
    assert model.num_dense == 2
    assert evaluate(model, open_reader(saved.data, path)).samples == 8


# ---- kinds of ids


@pytest.mark.parametrize("trained_on_text", [True, False])
def test_a_file_with_other_ids_than_the_training_data_is_refused(
    tmp_path: Path, trained_on_text: bool
) -> None:
    text = write(tmp_path / "text.parquet", y=LABELS, c=TEXT)
    integers = write(tmp_path / "integers.parquet", y=LABELS, c=[int(x) for x in TEXT])
    good, bad = (text, integers) if trained_on_text else (integers, text)
    run = Run(config(good, SCHEMA, train_max_steps=1), tmp_path / "run")
    run.train()
    recorded = "xxhash64" if trained_on_text else "integer"
    _, saved = load_trained(tmp_path / "run")
    assert saved.data.schema["features"] == {"f": {"column": "c", "ids": recorded}}

    message = rf"{bad.name}: column 'c' holds (string|int64), .* feature 'f' was read with .* before"
    for labelled in (True, False):  # eval, predict
        assert len(list(open_reader(saved.data, good, labelled=labelled))) == 2
        with pytest.raises(InputError, match=message):
            open_reader(saved.data, bad, labelled=labelled)
    with pytest.raises(InputError, match=message):
        Run(config(good, SCHEMA, data_test_path=str(bad)), tmp_path / "other")
    bad.replace(good)
    with pytest.raises(InputError, match=r"column 'c' holds"):
        Run.resume(tmp_path / "run")


def test_files_of_one_reader_have_the_same_ids(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", y=LABELS, c=pa.nulls(8))  # holds no id: both kinds may follow
    write(tmp_path / "b.parquet", y=LABELS, c=[[text] for text in TEXT])
    write(tmp_path / "c.parquet", y=LABELS, c=[int(text) for text in TEXT])
    schema = Schema.from_dict(SCHEMA)
    with pytest.raises(InputError, match=r"c.parquet: column 'c' holds int64"):
        ParquetReader(tmp_path, schema, batch_size=8)
    reader = ParquetReader(tmp_path, schema, batch_size=8, on_error="skip")
    assert len(list(reader)) == 2
    assert reader.skipped == {"wrong type": 8}
    hashed = Schema.from_dict({"label": "y", "features": {"f": {"column": "c", "hash": True}}})
    _, b, c = ParquetReader(tmp_path, hashed, batch_size=8)
    assert b.features["f"].to_lists() == c.features["f"].to_lists()


def test_a_text_and_an_integer_column_do_not_share_a_table(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", y=LABELS, c=TEXT, d=[int(x) for x in TEXT])

    def run(number: int, **d: Any) -> Run:
        schema = {"label": "y", "features": {"f": "c", "g": {"column": "d", **d}}}
        made = config(path, schema, model_tables={"g": "f"}, train_max_steps=1)
        return Run(made, tmp_path / f"run{number}")

    with pytest.raises(
        InputError, match=r"'f' and 'g' share table 'f', but the ids of 'f' are xxhash64 and .* integer"
    ):
        run(0)
    run(1, hash=True).train()
    run(2, slot=3).train()
