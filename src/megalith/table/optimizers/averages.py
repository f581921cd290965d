"""MovingAverage and BatchSoftmax: rows that average values or intervals instead of following gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megalith.errors import InputError
from megalith.table.optimizers.optimizer import Optimizer, State
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


_PART = 2**24
"""A float32 holds integers up to this, so the last step is kept in two parts."""


@dataclass(frozen=True)
class BatchSoftmax(Optimizer):
    """w = (1 - lr) * w + lr * (t - a); a = t, with t = step + 1. The gradient is not used.

    The weight estimates the interval between occurrences of an id; a softmax over the ids of a batch
    subtracts log(1 / w) to correct for how often an id is sampled (Yi et al., RecSys 2019). The segment must
    have dim 1. As in Monolith, the first occurrence counts from step 0; give the table an initializer, such
    as Constant(100.0), to start from a typical interval.

    Args:
        lr: Weight of the new interval in the average.
    """

    lr: LearningRate = 0.1
    name: ClassVar[str] = "batch_softmax"

    def states(self, dim: int) -> tuple[State, ...]:
        # The step of the last occurrence, high * 2^24 + low.
        if dim != 1:
            raise InputError(f"BatchSoftmax: the segment must have dim 1, got {dim}")
        return (State("step_high", 1), State("step_low", 1))

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        t = step + 1
        before = state["step_high"].long() * _PART + state["step_low"].long()
        rows.copy_((1 - lr) * rows + lr * (t - before).float())
        state["step_high"].fill_(t // _PART)
        state["step_low"].fill_(t % _PART)
