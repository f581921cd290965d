"""update="backward" with a dense optimizer: loops that would update rows too often raise, others do not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from megalith import SGD, EmbeddingCollection, Feature, TableConfig
from megalith.errors import UsageError
from megalith.nn import micro_steps

IDS = {"a": torch.arange(3)}


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = TableConfig("t", dim=2, optimizer=SGD(0.1))
        self.embeddings = EmbeddingCollection([table], [Feature("a", "t")], **options)
        self.bottom, self.head = nn.Linear(2, 2), nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self) -> Tensor:
        logits: Tensor = self.head(self.embeddings(IDS)["a"] + self.bottom(torch.ones(3, 2)))
        return logits

    def backward(self) -> None:
        self().square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def accumulated(model: Model) -> None:
    for _ in range(2):
        for _ in range(2):
            (model().square().mean() / 2).backward()
        model.step()


def test_a_second_backward_before_the_optimizers_step_raises() -> None:
    model = Model()
    with pytest.raises(
        UsageError, match=r'second backward before the step.*update="step".*allow_micro_steps'
    ):
        accumulated(model)
    assert model.embeddings.global_step == 3  # the fourth backward was not applied


@pytest.mark.parametrize("parameters", ["bottom", "head"])
def test_it_does_not_depend_on_the_order_of_gradients(parameters: str) -> None:
    model = Model()
    model.optimizer = torch.optim.SGD(model.get_submodule(parameters).parameters(), lr=0.1)
    with pytest.raises(UsageError, match="second backward"):
        accumulated(model)


def two_losses(model: Model) -> None:
    for _ in range(2):
        model().mean().backward()
        model().square().mean().backward()
        model.step()


def clipped(model: Model) -> None:
    for _ in range(2):
        for _ in range(2):
            model.backward()
            nn.utils.clip_grad_norm_(model.head.parameters(), 0.1)
        model.step()


def with_zeros_between(model: Model) -> None:
    """Its smallest parameter has a gradient that is always zero."""
    model.optimizer.add_param_group({"params": [idle := nn.Parameter(torch.ones(()))]})
    for _ in range(2):
        for _ in range(2):
            (model().square().mean() + 0 * idle).backward()
        model.step()


def with_sparse_gradients(model: Model) -> None:
    layer = nn.Embedding(3, 1, sparse=True)
    model.optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(2):
            (model().mean() + layer(torch.arange(3)).sum()).backward()
        model.step()


@pytest.mark.parametrize("loop", [two_losses, clipped, with_zeros_between, with_sparse_gradients])
def test_what_else_happens_to_gradients_hides_nothing(loop: Callable[[Model], None]) -> None:
    with pytest.raises(UsageError, match="second backward before the step"):
        loop(Model())


def test_allow_micro_steps_and_update_step_do_not_raise() -> None:
    allowed, in_step = Model(allow_micro_steps=True), Model(update="step")
    accumulated(allowed)
    accumulated(in_step)
    assert allowed.embeddings.global_step == 4


def usual(model: Model) -> None:
    model.backward()
    model.step()


def skipped_steps(model: Model) -> None:
    model.backward()
    model.optimizer.zero_grad()  # as after a loss that is not finite
    model.backward()
    model.optimizer.zero_grad(set_to_none=False)
    model.backward()
    model.step()


def several_forwards(model: Model) -> None:
    (model() + model()).mean().backward()
    model.step()


def dense_alone(model: Model) -> None:
    model.backward()
    model.head(torch.ones(1, 2)).sum().backward()
    model.step()


def rows_then_dense(model: Model) -> None:
    """Two backwards update rows and two bring dense gradients, but only the last does both."""
    model.embeddings(IDS)["a"].sum().backward()
    model.head(torch.ones(1, 2)).sum().backward()
    model.backward()
    model.step()


def rows_for_many_steps(model: Model) -> None:
    model.backward()
    model.step()
    for _ in range(3):
        model.embeddings(IDS)["a"].sum().backward()


def with_a_closure(model: Model) -> None:
    def closure() -> Tensor:
        model.optimizer.zero_grad()
        loss = model().square().mean()
        loss.backward()
        return loss

    model.optimizer.step(closure)  # type: ignore[arg-type]


def two_optimizers(model: Model) -> None:
    """One makes a step for every backward, the other for every second."""
    often = torch.optim.SGD(model.head.parameters(), lr=0.1)
    slow = torch.optim.SGD(model.bottom.parameters(), lr=0.1)
    for number in range(4):
        model.backward()
        often.step()
        often.zero_grad()
        if number % 2:
            slow.step()
            slow.zero_grad()


def another_model(model: Model) -> None:
    other = nn.Linear(2, 1)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    model.embeddings(IDS)["a"].sum().backward()
    for _ in range(2):
        other(torch.ones(1, 2)).sum().backward()
    theirs.step()
    model.embeddings(IDS)["a"].sum().backward()
    model.embeddings(IDS)["a"].sum().backward()


def fused_into_backward(model: Model) -> None:
    """Every parameter has an optimizer that makes its step in backward."""
    handles = []
    for parameter in model.head.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)

        def update(_: Tensor, own: Any = own) -> None:
            own.step()
            own.zero_grad()

        handles.append(parameter.register_post_accumulate_grad_hook(update))
    for _ in range(3):
        model.backward()
        model.bottom.zero_grad()
    for handle in handles:
        handle.remove()


LOOPS: list[Callable[[Model], None]] = [
    *(usual, skipped_steps, several_forwards, dense_alone, rows_then_dense, rows_for_many_steps),
    *(with_a_closure, two_optimizers, another_model, fused_into_backward),
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_other_loops_do_not_raise(loop: Callable[[Model], None]) -> None:
    model = Model()
    for _ in range(4):
        loop(model)


def test_several_collections_in_one_model() -> None:
    first, second = Model(), Model()
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for _ in range(4):
        (first() + second()).mean().backward()
        both.step()
        both.zero_grad()
    (first() + second()).mean().backward()
    loss = (first() + second()).mean()
    with pytest.raises(UsageError, match="second backward"):
        loss.backward()


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_grad_scaler_raises_at_its_second_step(unscaled: bool) -> None:
    model = Model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step() -> None:
        scaler.scale(model().square().mean()).backward()
        if unscaled:
            scaler.unscale_(model.optimizer)
        scaler.step(model.optimizer)
        scaler.update()
        model.optimizer.zero_grad()

    step()
    with pytest.raises(UsageError, match=r'GradScaler scales the loss.*update="step".*scaler.get_scale\(\)'):
        step()


def test_nothing_is_left_behind() -> None:
    model = Model()
    head = model.head
    gc.collect()
    hooks, guards = len(torch_optimizer._global_optimizer_post_hooks), len(micro_steps._GUARDS)
    for _ in range(2):
        usual(model)
    del model
    gc.collect()
    assert len(torch_optimizer._global_optimizer_post_hooks) == hooks, "one hook for all collections"
    assert len(micro_steps._GUARDS) == guards - 1
    assert not any(parameter._backward_hooks for parameter in head.parameters())


def test_a_collection_may_be_freed_during_a_step() -> None:
    freed: list[Model] = []

    def free(*_: Any) -> None:
        freed.clear()
        gc.collect()

    # Before the collections are made: torch's iteration goes on after this hook.
    handle = torch_optimizer.register_optimizer_step_post_hook(free)
    try:
        model = Model()
        freed.append(Model())
        usual(model)
    finally:
        handle.remove()
    assert not freed
