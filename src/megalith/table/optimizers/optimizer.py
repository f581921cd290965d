"""What an optimizer is: its settings, the state it keeps per row, and one step.

A new optimizer is a file beside this one (settings + the torch step that defines the
result), a file in native/optimizers (the same step for the cpu engine), and a line in each
directory's list. Optimizers never see ids, duplicates or learning-rate schedules: they get one
summed gradient per distinct row and the rate of this step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megalith.errors import InputError
from megalith.table.schedules import FLOAT32_MAX, LearningRate, as_float32, check_rate, rate_at


@dataclass(frozen=True)
class State:
    """A named piece of a row's optimizer state: its size in floats and initial value."""

    name: str
    size: int
    initial: float = 0.0


@dataclass(frozen=True)
class Optimizer:
    """Base of the sparse optimizers. `lr` is a float, a schedule or any callable of the step."""

    lr: LearningRate

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_rate(type(self).__name__, self.lr)

    def rate(self, step: int) -> float:
        """The learning rate of a step. Raises InputError if the schedule gives no usable one."""
        return rate_at(self.lr, step)

    def state(self, dim: int) -> tuple[State, ...]:
        """The state kept beside a segment of `dim` weights, in storage order."""
        raise NotImplementedError

    def step(self, weights: Tensor, state: Mapping[str, Tensor], grads: Tensor, lr: float) -> None:
        """One step in place: weights and grads float32 [n, dim], state [n, size] each."""
        raise NotImplementedError

    @property
    def hyper(self) -> tuple[float, ...]:
        """The settings in the order of the native rule."""
        return ()

    def _check(self, *fields: str) -> None:
        """Raises InputError for a field that is negative or not finite."""
        for field in fields:
            value = getattr(self, field)
            good = isinstance(value, int | float) and 0 <= value <= FLOAT32_MAX
            if not good:
                raise InputError(
                    f"{type(self).__name__}: {field} must be finite and not negative, got {value!r}"
                )

    def _check_below_one(self, field: str, value: float) -> None:
        good = isinstance(value, int | float) and 0 <= value < 1 and as_float32(value) < 1
        if not good:
            raise InputError(
                f"{type(self).__name__}: {field} must be in [0, 1) also as a float32, got {value!r}"
            )
