"""pad_to_equal_batches: the same number of batches on 1, 2 and 4 real ranks, whichever runs out first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megalith import SGD, EmbeddingCollection, Feature, LocalShards, Ragged, TableConfig
from megalith.data import (
    Batch,
    EqualBatchLoader,
    MemoryReader,
    Samples,
    SyntheticBatch,
    SyntheticReader,
    pad_to_equal_batches,
)
from megalith.errors import InputError
from tests.distributed.ranks import error_of, run_ranks, store, wait_for

SOON = 2.0


def make_batch(rows: int, *, time: int | None = None) -> Batch:
    """Every kind of column: plain and weighted features, features of vectors, labels, dense, weights."""
    values = torch.arange(2 * rows)
    splits = 2 * torch.arange(rows + 1)
    features = {
        "plain": Ragged(values, splits),
        "weighted": Ragged(values, splits, torch.ones(2 * rows)),
        "vectors": Ragged(torch.ones(2 * rows, 3, dtype=torch.float16), splits),
    }
    position = {"row": rows}
    return Batch(features, torch.ones(rows, 2), torch.ones(rows, 5), torch.ones(rows), time, position)


def shape(batch: Batch) -> dict[str, Any]:
    """All that a model could trip over."""
    features = {
        name: (x.values.dtype, tuple(x.values.shape[1:]), x.weights is not None, len(x))
        for name, x in batch.features.items()
    }
    columns = {
        name: None if x is None else (x.dtype, tuple(x.shape))
        for name, x in (("labels", batch.labels), ("dense", batch.dense), ("weights", batch.weights))
    }
    return {"features": features, **columns, "rows": len(batch), "time": batch.time, "at": batch.position}


# ---- counts

CASES = {
    1: [(3,), (0,)],
    2: [(2, 5), (4, 4), (0, 2), (0, 0)],
    4: [(1, 0, 3, 2), (0, 0, 0, 1)],
}


def lengths(cases: list[tuple[int, ...]]) -> list[list[list[int]]]:
    """Per case the rows of each batch of two epochs on this rank, which has case[rank] batches of its own."""
    found = []
    for case in cases:
        loader = pad_to_equal_batches([make_batch(1 + i) for i in range(case[dist.get_rank()])])
        found.append([[len(batch) for batch in loader] for _ in range(2)])
    return found


@pytest.mark.parametrize("ranks", CASES)
def test_every_rank_yields_as_many_batches_as_the_longest(ranks: int) -> None:
    results = run_ranks(lengths, CASES[ranks], world_size=ranks)
    for rank, found in enumerate(results):
        for case, epochs in zip(CASES[ranks], found, strict=True):
            expected = [1 + i for i in range(case[rank])] + [0] * (max(case) - case[rank])
            assert epochs == [expected, expected], case


def test_without_a_process_group_it_adds_nothing() -> None:
    batches = [make_batch(1), make_batch(2)]
    assert [id(batch) for batch in pad_to_equal_batches(batches)] == [id(batch) for batch in batches]


# ---- what an empty batch is


def shapes() -> list[dict[str, Any]]:
    own = [[make_batch(2, time=50)], [], [make_batch(1, time=70), make_batch(3, time=None)]][dist.get_rank()]
    return [shape(batch) for batch in pad_to_equal_batches(own)]


def test_an_empty_batch_has_the_columns_of_the_others_even_where_there_never_was_one() -> None:
    first, second, third = run_ranks(shapes, world_size=3)
    blank = {
        "features": {
            "plain": (torch.int64, (), False, 0),
            "weighted": (torch.int64, (), True, 0),
            "vectors": (torch.float16, (3,), False, 0),
        },
        "labels": (torch.float32, (0, 2)),
        "dense": (torch.float32, (0, 5)),
        "weights": (torch.float32, (0,)),
        "rows": 0,
    }
    assert [batch["rows"] for batch in third] == [1, 3]
    assert first[1] == {**blank, "time": None, "at": {"row": 2}}  # the position of its last batch
    assert second[0] == {**blank, "time": 70, "at": {}}  # the newest time of the others
    assert second[1] == {**blank, "time": None, "at": {}}


def of_readers() -> tuple[list[int], dict[str, Any], str]:
    """Three synthetic batches over 2 ranks; then 1 row over 2 ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = list(pad_to_equal_batches(SyntheticReader(batch_size=4, num_batches=3).shard(rank, size)))
    samples = Samples({"a": Ragged.from_lists([[1, 2]])}, torch.ones(1))
    reader = MemoryReader(samples, batch_size=2).shard(rank, size)
    (batch,) = pad_to_equal_batches(reader)
    reader.seek(batch.position)
    return [len(batch) for batch in batches], batch.position, type(batches[-1]).__name__


