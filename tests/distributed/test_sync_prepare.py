"""Batches prepared in data workers, forked and spawned, train the same bits as those prepared on the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from megalith import (
    Adagrad,
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
from tests.distributed.ranks import run_ranks
from tests.table.support import assert_same_bits, assert_same_tables, whole

BATCHES = 4
TABLES = [TableConfig("a", dim=4, optimizer=Adagrad(0.1)), TableConfig("b", dim=3, optimizer=Adagrad(0.2))]
FEATURES = [Feature("x", "a", Mean()), Feature("y", "a", FirstN(2)), Feature("z", "b")]


def columns(rank: int, number: int) -> dict[str, Ragged]:
    generator = torch.Generator().manual_seed(10 * number + rank)
    made = {}
    for feature in FEATURES:
        lengths = torch.randint(0, 5, (6,), generator=generator)
        ids = torch.randint(0, 15, (int(lengths.sum()),), generator=generator)
        weights = torch.rand(len(ids), generator=generator)
        made[feature.name] = Ragged.from_lengths(
            ids, lengths, weights=weights if feature.name == "x" else None
        )
    return made


class Prepared(Dataset[Any]):
    """A rank's batches, prepared wherever they are read."""

    def __init__(self, rank: int, prepare: Callable[[Any], Any]) -> None:
        self._rank = rank
        self._prepare = prepare

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, number: int) -> tuple[Any, bool]:
        in_worker = torch.utils.data.get_worker_info() is not None
        return self._prepare(columns(self._rank, number)), in_worker


def new_collection() -> EmbeddingCollection:
    routers: dict[str, str | Router] = {"a": Router("continuous", 2, block_size=5), "b": "hash_roundrobin"}
    return EmbeddingCollection(SyncShards(TABLES, router=routers, timeout=60.0), FEATURES)


def train(collection: EmbeddingCollection, batch: Any) -> torch.Tensor:
    rows = collection(batch, time=5)
    outputs = torch.cat([rows[f.name].flatten(1) for f in FEATURES], 1)
    outputs.square().sum().backward()
    return outputs.detach()


def in_workers() -> dict[str, bool]:
    """Rank 0 has a spawned worker, rank 1 a forked one."""
    rank = dist.get_rank()
    plain, prepared = new_collection(), new_collection()
    way = "fork" if rank else "spawn"
    data = Prepared(rank, prepared.prepare if rank else prepared.preparer())
    loader: DataLoader[Any] = DataLoader(
        data, batch_size=None, num_workers=1, multiprocessing_context=way, timeout=100
    )
    all_in_worker = True
    for number, (ready, in_worker) in enumerate(loader):
        all_in_worker &= in_worker
        assert_same_bits(train(prepared, ready), train(plain, columns(rank, number)))
    for name in ("a", "b"):
        assert_same_tables(whole(prepared.shards.local[name]), whole(plain.shards.local[name]))
    return {"all in the worker": all_in_worker, "trained": len(plain.shards.local["a"]) > 0}


def test_a_data_worker_prepares_the_same_bits() -> None:
    assert run_ranks(in_workers) == [{"all in the worker": True, "trained": True}] * 2


def prepared_elsewhere() -> list[bool]:
    """The second forward of a started batch, which tables of one process have prepared, looks up again."""
    collection = new_collection()
    batch = EmbeddingCollection(LocalShards(TABLES), FEATURES).prepare(columns(dist.get_rank(), 0))
    started = collection.start(batch)
    expected = collection.eval()(columns(dist.get_rank(), 0))
    twice = [collection(started) for _ in range(2)]
    return [torch.equal(out[f.name], expected[f.name]) for out in twice for f in FEATURES]


def test_a_started_batch_of_prepared_columns_may_be_used_again() -> None:
    assert run_ranks(prepared_elsewhere) == [[True] * 6] * 2
