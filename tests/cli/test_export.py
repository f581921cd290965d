"""megalith export: writes a version of a run; errors are one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet
import pytest
import torch

from megalith.data import Schema
from megalith.serving.export.servable import Servable
from megalith.serving.export.signature import Signature
from megalith.training import Run, RunConfig, load_trained
from tests.cli.support import megalith, plain, words
from tests.serving.export.export_support import run_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of four steps."""
    run = Run(run_config(), tmp_path_factory.mktemp("cli") / "run")
    run.train()
    return run.directory


def test_a_run_becomes_a_version_called_after_its_step(run: Path, tmp_path: Path) -> None:
    assert f"rows in {tmp_path / 'out'}" in words("export", run, tmp_path / "out")
    servable = Servable(tmp_path / "out" / "4")
    servable.warm_up()
    assert (servable.signature.model, servable.signature.precision) == ("deepfm", "float32")
    again = megalith("export", run, tmp_path / "out")
    assert again.exit_code == 1
    assert "exists: choose another version (--version, in Python version=...)" in plain(again.output)


def test_options(run: Path, tmp_path: Path) -> None:
    flags = ("--model-name", "clicks", "--precision", "int8", "--num-shards", 2, "--version", 7)
    words("export", run / "checkpoint", tmp_path, *flags)
    for part in ("entry", "ps_0", "ps_1"):
        signature = Signature.read(tmp_path / part / "7")
        assert (signature.name, signature.precision) == (f"clicks:{part}", "int8")


def test_a_directory_without_a_run(tmp_path: Path) -> None:
    nothing = megalith("export", tmp_path / "nowhere", tmp_path / "out")
    assert nothing.exit_code == 1
    assert "no complete checkpoint" in plain(nothing.output)


def test_the_dense_values_of_requests_are_named(tmp_path: Path, restore_threads: None) -> None:
    """A server does not normalise: the command says what to send, and that gives the scores of `predict`."""
    price, age = [10.0, 250.0, None, 3.0], [20.0, 40.0, 60.0, 80.0]
    columns = {"y": [0, 1, 1, 0], "user": [1, 2, 3, 4], "price": price, "age": age}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    dense = [
        {"column": "price", "normalise": "log1p", "indicator": True},
        {"column": "age", "normalise": "standard"},
    ]
    schema = {"label": "y", "features": {"user": "user"}, "dense": dense}
    data = {"kind": "parquet", "path": str(tmp_path / "a.parquet"), "schema": schema}
    run = Run(RunConfig.from_dict({**run_config().to_dict(), "data": data}), tmp_path / "run")
    run.train()
    said = words("export", run.directory, tmp_path / "out")
    std = float(np.std(age))
    values = f"[log1p(price), 1 if price is missing, else 0, (age - 50.0) / {std}]"
    assert f"does not normalise dense values; send {values}, and 0 for a missing value" in said

    words("predict", run.directory, tmp_path / "a.parquet", tmp_path / "scores.csv")
    wanted = csv.read_csv(tmp_path / "scores.csv").column(-1).to_numpy()
    sent = [
        [0 if x is None else np.log1p(x), x is None, (y - 50) / std] for x, y in zip(price, age, strict=True)
    ]
    servable = Servable(tmp_path / "out" / str(run.step))
    scores = servable.predict(
        {"user": torch.tensor(columns["user"])}, torch.tensor(sent, dtype=torch.float32)
    )
    np.testing.assert_allclose(scores["probabilities"].numpy(), wanted, rtol=1e-5)

    _, config = load_trained(run.directory)
    raw = np.array([[np.nan if x is None else x, y] for x, y in zip(price, age, strict=True)])
    found = Schema.from_dict(config.data.schema).normalise(raw)
    np.testing.assert_allclose(found.numpy(), np.array(sent, np.float32), rtol=1e-6)


def test_dense_values_that_are_sent_as_they_are_need_no_words(run: Path, tmp_path: Path) -> None:
    assert "normalise" not in words("export", run, tmp_path / "out")
