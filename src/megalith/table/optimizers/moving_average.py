"""MovingAverage: rows that average values instead of following gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megalith.table.optimizers.optimizer import Optimizer
from megalith.table.schedules import LearningRate


@dataclass(frozen=True)
class MovingAverage(Optimizer):
    """w = momentum * w + (1 - momentum) * g, where g is a value to average, not a gradient.

    Values of one id in one update are summed, as gradients are. It keeps no state.

    Args:
        lr: Not used.
        momentum: Factor of the previous average, in [0, 1).
    """

    lr: LearningRate = 1.0
    momentum: float = 0.9
    name: ClassVar[str] = "moving_average"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_below_one("momentum")

    @property
    def hyper(self) -> tuple[float, ...]:
        """momentum, 1 - momentum."""
        return (self.momentum, 1 - self.momentum)

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        rows.copy_(self.momentum * rows + (1 - self.momentum) * grads)
