"""Learning-rate schedules: callables that map a step to a learning rate.

The `lr` of an optimizer is a float, one of these schedules, or any function of the step. It is evaluated at
the step of each update.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

from megalith.errors import InputError

LearningRate = float | Callable[[int], float]

FLOAT32_MAX = 3.4028234e38  # tables compute in float32: a larger number becomes infinite


def as_float32(x: float) -> float:
    """Returns the number rounded to float32, as tables use it."""
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
        if self.decay_steps < 1:
            raise InputError(f"PolynomialDecay: decay_steps must be at least 1, got {self.decay_steps}")
        if not math.isfinite(self.power):
            raise InputError(f"PolynomialDecay: power must be finite, got {self.power}")
        _rates("PolynomialDecay", initial=self.initial, end=self.end)

    def __call__(self, step: int) -> float:
        """Returns the rate at a step."""
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
        if self.steps < 1:
            raise InputError(f"Warmup: steps must be at least 1, got {self.steps}")
        _rates("Warmup", start=self.start)
        if not callable(self.then):
            _rates("Warmup", then=self.then)

    def __call__(self, step: int) -> float:
        """Returns the rate at a step."""
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
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        object.__setattr__(self, "rates", tuple(self.rates))
        if len(self.rates) != len(self.boundaries) + 1:
            raise InputError(
                f"Piecewise: {len(self.boundaries)} boundaries need "
                f"{len(self.boundaries) + 1} rates, got {len(self.rates)}"
            )
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise InputError(f"Piecewise: boundaries must ascend, got {list(self.boundaries)}")
        for rate in self.rates:
            _rates("Piecewise", rates=rate)

    def __call__(self, step: int) -> float:
        """Returns the rate at a step."""
        return self.rates[sum(step >= boundary for boundary in self.boundaries)]


def rate_at(lr: LearningRate, step: int) -> float:
    """Returns the rate of a float, schedule or callable at a step.

    Raises:
        InputError: The rate is not a number, is negative or is not finite.
    """
    rate = lr(step) if callable(lr) else lr
    if not isinstance(rate, int | float):
        try:
            rate = float(rate)
        except (TypeError, ValueError):
            raise InputError(f"learning rate at step {step} is {rate!r}: it must be a number") from None
    if not 0 <= rate <= FLOAT32_MAX:
        raise InputError(f"learning rate at step {step} is {rate}: it must be finite and not negative")
    return float(rate)


def check_rate(owner: str, lr: LearningRate) -> None:
    """Raises InputError unless `lr` is a callable or a finite float that is not negative."""
    if not callable(lr):
        _rates(owner, lr=lr)


def _rates(owner: str, **fields: float) -> None:
    for field, value in fields.items():
        good = isinstance(value, int | float) and 0 <= value <= FLOAT32_MAX
        if not good:
            raise InputError(f"{owner}: {field} must be finite and not negative, got {value!r}")
