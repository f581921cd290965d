"""Learning-rate schedules: callables that map a step to a learning rate.

The `lr` of an optimizer is a number, one of these schedules, or a callable of the step or of no argument. It
is evaluated at each update. Whether a callable takes the step is determined once, when it is configured.
"""

from __future__ import annotations

import inspect
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from megalith.errors import InputError
from megalith.ops.checks import as_integer, as_number

LearningRate = float | Callable[[int], float] | Callable[[], float]

FLOAT32_MAX = 3.4028234e38  # tables compute in float32: a larger number becomes infinite


def as_float32(x: float) -> float:
    """Round a number to float32, as tables use it."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


@dataclass(frozen=True)
class PolynomialDecay:
    """Moves from `initial` to `end` over `decay_steps` steps by a polynomial.

    lr = (initial - end) * (1 - min(step, decay_steps) / decay_steps) ** power + end.

    Args:
        initial: The rate at step 0.
        decay_steps: Number of steps, at least 1.
        end: The rate after `decay_steps` steps. It may be above `initial`: the rate then grows.
        power: The exponent.
        cycle: Replaces decay_steps by its smallest multiple that is not below the step.
    """

    initial: float
    decay_steps: int
    end: float = 0.0001
    power: float = 1.0
    cycle: bool = False

    def __post_init__(self) -> None:
        _check_steps(self, "decay_steps")
        power = as_number(self.power)
        if power is None or not math.isfinite(power):
            raise InputError(f"PolynomialDecay: power must be a finite number, got {self.power!r}")
        object.__setattr__(self, "power", power)
        check_numbers(self, "initial", "end")

    def __call__(self, step: int) -> float:
        """Return the rate at a step, >= 0."""
        step = _checked_step("PolynomialDecay", step)
        span = float(self.decay_steps)
        if self.cycle:
            span *= max(1, math.ceil(step / self.decay_steps))
        left = 1.0 - min(step, span) / span
        return float((self.initial - self.end) * left**self.power + self.end)


@dataclass(frozen=True)
class Warmup:
    """Grows linearly from `start` to the rate of `then` over `steps` steps, then follows `then`.

    Args:
        then: A number, a schedule or a callable. It is evaluated at the full step.
        steps: Number of steps, at least 1.
        start: The rate at step 0.
    """

    then: LearningRate
    steps: int
    start: float = 0.0

    _arguments: ClassVar[int | None] = None
    """How `then` is called; see `check_rate`. Each object has its own."""

    def __post_init__(self) -> None:
        _check_steps(self, "steps")
        check_numbers(self, "start")
        then, arguments = check_rate("Warmup", self.then, "then")
        object.__setattr__(self, "then", then)
        object.__setattr__(self, "_arguments", arguments)

    def __call__(self, step: int) -> float:
        """Return the rate at a step, >= 0."""
        step = _checked_step("Warmup", step)
        rate = rate_at(self.then, step, self._arguments)
        if step >= self.steps:
            return rate
        return self.start + (rate - self.start) * step / self.steps


@dataclass(frozen=True)
class Piecewise:
    """Constant rates between boundaries.

    Args:
        boundaries: Ascending steps; `rates[i + 1]` starts at `boundaries[i]`.
        rates: One more than the boundaries; `rates[0]` applies before the first boundary.
    """

    boundaries: tuple[int, ...]
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        for field in ("boundaries", "rates"):
            value = getattr(self, field)
            if not isinstance(value, list | tuple):
                raise InputError(f"Piecewise: {field} must be a list, got {value!r}")
            object.__setattr__(self, field, tuple(value))
        if len(self.rates) != len(self.boundaries) + 1:
            raise InputError(
                f"Piecewise: {len(self.boundaries)} boundaries need "
                f"{len(self.boundaries) + 1} rates, got {len(self.rates)}"
            )
        boundaries = tuple(map(_as_step, self.boundaries))
        if None in boundaries:
            raise InputError(f"Piecewise: boundaries must be steps, got {self.boundaries!r}")
        object.__setattr__(self, "boundaries", boundaries)
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise InputError(f"Piecewise: boundaries must ascend, got {list(self.boundaries)}")
        object.__setattr__(self, "rates", tuple(_rate("Piecewise", "rates", x) for x in self.rates))

    def __call__(self, step: int) -> float:
        """Return the rate at a step, >= 0."""
        step = _checked_step("Piecewise", step)
        return self.rates[sum(step >= boundary for boundary in self.boundaries)]


class TableLR(Optimizer):
    """A learning rate of tables that torch's schedulers and LR finders change.

    It is the `lr` of the optimizer of tables, and to torch an optimizer with one param group, whose `lr` it
    returns; its `step` does nothing, because tables are updated in backward or by `collection.step`. To
    change the rates of dense weights and tables with one scheduler, pass `rate.parameter` to the optimizer of
    the dense weights and call `follow`.

    Args:
        lr: The rate at the start.

    Attributes:
        parameter: A parameter without elements that marks the param group of the tables.

    Example:
        >>> rate = TableLR(0.1)
        >>> table = TableConfig("user", dim=8, optimizer=Adagrad(rate))
        >>> scheduler = torch.optim.lr_scheduler.LambdaLR(rate, lambda step: 0.5**step)
        >>> rate()
        0.1
    """

    def __init__(self, lr: float) -> None:
        self.parameter = torch.nn.Parameter(torch.empty(0, device="cpu"))
        self._followed: Optimizer = self
        super().__init__([self.parameter], {"lr": _rate("TableLR", "lr", lr)})

    def __call__(self) -> float:
        """Return the rate of the param group of `parameter`."""
        for group in self._followed.param_groups:
            if any(each is self.parameter for each in group["params"]):
                return float(group["lr"])
        raise InputError("TableLR: the optimizer that it follows no longer has its parameter")

    def follow(self, optimizer: Optimizer) -> None:
        """Use the rate of a param group of another optimizer.

        Args:
            optimizer: An optimizer with `parameter` in one of its param groups.

        Raises:
            InputError: It has no such param group.
        """
        groups = getattr(optimizer, "param_groups", [])
        if not any(each is self.parameter for group in groups for each in group["params"]):
            raise InputError(
                "TableLR: follow takes an optimizer with a param group such as "
                '{"params": [rate.parameter], "lr": 0.1}'
            )
        self._followed = optimizer

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do nothing: tables are updated in backward, or by `collection.step`.

        Args:
            closure: Computes the loss, as in torch.

        Returns:
            The loss of the closure, if there is one.
        """
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def __repr__(self) -> str:
        return "TableLR(...)"  # not its rate, which differs between two moments of a run

    def __deepcopy__(self, memo: object) -> TableLR:
        return self

    def __reduce__(self) -> Any:
        return TableLR, (self(),)


