"""Tables of the cuda engine in a model that torch compiles, casts and scales; on a GPU, if there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from megalith import Adagrad, EmbeddingCollection, Feature, Mean, Ragged, TableConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def trained(engine: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Rows and dense weights after some steps with autocast, a compiled head and a GradScaler."""
    torch.manual_seed(0)
    config = TableConfig("t", dim=4, optimizer=Adagrad(0.1, initial_accumulator_value=0.1))
    features = [Feature("x", "t"), Feature("y", "t", combiner=Mean())]
    collection = EmbeddingCollection([config], features, update="step", engine=engine)
    head = nn.Linear(8, 1).to(DEVICE)
    compiled: Any = torch.compile(head, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    bags = Ragged.from_lists([[3, 4], [], [-1, 3, 3]]).to(DEVICE)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = collection({"x": torch.tensor([1, 2, step], device=DEVICE), "y": bags})
            assert {value.dtype for value in out.values()} == {torch.float32}
            loss = (compiled(torch.cat([out["x"], out["y"]], 1)).float() - 1.0).square().mean()
        scaler.scale(loss).backward()
        assert collection.grads_finite()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        collection.step(scale=1 / scale)
    rows = collection.tables["t"].lookup(torch.tensor([-1, 0, 1, 2, 3, 4]))
    return rows.cpu(), [weight.detach().cpu() for weight in head.parameters()]


def test_amp_and_a_compiled_head_train_as_with_the_reference_engine(bfloat16_matmul: None) -> None:
    (rows, weights), (expected, others) = trained("cuda"), trained("reference")
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)
    for own, other in zip(weights, others, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
