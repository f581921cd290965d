"""Gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megalith.table.optimizers.optimizer import Optimizer, State
from megalith.table.schedules import LearningRate


@dataclass(frozen=True)
class Momentum(Optimizer):
    """v = momentum * v - lr * (g + weight_decay * w); w += v.

    The rate is inside the velocity (Monolith's and TensorFlow's form), where torch.optim.SGD
    applies it outside: the two differ when the rate changes between steps. With `nesterov`,
    w += (1 + momentum) * v - momentum * (the velocity before).
    A row's velocity rests while the row is not trained.
    """

    lr: LearningRate = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False
    name: ClassVar[str] = "momentum"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("weight_decay")
        self._check_below_one("momentum", self.momentum)

    @property
    def hyper(self) -> tuple[float, ...]:
        """momentum, weight decay, nesterov."""
        return (self.momentum, self.weight_decay, float(self.nesterov))

    def state(self, dim: int) -> tuple[State, ...]:
        """The velocity."""
        return (State("velocity", dim),)

    def step(self, weights: Tensor, state: Mapping[str, Tensor], grads: Tensor, lr: float) -> None:
        """One step in place."""
        before = state["velocity"].clone()
        velocity = self.momentum * before - lr * (grads + self.weight_decay * weights)
        state["velocity"].copy_(velocity)
        if self.nesterov:
            velocity = (1.0 + self.momentum) * velocity - self.momentum * before
        weights.copy_(weights + velocity)