def test_readers_keep_their_position_and_their_kind_of_batch(two_ranks: list[Any]) -> None:
    first, second = (result["readers"] for result in two_ranks)
    assert first == ([4, 4], {"epoch": 0, "row": 1, "shard": [0, 2]}, SyntheticBatch.__name__)
    assert second == ([4, 0], {"epoch": 1, "row": 0, "shard": [1, 2]}, SyntheticBatch.__name__)


def trained() -> tuple[list[float], int]:
    """DDP calls an all-reduce a step: it would hang if one rank made fewer."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    shards = LocalShards([TableConfig("t", dim=4, optimizer=SGD(0.5))])
    collection = EmbeddingCollection(shards, [Feature("plain", "t")])
    head = DistributedDataParallel(nn.Linear(4, 1))
    steps = 0
    for batch in pad_to_equal_batches([make_batch(2)] * (3 if rank else 0)):
        head(collection({"plain": batch.features["plain"]})["plain"]).sum().backward()
        steps += 1
    return [p.grad.abs().sum().item() for p in head.parameters() if p.grad is not None], steps


def test_a_model_under_ddp_takes_empty_batches(two_ranks: list[Any]) -> None:
    first, second = (result["trained"] for result in two_ranks)
    assert first == second
    assert first[1] == 3


# ---- trouble


class Broken(Iterable[Batch]):
    """Yields one batch; the next cannot be read."""

    def __iter__(self) -> Iterator[Batch]:
        yield make_batch(1)
        raise InputError("clicks.csv, row 7: no label")


def broken() -> list[Any]:
    rank = dist.get_rank()
    seen: list[int] = []

    def loop(loader: Iterable[Any]) -> None:
        seen.extend(len(batch) for batch in pad_to_equal_batches(loader))

    read = error_of(lambda: loop(Broken() if rank == 1 else [make_batch(2)] * 9))
    kind = error_of(lambda: loop(["no batch"] if rank == 0 else [make_batch(2)]))
    return [seen, read, kind]


def on_two_ranks() -> dict[str, Any]:
    return {"readers": of_readers(), "trained": trained(), "broken": broken()}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks)


def test_an_error_of_one_loader_ends_all_at_the_same_batch(two_ranks: list[Any]) -> None:
    first, second = (result["broken"] for result in two_ranks)
    assert (first[0], second[0]) == ([2], [1])
    assert second[1] == "InputError: clicks.csv, row 7: no label"
    assert first[1].startswith("RankFailedError: ")
    assert "batch 1 of epoch 1: rank 1 failed to read it, so rank 0 stops too" in first[1]
    assert first[2] == "InputError: pad_to_equal_batches: the loader must yield Batches, got str"
    assert second[2].startswith("RankFailedError: ")


def stalled() -> str:
    """Of 4 ranks, two stop after the first batch and wait until the others have given up."""
    rank = dist.get_rank()
    loader = pad_to_equal_batches([make_batch(1)] * 3, timeout=SOON)
    if rank in (1, 2):
        iterator = iter(loader)
        next(iterator)
        wait_for("timed out/0", "timed out/3")
        return error_of(lambda: next(iterator)) if rank == 1 else ""
    said = error_of(lambda: list(loader))
    store().set(f"timed out/{rank}", "")
    return said


def test_ranks_that_do_not_come_are_named_and_a_late_one_is_told() -> None:
    results = run_ranks(stalled, world_size=4)
    for rank in (0, 3):
        where = "RankTimeoutError: pad_to_equal_batches: batch 1 of epoch 1"
        assert results[rank].startswith(f"{where}: rank {rank} waited for ranks 1, 2")
        assert "within 2 s" in results[rank]
    assert results[1].startswith("RankTimeoutError: ")


def never_called() -> str:
    return error_of(pad_to_equal_batches, [], timeout=SOON) if dist.get_rank() == 1 else ""


def test_a_rank_that_never_calls_it_is_named() -> None:
    _, said = run_ranks(never_called)
    assert said.startswith("RankTimeoutError: pad_to_equal_batches: rank 1 waited for rank 0")


def groups() -> list[int]:
    """Ranks 0 and 2, ranks 1 and 3; then all, and the error of a rank outside a group."""
    rank = dist.get_rank()
    odd, both = dist.new_group([1, 3]), dist.new_group([0, 2])
    assert error_of(EqualBatchLoader, [], both if rank % 2 else odd).startswith("UsageError: ")
    loaders = [
        pad_to_equal_batches([make_batch(1)] * rank, odd if rank % 2 else both),
        pad_to_equal_batches([make_batch(1)] * rank),
    ]
    return [len(list(loader)) for loader in loaders]


def test_groups_agree_among_themselves() -> None:
    assert run_ranks(groups, world_size=4) == [[2, 3], [3, 3], [2, 3], [3, 3]]
