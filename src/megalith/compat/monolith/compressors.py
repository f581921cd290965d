"""Monolith's compressors, as serving precisions of `megalith.Segment`."""

from __future__ import annotations

from megalith.table import FixedPoint, OneBit


def Fp32Compressor() -> str:
    """Return the serving precision of weights in 32 bits."""
    return "float32"


def Fp16Compressor() -> str:
    """Return the serving precision of weights in 16 bits."""
    return "float16"


def FixedR8Compressor(fixed_range: float = 1.0) -> FixedPoint:
    """Return the serving precision of weights in 8 bits.

    Args:
        fixed_range: The magnitude of -128 steps.

    Returns:
        The value of `Segment.serving`.
    """
    return FixedPoint(fixed_range)


def OneBitCompressor(step_size: int = 200, amplitude: float = 0.05) -> OneBit:
    """Return the serving precision of weights in one bit.

    Args:
        step_size: Number of steps with one scale.
        amplitude: The magnitude of all served weights.

    Returns:
        The value of `Segment.serving`.
    """
    return OneBit(amplitude, step_size=step_size)
