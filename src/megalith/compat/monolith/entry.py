"""Monolith's compressors, as serving precisions of `megalith.Segment`, and its learning rate functions."""

from __future__ import annotations

from megalith.table import FixedPoint, OneBit, schedules

# ---- compressors


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


# ---- learning rates


def PolynomialDecay(  # Monolith's name, which is a class there
    initial_learning_rate: float,
    decay_steps: int,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
    name: str | None = None,
) -> schedules.PolynomialDecay:
    """Return a `megalith.PolynomialDecay`, which is evaluated at the step of each update.

    Args:
        initial_learning_rate: The rate at step 0.
        decay_steps: The number of steps, at least 1.
        end_learning_rate: The rate after `decay_steps` steps. It may be above the initial rate: the rate then
            grows.
        power: The exponent of the polynomial.
        cycle: Whether to replace `decay_steps` by its smallest multiple that is not below the step.
    """
    return schedules.PolynomialDecay(initial_learning_rate, decay_steps, end_learning_rate, power, cycle)
