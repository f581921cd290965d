"""OneBit: weights served as their sign, one bit each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.checks import as_number
from megalith.table.schedules import FLOAT32_MAX, as_float32
from megalith.table.serving_precision import ServingPrecision

_GROWTH = 0.005

# A rational approximation of tanh, the one of Eigen. Its operations round in one way on every machine, so it
# gives the same bits wherever a weight is; torch.tanh depends on the CPU and on the place in the tensor.
_TANH_LIMIT = 7.90531110763549805  # tanh is 1 in float32 from here on
_TANH_LINEAR = 0.0004
_NUMERATOR = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_DENOMINATOR = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


@dataclass(frozen=True)
class OneBit(ServingPrecision):
    """A weight is served as amplitude or -amplitude, by its sign, in one bit.

    Zero counts as negative. Training sees amplitude * tanh(scale * w), which approaches the served weight as
    the scale grows; gradients are multiplied by its derivative. The scale is a function of the step alone:

        scale = min(max_scale, init_scale * sqrt(1 + 0.005 * s))

    where s is the step, rounded down to a multiple of step_size.

    Args:
        amplitude: The magnitude of all served weights.
        init_scale: The scale of the first steps.
        max_scale: The largest scale.
        step_size: Number of steps with one scale.

    Raises:
        InputError: A setting is not positive, or too large for float32.
    """

    amplitude: float = 0.05
    init_scale: float = 1.0
    max_scale: float = 10000.0
    step_size: int = 200
    name: ClassVar[str] = "one_bit"
    depends_on_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in ("amplitude", "init_scale", "max_scale"):
            value = as_number(getattr(self, field))
            if value is None or not 0 < value <= FLOAT32_MAX or as_float32(value) == 0:
                raise InputError(
                    f"OneBit: {field} must be a positive number in the range of float32, "
                    f"got {getattr(self, field)!r}"
                )
            object.__setattr__(self, field, as_float32(value))
        if isinstance(self.step_size, bool) or not isinstance(self.step_size, int) or self.step_size < 1:
            raise InputError(f"OneBit: step_size must be a positive integer, got {self.step_size!r}")
        if self.amplitude * self.max_scale > FLOAT32_MAX:
            raise InputError("OneBit: amplitude * max_scale must be in the range of float32")

    def scale(self, step: int) -> float:
        """Return the scale of a step.

        Args:
            step: The global step, from 0.

        Returns:
            The scale, a float32.
        """
        reached = step - step % self.step_size
        return as_float32(min(self.max_scale, self.init_scale * math.sqrt(1 + _GROWTH * reached)))

    @property
    def unit(self) -> float:
        """The amplitude."""
        return self.amplitude

    @classmethod
    def from_unit(cls, unit: float) -> Self:
        return cls(unit)

    def code_bytes(self, dim: int) -> int:
        # Eight weights per byte.
        return -(-dim // 8)

    def encode(self, rows: Tensor) -> Tensor:
        # Weight c is bit c % 8 of byte c // 8, 1 for a positive weight.
        padded = torch.nn.functional.pad((rows > 0).to(torch.uint8), (0, -rows.shape[1] % 8))
        places = torch.arange(8, dtype=torch.uint8, device=rows.device)
        bits: Tensor = padded.unflatten(1, (self.code_bytes(rows.shape[1]), 8)) << places
        return bits.sum(dim=2, dtype=torch.uint8)

    def decode(self, codes: Tensor, dim: int) -> Tensor:
        places = torch.arange(8, dtype=torch.uint8, device=codes.device)
        bits = (codes[:, :, None] >> places) & 1
        positive = bits.flatten(1)[:, :dim].to(torch.float32)
        return (2.0 * positive - 1.0) * self.amplitude

    def trained(self, rows: Tensor, step: int) -> Tensor:
        # Amplitude * tanh(scale * w).
        return tanh(rows * self.scale(step)) * self.amplitude

    def native_view(self, step: int | None) -> tuple[int, float, float]:
        return (1, self.amplitude, 0.0) if step is None else (2, self.scale(step), self.amplitude)

    def slope(self, step: int) -> float:
        # Amplitude * scale.
        return as_float32(self.amplitude * self.scale(step))

    def gradient(self, grads: Tensor, rows: Tensor, step: int) -> Tensor:
        # Multiplied by amplitude * scale * (1 - tanh^2).
        seen = tanh(rows * self.scale(step))
        return grads * ((1.0 - seen * seen) * self.slope(step))


def tanh(x: Tensor) -> Tensor:
    """Compute tanh with the same bits on every machine."""
    bounded = x.clamp(-_TANH_LIMIT, _TANH_LIMIT)
    square = bounded * bounded
    ratio = _polynomial(square, _NUMERATOR).mul_(bounded).div_(_polynomial(square, _DENOMINATOR))
    return torch.where(x.abs() < _TANH_LINEAR, x, ratio.clamp_(-1.0, 1.0))


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Evaluate a polynomial, from the highest power, with one rounding per operation."""
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total.mul_(x).add_(coefficient)
    return total
