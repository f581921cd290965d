"""Promise 6: with a fixed number of micro-batches, tables and dense weights have the same bits on 1, 2 and 4
ranks, for any number of threads and either transport."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingCollection,
    Feature,
    FirstN,
    LocalShards,
    Mean,
    Ragged,
    Router,
    SyncShards,
    TableConfig,
)
from megalith.nn import MicroBatches
from tests.distributed.ranks import error_of, run_ranks
from tests.table.support import whole

NUM, STEPS, ROWS = 8, 3, 4
USES_RARE = (0, 4, 5, 6)
"""The micro-batches with ids of table "rare": on 4 ranks all but rank 1 have some."""

TABLES = [
    TableConfig("user", dim=5, optimizer=Adagrad(0.1)),
    TableConfig("item", dim=3, optimizer=Adam(0.05)),
    TableConfig("rare", dim=2, optimizer=SGD(0.3)),
]
FEATURES = [
    Feature("user", "user", Mean()),
    Feature("friends", "user", FirstN(2)),
    Feature("seen", "item"),
    Feature("rare", "rare"),
]


def micro_batch(step: int, index: int) -> tuple[dict[str, Ragged], Tensor]:
    """The same on every rank; ids are few, so that most micro-batches share them."""
    generator = torch.Generator().manual_seed(100 * step + index)

    def column(most: int, ids: int, weighted: bool = False) -> Ragged:
        lengths = torch.randint(0, most + 1, (ROWS,), generator=generator)
        n = int(lengths.sum())
        values = torch.randint(0, ids, (n,), generator=generator)
        weights = torch.rand(n, generator=generator) + 0.5 if weighted else None
        return Ragged.from_lengths(values, lengths, weights=weights)

    columns = {
        "user": column(4, 12, weighted=True),
        "friends": column(4, 12),
        "seen": column(6, 9),
        "rare": column(3 if index in USES_RARE else 0, 4),
    }
    return columns, torch.rand(ROWS, generator=generator)


class Layer(nn.Linear):
    """A linear layer without matmul, whose bits depend on the number of threads on some CPUs (MKL)."""

    def forward(self, rows: Tensor) -> Tensor:
        return (rows.unsqueeze(1) * self.weight).sum(-1) + self.bias


class Model(nn.Module):
    """Embeddings, two layers, a number for each row."""

    def __init__(self, shards: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embeddings = EmbeddingCollection(shards, FEATURES, update="step", **options)
        self.head = nn.Sequential(Layer(5 + 10 + 3 + 2, 16), nn.ReLU(), Layer(16, 1))

    def loss(self, columns: dict[str, Ragged], labels: Tensor) -> Tensor:
        rows = self.embeddings(columns)
        joined = torch.cat([rows[f.name].flatten(1) for f in FEATURES], 1)
        loss: Tensor = (self.head(joined)[:, 0] - labels).square().mean()
        return loss


def train(shards: Any, threads: int = 1, **options: Any) -> dict[str, Any]:
    """This rank's rows of every table, and the dense weights, after some steps."""
    torch.set_num_threads(threads)
    model = Model(shards, **options)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=0.01)
    micro = MicroBatches(model, NUM)
    for step in range(STEPS):
        batches = [micro_batch(step, index) for index in micro.mine]
        micro.step([lambda batch=batch: model.loss(*batch) for batch in batches])  # type: ignore[misc]
        optimizer.step()
    torch.set_num_threads(1)
    model.embeddings.shards.flush()
    tables = {name: whole(table) for name, table in model.embeddings.shards.local.items()}
    return {
        "tables": {name: (t.ids, t.rows, *t.state.values()) for name, t in tables.items()},
        "dense": [p.detach() for p in model.head.parameters()],
    }


CLIPPED: dict[str, Any] = {"clip_value": 0.002, "clip_norm": 0.05}


def on_a_rank() -> dict[str, dict[str, Any]]:
    size = dist.get_world_size()
    routers = {"user": Router("continuous", size, block_size=2), "item": "hash_roundrobin"}

    def spread(**options: Any) -> SyncShards:
        return SyncShards(TABLES, timeout=60.0, **options)

    found = {
        "gloo": train(spread(transport="gloo")),
        "a list of tables": train(TABLES, threads=2),
        "other routers, 3 threads": train(spread(router=routers), threads=3),
        "the other engine": train(spread(engine="reference")),
        "pushed": train(spread(push=True)),
        "clipped": train(spread(), **CLIPPED),
    }
    if size == 1:
        found["LocalShards"] = train(LocalShards(TABLES))
        found["clipped LocalShards"] = train(LocalShards(TABLES), **CLIPPED)
    return found


def digest(ranks: list[dict[str, Any]]) -> str:
    """Of all rows by id, wherever they are, and the dense weights, which must be the same on all ranks."""
    hashed = hashlib.sha256()
    for table in TABLES:
        parts = zip(*(rank["tables"][table.name] for rank in ranks), strict=True)
        ids, *values = (torch.cat(part) for part in parts)
        assert ids.unique().numel() == ids.numel()
        order = torch.argsort(ids)
        for tensor in (ids, *values):
            hashed.update(tensor[order].contiguous().numpy().tobytes())
    dense = [b"".join(p.contiguous().numpy().tobytes() for p in rank["dense"]) for rank in ranks]
    assert len(set(dense)) == 1
    hashed.update(dense[0])
    return hashed.hexdigest()


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    """By number of ranks and way of training."""
    found = {}
    for size in (1, 2, 4):
        ranks = run_ranks(on_a_rank, world_size=size)
        for name in ranks[0]:
            found[f"{size} ranks, {name}"] = digest([rank[name] for rank in ranks])
    return found


def test_tables_and_dense_weights_have_the_same_bits_on_any_number_of_ranks(digests: dict[str, str]) -> None:
    plain = {name: value for name, value in digests.items() if "clipped" not in name and "engine" not in name}
    assert len(plain) == 13
    assert len(set(plain.values())) == 1, plain


def test_clipping_does_not_depend_on_the_number_of_ranks(digests: dict[str, str]) -> None:
    clipped = {name: value for name, value in digests.items() if "clipped" in name}
    assert len(clipped) == 4
    assert len(set(clipped.values())) == 1, clipped
    assert clipped["1 ranks, clipped"] != digests["1 ranks, gloo"]


def test_each_engine_has_its_own_bits_on_any_number_of_ranks(digests: dict[str, str]) -> None:
    assert len({value for name, value in digests.items() if "engine" in name}) == 1


def refused() -> list[str]:
    said = [error_of(MicroBatches, Model(SyncShards(TABLES)), num) for num in (6, 1, 0)]
    said.append(error_of(MicroBatches, Model(SyncShards(TABLES), reduction="sum"), 8))
    return [*said, error_of(MicroBatches(Model(SyncShards(TABLES)), 4).step, [])]


def test_numbers_that_no_tree_divides_among_the_ranks_are_refused() -> None:
    for said in run_ranks(refused):
        assert ["power of two and a multiple of 2 ranks" in each for each in said] == [True] * 3 + [False] * 2
        assert 'reduction="mean"' in said[3]
        assert "expected 2 losses, got 0" in said[4]
