"""Updates of the cuda engine with atomic additions equal those of the reference engine within rounding."""

from __future__ import annotations

import pytest
import torch

from megalith import SGD, Adam, EmbeddingCollection, Feature, Mean, Ragged, Segment, Table, TableConfig
from megalith.errors import InputError
from tests.table.engines.cuda_configs import ON_GPU, gpu_or_soak
from tests.table.engines.programs import Program, everything

SIZES = {"distinct": 3000, "batch": 5000} if ON_GPU else {"distinct": 10, "batch": 9}
CONFIGS = {
    "one": TableConfig("t", dim=5, optimizer=Adam(0.1), deterministic=False),
    "segments": TableConfig(
        "t",
        segments=[Segment(2, optimizer=SGD(0.5), precision="bfloat16"), Segment(3, optimizer=Adam(0.1))],
        deterministic=False,
    ),
}


@gpu_or_soak
@pytest.mark.parametrize("name", CONFIGS)
def test_programs_of_updates(name: str) -> None:
    calls = ("update", "update", "update_pooled", "lookup")
    # The gradients are multiples of 1/64: their sums are exact in any order.
    Program(CONFIGS[name], 5, calls=calls, **SIZES).run(60 if ON_GPU else 5)


@gpu_or_soak
def test_tables_with_and_without_atomic_additions_train_alike() -> None:
    column = Ragged.from_lists([[1, 2, 1], [4], [3, 1]])
    results = []
    for deterministic in (True, False):
        configs = [
            TableConfig(name, dim=3, optimizer=Adam(0.1), deterministic=deterministic) for name in ("a", "b")
        ]
        collection = EmbeddingCollection(
            configs, [Feature("x", "a"), Feature("y", "b", combiner=Mean())], engine="cuda"
        )
        for _ in range(2):
            out = collection({"x": column, "y": column})
            (out["x"] * out["y"] + out["x"]).sum().backward()
        results.append([everything(collection.tables[name]).rows for name in ("a", "b")])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_row_with_a_sum_that_is_not_finite_is_skipped_and_the_next_call_is_clean() -> None:
    table = Table(TableConfig("t", dim=2, optimizer=SGD(1.0), deterministic=False), engine="cuda")
    ids = torch.tensor([1, 1, 2])
    table.assign(torch.tensor([1, 2]), torch.zeros(2, 2))
    table.apply_gradients(ids, torch.tensor([[3e38, 0.0], [3e38, 0.0], [1.0, 1.0]]), step=0)
    with pytest.raises(InputError, match="1 rows got gradients with NaN or Inf"):
        table.stats()
    table.apply_gradients(ids, torch.ones(3, 2), step=1)
    assert table.lookup(torch.tensor([1, 2])).tolist() == [[-2.0, -2.0], [-2.0, -2.0]]
