"""Learning-rate schedules: objects (or any callable) that turn a step into a rate.

Wherever an optimizer takes `lr`, a float, one of these, or a plain function of the
step will do. The rate is evaluated from the step given with each update.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

from megalith.errors import InputError

LearningRate = float | Callable[[int], float]

FLOAT32_MAX = 3.4028234e38  # what tables compute with; beyond it a number is infinite


def as_float32(x: float) -> float:
    """The number as a table sees it."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


@dataclass(frozen=True)
class PolynomialDecay:
    """From `initial` to `end` over `decay_steps` steps, by a power of the part left.

    lr = (initial - end) * (1 - min(step, decay_steps) / decay_steps) ** power + end. With `cycle`,
    decay_steps is stretched to the next multiple that the step has not passed, and the decay
    starts again there. `end` may be above `initial`: the rate then grows.
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
        """The rate at a step."""
        span = float(self.decay_steps)
        if self.cycle:
            span *= max(1, math.ceil(step / self.decay_steps))
        left = 1.0 - min(step, span) / span
        return float((self.initial - self.end) * left**self.power + self.end)


@dataclass(frozen=True)
class Warmup:
    """Grows linearly from `start` to the rate of `then` over `steps` steps, then follows `then`.

    `then` is a float, a schedule or a callable, and sees the full step.
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
        """The rate at a step."""
        rate = rate_at(self.then, step)
        if step >= self.steps:
            return rate
        return self.start + (rate - self.start) * step / self.steps


@dataclass(frozen=True)
class Piecewise:
    """`rates[0]` before `boundaries[0]`, `rates[1]` from there to `boundaries[1]`, and so on."""

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
        """The rate at a step."""
        return self.rates[sum(step >= boundary for boundary in self.boundaries)]


def rate_at(lr: LearningRate, step: int) -> float:
    """The rate of a float, schedule or callable at a step. Raises InputError if it is no rate."""
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
    """Raises InputError unless `lr` is a usable float or a callable."""
    if not callable(lr):
        _rates(owner, lr=lr)


def _rates(owner: str, **fields: float) -> None:
    for field, value in fields.items():
        good = isinstance(value, int | float) and 0 <= value <= FLOAT32_MAX
        if not good:
            raise InputError(f"{owner}: {field} must be finite and not negative, got {value!r}")
