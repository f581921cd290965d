"""Serving precisions: how rows are stored in an export, and what reads them back.

float32 and float16 are what they say. int8 is Monolith's fixed point: whole steps of r / 128, r for each
segment of a row, values beyond r at the nearest end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.errors import InputError

PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
_MAX_HALF = 65504.0
_SMALLEST_STEP = torch.finfo(torch.float32).tiny


def dtype_of(precision: str) -> torch.dtype:
    """The type rows are stored in. Raises InputError for an unknown precision."""
    if precision not in PRECISIONS:
        raise InputError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    return PRECISIONS[precision]


def steps_for(largest: Sequence[float], precision: str) -> list[float]:
    """Returns the step of each segment, given its largest magnitude, which becomes 127 steps; 1 if unused.

    A step is at least float32's smallest normal number, so that it never underflows to 0.
    """
    if precision != "int8":
        return [1.0] * len(largest)
    return [max(each / 127.0, _SMALLEST_STEP) if each > 0 else 1.0 for each in largest]


def encode(rows: Tensor, precision: str, steps: Tensor) -> Tensor:
    """float32 rows [n, dim] as they are stored. steps: float32 [dim], for int8.

    Raises InputError for NaN and Inf, and for values that float16 cannot hold.
    """
    if not bool(torch.isfinite(rows).all()):
        raise InputError("a row holds NaN or Inf")
    if precision == "float32":
        return rows
    if precision == "float16":
        if rows.numel() and float(rows.abs().max()) > _MAX_HALF:
            raise InputError(f"a row holds {float(rows.abs().max()):g}, beyond float16: export as float32")
        return rows.to(torch.float16)
    return fixed_r8(rows, steps)


def decode(stored: Tensor, steps: Tensor) -> Tensor:
    """What `encode` gave, as float32 [n, dim]."""
    rows = stored.to(torch.float32)
    return rows * steps if stored.dtype == torch.int8 else rows


def fixed_r8(rows: Tensor, steps: Tensor) -> Tensor:
    """Values in whole steps, halves away from zero, within -128 .. 127; NaN is 0."""
    half = torch.where(rows < 0, -steps / 2, steps / 2)
    whole = torch.trunc((rows + half) / steps).clamp(-128, 127)
    return torch.nan_to_num(whole, nan=0.0).to(torch.int8)
