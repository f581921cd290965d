"""Frequencies of ids: all are counted, large features are sampled by id, and counts continue on resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalith.data import Batch
from megalith.errors import CheckpointError
from megalith.ragged import Ragged
from megalith.training import id_frequencies
from megalith.training.id_frequencies import IdFrequencies, keep_only


def batch(ids: torch.Tensor) -> Batch:
    return Batch({"user": Ragged(ids, torch.arange(len(ids) + 1))}, torch.zeros(len(ids)))


def test_every_id_of_a_long_run_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_frequencies, "_PENDING", 100)
    frequencies = IdFrequencies()
    for _ in range(30):
        frequencies.update(batch(torch.tensor([7, 7, *range(100, 120)])))
    summary = frequencies.summary(700)
    assert (summary["samples"], summary["samples_of_run"]) == (660, 700)
    assert summary["features"]["user"] == {"share": 1.0, "occurrences": 660, "counts": [[30, 20], [60, 1]]}


def test_the_first_rows_of_a_large_batch_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_frequencies, "MAX_ROWS", 2)
    frequencies = IdFrequencies()
    column = Ragged.from_lists([[1, 2], [], [3], [4]])
    frequencies.update(Batch({"tags": column}, torch.zeros(4)))
    summary = frequencies.summary(4)
    assert (summary["samples"], summary["features"]["tags"]["occurrences"]) == (2, 2)


def test_a_feature_of_many_ids_is_a_sample_whose_counts_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_frequencies, "MAX_IDS", 1000)
    monkeypatch.setattr(id_frequencies, "_PENDING", 500)
    frequencies = IdFrequencies()
    for start in range(0, 8000, 100):  # each id three times, far apart
        for _ in range(3):
            frequencies.update(batch(torch.arange(start, start + 100)))
    found = frequencies.summary(24_000)["features"]["user"]
    assert found["occurrences"] == 24_000
    assert found["share"] in (1 / 8, 1 / 16)
    ((times, ids),) = found["counts"]
    assert times == 3
    assert ids / found["share"] == pytest.approx(8000, rel=0.2)


def test_saved_counts_continue(tmp_path: Path) -> None:
    frequencies = IdFrequencies()
    frequencies.update(batch(torch.tensor([-1, 5, 5])))
    frequencies.save(tmp_path, 10)
    frequencies.update(batch(torch.tensor([5])))
    frequencies.save(tmp_path, 20)

    again = IdFrequencies.load(tmp_path, 10)
    again.update(batch(torch.tensor([5])))
    assert again.summary(4) == frequencies.summary(4)
    keep_only(tmp_path, 20)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000020.safetensors"]
    assert IdFrequencies.load(tmp_path, 10).samples == 0
    (tmp_path / "step-000000000020.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="step-000000000020"):
        IdFrequencies.load(tmp_path, 20)
