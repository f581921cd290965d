"""Adagrad with coupled or decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megalith.errors import InputError
from megalith.table.optimizers.adagrad import AdagradSettings
from megalith.table.optimizers.optimizer import State


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
