"""SyncShards and DistributedDataParallel in one step: ranks train what one process trains on the joined
batch, tables and dense weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megalith import (
    Adagrad,
    Adam,
    EmbeddingCollection,
    Feature,
    LocalShards,
    Mean,
    Ragged,
    SyncShards,
    TableConfig,
)
from megalith.shards import Shards
from tests.distributed.ranks import run_ranks
from tests.table.support import whole

STEPS, BATCH = 6, 8
TABLES = [TableConfig("a", dim=4, optimizer=Adagrad(0.2)), TableConfig("b", dim=3, optimizer=Adam(0.05))]
FEATURES = [Feature("x", "a", Mean()), Feature("y", "a"), Feature("z", "b")]


class Model(nn.Module):
    """Towers around the embeddings, so that dense gradients come before, between and after sparse ones."""

    def __init__(self, shards: Shards, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = EmbeddingCollection(shards, FEATURES, **options)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(3, 8)
        self.bottom, self.top = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, batch: dict[str, Ragged], dense: Tensor) -> Tensor:
        rows = self.embeddings(batch)
        hidden = (
            self.first(torch.cat([rows["x"], rows["y"]], 1)) + self.second(rows["z"]) + self.bottom(dense)
        )
        logits: Tensor = self.top(torch.tanh(hidden))[:, 0]
        return logits


def batches() -> list[tuple[dict[str, Ragged], Tensor, Tensor]]:
    """Ids that all ranks share."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(STEPS):
        columns = {}
        for feature in FEATURES:
            lengths = torch.randint(1, 4, (BATCH,), generator=generator)
            ids = torch.randint(0, 10, (int(lengths.sum()),), generator=generator)
            columns[feature.name] = Ragged.from_lengths(ids, lengths)
        dense = torch.rand(BATCH, 5, generator=generator)
        made.append((columns, dense, torch.randint(2, (BATCH,), generator=generator).float()))
    return made


def train(shards: Shards, share: slice, ranks: int, **options: Any) -> dict[str, Any]:
    """Trains a share of every batch; this process's rows, dense weights, and predictions at the end."""
    model = Model(shards, **options)
    # Small buckets: many all-reduces per step, in progress at the same time as rows.
    trained: nn.Module = DistributedDataParallel(model, bucket_cap_mb=0.0001) if ranks > 1 else model
    mean = options["reduction"] == "mean"
    # DDP averages over ranks; where the loss is a sum of shares, the sum is that times their number.
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.5 if mean else 0.5 * ranks
    )
    for columns, dense, labels in batches():
        optimizer.zero_grad()
        logits = trained({name: column[share] for name, column in columns.items()}, dense[share])
        losses = nn.functional.binary_cross_entropy_with_logits(logits, labels[share], reduction="none")
        (losses.mean() if mean else losses.sum() / BATCH).backward()
        optimizer.step()
        if model.embeddings.update == "step":
            model.embeddings.step()
    columns, dense, _ = batches()[0]
    model.eval()
    with torch.no_grad():
        predicted = model({name: column[share] for name, column in columns.items()}, dense[share])
    model.embeddings.shards.flush()
    return {
        "predicted": predicted,
        "steps": model.embeddings.global_step,
        "dense": [p.detach() for p in model.parameters()],
        "rows": {name: (whole(table).ids, whole(table).rows) for name, table in shards.local.items()},
    }


WAYS: dict[str, dict[str, Any]] = {
    "mean, in backward": {"reduction": "mean"},
    "mean, in step": {"reduction": "mean", "update": "step"},
    "sum, in backward": {"reduction": "sum"},
    "mean, clipped": {"reduction": "mean", "clip_value": 0.01, "clip_norm": 0.02},
}
UNEVEN = "sum, uneven shares"
"""The first rank has nothing, the last most."""
OWN = "tables of their own"


def on_a_rank() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()

    def spread(**options: Any) -> SyncShards:
        return SyncShards(TABLES, timeout=60.0, **options)

    own = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    found = {way: train(spread(), own, size, **options) for way, options in WAYS.items()}
    found["gloo"] = train(spread(transport="gloo"), own, size, reduction="mean")
    found["pushed"] = train(spread(push=True), own, size, reduction="mean")
    uneven = slice(max(0, rank - 1), BATCH if rank == size - 1 else rank)
    found[UNEVEN] = train(spread(), uneven, size, reduction="sum")
    found[OWN] = train(LocalShards(TABLES), own, size, reduction="mean")
    return found


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(on_a_rank, world_size=request.param)


def alone(**options: Any) -> dict[str, Any]:
    return train(LocalShards(TABLES), slice(None), 1, **options)


def near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", [*WAYS, "gloo", "pushed", UNEVEN])
def test_ranks_train_what_one_process_trains_on_the_joined_batch(
    ranks: list[dict[str, Any]], way: str
) -> None:
    expected = alone(**WAYS.get(way, {"reduction": "sum" if way == UNEVEN else "mean"}))
    for rank in ranks:
        got = rank[way]
        assert got["steps"] == STEPS
        for a, b, c in zip(got["dense"], ranks[0][way]["dense"], expected["dense"], strict=True):
            assert torch.equal(a, b)
            near(a, c)
    near(torch.cat([rank[way]["predicted"] for rank in ranks]), expected["predicted"])
    for name, (ids, rows) in expected["rows"].items():
        found = [rank[way]["rows"][name] for rank in ranks]
        all_ids, all_rows = (torch.cat([part[k] for part in found]) for k in (0, 1))
        order = torch.argsort(all_ids)
        assert torch.equal(all_ids[order], ids)
        near(all_rows[order], rows)


def test_each_rank_trained_its_own_part(ranks: list[dict[str, Any]]) -> None:
    for name in ("a", "b"):
        sizes = [len(rank["gloo"]["rows"][name][0]) for rank in ranks]
        assert all(sizes)
        assert sum(sizes) == 10


def test_ranks_with_tables_of_their_own_keep_the_dense_part_equal(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank[OWN] for rank in ranks[:2])
    assert all(torch.equal(a, b) for a, b in zip(first["dense"], second["dense"], strict=True))
    assert not torch.equal(first["rows"]["a"][1][:2], second["rows"]["a"][1][:2])  # each trained its own
