"""The Optimizer contract: settings, the state of each row, and one step.

A new optimizer is one file in this folder (settings and the torch step that defines the result), one file in
native/optimizers (the same step for the cpu engine), and one line in the list of each folder. An optimizer
does not handle ids, duplicates or learning-rate schedules: it receives one summed gradient per distinct row
and the learning rate of the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megalith.errors import InputError
from megalith.table.schedules import FLOAT32_MAX, LearningRate, as_float32, check_rate, rate_at


@dataclass(frozen=True)
class State:
    """One state of an optimizer, stored with each row.

    Attributes:
        name: Name, unique within the optimizer.
        size: Number of floats.
        initial: Initial value of each float.
    """

    name: str
    size: int
    initial: float = 0.0


@dataclass(frozen=True)
class Optimizer(ABC):
    """Base class of the sparse optimizers.

    Args:
        lr: The learning rate: a float, a schedule, or a callable of the step or of no argument.

    Raises:
        InputError: A setting is out of range.
    """

    lr: LearningRate

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_rate(type(self).__name__, self.lr)

    def rate(self, step: int) -> float:
        """Return the learning rate at a step.

        Args:
            step: The global step, from 0.

        Returns:
            The rate, finite and not negative.

        Raises:
            InputError: The callable raises, or returns a rate that is not a number, negative or not finite.
        """
        return rate_at(self.lr, step)

    @abstractmethod
    def state(self, dim: int) -> tuple[State, ...]:
        """Return the states of a segment, in storage order.

        Args:
            dim: Number of weights of the segment.

        Returns:
            The states, none if the optimizer keeps no state.
        """

    @abstractmethod
    def step(self, weights: Tensor, state: Mapping[str, Tensor], grads: Tensor, lr: float) -> None:
        """Make one step in place.

        Args:
            weights: float32 [n, dim].
            state: float32 [n, size] by name.
            grads: float32 [n, dim], one summed gradient per row.
            lr: The learning rate.
        """

    @property
    def hyper(self) -> tuple[float, ...]:
        """The settings, in the order of the native implementation."""
        return ()

    def _check(self, *fields: str) -> None:
        """Raise InputError if a field is negative or not finite."""
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
