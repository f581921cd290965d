"""save and load: what is restored, files of bounded size, and state that cannot be saved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith import SGD, EmbeddingCollection, Feature, Ragged, TableConfig, checkpoint
from megalith.errors import CheckpointError, InputError, UsageError
from megalith.storage.store import LocalStore
from tests.checkpoint.support import IDS, Model, State, assert_same, state_of, train


class TiedModel(Model):
    """With two names for one weight, and a buffer of each kind."""

    def __init__(self, engine: str = "cpu") -> None:
        super().__init__(engine=engine)
        self.tied = self.dense.weight
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def train_steps(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        """Train on ids and with noise that torch's and Python's generators draw."""
        for _ in range(steps):
            column = Ragged(IDS[torch.randint(0, IDS.numel(), (8,))], torch.arange(9))
            optimizer.zero_grad()
            (self({"user": column, "item": column}, 100).square().sum() * random.random()).backward()
            optimizer.step()
            self.steps += 1

    def everything(self) -> State:
        dense = {key: value.clone() for key, value in self.state_dict().items() if isinstance(value, Tensor)}
        return state_of(self) | dense


@pytest.mark.parametrize("other", ["cpu", "reference"])
def test_a_loaded_model_equals_the_saved_one_and_trains_with_the_same_bits(
    tmp_path: Path, other: str
) -> None:
    torch.manual_seed(1)
    random.seed(1)
    model = TiedModel()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model.train_steps(optimizer, 3)
    progress = {"step": 3, "rng": checkpoint.rng_state()}
    checkpoint.save(model, tmp_path / "c", optimizer=optimizer, progress=progress)
    saved = model.everything()
    model.train_steps(optimizer, 3)

    loaded = TiedModel(other)
    again = torch.optim.Adam(loaded.parameters(), 0.5)
    loaded.train_steps(again, 1)
    report = checkpoint.load(loaded, tmp_path / "c", optimizer=again)

    assert report.progress["step"] == 3
    rows = {name: saved[f"{name}/ids"].numel() for name in ("user", "item")}
    assert report.rows == {f"embeddings.{name}": number for name, number in rows.items()}
    assert_same(loaded.everything(), saved)
    if other == "cpu":
        checkpoint.set_rng_state(report.progress["rng"])
        loaded.train_steps(again, 3)
        assert_same(loaded.everything(), model.everything())


def collection() -> EmbeddingCollection:
    return EmbeddingCollection([TableConfig("t", dim=2, optimizer=SGD(1.0))], [Feature("f", "t")])


def test_a_save_whose_files_were_deleted_before_they_were_flushed_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loaded = Model(), Model(seed=8)
    train(model, 1)
    checkpoint.save(model, tmp_path)
    real = LocalStore.flush

    def flush(self: LocalStore, names: Any) -> None:
        self.remove(names[0].partition("/")[0])  # as another save does at its end
        real(self, names)

    monkeypatch.setattr(LocalStore, "flush", flush)
    with pytest.raises(CheckpointError, match="another save ended in the meantime"):
        checkpoint.save(model, tmp_path)
    checkpoint.load(loaded, tmp_path)
    assert_same(state_of(loaded), state_of(model))


def test_state_that_cannot_be_saved_raises(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def get_extra_state(self) -> Any:
            return 1

    with pytest.raises(UsageError, match="extra state"):
        checkpoint.save(nn.Sequential(collection(), Odd()), tmp_path)
    for value in (torch.ones(1), float("nan")):
        with pytest.raises(InputError, match="progress"):
            checkpoint.save(collection(), tmp_path, progress={"x": value})
    assert not list(tmp_path.glob("data-*"))


def test_folders_of_an_unfinished_save_are_listed(tmp_path: Path) -> None:
    checkpoint.save(Model(), tmp_path)
    (tmp_path / "data-0123456789ab").mkdir()
    (found,) = checkpoint.find_checkpoints(tmp_path)
    assert found.leftovers == ["data-0123456789ab"]
