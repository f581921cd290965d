"""Monolith's learning rate functions, with its argument names."""

from __future__ import annotations

from megalith.table import schedules


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
        name: Ignored; the name of a graph node in Monolith.

    Returns:
        The schedule, for the `lr` of an optimizer.
    """
    return schedules.PolynomialDecay(initial_learning_rate, decay_steps, end_learning_rate, power, cycle)
