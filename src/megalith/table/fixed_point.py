"""FixedPoint: weights served as one byte each, Monolith's `fixed_r8`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.checks import as_number
from megalith.table.schedules import FLOAT32_MAX, as_float32
from megalith.table.serving_precision import ServingPrecision

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
