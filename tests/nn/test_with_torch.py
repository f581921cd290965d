"""A collection together with the rest of torch: compile, autocast, GradScaler, torch.optim, DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.data import DataLoader, Dataset

from megalith import Adagrad, EmbeddingCollection, Feature, FirstN, Mean, Ragged, TableConfig
from megalith.errors import InputError, UsageError
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


class Between(Model):
    """Dense layers before and after the collection."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scale = nn.Linear(1, 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        factor = self.scale(torch.ones(1, 1)).sigmoid()
        out = self.embeddings(batch)
        logits: Tensor = self.head(torch.cat([out["a"], out["b"].flatten(1)], 1))[:, 0]
        return logits * factor[0]


def test_compiled_code_breaks_once_at_the_collection_and_is_not_compiled_again(graphs: Graphs) -> None:
    model, plain = Between(), Between()
    compiled = torch.compile(model, backend=graphs)  # without dynamic=True, as most users call it
    train_beside(model, compiled, plain)  # warm-up: torch compiles for the first size, then for any
    warm = len(graphs.graphs)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train_beside(model, compiled, plain)
    assert len(graphs.graphs) == warm
    found = torch._dynamo.explain(model)(batch(0)[0])
    assert (found.graph_break_count, found.graph_count) == (1, 2), found.break_reasons


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


# ---- follow


def following(**options: Any) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(update="step", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.embeddings.follow(optimizer)
    return model, optimizer


def scaled_step(
    scaler: torch.amp.GradScaler, model: Model, optimizer: torch.optim.Optimizer, loss: Tensor
) -> bool:
    """True if the step was taken."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= scale


def same_weights(model: Model, other: Model) -> None:
    assert_same_bits(rows_of(model), rows_of(other))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_trains_as_without_scaling(fused: bool) -> None:
    model, plain = Model(update="step", clip_value=0.01), Model(clip_value=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, fused=fused) for m in (model, plain)]
    model.embeddings.follow(optimizers[0])
    for number in range(5):
        assert scaled_step(scaler, model, optimizers[0], loss_of(model, number))
        optimizers[1].zero_grad()
        loss_of(plain, number).backward()
        optimizers[1].step()
    same_weights(model, plain)  # a scale that is a power of two rounds nothing


@pytest.mark.parametrize("where", ["dense and sparse", "sparse alone", "sparse alone, fused"])
def test_a_grad_scaler_skips_a_step_that_overflows(where: str) -> None:
    model, _ = following()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused="fused" in where)
    model.embeddings.follow(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert scaled_step(scaler, model, optimizer, loss_of(model, 0))
    rows, weights = rows_of(model), [p.detach().clone() for p in model.parameters()]

    if where == "dense and sparse":
        loss = loss_of(model, 1) * 3e38 * 1e38
    else:
        out = model.embeddings({"a": ints(1), "b": ints(1)})
        loss = loss_of(model, 1) + (out["a"] * 3e38).sum()  # finite until it is scaled
    assert not scaled_step(scaler, model, optimizer, loss)
    assert scaler.get_scale() == 2.0**9
    assert_same_bits(rows_of(model), rows)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert model.embeddings.global_step == 1

    assert scaled_step(scaler, model, optimizer, loss_of(model, 2))  # and on it goes
    assert model.embeddings.global_step == 2


def test_two_micro_batches_are_one_step_of_rows_and_weights() -> None:
    (model, optimizer), (other, _) = following(), following()
    by_hand = torch.optim.SGD(other.head.parameters(), lr=0.1)
    for number in range(0, 6, 2):
        optimizer.zero_grad()
        by_hand.zero_grad()
        for each in (model, other):
            for half in (number, number + 1):
                (loss_of(each, half) / 2).backward()
        optimizer.step()
        by_hand.step()
        other.embeddings.step()
    assert model.embeddings.global_step == 3
    same_weights(model, other)


def test_clip_grad_norm_scales_rows_by_the_factor_of_the_weights() -> None:
    (model, optimizer), (other, _) = following(), following()
    norm = nn.utils.get_total_norm(torch.autograd.grad(loss_of(model, 0), list(model.head.parameters())))
    model.embeddings.zero_grad()
    loss_of(model, 0).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) == norm
    optimizer.step()
    loss_of(other, 0).backward()
    other.embeddings.step(scale=float(0.01 / (norm + 1e-6)))
    torch.testing.assert_close(rows_of(model), rows_of(other), rtol=1e-6, atol=0)
    assert model.embeddings.rows_anchor.tolist() == [0]  # type: ignore[union-attr,operator]


def test_dropped_gradients_reach_neither_rows_nor_weights() -> None:
    (model, optimizer), (other, same) = following(), following()
    for each, opt in ((model, optimizer), (other, same)):
        for number in (0, 1) if each is model else (1,):
            opt.zero_grad()
            loss_of(each, number).backward()
        opt.step()
    same_weights(model, other)


def test_a_loop_that_drops_only_dense_gradients_scales_no_step_of_the_rows() -> None:
    (model, optimizer), (other, same) = following(), following()
    for number in range(3):
        model.head.zero_grad()
        same.zero_grad()
        for each in (model, other):
            loss_of(each, number).backward()
        optimizer.step()
        same.step()
    same_weights(model, other)


def test_what_follow_cannot_do_is_named() -> None:
    model, optimizer = following()
    with pytest.raises(UsageError, match=r'follow\(\) is for EmbeddingCollection\(update="step"\)'):
        Model().embeddings.follow(optimizer)
    with pytest.raises(InputError, match=r"as torch.optim.Adam\(model.parameters\(\)\)"):
        model.embeddings.follow(torch.optim.SGD(model.head.parameters()))
    with pytest.raises(UsageError, match="maximize=True: rows minimize; negate the loss"):
        model.embeddings.follow(torch.optim.SGD(model.parameters(), maximize=True))
    loss_of(model, 0).backward()
    model.zero_grad()  # of the dense part alone
    loss_of(model, 0).backward()
    rows = rows_of(model)
    with pytest.raises(InputError, match=r"the gradients were set to zero other than by optimizer.zero_grad"):
        optimizer.step()
    assert_same_bits(rows_of(model), rows)
    half = Model(update="step", output_dtype=torch.float16).half()
    with pytest.raises(UsageError, match="use autocast or bfloat16"):
        half.embeddings.follow(torch.optim.SGD(half.parameters()))


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
