"""The Optimizer contract: settings, the state of each row, and one step.

A user's optimizer is a subclass of `Optimizer` with `update` and, if it keeps state, `states`; it runs in
torch. An optimizer of the library also has one file in native/optimizers (the same step for the cpu engine)
and one line in the list of each folder. An optimizer does not handle ids, duplicates or learning-rate
schedules: it receives one summed gradient per distinct row and the learning rate of the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.checks import as_number
from megalith.table.schedules import (
    FLOAT32_MAX,
    LearningRate,
    as_float32,
    check_numbers,
    check_rate,
    rate_at,
)


@dataclass(frozen=True)
class State:
    """One state of an optimizer, stored with each row.

    Attributes:
        name: Name, unique within the optimizer: letters, digits and underscores.
        size: Number of floats: the dim of the segment for one per weight, 1 for one per row.
        initial: Initial value of each float.

    Raises:
        InputError: A field has the wrong type or value.
    """

    name: str
    size: int
    initial: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise InputError(f"State: name must be letters, digits and underscores, got {self.name!r}")
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise InputError(f"State {self.name!r}: size must be a positive integer, got {self.size!r}")
        initial = as_number(self.initial)
        if initial is None or not abs(initial) <= FLOAT32_MAX:
            raise InputError(f"State {self.name!r}: initial must be a finite number, got {self.initial!r}")
        object.__setattr__(self, "initial", initial)


@dataclass(frozen=True)
class Optimizer(ABC):
    """Base class of the sparse optimizers.

    A subclass with an `update` is an optimizer. The cpu engine calls it once for all distinct rows of an
    update, the reference engine once per row: rows must not depend on each other.

    Args:
        lr: The learning rate: a number, a schedule, or a callable of the step or of no argument. A 0-d tensor
            is read once.

    Raises:
        InputError: A setting is out of range.
    """

    lr: LearningRate

    name: ClassVar[str]
    """Identifies the optimizer in checkpoints; the name of the class, unless the class sets it."""

    _arguments: ClassVar[int | None] = None
    """How a callable `lr` is called; see `check_rate`. Each object has its own."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    def __post_init__(self) -> None:
        lr, arguments = check_rate(type(self).__name__, self.lr)
        object.__setattr__(self, "lr", lr)
        object.__setattr__(self, "_arguments", arguments)

    def rate(self, step: int) -> float:
        """Return the learning rate at a step.

        Args:
            step: The global step, from 0.

        Returns:
            The rate, finite and not negative.

        Raises:
            InputError: The callable raises, or returns a rate that is not a number, negative or not finite.
        """
        return rate_at(self.lr, step, self._arguments)

    def states(self, dim: int) -> tuple[State, ...]:
        """Return the states of a segment, in storage order.

        Args:
            dim: Number of weights of the segment.

        Returns:
            The states, none if the optimizer keeps no state.
        """
        return ()

    @abstractmethod
    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        """Make one step: change rows and state in place.

        Args:
            rows: The weights, float32 [n, dim].
            grads: float32 [n, dim], one summed gradient per row.
            state: float32 [n, size] by name.
            lr: The learning rate of this step.
            step: The global step, from 0.
        """

    def correction(self, step: int) -> float:
        """Return the bias correction by the global step, which the native step multiplies the rate by.

        Args:
            step: The global step, from 0.

        Returns:
            The factor; 1 for an optimizer that does not depend on the step.
        """
        return 1.0

    @property
    def hyper(self) -> tuple[float, ...]:
        """The settings, in the order of the native implementation."""
        return ()

    def _check(self, *fields: str) -> None:
        """Raise InputError if a field is negative or not finite; see `check_numbers`."""
        check_numbers(self, *fields)

    def _check_flag(self, field: str) -> None:
        """Raise InputError if a field is not True or False."""
        if not isinstance(getattr(self, field), bool):
            raise InputError(
                f"{type(self).__name__}: {field} must be True or False, got {getattr(self, field)!r}"
            )

    def _check_below_one(self, field: str) -> None:
        """Raise InputError unless a field is in [0, 1), or each of its numbers if it is a tuple."""
        value = getattr(self, field)
        numbers = [as_number(x) for x in (value if isinstance(value, tuple) else (value,))]
        if not all(x is not None and 0 <= x < 1 and as_float32(x) < 1 for x in numbers):
            raise InputError(
                f"{type(self).__name__}: {field} must be in [0, 1) also as a float32, got {value!r}"
            )
        object.__setattr__(self, field, tuple(numbers) if isinstance(value, tuple) else numbers[0])


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum the squares of each row."""
    # The order of additions is the same in every engine: eight lanes, then a tree over the lanes.
    #
    # x: float32 [n, dim]; returns: float32 [n].
    columns = -(-x.shape[1] // 8) * 8
    padded = torch.nn.functional.pad(x, (0, columns - x.shape[1]))
    lanes = torch.zeros(x.shape[0], 8, dtype=x.dtype, device=x.device)
    for block in padded.view(x.shape[0], columns // 8, 8).unbind(1):
        lanes = lanes + block * block
    a, b, c, d = ((lanes[:, k] + lanes[:, k + 4]) for k in range(4))
    return (a + c) + (b + d)
