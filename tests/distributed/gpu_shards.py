"""SyncShards on GPUs: NCCL at world size 1, and several ranks that share one GPU. `make test-gpu` runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalith import SGD, SyncShards, TableConfig, Zeros
from tests.distributed import cuda_shards
from tests.distributed.ranks import run_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_gpu_train_as_one_process(ranks: int) -> None:
    size, steps = 4096, 5
    found = run_ranks(cuda_shards.all_ranks, size, steps, "gloo", world_size=ranks)
    assert {own["transport"] for own in found} == {"gloo"}
    cuda_shards.check(found, cuda_shards.one_process("reference", size, steps))


def test_one_rank_with_nccl_trains_as_without_ranks() -> None:
    size, steps = 4096, 5
    found = run_ranks(cuda_shards.all_ranks, size, steps, "nccl", world_size=1)
    assert found[0]["transport"] == "nccl"
    cuda_shards.check(found, cuda_shards.one_process("cuda", size, steps))


def side_stream() -> list[Any]:
    shards = SyncShards(
        [TableConfig("t", dim=16, optimizer=SGD(1.0), initializer=Zeros())], engine="cuda", transport="nccl"
    )
    ids, ones = torch.arange(100_000, device="cuda"), torch.ones(100_000, 16, device="cuda")
    torch.cuda.synchronize()
    right = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for step in range(10):
            lookup = shards.lookup({"t": ids})
            right.append(bool((lookup.rows["t"] == -float(step)).all()))
            shards.apply_gradients(lookup, {"t": ones * 1.0}, step=step)
    return right


def test_calls_on_another_stream_than_the_exchange_are_in_order() -> None:
    (right,) = run_ranks(side_stream, world_size=1)
    assert all(right)
