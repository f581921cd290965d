"""Lion: steps by the sign of an averaged gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megalith.errors import InputError
from megalith.table.optimizers.optimizer import Optimizer, State
from megalith.table.schedules import LearningRate


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