def rate_at(lr: LearningRate, step: int, arguments: int | None = None) -> float:
    """Evaluate a learning rate at a step."""
    step = _checked_step("learning rate", step)
    rate: Any = _called(lr, step, arguments) if callable(lr) else lr
    if not isinstance(rate, int | float):
        try:
            rate = float(rate)
        except Exception:  # such as a RuntimeError of a tensor with several elements
            raise InputError(f"learning rate at step {step} is {rate!r}: it must be a number") from None
    if not 0 <= rate <= FLOAT32_MAX:
        raise InputError(f"learning rate at step {step} is {rate}: it must be finite and not negative")
    return float(rate)


_UNKNOWN = -1  # a callable of C without a signature, such as Tensor.item


def _called(lr: Callable[..., Any], step: int, arguments: int | None) -> Any:
    if arguments is None:
        arguments = _count_arguments(lr)
    try:
        if arguments == _UNKNOWN:
            try:
                return lr(step)
            except TypeError:
                return lr()
        return lr(step) if arguments == 1 else lr()
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"learning rate at step {step}: lr={lr!r} raised {type(error).__name__}: {error}"
        ) from error


def _count_arguments(lr: Callable[..., Any]) -> int | None:
    """Return how many arguments a callable is called with: 1, the step, if it takes one, else 0; _UNKNOWN if
    it has no signature; None if it requires more.
    """
    try:
        signature = inspect.signature(lr)
    except (TypeError, ValueError):
        return _UNKNOWN
    for count in (1, 0):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count
    return None


def check_positive_rate(owner: str, rate: float, step: int) -> float:
    """Check the learning rate of an optimizer whose formula divides by it."""
    if as_float32(rate) == 0:
        raise InputError(f"{owner}: learning rate at step {step} is 0, but the formula divides by it")
    return rate


def check_rate(owner: str, lr: LearningRate, field: str = "lr") -> tuple[LearningRate, int]:
    """Check a learning rate when it is configured. The rate of a callable is checked when it is evaluated."""
    if not callable(lr):
        return _rate(owner, field, lr), 0
    arguments = _count_arguments(lr)
    if arguments is None:
        raise InputError(
            f"{owner}: {field} must be a number, a schedule, or a callable of the step or of no argument, "
            f"got {lr!r}, which needs other arguments"
        )
    return lr, arguments


def check_numbers(settings: Any, *fields: str) -> None:
    """Check settings that must be finite and not negative."""
    for field in fields:
        number = _rate(type(settings).__name__, field, getattr(settings, field))
        object.__setattr__(settings, field, number)


def _as_step(value: Any) -> Any:
    """Return a step or a number of steps as an int or float; None if it is not a number."""
    integer = as_integer(value)
    return as_number(value) if integer is None else integer


def _checked_step(owner: str, step: Any) -> Any:
    number = _as_step(step)
    if number is None or math.isnan(number):
        raise InputError(f"{owner}: step must be a number, got {step!r}")
    return number


def _check_steps(settings: Any, field: str) -> None:
    value = getattr(settings, field)
    steps = _as_step(value)
    if steps is None or not 1 <= steps < math.inf:
        raise InputError(f"{type(settings).__name__}: {field} must be a number of at least 1, got {value!r}")
    object.__setattr__(settings, field, steps)


def _rate(owner: str, field: str, value: Any) -> float:
    number = as_number(value)
    if number is None or not 0 <= number <= FLOAT32_MAX:
        raise InputError(f"{owner}: {field} must be a finite number and not negative, got {value!r}")
    return number
