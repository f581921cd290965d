"""RMSProp and Adadelta: gradients divided by the root of their averaged squares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megalith.table.optimizers.optimizer import Optimizer, State
from megalith.table.schedules import LearningRate


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """n = alpha * n + (1 - alpha) * g^2; w -= lr * g / (sqrt(n) + eps), and g includes weight_decay * w.

    Formula and defaults are those of torch.optim.RMSprop without momentum and centering. Monolith's form is
    RMSProp(0.01, alpha=0.9, eps=1); its kernel ignores the learning rate of the step, this one uses it.

    Args:
        lr: The learning rate.
        alpha: Factor of the previous average, in [0, 1).
        eps: Added to sqrt(n).
        weight_decay: Factor of the weight that is added to its gradient.
    """

    lr: LearningRate = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    name: ClassVar[str] = "rmsprop"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("eps", "weight_decay")
        self._check_below_one("alpha")

    @property
    def new_square(self) -> float:
        """Factor of the squared gradient in the average."""
        return 1 - self.alpha

    @property
    def hyper(self) -> tuple[float, ...]:
        """alpha, factor of the squared gradient, eps, weight decay."""
        return (self.alpha, self.new_square, self.eps, self.weight_decay)

    def states(self, dim: int) -> tuple[State, ...]:
        # The average of squared gradients.
        return (State("square_avg", dim),)

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        grads = grads + self.weight_decay * rows
        n = state["square_avg"]
        n.copy_(self.alpha * n + self.new_square * (grads * grads))
        rows.copy_(rows - lr * grads / (n.sqrt() + self.eps))


@dataclass(frozen=True)
class RMSPropV2(RMSProp):
    """RMSProp with a decayed sum instead of an average: n = alpha * n + g^2.

    Monolith's rmspropv2 is RMSPropV2(0.01, alpha=0.9, eps=1).

    Args:
        lr: The learning rate.
        alpha: Factor of the previous sum, in [0, 1).
        eps: Added to sqrt(n).
        weight_decay: Factor of the weight that is added to its gradient.
    """

    name: ClassVar[str] = "rmsprop_v2"

    @property
    def new_square(self) -> float:
        """Factor of the squared gradient in the sum."""
        return 1.0


@dataclass(frozen=True)
class Adadelta(Optimizer):
    """a = rho * a + (1 - rho) * g^2; d = sqrt(u + eps) / sqrt(a + eps) * g; u = rho * u + (1 - rho) * d^2.

    Then w -= lr * d. g includes weight_decay * w. Formula and defaults are those of torch.optim.Adadelta;
    Monolith's defaults are Adadelta(0.01, rho=0.9, eps=0.01).

    Args:
        lr: The learning rate.
        rho: Factor of the previous averages, in [0, 1).
        eps: Added to both averages.
        weight_decay: Factor of the weight that is added to its gradient.
    """

    lr: LearningRate = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0
    name: ClassVar[str] = "adadelta"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("eps", "weight_decay")
        self._check_below_one("rho")

    @property
    def hyper(self) -> tuple[float, ...]:
        """rho, 1 - rho, eps, weight decay."""
        return (self.rho, 1 - self.rho, self.eps, self.weight_decay)

    def states(self, dim: int) -> tuple[State, ...]:
        # The averages of squared gradients and squared steps.
        return (State("square_avg", dim), State("acc_delta", dim))

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        grads = grads + self.weight_decay * rows
        a, u = state["square_avg"], state["acc_delta"]
        a.copy_(self.rho * a + (1 - self.rho) * (grads * grads))
        delta = (u + self.eps).sqrt() / (a + self.eps).sqrt() * grads
        u.copy_(self.rho * u + (1 - self.rho) * (delta * delta))
        rows.copy_(rows - lr * delta)
