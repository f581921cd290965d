"""Collections that are built before init_process_group: each use before and after it, at two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megalith import SGD, EmbeddingCollection, Feature, LocalShards, SyncShards, TableConfig, checkpoint
from tests.distributed.ranks import error_of, run_ranks
from tests.nn.test_shards_choice import BATCH, OTHER_CALLS, TABLE, USES, new


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = EmbeddingCollection(
            [TableConfig("t", dim=2, optimizer=SGD(0.5))], [Feature("a", "t")]
        )
        self.head = nn.Linear(2, 1)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embeddings({"a": ids})["a"])
        return logits


def train(model: Model) -> dict[str, Any]:
    """Wraps a model in DDP and trains it; its rows of all ranks and its dense weights."""
    wrapped = DistributedDataParallel(model)
    undecided = model.embeddings._shards is None
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        wrapped(torch.arange(4) + step + dist.get_rank()).square().sum().backward()
        optimizer.step()
    rows = model.embeddings.shards.lookup({"t": torch.arange(8)}).rows["t"]
    return {"undecided": undecided, "rows": rows.tolist(), "head": model.head.weight.tolist()}


def after_init(use: str, made: EmbeddingCollection, path: Path) -> str:
    """The shards that a first use after init_process_group chooses."""
    USES[use](made, path)
    return type(made.shards).__name__


def on_a_rank(path: Path) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()

    unused, model = {use: new() for use in USES}, Model()
    for made in unused.values():
        for call in OTHER_CALLS.values():
            call(made)
    used = {use: new() for use in USES}
    for use, made in used.items():
        USES[use](made, path / f"{rank}" if use == "checkpoint.save" else path)
    given = EmbeddingCollection(LocalShards([TABLE]), [Feature("a", "t")])
    given(BATCH)

    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=size)
    return {
        "first use after": {use: after_init(use, made, path) for use, made in unused.items()},
        "first use before": {use: error_of(made, BATCH) for use, made in used.items()},
        "given": error_of(given, BATCH),
        "ddp": train(model),
        "built after": train(Model()),
        "at construction": type(new()._shards).__name__,
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("choice")
    checkpoint.save(new(), path / "saved")
    return run_ranks(on_a_rank, path)


def test_the_first_use_after_init_process_group_spreads_the_tables(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["first use after"] == dict.fromkeys(USES, SyncShards.__name__)
        assert rank["at construction"] == SyncShards.__name__


@pytest.mark.parametrize("use", USES)
def test_a_group_that_appears_after_a_use_raises(ranks: list[dict[str, Any]], use: str) -> None:
    for rank in ranks:
        message = rank["first use before"][use]
        assert "tables 't' were used before the process group of 2 ranks existed" in message
        assert "init_process_group before the first use" in message
        assert "LocalShards(tables)" in message


def test_given_local_shards_are_not_questioned(ranks: list[dict[str, Any]]) -> None:
    assert [rank["given"] for rank in ranks] == ["", ""]


def test_ddp_trains_a_model_built_before_the_group_like_one_built_after(ranks: list[dict[str, Any]]) -> None:
    # One process, which has the batches of both ranks; DDP and the tables divide by the number of ranks.
    alone = Model()
    optimizer = torch.optim.SGD(alone.head.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (alone(torch.cat([torch.arange(4) + step, torch.arange(4) + step + 1])).square().sum() / 2).backward()
        optimizer.step()
    rows = alone.embeddings.shards.lookup({"t": torch.arange(8)}).rows["t"]
    torch.testing.assert_close(torch.tensor(ranks[0]["ddp"]["rows"]), rows)
    torch.testing.assert_close(torch.tensor(ranks[0]["ddp"]["head"]), alone.head.weight.detach())
    for rank in ranks:
        assert rank["ddp"].pop("undecided")
        assert not rank["built after"].pop("undecided")
        assert rank["ddp"] == rank["built after"] == ranks[0]["ddp"]
