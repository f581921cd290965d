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

    def state(self, dim: int) -> tuple[State, ...]:
        """See `Optimizer.state`: there is none."""
        return ()

    def step(self, weights: Tensor, state: Mapping[str, Tensor], grads: Tensor, lr: float) -> None:
        """See `Optimizer.step`."""
        weights.copy_(weights - lr * grads)
