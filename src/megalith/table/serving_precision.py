"""Serving precisions: how servers store the weights of a segment, and what training sees of it.

Servers hold codes of a few bits instead of weights: `FixedPoint` (Monolith's `fixed_r8`, one byte each)
or `OneBit` (the sign). So that a model is trained for what will be served, lookups return a view of the
stored weights, while the stored rows stay as they are: optimizer steps, assignments, scans, checkpoints
and snapshots work on them.

    lookup                          returns
    with a step (training)          `trained` of the stored weights
    without a step (evaluation)     `served` of the stored weights, which is what a server returns

`ServingView` applies the precision of each segment to its columns. Engines apply it to rows that they
have read, and to the summed gradients of an update. native/serving_view.hpp computes the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.checks import as_number
from megalith.table.schedules import FLOAT32_MAX, as_float32

if TYPE_CHECKING:
    from megalith.table.config import TableConfig


class ServingPrecision(ABC):
    """A serving precision with codes: `FixedPoint` or `OneBit`.

    Attributes:
        name: Its name in exports and config files.
        depends_on_step: Whether the view of training changes with the step.
    """

    name: ClassVar[str]
    depends_on_step: ClassVar[bool] = False

    @property
    @abstractmethod
    def unit(self) -> float:
        """The float32 that a server multiplies codes by; together with the name it decodes them."""

    @classmethod
    @abstractmethod
    def from_unit(cls, unit: float) -> Self:
        """Return a precision that encodes and decodes with a unit; settings of training are the defaults.

        Args:
            unit: The `unit` of a precision of this class.

        Returns:
            The precision.

        Raises:
            InputError: No precision has this unit.
        """

    @abstractmethod
    def code_bytes(self, dim: int) -> int:
        """Return the size of the codes of a row.

        Args:
            dim: Number of weights.

        Returns:
            Number of bytes.
        """

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Compute the codes of weights.

        Args:
            rows: float32 [n, dim].

        Returns:
            uint8 [n, code_bytes].
        """

    @abstractmethod
    def decode(self, codes: Tensor, dim: int) -> Tensor:
        """Compute the weights of codes.

        Args:
            codes: uint8 [n, code_bytes].
            dim: Number of weights.

        Returns:
            float32 [n, dim].
        """

    def served(self, rows: Tensor) -> Tensor:
        """Return what servers return for stored weights: the decoded codes.

        Args:
            rows: float32 [n, dim].

        Returns:
            float32 [n, dim].
        """
        return self.decode(self.encode(rows), rows.shape[1])

    @abstractmethod
    def trained(self, rows: Tensor, step: int) -> Tensor:
        """Return what training sees of stored weights.

        Args:
            rows: float32 [n, dim].
            step: The global step, from 0.

        Returns:
            float32 [n, dim].
        """

    @abstractmethod
    def native_view(self, step: int | None) -> tuple[int, float, float]:
        """Return how the native module computes a view (native/serving_view.hpp).

        Args:
            step: The global step for `trained`; None for `served`.

        Returns:
            The number of the view and its two numbers, float32.
        """

    def slope(self, step: int) -> float:
        """Return the factor of gradients that does not depend on weights, for the native module.

        Args:
            step: The global step, from 0.

        Returns:
            The largest factor of `gradient`, a float32.
        """
        return 1.0

    def gradient(self, grads: Tensor, rows: Tensor, step: int) -> Tensor:
        """Compute the gradients of stored weights from those of what training sees.

        Args:
            grads: float32 [n, dim], the gradients of `trained`.
            rows: float32 [n, dim], the stored weights.
            step: The global step, from 0.

        Returns:
            float32 [n, dim]; `grads` itself for a straight-through estimator.
        """
        return grads


_STEPS = 128
SMALLEST_STEP = torch.finfo(torch.float32).tiny
"""Smaller steps would lose bits."""


