"""Stochastic gradient descent, without and with momentum."""

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


@dataclass(frozen=True)
class Momentum(Optimizer):
    """v = momentum * v - lr * (g + weight_decay * w); w += v.

    The learning rate is part of the velocity, as in Monolith and TensorFlow; torch.optim.SGD multiplies by it
    outside. The two forms differ when the learning rate changes between steps. With `nesterov`,
    w += (1 + momentum) * v - momentum * (the previous velocity). The velocity of a row does not change while
    the row is not updated.

    Args:
        lr: The learning rate.
        momentum: Factor of the previous velocity, in [0, 1).
        weight_decay: Factor of the weight that is added to its gradient.
        nesterov: Whether to use Nesterov's form.
    """

    lr: LearningRate = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False
    name: ClassVar[str] = "momentum"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_flag("nesterov")
        self._check("weight_decay")
        self._check_below_one("momentum")

    @property
    def hyper(self) -> tuple[float, ...]:
        """momentum, weight decay, nesterov."""
        return (self.momentum, self.weight_decay, float(self.nesterov))

    def states(self, dim: int) -> tuple[State, ...]:
        # The velocity.
        return (State("velocity", dim),)

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        before = state["velocity"].clone()
        velocity = self.momentum * before - lr * (grads + self.weight_decay * rows)
        state["velocity"].copy_(velocity)
        if self.nesterov:
            velocity = (1.0 + self.momentum) * velocity - self.momentum * before
        rows.copy_(rows + velocity)
