"""PartitionedHashTable with enable_gpu_emb: the layouts of CPU tables, after rounds of random gradients.

Without a GPU the kernels run in Triton's interpreter, some cases in `make test` and the others in `make
soak`; `make test-gpu` runs all of them on a GPU, where tables over two ranks share it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith import LocalShards, Ragged, TableConfig
from megalith.compat.monolith import ParserCtx, PartitionedHashTable, sharding_sparse_fids_with_context
from tests.compat.monolith.test_distributed_ps import SLICES, params
from tests.distributed.ranks import run_ranks

ON_A_GPU = torch.cuda.is_available()
SOAK = [] if ON_A_GPU else [pytest.mark.soak]
BATCH, ROUNDS = (4, 3) if ON_A_GPU else (2, 2)


def context_of(native: bool, num_ps: int, on_gpu: bool) -> ParserCtx:
    context = ParserCtx(True)
    options = {"num_ps": num_ps, "enable_gpu_emb": on_gpu, "use_gpu": on_gpu}
    context.sharding_sparse_fids_op_params = params(native, **options)
    return context


def reference_tables(_: int, configs: dict[str, TableConfig]) -> LocalShards:
    """Tables that need no native module, which the machine with the GPU may lack."""
    return LocalShards(list(configs.values()), engine="reference")


def rounds(table: PartitionedHashTable, context: ParserCtx | None, rows: slice) -> list[Tensor]:
    """The layouts that rounds of a lookup and random gradients see, for some rows of each batch."""
    generator = torch.Generator().manual_seed(1)
    bundle: dict[str, Any] = {}  # Monolith's test passes one to all rounds
    seen = []
    for step in range(ROUNDS):
        ids = torch.randint(0, 6, (len(SLICES), BATCH, 2), generator=generator)
        batch = {name: Ragged.from_lists(own[rows].tolist()) for name, own in zip(SLICES, ids, strict=True)}
        features: dict[str, Any] = {} if context else dict(batch)
        if context:
            sharding_sparse_fids_with_context(batch, features, context)
        layouts = table.flatten_layout(table.lookup(features, bundle))
        grads = [torch.randn(BATCH, x.shape[1], generator=generator)[rows].to(x.device) for x in layouts]
        table.apply_gradients(list(zip(grads, layouts, strict=True)), step, 7, auxiliary_bundle=bundle)
        seen.append(torch.cat([x.detach().cpu() for x in layouts], 1))
    return seen


def on_the_cpu(native: bool) -> list[Tensor]:
    context = context_of(native, 1, on_gpu=False)
    return rounds(PartitionedHashTable(1, reference_tables, native, parser_ctx=context), None, slice(None))


@pytest.mark.parametrize("split_ahead", [False, True], ids=["ids", "split"])
@pytest.mark.parametrize(
    "native", [pytest.param(value, marks=SOAK) for value in (False, True)], ids=["merged", "native"]
)
def test_tables_on_a_gpu_have_the_layouts_of_tables_on_the_cpu(native: bool, split_ahead: bool) -> None:
    """Monolith's test of GPU tables, on one rank."""
    context = context_of(native, 1, on_gpu=True)
    table = PartitionedHashTable(1, None, native, parser_ctx=context)
    found = rounds(table, context if split_ahead else None, slice(None))
    torch.testing.assert_close(found, on_the_cpu(native), rtol=0.0, atol=1e-6)


def rounds_of_a_rank(native: bool) -> tuple[list[Tensor], Tensor]:
    """A rank's half of each batch; then the row of an id of each rank, as rank 1 assigned it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if ON_A_GPU:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    context = context_of(native, size, on_gpu=True)
    table = PartitionedHashTable(size, None, native, parser_ctx=context)
    half = BATCH // size
    seen = rounds(table, context, slice(rank * half, (rank + 1) * half))
    (name, config), device = next(iter(table.shards.configs.items())), table.shards.device
    ids = {ps: {name: torch.tensor([100 + ps], device=device)} for ps in range(size)}
    rows = torch.full((1, config.dim), 2.0, device=device)
    data = {ps: {name: (own[name], rows)} for ps, own in ids.items()} if rank == 1 else {}
    found = table.assign(data).assign_add(data)._lookup_raw(ids)
    return seen, torch.stack([found[ps][name][0, 0].cpu() for ps in range(size)])


@pytest.mark.parametrize("native", [pytest.param(False, marks=SOAK), True], ids=["merged", "native"])
def test_tables_over_ranks_train_as_one_process(native: bool) -> None:
    found = run_ranks(rounds_of_a_rank, native)
    together = [torch.cat(parts) for parts in zip(*(seen for seen, _ in found), strict=True)]
    torch.testing.assert_close(together, on_the_cpu(native), rtol=0.0, atol=1e-6)
    assert [assigned.tolist() for _, assigned in found] == [[4.0, 4.0]] * 2
