"""Adam with an update count per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.table.optimizers.optimizer import Optimizer, State
from megalith.table.schedules import LearningRate


@dataclass(frozen=True)
class Adam(Optimizer):
    """m += (g - m)(1 - beta1); v += (g^2 - v)(1 - beta2); w -= r * m / (sqrt(v) + eps).

    r = lr * sqrt(1 - beta2^t) / (1 - beta1^t), and g includes weight_decay * w. There are two differences
    from torch.optim.Adam and SparseAdam: t counts the updates of the row, not the steps of the table, so a
    rare id is not treated like a frequent one; and eps is added to the uncorrected sqrt(v), so it has more
    effect in the first updates of a row.

    Args:
        lr: The learning rate.
        betas: beta1 and beta2, each in [0, 1).
        eps: Added to sqrt(v).
        weight_decay: Factor of the weight that is added to its gradient.
    """

    lr: LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    name: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("eps", "weight_decay")
        if not isinstance(self.betas, list | tuple) or len(self.betas) != 2:
            raise InputError(f"Adam: betas must be two numbers, got {self.betas!r}")
        object.__setattr__(self, "betas", tuple(self.betas))
        for beta in self.betas:
            self._check_below_one("betas", beta)

    @property
    def hyper(self) -> tuple[float, ...]:
        """beta1, beta2, eps, weight decay."""
        return (*self.betas, self.eps, self.weight_decay)

    def state(self, dim: int) -> tuple[State, ...]:
        """See `Optimizer.state`: both moments and the update count of the row."""
        return (State("m", dim), State("v", dim), State("count", 1))

    def step(self, weights: Tensor, state: Mapping[str, Tensor], grads: Tensor, lr: float) -> None:
        """See `Optimizer.step`."""
        one = torch.ones((), dtype=torch.float32)
        beta1, beta2 = (torch.tensor(b, dtype=torch.float32) for b in self.betas)
        state["count"].copy_(state["count"] + 1.0)
        t = state["count"].double()
        correction = (1.0 - beta2.double() ** t).sqrt() / (1.0 - beta1.double() ** t)
        rate = lr * correction.float()
        grads = grads + self.weight_decay * weights
        m, v = state["m"], state["v"]
        m.copy_(m + (grads - m) * (one - beta1))
        v.copy_(v + (grads * grads - v) * (one - beta2))
        weights.copy_(weights - rate * m / (v.sqrt() + self.eps))
