"""FTRL-proximal: l1 regularisation sets single weights (FTRL) or whole rows (GroupFTRL) to zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megalith.table.optimizers.optimizer import Optimizer, State, sum_of_squares
from megalith.table.schedules import LearningRate, check_positive_rate


@dataclass(frozen=True)
class FTRL(Optimizer):
    """Follow the regularised leader: an l1 penalty sets weights to zero.

    n' = n + g^2; z += g - (sqrt(n') - sqrt(n)) / lr * w; then w = 0 where |z| <= l1, else
    w = -lr * (z - sign(z) * l1) / (sqrt(n') + beta + l2 * lr). l2 is not doubled, unlike in TensorFlow.
    Monolith's sign error for l1 > 0 is fixed. The defaults are Monolith's; torch.optim has no FTRL. A
    learning rate of 0 raises InputError, because the formula divides by it.

    Args:
        lr: The learning rate.
        initial_accumulator_value: Initial value of n.
        beta: Added to sqrt(n').
        l1: Weight of the l1 penalty.
        l2: Weight of the l2 penalty.
    """

    lr: LearningRate = 1e-2
    initial_accumulator_value: float = 0.1
    beta: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    name: ClassVar[str] = "ftrl"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("initial_accumulator_value", "beta", "l1", "l2")

    def rate(self, step: int) -> float:
        # 0 is an error.
        return check_positive_rate(type(self).__name__, super().rate(step), step)

    @property
    def hyper(self) -> tuple[float, ...]:
        """beta, l1, l2."""
        return (self.beta, self.l1, self.l2)

    def states(self, dim: int) -> tuple[State, ...]:
        # The sum of squared gradients and z.
        return (State("sum", dim, self.initial_accumulator_value), State("z", dim))

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        before = state["sum"].clone()
        n = before + grads * grads
        sigma = (n.sqrt() - before.sqrt()) / lr
        z = state["z"] + (grads - sigma * rows)
        state["sum"].copy_(n)
        state["z"].copy_(z)
        shrunk = torch.where(z < 0, z + self.l1, z - self.l1)
        value = -lr * shrunk / (n.sqrt() + self.beta + self.l2 * lr)
        rows.copy_(torch.where(z.abs() > self.l1, value, torch.zeros_like(value)))


@dataclass(frozen=True)
class GroupFTRL(FTRL):
    """FTRL with the length |z| of the segment's z in place of each |z|.

    n' = n + g^2; z += g - (sqrt(n') - sqrt(n)) / lr * w; then w = 0 if |z| <= l1, else
    w = -lr * z * (1 - l1 / |z|) / (sqrt(n') + beta + l2 * lr). The formula is in Monolith's headers, its
    kernel is not in the open release. A learning rate of 0 raises InputError.

    Args:
        lr: The learning rate.
        initial_accumulator_value: Initial value of n.
        beta: Added to sqrt(n').
        l1: Length of z below which the row is zero.
        l2: Weight of the l2 penalty.
    """

    initial_accumulator_value: float = 0.0
    beta: float = 1.0
    name: ClassVar[str] = "group_ftrl"

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        n, z = state["sum"], state["z"]
        before = n.clone()
        n.copy_(n + grads * grads)
        z.copy_(z + (grads - (n.sqrt() - before.sqrt()) / lr * rows))
        norm = sum_of_squares(z).sqrt()[:, None]
        value = -lr * ((norm - self.l1) / norm) * z / (n.sqrt() + self.beta + self.l2 * lr)
        rows.copy_(torch.where((norm <= self.l1) | (z == 0), 0.0, value))
