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
    """w -= lr * g. The same as torch.optim.SGD without momentum; keeps no state."""

    lr: LearningRate = 1e-3
    name: ClassVar[str] = "sgd"

    def state(self, dim: int) -> tuple[State, ...]:
        """None."""
        return ()

    def step(self, weights: Tensor, state: Mapping[str, Tensor], grads: Tensor, lr: float) -> None:
        """One step in place."""
        weights.copy_(weights - lr * grads)
