"""Dense weights as rows: torch's Adam has the same bits on rows of a table as on the weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from megalith import LocalShards, TableConfig, Zeros
from megalith.errors import UsageError
from megalith.training.ps_weights import DenseAdam, DenseWeights


def test_adam_on_rows_has_the_bits_of_torch() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(5 * 37, generator=generator)
    expected = nn.Parameter(weights.clone())
    optimizer = torch.optim.Adam([expected], 0.013)
    config = TableConfig("dense", dim=37, optimizer=DenseAdam(0.013), initializer=Zeros())
    shards, ids = LocalShards([config]), torch.arange(5)
    shards.assign({"dense": (ids, weights.view(5, 37))})
    for step in range(20):
        grads = torch.randn(5 * 37, generator=generator)
        expected.grad = grads.clone()
        optimizer.step()
        shards.apply_gradients({"dense": ids}, {"dense": grads.view(5, 37)}, step=step)
        assert torch.equal(shards.lookup({"dense": ids}).rows["dense"].reshape(-1), expected.detach())


def test_a_model_with_buffers_raises() -> None:
    def place(tables: Sequence[TableConfig]) -> LocalShards:
        return LocalShards(tables)

    with pytest.raises(UsageError, match=r"buffers \(1.num_batches_tracked, .*train it in one process"):
        DenseWeights(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 0.1, place)  # type: ignore[arg-type]
