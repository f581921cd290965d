"""Cases of Monolith's tests that need a GPU, on a machine with one: `python -m pytest THIS_FILE`.

The ops of Monolith's GPU cases (fused gathers, segment sums, splits, layouts, aligned buffers) run on the GPU
in test_distribution_ops, test_buffer_ops, test_reduce_ops, test_layout_ops and test_layout_versions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalith import LocalShards, Ragged, TableConfig
from megalith.compat.monolith.distributed_ps import PartitionedHashTable
from megalith.compat.monolith.distribution_utils import FLAGS, update_session_config_for_gpu
from megalith.compat.monolith.parsers import ParserCtx, sharding_sparse_fids_with_context
from tests.compat.monolith.test_distributed_ps import SLICES, params


def reference_tables(_: int, configs: dict[str, TableConfig]) -> LocalShards:
    """Tables that need no native module, which the machine with the GPU may lack."""
    return LocalShards(list(configs.values()), engine="reference")


@pytest.mark.parametrize("split_ahead", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_gpu_emb_has_the_layouts_of_the_cpu(native: bool, split_ahead: bool) -> None:
    """Two rounds of a lookup and random gradients, on one rank, batch 3."""
    contexts = [ParserCtx() for _ in range(2)]
    for context, on_gpu in zip(contexts, (True, False), strict=True):
        options = {"num_ps": 1, "enable_gpu_emb": on_gpu, "use_gpu": on_gpu}
        context.sharding_sparse_fids_op_params = params(native, **options)
    on_gpu = PartitionedHashTable(1, None, native, parser_ctx=contexts[0])
    on_cpu = PartitionedHashTable(1, reference_tables, native, parser_ctx=contexts[1])
    assert on_gpu.shards.device.type == "cuda"
    generator = torch.Generator().manual_seed(1)
    for step in range(3):  # the last lookup shows the second round's rows
        ids = torch.randint(0, 6, (len(SLICES), 3, 2), generator=generator)
        batch = {name: Ragged.from_lists(own.tolist()) for name, own in zip(SLICES, ids, strict=True)}
        found: list[Any] = []
        for table, context in zip((on_gpu, on_cpu), contexts, strict=True):
            features: dict[str, Any] = dict(batch)
            if split_ahead:
                features = {}
                sharding_sparse_fids_with_context(batch, features, context)
            bundle: dict[str, Any] = {}
            found.append((table, table.flatten_layout(table.lookup(features, bundle)), bundle))
        for got, expected in zip(found[0][1], found[1][1], strict=True):
            assert got.is_cuda
            torch.testing.assert_close(got.detach().cpu(), expected.detach(), rtol=0.0, atol=1e-6)
        grads = [torch.randn(layout.shape, generator=generator) for layout in found[1][1]]
        for table, layouts, bundle in found:
            pairs = [(grad.to(x.device), x) for grad, x in zip(grads, layouts, strict=True)]
            table.apply_gradients(pairs, step, req_time=7, auxiliary_bundle=bundle)


def test_tensors_move_to_the_gpu() -> None:
    context = ParserCtx()
    context.sharding_sparse_fids_op_params = params(False, num_ps=1)
    table = PartitionedHashTable(1, reference_tables, False, parser_ctx=context)
    values: dict[str, Any] = {"a": torch.ones(1), "batch_size": torch.ones(1), "b": 3}
    table.tensor_move_to_gpu(((values, ["batch_size"]),))
    assert (values["a"].is_cuda, values["batch_size"].is_cuda, values["b"]) == (True, False, 3)


def test_the_memory_fraction_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FLAGS, "enable_sync_training", True)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    monkeypatch.setenv("MONOLITH_WITH_BYTEPS_FWD_GDR", "1")
    set_to: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_to.append)
    config = type("Config", (), {"gpu_options": type("Options", (), {})()})()
    update_session_config_for_gpu(config)
    assert set_to == [config.gpu_options.per_process_gpu_memory_fraction] == [0.4]
