"""Adagrad and its relatives: one learning rate per weight, or one per row.

Adagrad            a sum of squared gradients per weight
RowWiseAdagrad     one sum per row, of the mean squared gradient
DynamicWdAdagrad   a sum per weight; weight decay inside or outside of the gradient
GroupAdagrad       one sum per row, of the largest squared gradient; whole rows become zero
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.table.optimizers.optimizer import Optimizer, State, sum_of_squares
from megalith.table.schedules import LearningRate, check_positive_rate


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


@dataclass(frozen=True)
class RowWiseAdagrad(AdagradSettings):
    """g += weight_decay * w; n += mean(g^2) over the segment; w -= lr * g / (sqrt(n) + eps).

    It keeps one float of state per row instead of one per weight. Formula and eps are those of FBGEMM's
    EXACT_ROWWISE_ADAGRAD; torch.optim has no such optimizer.

    Args:
        lr: The learning rate.
        initial_accumulator_value: Initial value of the sum n.
        eps: Added to sqrt(n).
        weight_decay: Factor of the weight that is added to its gradient.
    """

    eps: float = 1e-8
    name: ClassVar[str] = "rowwise_adagrad"

    def states(self, dim: int) -> tuple[State, ...]:
        # The sum of mean squared gradients.
        return (State("sum", 1, self.initial_accumulator_value),)

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        grads = grads + self.weight_decay * rows
        mean = sum_of_squares(grads) / float(grads.shape[1])
        state["sum"].copy_(state["sum"] + mean[:, None])
        rows.copy_(rows - lr * grads / (state["sum"].sqrt() + self.eps))


@dataclass(frozen=True)
class DynamicWdAdagrad(AdagradSettings):
    """n += g^2; w -= lr * g / (sqrt(n) + eps) + lr * weight_decay * w.

    With decoupled=False it is Adagrad: g includes weight_decay * w, and the second term is absent. These are
    the two formulas of Monolith's dynamic_wd_adagrad, whose kernel its open release does not contain;
    Monolith has no eps and starts n at 0.1.

    Args:
        lr: The learning rate.
        initial_accumulator_value: Initial value of the sum n.
        eps: Added to sqrt(n).
        weight_decay: lr * weight_decay is the part of the weight that a step removes.
        decoupled: Whether the weight decay is outside of the gradient.
    """

    decoupled: bool = True
    name: ClassVar[str] = "dynamic_wd_adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.decoupled, bool):
            raise InputError(f"DynamicWdAdagrad: decoupled must be True or False, got {self.decoupled!r}")

    @property
    def hyper(self) -> tuple[float, ...]:
        """eps, weight decay added to the gradient, decoupled weight decay."""
        coupled, apart = (0.0, self.weight_decay) if self.decoupled else (self.weight_decay, 0.0)
        return (self.eps, coupled, apart)

    def states(self, dim: int) -> tuple[State, ...]:
        # The sum of squared gradients.
        return (State("sum", dim, self.initial_accumulator_value),)

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        eps, coupled, apart = self.hyper
        grads = grads + coupled * rows
        n = state["sum"]
        n.copy_(n + grads * grads)
        rows.copy_(rows - (lr * grads / (n.sqrt() + eps) + lr * apart * rows))


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
