"""Learning-rate schedules: callables that map a step to a learning rate.

The `lr` of an optimizer is a float, one of these schedules, or a callable of the step or of no argument. It
is evaluated at each update.
"""

from __future__ import annotations

import inspect
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from megalith.errors import InputError

LearningRate = float | Callable[[int], float] | Callable[[], float]

FLOAT32_MAX = 3.4028234e38  # tables compute in float32: a larger number becomes infinite


def as_float32(x: float) -> float:
    """Round a number to float32, as tables use it.

    Args:
        x: A number that is not above `FLOAT32_MAX`.

    Returns:
        The nearest float32.
    """
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
        _check_steps("PolynomialDecay", "decay_steps", self.decay_steps)
        if not isinstance(self.power, int | float) or not math.isfinite(self.power):
            raise InputError(f"PolynomialDecay: power must be finite, got {self.power!r}")
        _rates("PolynomialDecay", initial=self.initial, end=self.end)

    def __call__(self, step: int) -> float:
        """Return the rate at a step, >= 0."""
        _check_step("PolynomialDecay", step)
        span = float(self.decay_steps)
        if self.cycle:
            span *= max(1, math.ceil(step / self.decay_steps))
        left = 1.0 - min(step, span) / span
        return float((self.initial - self.end) * left**self.power + self.end)


@dataclass(frozen=True)
class Warmup:
    """Grows linearly from `start` to the rate of `then` over `steps` steps, then follows `then`.

    Args:
        then: A float, a schedule or a callable. It is evaluated at the full step.
        steps: Number of steps, at least 1.
        start: The rate at step 0.
    """

    then: LearningRate
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        _check_steps("Warmup", "steps", self.steps)
        _rates("Warmup", start=self.start)
        check_rate("Warmup", self.then, "then")

    def __call__(self, step: int) -> float:
        """Return the rate at a step, >= 0."""
        _check_step("Warmup", step)
        rate = rate_at(self.then, step)
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
        for boundary in self.boundaries:
            if isinstance(boundary, bool) or not isinstance(boundary, int | float):
                raise InputError(f"Piecewise: boundaries must be steps, got {boundary!r}")
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise InputError(f"Piecewise: boundaries must ascend, got {list(self.boundaries)}")
        for rate in self.rates:
            _rates("Piecewise", rates=rate)

    def __call__(self, step: int) -> float:
        """Return the rate at a step, >= 0."""
        _check_step("Piecewise", step)
        return self.rates[sum(step >= boundary for boundary in self.boundaries)]


def rate_at(lr: LearningRate, step: int) -> float:
    """Evaluate a learning rate at a step.

    Args:
        lr: A float, a schedule, or a callable of the step or of no argument.
        step: The global step, from 0.

    Returns:
        The rate, finite and not negative.

    Raises:
        InputError: The callable raises, or the rate is not a number, is negative or is not finite.
    """
    _check_step("learning rate", step)
    rate: Any = _called(lr, step) if callable(lr) else lr
    if not isinstance(rate, int | float):
        try:
            rate = float(rate)
        except Exception:  # such as a RuntimeError of a tensor with several elements
            raise InputError(f"learning rate at step {step} is {rate!r}: it must be a number") from None
    if not 0 <= rate <= FLOAT32_MAX:
        raise InputError(f"learning rate at step {step} is {rate}: it must be finite and not negative")
    return float(rate)


_UNKNOWN = -1  # a callable of C without a signature, such as Tensor.item


def _called(lr: Callable[..., Any], step: int) -> Any:
    arguments = _arguments(lr)
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


def _arguments(lr: Callable[..., Any]) -> int | None:
    """Return how many arguments a callable is called with: 1, the step, if it takes one, else 0; _UNKNOWN if
    it has no signature; None if it requires more."""
    if isinstance(lr, FunctionType) and lr.__code__.co_argcount == 1:
        return 1  # the usual case, without the cost of a signature
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
    """Check the learning rate of an optimizer whose formula divides by it.

    Args:
        owner: Name of the optimizer, for messages.
        rate: The rate.
        step: The step at which it was evaluated, for messages.

    Returns:
        The rate.

    Raises:
        InputError: The rate is 0 as a float32.
    """
    if as_float32(rate) == 0:
        raise InputError(f"{owner}: learning rate at step {step} is 0, but the formula divides by it")
    return rate


def check_rate(owner: str, lr: LearningRate, field: str = "lr") -> None:
    """Check a learning rate when it is configured. The rate of a callable is checked when it is evaluated.

    Args:
        owner: Name of the class that has the rate, for messages.
        lr: The rate.
        field: Name of the setting, for messages.

    Raises:
        InputError: `lr` is not a finite float >= 0 and not a callable of at most one required argument.
    """
    if not callable(lr):
        _rates(owner, **{field: lr})
    elif _arguments(lr) is None:
        raise InputError(
            f"{owner}: {field} must be a float, a schedule, or a callable of the step or of no argument, "
            f"got {lr!r}, which needs other arguments"
        )


def _check_step(owner: str, step: float) -> None:
    if not isinstance(step, int | float) or math.isnan(step):
        raise InputError(f"{owner}: step must be a number, got {step!r}")


def _check_steps(owner: str, field: str, steps: float) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int | float) or not 1 <= steps < math.inf:
        raise InputError(f"{owner}: {field} must be at least 1, got {steps!r}")


def _rates(owner: str, **fields: Any) -> None:
    for field, value in fields.items():
        good = isinstance(value, int | float) and 0 <= value <= FLOAT32_MAX
        if not good:
            raise InputError(f"{owner}: {field} must be finite and not negative, got {value!r}")
