"""A model with a collection under DistributedDataParallel: two ranks, each with tables of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megalith import SGD, EmbeddingCollection, Feature, LocalShards, Mean, Ragged, TableConfig
from tests.distributed.ranks import run_ranks

STEPS, BATCH = 5, 8
Result = dict[str, Tensor]


class Model(nn.Module):
    def __init__(self, update: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        shards = LocalShards([TableConfig("t", dim=4, optimizer=SGD(0.5))])
        self.embeddings = EmbeddingCollection(shards, [Feature("a", "t", Mean())], update=update)
        self.head = nn.Linear(4, 1)

    def forward(self, batch: dict[str, Ragged]) -> Tensor:
        logits: Tensor = self.head(self.embeddings(batch)["a"])[:, 0]
        return logits


def batches() -> list[tuple[Ragged, Tensor]]:
    """Ids 0 to 9 in the first half of each batch, 10 to 19 in the second."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(STEPS):
        ids = torch.randint(10, (BATCH, 3), generator=generator)
        ids[BATCH // 2 :] += 10
        labels = torch.randint(2, (BATCH,), generator=generator).float()
        made.append((Ragged.from_padded(ids, pad=-1), labels))
    return made


def train(update: str, ranks: int, rank: int) -> Result:
    """The rank's part of every batch; the dense weights and all rows at the end."""
    model = Model(update)
    trained: nn.Module = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.5)
    for column, labels in batches():
        own = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(trained({"a": column[own]}), labels[own])
        loss.backward()
        optimizer.step()
        if update == "step":
            model.embeddings.step(scale=1 / ranks)  # of a mean over ranks, as DDP makes it
    ids = torch.arange(20)
    rows = model.embeddings.shards.lookup({"t": ids}).rows["t"]
    return {"rows": rows, **{name: p.detach() for name, p in model.head.named_parameters()}}


def list_of_tables() -> str:
    made = EmbeddingCollection([TableConfig("t", dim=4, optimizer=SGD(0.5))], [Feature("a", "t")])
    return type(made.shards).__name__


def on_a_rank() -> tuple[Result, Result, str]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return train("step", ranks, rank), train("backward", ranks, rank), list_of_tables()


@pytest.fixture(scope="module")
def results() -> list[tuple[Result, Result, str]]:
    return run_ranks(on_a_rank)


def test_two_ranks_train_what_one_process_trains_on_the_joined_batch(results: list[Any]) -> None:
    alone = train("step", 1, 0)
    (first, *_), (second, *_) = results
    for name in ("weight", "bias"):
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], alone[name], rtol=1e-5, atol=1e-6)
    rows = torch.cat([first["rows"][:10], second["rows"][10:]])  # each rank's own ids
    torch.testing.assert_close(rows, alone["rows"], rtol=1e-5, atol=1e-6)


def test_updates_in_backward_keep_the_dense_part_in_step(results: list[Any]) -> None:
    (_, first, _), (_, second, _) = results
    assert torch.equal(first["weight"], second["weight"])
    assert not torch.equal(first["rows"], second["rows"])  # each rank trained its own


def test_a_list_of_tables_is_spread_over_the_ranks(results: list[Any]) -> None:
    assert [name for _, _, name in results] == ["SyncShards", "SyncShards"]
