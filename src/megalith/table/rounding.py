"""Rounding of weights to the precision of their segment. It is the torch reference of native/narrow.hpp.

Initial rows, assignments and restored rows round to the nearest value, ties to even; an optimizer step rounds
as `Segment.rounding` says. Numbers beyond the largest finite value become that value. Stochastic rounding
takes one of the two neighbours of a number: the one with the larger magnitude with a probability equal to the
distance from the other. Its 24 random bits are a pure function of (seed, table, id, column, step), so the
result does not depend on the order of ids, on threads or on ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.bits import mix64, signed
from megalith.table.config import Segment, TableConfig
from megalith.table.initializers import draw_bits

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""The dtype of each precision of `Segment`."""

_STEP_FACTOR = 0x8CB92BA72F3D8DD7
_WORD = (1 << 64) - 1


def round_rows(config: TableConfig, rows: Tensor) -> Tensor:
    """Round weights to the nearest values that the segments of a table store."""
    # rows: float32 [n, dim]; returns: float32 [n, dim]: `rows` itself if all segments are float32.
    if all(segment.precision == "float32" for segment in config.segments):
        return rows
    pieces = rows.split([segment.dim for segment in config.segments], dim=1)
    return torch.cat([_nearest(s, piece) for s, piece in zip(config.segments, pieces, strict=True)], dim=1)


def round_step(config: TableConfig, key: int, ids: Tensor, rows: Tensor, step: int) -> Tensor:
    """Round the weights of a step as the segments of a table say."""
    # ids: int64 [n]; rows: float32 [n, dim], after the step of the optimizer; returns: float32 [n, dim]:
    # `rows` itself if all segments are float32.
    if all(segment.rounding == "nearest" for segment in config.segments):
        return round_rows(config, rows)
    keys = mix64(mix64(ids ^ signed(key)) + signed((step + 1) * _STEP_FACTOR & _WORD))[:, None]
    pieces, start = [], 0
    for segment in config.segments:
        piece = rows[:, start : start + segment.dim]
        if segment.rounding == "stochastic":
            draws = draw_bits(keys, torch.arange(start, start + segment.dim, device=ids.device))
            pieces.append(_stochastic(segment, piece, draws))
        else:
            pieces.append(_nearest(segment, piece))
        start += segment.dim
    return torch.cat(pieces, dim=1)


def _clamped(segment: Segment, rows: Tensor) -> Tensor:
    largest = torch.finfo(DTYPES[segment.precision]).max
    return rows.clamp(-largest, largest)


def _nearest(segment: Segment, rows: Tensor) -> Tensor:
    if segment.precision == "float32":
        return rows
    return _clamped(segment, rows).to(DTYPES[segment.precision]).float()


def _stochastic(segment: Segment, rows: Tensor, draws: Tensor) -> Tensor:
    """Return rows rounded with one draw of 24 bits per weight."""
    inside = _clamped(segment, rows).contiguous()
    bits = inside.view(torch.int32)
    if segment.precision == "bfloat16":
        # Adding the draw to the magnitude carries into the kept bits with the right probability.
        rounded = (bits + (draws >> 8).int()) & ~0xFFFF
        return torch.where(inside.isnan(), inside, rounded.view(torch.float32))
    usual = ((bits + (draws >> 11).int()) & ~0x1FFF).view(torch.float32)
    # Below 2^-14 the stored values are the multiples of 2^-24.
    scaled = inside.abs() * 2.0**24
    lower = scaled.floor()
    raised = draws.float() >= 2.0**24 - (scaled - lower) * 2.0**24
    small = torch.copysign((lower + raised.float()) * 2.0**-24, inside)
    return torch.where(inside.isnan(), inside, torch.where(inside.abs() < 2.0**-14, small, usual))