@dataclass(frozen=True)
class FixedPoint(ServingPrecision):
    """A weight is served as an integer number of steps, -128 to 127, in one byte.

    A step is range / 128. Weights round to the nearest step, halves away from zero; those beyond the range
    become -128 or 127 steps. Training sees the rounded weights, and gradients pass straight through.

    Args:
        range: The magnitude of -128 steps.

    Raises:
        InputError: `range` is not a positive number, or too small or too large for float32.
    """

    range: float = 1.0
    name: ClassVar[str] = "fixed_point"

    def __post_init__(self) -> None:
        value = as_number(self.range)
        if value is None or not SMALLEST_STEP * _STEPS <= value <= FLOAT32_MAX:
            raise InputError(
                f"FixedPoint: range must be from {SMALLEST_STEP * _STEPS:.2g} to {FLOAT32_MAX:.2g}, "
                f"got {self.range!r}"
            )
        object.__setattr__(self, "range", as_float32(value))

    @property
    def unit(self) -> float:
        """The size of a step, exact in float32."""
        return self.range / _STEPS

    @classmethod
    def from_unit(cls, unit: float) -> Self:
        return cls(unit * _STEPS)

    def code_bytes(self, dim: int) -> int:
        # One byte per weight.
        return dim

    def encode(self, rows: Tensor) -> Tensor:
        # Numbers of steps as int8; NaN becomes 0.
        return fixed_point_codes(rows, torch.tensor(self.unit, device="cpu")).view(torch.uint8)

    def decode(self, codes: Tensor, dim: int) -> Tensor:
        return codes.view(torch.int8).to(torch.float32) * self.unit

    def trained(self, rows: Tensor, step: int) -> Tensor:
        # What is served.
        return self.served(rows)

    def native_view(self, step: int | None) -> tuple[int, float, float]:
        return 0, self.unit, 0.0


def fixed_point_codes(rows: Tensor, steps: Tensor) -> Tensor:
    """Round values to steps, halves away from zero."""
    # rows: float32 [n, dim]; steps: step size of all columns, float32 [], or of each, float32 [dim]; returns:
    # numbers of steps, int8 [n, dim], clamped to -128 ..
    half = torch.where(rows < 0, -steps / 2, steps / 2)
    rounded = torch.trunc((rows + half) / steps).clamp(-_STEPS, _STEPS - 1)
    return torch.nan_to_num(rounded, nan=0.0).to(torch.int8)


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


class ServingView:
    """The view of the rows of one table. Use `of`, which returns None for a table without a view."""

    def __init__(self, columns: list[tuple[slice, ServingPrecision]]) -> None:
        self._columns = columns
        self.depends_on_step = any(precision.depends_on_step for _, precision in columns)

    @classmethod
    def of(cls, config: TableConfig) -> ServingView | None:
        columns, start = [], 0
        for segment in config.segments:
            if isinstance(segment.serving, ServingPrecision):
                columns.append((slice(start, start + segment.dim), segment.serving))
            start += segment.dim
        return cls(columns) if columns else None

    def apply(self, rows: Tensor, step: int | None) -> Tensor:
        """Replace stored weights by what a lookup returns, in place."""
        # rows: float32 [n, dim].
        for columns, precision in self._columns:
            stored = rows[:, columns]
            stored.copy_(precision.served(stored) if step is None else precision.trained(stored, step))
        return rows

    def native_parts(self, step: int | None) -> list[tuple[int, int, int, float, float]]:
        """Return the arguments of the native module, which computes the same bits."""
        parts = []
        for columns, precision in self._columns:
            view, first, second = precision.native_view(step)
            parts.append((view, columns.start, columns.stop, first, second))
        return parts

    def slopes(self, step: int) -> list[float]:
        """Return the largest factor of the gradients of each segment with a view; see `native_parts`."""
        return [precision.slope(step) for _, precision in self._columns]

    def gradient(self, grads: Tensor, rows: Tensor, step: int) -> Tensor:
        """Compute the gradients of stored weights from those of what training sees."""
        # grads: float32 [n, dim]; rows: float32 [n, dim], the stored weights; returns: float32 [n, dim].
        if not self.depends_on_step:
            return grads
        result = grads.clone()
        for columns, precision in self._columns:
            result[:, columns] = precision.gradient(grads[:, columns], rows[:, columns], step)
        return result
