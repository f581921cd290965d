"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megalith.table.optimizers.optimizer import Optimizer, State
from megalith.table.schedules import LearningRate


@dataclass(frozen=True)
class SGD(Optimizer):
    """w -= lr * g, like torch.optim.SGD without momentum. It keeps no state.

    Args:
        lr: The learning rate.
    """

    lr: LearningRate = 1e-3
    name: ClassVar[str] = "sgd"

    def states(self, dim: int) -> tuple[State, ...]:
        # There is none.
        return ()

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        rows.copy_(rows - lr * grads)
