"""Tables of the cuda engine in a model that torch compiles, casts and scales; on a GPU, if there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from megalith import (
    SGD,
    Adagrad,
    EmbeddingCollection,
    Feature,
    FirstN,
    Mean,
    Normal,
    Ragged,
    RowWiseAdagrad,
    Table,
    TableConfig,
    Zeros,
)
from megalith.library import native_module
from megalith.table import Chunk
from tests.table.engines.cuda_configs import cases, gpu_or_soak
from tests.table.engines.programs import everything

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


@gpu_or_soak
def test_amp_and_a_compiled_head_train_as_with_the_reference_engine(bfloat16_matmul: None) -> None:
    (rows, weights), (expected, others) = trained("cuda"), trained("reference")
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)
    for own, other in zip(weights, others, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@gpu_or_soak
def test_training_follows_an_evaluation_in_inference_mode() -> None:
    config = TableConfig("t", dim=2, optimizer=SGD(1.0), initializer=Zeros())
    columns = {"x": torch.tensor([1, 2, 1], device=DEVICE)}
    with torch.inference_mode():  # it makes the memory that later steps of these sizes use
        collection = EmbeddingCollection([config], [Feature("x", "t")], engine="cuda")
        for _ in range(4):
            assert float(collection(columns)["x"].abs().sum()) == 0.0
    for _ in range(2):
        collection(columns)["x"].sum().backward()
    with torch.inference_mode():
        assert collection(columns)["x"].tolist() == [[-4.0, -4.0], [-2.0, -2.0], [-4.0, -4.0]]
    collection.tables["t"].remove(torch.tensor([1]))
    assert len(collection.tables["t"]) == 1


@pytest.mark.parametrize("deterministic", cases([True, False], True))
def test_rows_that_were_made_in_inference_mode_can_be_trained(deterministic: bool) -> None:
    config = TableConfig(
        "t",
        dim=2,
        optimizer=SGD(1.0),
        initializer=Zeros(),
        deterministic=deterministic,
        device_bytes=2048,
    )
    with torch.inference_mode():
        table = Table(config, engine="cuda")
        table.assign(torch.arange(50), torch.zeros(50, 2))
        table.remove(torch.arange(3))
    for step in range(2):
        table.apply_gradients(torch.arange(40, 60), torch.ones(20, 2), step=step)
    table.remove(torch.arange(45))
    assert table.lookup(torch.tensor([44, 45, 59])).tolist() == [[0.0, 0.0], [-2.0, -2.0], [-2.0, -2.0]]
    table.clear()
    assert len(table) == 0


def trained_rows(engine: str) -> list[Chunk]:
    configs = [
        TableConfig("a", dim=4, optimizer=Adagrad(0.1)),
        TableConfig("b", dim=3, optimizer=RowWiseAdagrad(0.2), initializer=Normal(0.0, 0.1)),
    ]
    features = [Feature("x", "a"), Feature("y", "a", combiner=Mean()), Feature("z", "b", combiner=FirstN(2))]
    collection = EmbeddingCollection(configs, features, engine=engine)
    columns = {
        "x": torch.tensor([1, 2, 3]),
        "y": Ragged.from_lists([[1, 2], [], [3]]),
        "z": Ragged.from_lists([[7, 8, 9], [7], []]),
    }
    for _ in range(2):
        out = collection(columns)
        assert {value.dtype for value in out.values()} == {torch.float32}
        sum((value * value + value).sum() for value in out.values()).backward()
    return [everything(collection.tables[name]) for name in ("a", "b")]


@pytest.mark.parametrize("engine", cases(["cuda", "reference", "cpu"], "reference", "cpu"))
def test_rows_stay_float32_under_another_default_type(engine: str) -> None:
    if engine == "cpu" and native_module() is None:
        pytest.skip("the native module is not built for this Python")
    expected = trained_rows(engine)
    torch.set_default_dtype(torch.float64)
    try:
        got = trained_rows(engine)
    finally:
        torch.set_default_dtype(torch.float32)
    for own, other in zip(got, expected, strict=True):
        assert own.rows.dtype == torch.float32
        assert torch.equal(own.rows, other.rows)
        assert all(torch.equal(own.state[key], other.state[key]) for key in other.state)
