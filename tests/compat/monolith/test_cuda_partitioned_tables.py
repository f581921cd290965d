"""PartitionedHashTable on the cuda engine: the layouts of CPU tables, after rounds of random gradients.

Without a GPU the kernels run in Triton's interpreter, one case in `make test` and the other in `make soak`;
`make test-gpu` runs both on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith import LocalShards, Ragged
from megalith.compat.monolith import PartitionedHashTable
from tests.compat.monolith.test_distributed_ps import SLICES, params

WITHOUT_A_GPU = [] if torch.cuda.is_available() else [pytest.mark.soak]


@pytest.mark.parametrize("native", [pytest.param(False, marks=WITHOUT_A_GPU), True])
def test_tables_on_a_gpu_have_the_layouts_of_tables_on_the_cpu(native: bool) -> None:
    context = SimpleNamespace(sharding_sparse_fids_op_params=params(native, num_ps=1))

    def table(engine: str) -> PartitionedHashTable:
        return PartitionedHashTable(
            1,
            lambda _, configs: LocalShards(list(configs.values()), engine=engine),
            native,
            parser_ctx=context,
        )

    tables = (table("cuda"), table("reference"))
    generator = torch.Generator().manual_seed(1)
    for step in range(3):  # the last lookup shows the second round's rows
        ids = torch.randint(0, 6, (len(SLICES), 3, 2), generator=generator)
        features = {name: Ragged.from_lists(own.tolist()) for name, own in zip(SLICES, ids, strict=True)}
        bundles: list[dict[str, Any]] = [{}, {}]
        on_gpu, on_cpu = (
            each.flatten_layout(each.lookup(features, bundle))
            for each, bundle in zip(tables, bundles, strict=True)
        )
        for got, expected in zip(on_gpu, on_cpu, strict=True):
            torch.testing.assert_close(got.detach().cpu(), expected.detach(), rtol=0.0, atol=1e-6)
        grads = [torch.randn(layout.shape, generator=generator) for layout in on_cpu]
        for each, layouts, bundle in zip(tables, (on_gpu, on_cpu), bundles, strict=True):
            pairs = [(grad.to(x.device), x) for grad, x in zip(grads, layouts, strict=True)]
            each.apply_gradients(pairs, step, req_time=7, auxiliary_bundle=bundle)
