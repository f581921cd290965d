"""Stochastic gradient descent, without and with momentum, and by the sign of an averaged gradient (Lion)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megalith.errors import InputError
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


@dataclass(frozen=True)
class Lion(Optimizer):
    """w -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w); m = beta2 * m + (1 - beta2) * g.

    torch.optim has no Lion; the formula and the defaults are those of the paper (arXiv:2302.06675).

    Args:
        lr: The learning rate.
        betas: beta1 and beta2, each in [0, 1).
        weight_decay: lr * weight_decay is the part of the weight that a step removes.
    """

    lr: LearningRate = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    name: ClassVar[str] = "lion"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("weight_decay")
        if not isinstance(self.betas, list | tuple) or len(self.betas) != 2:
            raise InputError(f"Lion: betas must be two numbers, got {self.betas!r}")
        object.__setattr__(self, "betas", tuple(self.betas))
        self._check_below_one("betas")

    @property
    def hyper(self) -> tuple[float, ...]:
        """beta1, 1 - beta1, beta2, 1 - beta2, weight decay."""
        beta1, beta2 = self.betas
        return (beta1, 1 - beta1, beta2, 1 - beta2, self.weight_decay)

    def states(self, dim: int) -> tuple[State, ...]:
        # The averaged gradient.
        return (State("m", dim),)

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        beta1, beta2 = self.betas
        m = state["m"]
        sign = (beta1 * m + (1 - beta1) * grads).sign()
        m.copy_(beta2 * m + (1 - beta2) * grads)
        rows.copy_(rows - lr * (sign + self.weight_decay * rows))
