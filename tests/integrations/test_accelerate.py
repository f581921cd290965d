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
from megalith.integrations.accelerate import Accelerator  # noqa: E402


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


def following() -> tuple[Any, Any, Any, Model]:
    """The recipe of docs/guides/frameworks.md."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model(update="step")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    model.embeddings.follow(optimizer)
    return accelerator, wrapped, optimizer, model


def accumulate(accelerator: Any, wrapped: Any, optimizer: Any, steps: range, clip: float = 0.02) -> None:
    for step in steps:
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(torch.arange(5) * (step + 1)).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def test_accumulation_and_clipping_reach_the_rows() -> None:
    *parts, model = following()
    accumulate(*parts, range(6))

    expected = Model(update="step")
    optimizer = torch.optim.SGD(expected.head.parameters(), lr=0.1)
    for step in range(6):
        (expected(torch.arange(5) * (step + 1)).square().mean() / 2).backward()
        if step % 2:
            norm = float(nn.utils.clip_grad_norm_(expected.head.parameters(), 0.02))
            optimizer.step()
            optimizer.zero_grad()
            expected.embeddings.step(scale=min(1.0, 0.02 / (norm + 1e-6)))
    assert model.embeddings.global_step == expected.embeddings.global_step == 3
    torch.testing.assert_close(model.head.weight, expected.head.weight)
    mine, other = (whole(each.embeddings.tables["t"]) for each in (model, expected))
    torch.testing.assert_close(mine.rows, other.rows, rtol=1e-5, atol=1e-7)


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
    *tables, own = following()
    accumulate(*tables, range(4))
    tables[0].save_state(str(path / "state"))
    *again, resumed = following()
    again[0].load_state(str(path / "state"))
    for each in (tables, again):
        accumulate(*each, range(4, 6))
    tables[0].save_model(tables[1], str(path / "model"))

    checkpoint.save(model, path / "megalith")
    fresh = Model()
    checkpoint.load(fresh, path / "megalith")
    rows = [fresh.embeddings.shards.lookup({"t": torch.arange(9)}).rows["t"].tolist(), dist.get_rank()]
    return {
        "said": said,
        "kind": type(model.embeddings.shards).__name__,
        "rows": rows,
        "own": contents(own),
        "resumed": contents(resumed),
    }


def contents(model: Model) -> dict[str, Any]:
    rows = model.embeddings.shards.lookup({"t": torch.arange(26)}).rows["t"].tolist()
    return {"rows": rows, "head": model.head.weight.tolist(), "step": model.embeddings.global_step}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    path = tmp_path_factory.mktemp("accelerate")
    return run_ranks(on_a_rank, path), path


def test_a_state_of_two_ranks_includes_the_tables_and_continues_exactly(
    ranks: tuple[list[dict[str, Any]], Path],
) -> None:
    for rank in ranks[0]:
        assert rank["resumed"] == rank["own"]
        assert rank["own"] == ranks[0][0]["own"]
        assert rank["own"]["step"] == 3


def test_a_state_of_two_ranks_loads_in_one_process(ranks: tuple[list[dict[str, Any]], Path]) -> None:
    *parts, model = following()
    parts[0].load_state(str(ranks[1] / "state"))
    assert model.embeddings.global_step == 2
    assert sorted(whole(model.embeddings.tables["t"]).ids.tolist()) == sorted(
        {i * (step + 1) for i in range(5) for step in range(4)}
    )
    checkpoint.load(model, ranks[1] / "model" / "megalith_0")
    assert contents(model) == ranks[0][0]["own"]


def test_two_ranks_are_told_to_use_checkpoint_save(ranks: tuple[list[dict[str, Any]], Path]) -> None:
    first, second = ranks[0]
    for rank in (first, second):
        assert rank["kind"] == SyncShards.__name__
        assert len(rank["said"]) == 2
        for said in rank["said"]:
            assert "accelerate saves the state_dict of rank 0 alone" in said
            assert (
                "use megalith.integrations.accelerate.Accelerator, or call megalith.checkpoint.save" in said
            )
    assert first["rows"][0] == second["rows"][0]
