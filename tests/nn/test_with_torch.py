"""A collection together with the rest of torch: compile, autocast, GradScaler, torch.optim, DataLoader."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.data import DataLoader, Dataset

from megalith import Adagrad, EmbeddingCollection, Feature, FirstN, Mean, Ragged, TableConfig
from megalith.errors import UsageError
from tests.nn.support import contents, ints
from tests.table.support import assert_same_bits, whole


class Model(nn.Module):
    """Two features of one table and a small dense part."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [TableConfig("t", dim=4, optimizer=Adagrad(0.1))]
        features = [Feature("a", "t", Mean()), Feature("b", "t", FirstN(2))]
        self.embeddings = EmbeddingCollection(tables, features, **options)
        self.head = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        out = self.embeddings(batch)
        logits: Tensor = self.head(torch.cat([out["a"], out["b"].flatten(1)], 1))[:, 0]
        return logits


def batch(number: int, size: int = 8) -> tuple[dict[str, Any], Tensor]:
    """Batch `number` of a made-up data set, and its labels."""
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 4, (size,), generator=generator)
    a = Ragged.from_lengths(torch.randint(20, (int(lengths.sum()),), generator=generator), lengths)
    b = torch.randint(-1, 20, (size, 3), generator=generator)
    return {"a": a, "b": b}, torch.randint(2, (size,), generator=generator).float()


def loss_of(model: Callable[[Any], Tensor], number: int, size: int = 8) -> Tensor:
    columns, labels = batch(number, size)
    return nn.functional.binary_cross_entropy_with_logits(model(columns), labels)


def rows_of(model: Model) -> Tensor:
    return whole(model.embeddings.shards.local["t"]).rows


# ---- torch.compile


class Graphs:
    """A backend that runs graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(module)
        return module.forward


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch.compiler.reset()
    yield Graphs()
    torch.compiler.reset()


def train_beside(model: Model, forward: Callable[[Any], Tensor], plain: Model) -> None:
    """Steps of `forward` on `model` give what steps of `plain` give, batches of several sizes."""
    optimizers = [torch.optim.SGD(m.head.parameters(), lr=0.1) for m in (model, plain)]
    for number, size in enumerate((3, 5, 5, 9)):
        losses = [loss_of(forward, number, size), loss_of(plain, number, size)]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert torch.equal(*losses)
    assert_same_bits(rows_of(model), rows_of(plain))


def test_compile_of_the_dense_part(graphs: Graphs) -> None:
    model, plain = Model(), Model()
    head: Any = torch.compile(model.head, backend=graphs, fullgraph=True, dynamic=True)
    model.head = head
    train_beside(model, model, plain)
    assert len(graphs.graphs) == 1


def test_compile_of_the_whole_model_breaks_at_the_collection_alone(graphs: Graphs) -> None:
    model, plain = Model(), Model()
    train_beside(model, torch.compile(model, backend=graphs, dynamic=True), plain)
    # One graph for all batch sizes: everything after the collection.
    (graph,) = graphs.graphs
    called = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    assert torch.cat in called
    assert torch._C._nn.linear in called


@pytest.mark.usefixtures("graphs")
def test_gradients_through_a_compiled_model() -> None:
    model, plain = Model(), Model()
    train_beside(model, torch.compile(model, backend="aot_eager", dynamic=True), plain)


# ---- AMP


def test_autocast(bfloat16_matmul: None) -> None:
    model = Model()
    for number in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model.embeddings(batch(number)[0])
            assert out["a"].dtype == torch.float32  # rows are not rounded; the linear layers round them
            assert model(batch(number)[0]).dtype == torch.bfloat16
            loss = loss_of(lambda columns: model(columns).float(), number)
        loss.backward()
    assert model.embeddings.global_step == 3
    assert torch.isfinite(rows_of(model)).all()


def scaled_step(
    scaler: torch.amp.GradScaler, model: Model, optimizer: torch.optim.Optimizer, loss: Tensor
) -> bool:
    """The recipe of the guide. True if the step was taken."""
    optimizer.zero_grad()
    model.embeddings.zero_grad()
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    if not model.embeddings.grads_finite():  # let the scaler see it
        next(model.head.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() < scale:
        return False
    model.embeddings.step(scale=1 / scale)
    return True


def test_grad_scaler_trains_as_without_scaling() -> None:
    model, plain = Model(update="step", clip_value=0.01), Model(clip_value=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizers = [torch.optim.SGD(m.head.parameters(), lr=0.1) for m in (model, plain)]
    for number in range(5):
        assert scaled_step(scaler, model, optimizers[0], loss_of(model, number))
        optimizers[1].zero_grad()
        loss_of(plain, number).backward()
        optimizers[1].step()
    assert_same_bits(rows_of(model), rows_of(plain))  # a scale that is a power of two rounds nothing
    for mine, other in zip(model.head.parameters(), plain.head.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("where", ["dense and sparse", "sparse alone"])
def test_grad_scaler_skips_a_step_that_overflows(where: str) -> None:
    model = Model(update="step")
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert scaled_step(scaler, model, optimizer, loss_of(model, 0))
    rows, weights = rows_of(model), [p.detach().clone() for p in model.head.parameters()]

    if where == "sparse alone":
        out = model.embeddings({"a": ints(1), "b": ints(1)})
        loss = loss_of(model, 1) + (out["a"] * 3e38).sum()  # finite until it is scaled
    else:
        loss = loss_of(model, 1) * 3e38 * 1e38

    assert not scaled_step(scaler, model, optimizer, loss)
    assert scaler.get_scale() == 2.0**9
    assert_same_bits(rows_of(model), rows)
    assert all(torch.equal(p, w) for p, w in zip(model.head.parameters(), weights, strict=True))
    assert model.embeddings.global_step == 1

    assert scaled_step(scaler, model, optimizer, loss_of(model, 2))  # and on it goes
    assert model.embeddings.global_step == 2


# ---- torch.optim


def test_moving_and_casting_a_model_leaves_rows_alone() -> None:
    model = Model()
    loss_of(model, 0).backward()
    rows = rows_of(model)
    model.double().to("cpu").float()
    assert_same_bits(rows_of(model), rows)
    loss_of(model, 0).backward()


def test_conversion_to_16_bits_and_torch_export_name_what_to_use() -> None:
    for convert in (nn.Module.half, nn.Module.bfloat16, lambda model: model.to(torch.float16)):
        with pytest.raises(UsageError, match=r"set TableConfig\(precision=...\) for the rows and Embedding"):
            convert(Model())
    assert Model(output_dtype=torch.bfloat16).bfloat16().head[0].weight.dtype == torch.bfloat16
    with pytest.raises(UsageError, match=r"use megalith.serving.export_model, which writes the rows"):
        torch.export.export(Model().eval(), ({"a": ints(1, 2), "b": ints(3, 4)},))


# ---- DataLoader


class Batches(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> tuple[dict[str, Any], Tensor]:
        return batch(number)


def test_workers_build_the_batches() -> None:
    model, plain = Model(), Model()
    loader = DataLoader(Batches(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    for columns, labels in loader:
        nn.functional.binary_cross_entropy_with_logits(model(columns), labels).backward()
    for number in range(6):
        loss_of(plain, number).backward()
    assert_same_bits(rows_of(model), rows_of(plain))
    assert contents(model.embeddings).keys() <= set(range(20))
