"""SyncShards with tables of the cuda engine, in Triton's interpreter; gpu_shards.py has the tests on GPUs."""

from __future__ import annotations

import torch

from megalith.distributed.exchange import Exchange, staging_buffer
from tests.distributed import cuda_shards
from tests.distributed.ranks import error_of, run_ranks


def test_ranks_with_tables_of_the_cuda_engine_train_as_one_process() -> None:
    found = run_ranks(cuda_shards.all_ranks, cuda_shards.SIZE, 2, "auto")
    cuda_shards.check(found, cuda_shards.one_process("reference", cuda_shards.SIZE, 2))


def nccl_without_a_gpu() -> str:
    return error_of(Exchange(transport="nccl").use_device, torch.device("cpu"))


def test_nccl_needs_a_gpu_for_each_rank() -> None:
    (found,) = run_ranks(nccl_without_a_gpu, world_size=1)
    assert found.startswith("UsageError: transport='nccl': each rank needs a GPU of its own")


def test_staging_memory_is_pinned_where_a_gpu_is() -> None:
    assert staging_buffer(8).is_pinned() == torch.cuda.is_available()
