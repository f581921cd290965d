"""Serving precisions: how an export stores rows.

int8 is Monolith's fixed point: a value is an integer number of steps, with one step size for each segment of
a row. Values beyond the range are clamped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.checks import one_of
from megalith.table.serving_precision import fixed_point_codes

PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
_MAX_HALF = 65504.0
_SMALLEST_STEP = torch.finfo(torch.float32).tiny


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of stored rows."""
    return PRECISIONS[one_of(precision, list(PRECISIONS), "precision")]


def steps_for(largest: Sequence[float], precision: str) -> list[float]:
    """Return the step size of each segment."""
    if precision != "int8":
        return [1.0] * len(largest)
    return [max(each / 127.0, _SMALLEST_STEP) if each > 0 else 1.0 for each in largest]


def encode(rows: Tensor, precision: str, steps: Tensor) -> Tensor:
    """Convert rows to their stored form."""
    # rows: float32 [n, dim]; steps: step size of each column, float32 [dim], or of all, float32 []; returns:
    # [n, dim], of the dtype of the precision.
    if not bool(torch.isfinite(rows).all()):
        raise InputError("a row holds NaN or Inf")
    if precision == "float32":
        return rows
    if precision == "float16":
        if rows.numel() and float(rows.abs().max()) > _MAX_HALF:
            raise InputError(f"a row holds {float(rows.abs().max()):g}, beyond float16: export as float32")
        return rows.to(torch.float16)
    return fixed_point_codes(rows, steps)


def decode(stored: Tensor, steps: Tensor) -> Tensor:
    """Convert stored rows back; the inverse of `encode`."""
    # stored: float32, float16 or int8 [n, dim]; steps: step size of each column, float32 [dim], or of all,
    # float32 []; returns: float32 [n, dim].
    rows = stored.to(torch.float32)
    return rows * steps if stored.dtype == torch.int8 else rows
