"""Adagrad: a learning rate per weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megalith.table.optimizers.optimizer import Optimizer, State
from megalith.table.schedules import LearningRate


@dataclass(frozen=True)
class AdagradSettings(Optimizer):
    """The settings that Adagrad and RowWiseAdagrad share."""

    lr: LearningRate = 1e-2
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("initial_accumulator_value", "eps", "weight_decay")

    @property
    def hyper(self) -> tuple[float, ...]:
        """eps, weight decay."""
        return (self.eps, self.weight_decay)


@dataclass(frozen=True)
class Adagrad(AdagradSettings):
    """g += weight_decay * w; n += g^2; w -= lr * g / (sqrt(n) + eps).

    Formula and defaults are those of torch.optim.Adagrad (without lr_decay: use a schedule). Monolith has no
    eps and starts n at 0.1: Adagrad(initial_accumulator_value=0.1, eps=0).

    Args:
        lr: The learning rate.
        initial_accumulator_value: Initial value of the sum n.
        eps: Added to sqrt(n).
        weight_decay: Factor of the weight that is added to its gradient.
    """

    name: ClassVar[str] = "adagrad"

    def states(self, dim: int) -> tuple[State, ...]:
        # The sum of squared gradients.
        return (State("sum", dim, self.initial_accumulator_value),)

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        grads = grads + self.weight_decay * rows
        state["sum"].copy_(state["sum"] + grads * grads)
        rows.copy_(rows - lr * grads / (state["sum"].sqrt() + self.eps))
