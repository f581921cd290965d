"""Hugging Face accelerate: save_state and load_state, in one process and at two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith import Adagrad, EmbeddingCollection, Feature, SyncShards, TableConfig, checkpoint
from megalith.errors import UsageError
from tests.distributed.ranks import run_ranks
from tests.table.support import assert_same_tables, whole

accelerate = pytest.importorskip("accelerate")


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [TableConfig("t", dim=4, optimizer=Adagrad(0.5))]
        self.embeddings = EmbeddingCollection(tables, [Feature("a", "t")], **options)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embeddings({"a": ids})["a"])
        return logits


def prepared(model: Model, **options: Any) -> tuple[Any, Any, Any]:
    accelerator = accelerate.Accelerator(cpu=True, **options)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=0.1)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, wrapped, optimizer


def train(accelerator: Any, wrapped: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        loss = wrapped(torch.arange(5) * (step + 1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def test_save_state_and_load_state_continue_exactly(tmp_path: Path) -> None:
    model, other = Model(), Model()
    parts = prepared(model)
    train(*parts, range(3))
    parts[0].save_state(str(tmp_path))

    resumed = prepared(other)
    resumed[0].load_state(str(tmp_path))
    for each in (parts, resumed):
        train(*each, range(3, 5))

    assert other.embeddings.global_step == model.embeddings.global_step == 5
    assert_same_tables(whole(other.embeddings.tables["t"]), whole(model.embeddings.tables["t"]))
    assert torch.equal(other.head.weight, model.head.weight)


def test_gradient_accumulation_needs_update_step() -> None:
    model = Model()
    accelerator, wrapped, optimizer = prepared(model, gradient_accumulation_steps=2)

    def loop() -> None:
        for step in range(4):
            with accelerator.accumulate(wrapped):
                train(accelerator, wrapped, optimizer, range(step, step + 1))

    with pytest.raises(UsageError, match=r'second backward.*update="step"'):
        loop()


def on_a_rank(path: Path) -> dict[str, Any]:
    model = Model()
    parts = prepared(model)
    train(*parts, range(3))
    said = []
    for save in (parts[0].save_state, lambda to: parts[0].save_model(parts[1], to)):
        with pytest.raises(UsageError) as raised:
            save(str(path / "accelerate"))
        said.append(str(raised.value))
    checkpoint.save(model, path / "megalith")
    fresh = Model()
    checkpoint.load(fresh, path / "megalith")
    rows = [fresh.embeddings.shards.lookup({"t": torch.arange(9)}).rows["t"].tolist(), dist.get_rank()]
    return {"said": said, "kind": type(model.embeddings.shards).__name__, "rows": rows}


def test_two_ranks_are_told_to_use_checkpoint_save(tmp_path: Path) -> None:
    first, second = run_ranks(on_a_rank, tmp_path)
    for rank in (first, second):
        assert rank["kind"] == SyncShards.__name__
        assert len(rank["said"]) == 2
        for said in rank["said"]:
            assert "accelerate saves the state_dict of rank 0 alone" in said
            assert "megalith.checkpoint.save(model, path)" in said
    assert first["rows"][0] == second["rows"][0]
