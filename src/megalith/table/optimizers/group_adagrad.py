"""GroupAdagrad: one learning rate per row, and rows that become zero as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megalith.table.optimizers.optimizer import Optimizer, State
from megalith.table.optimizers.rowwise_adagrad import sum_of_squares
from megalith.table.schedules import LearningRate, check_positive_rate


@dataclass(frozen=True)
class GroupAdagrad(Optimizer):
    """s += max(g^2); r = lr / (beta + sqrt(s)); z = g - w / r; w = -r * (1 - l2 / |z|) * z.

    w is 0 if |z| <= l2. g includes weight_decay * w. max and |z| are over the segment, so l2 sets a whole
    row to zero; without l2 it is w -= r * g. The defaults are Monolith's; torch.optim has no such optimizer.
    A learning rate of 0 raises InputError, because the formula divides by it.

    Args:
        lr: The learning rate.
        initial_accumulator_value: Initial value of s.
        beta: Added to sqrt(s).
        l2: Length of z below which the row is zero.
        weight_decay: Factor of the weight that is added to its gradient.
    """

    lr: LearningRate = 1e-2
    initial_accumulator_value: float = 0.1
    beta: float = 0.0
    l2: float = 0.0
    weight_decay: float = 0.0
    name: ClassVar[str] = "group_adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("initial_accumulator_value", "beta", "l2", "weight_decay")

    def rate(self, step: int) -> float:
        # 0 is an error.
        return check_positive_rate("GroupAdagrad", super().rate(step), step)

    @property
    def hyper(self) -> tuple[float, ...]:
        """beta, l2, weight decay."""
        return (self.beta, self.l2, self.weight_decay)

    def states(self, dim: int) -> tuple[State, ...]:
        # The sum of the largest squared gradients.
        return (State("sum", 1, self.initial_accumulator_value),)

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        grads = grads + self.weight_decay * rows
        s = state["sum"]
        s.copy_(s + (grads * grads).amax(1, keepdim=True))
        rate = lr / (self.beta + s.sqrt())
        z = grads - rows / rate
        norm = sum_of_squares(z).sqrt()[:, None]
        rows.copy_(torch.where(norm <= self.l2, 0.0, -rate * ((norm - self.l2) / norm) * z))
