"""Cases of Monolith's tests that need a GPU, on a machine with one: `python -m pytest THIS_FILE`.

Others run on the GPU in test_distribution_ops, test_buffer_ops, test_reduce_ops, test_layout_ops and
test_layout_versions (the ops of Monolith's GPU cases) and in test_cuda_partitioned_tables (`enable_gpu_emb`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megalith import LocalShards
from megalith.compat.monolith import ParserCtx, PartitionedHashTable
from megalith.compat.monolith.distribution_utils import FLAGS, update_session_config_for_gpu
from tests.compat.monolith.test_cuda_partitioned_tables import reference_tables
from tests.compat.monolith.test_distributed_ps import VECTORS, params
from tests.compat.monolith.test_distributed_ps_sync import configs, expected_of, named, the_case


@pytest.mark.parametrize("native", [False, True], ids=["merged", "native"])
@pytest.mark.parametrize("vector", VECTORS, ids=["assign", "lookup", "gradients"])
def test_layouts_on_the_gpu(vector: Callable[[PartitionedHashTable], None], native: bool) -> None:
    """Monolith's cases with use_gpu: layouts on the GPU, of tables that are not."""
    context = ParserCtx(True)
    context.sharding_sparse_fids_op_params = params(native, use_gpu=True)
    vector(PartitionedHashTable(2, reference_tables, native, parser_ctx=context))


def test_the_synchronous_table_of_the_cuda_engine() -> None:
    def on_the_gpu(rank: int) -> LocalShards:
        return LocalShards([named(name, config) for name, config in configs(rank).items()], engine="cuda")

    assert the_case(make=on_the_gpu) == expected_of(1)


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
