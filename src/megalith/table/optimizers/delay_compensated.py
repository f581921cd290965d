"""DelayCompensated: corrects gradients that were computed from older weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megalith.errors import InputError
from megalith.table.optimizers.optimizer import Optimizer, State


@dataclass(frozen=True, init=False)
class DelayCompensated(Optimizer):
    """g += strength * g^2 * (w - w_seen), then a step of the base optimizer (DC-ASGD, arXiv:1609.08326).

    w_seen are the weights that the gradient was computed from. A gradient is taken to be one update of its
    row late, as with asynchronous pushes: w - w_seen is the change of the row in its previous update, which
    is kept as state. Gradients that are not late need no correction.

    Args:
        base: The optimizer that makes the step.
        strength: Factor of the correction, lambda in the paper.
    """

    base: Optimizer
    strength: float = 0.1
    name: ClassVar[str] = "delay_compensated"

    def __init__(self, base: Optimizer, strength: float = 0.1) -> None:
        if not isinstance(base, Optimizer) or isinstance(base, DelayCompensated):
            raise InputError(f"DelayCompensated: base must be another Optimizer, got {base!r}")
        for field, value in (("lr", base.lr), ("base", base), ("strength", strength)):
            object.__setattr__(self, field, value)
        self.__post_init__()
        self._check("strength")

    def rate(self, step: int) -> float:
        # That of the base.
        return self.base.rate(step)

    def correction(self, step: int) -> float:
        # That of the base.
        return self.base.correction(step)

    @property
    def hyper(self) -> tuple[float, ...]:
        """The strength, then the settings of the base."""
        return (self.strength, *self.base.hyper)

    def states(self, dim: int) -> tuple[State, ...]:
        # The last change of the weights, then the state of the base.
        return (State("change", dim), *self.base.states(dim))

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        change = state["change"]
        grads = grads + self.strength * (grads * grads) * change
        before = rows.clone()
        self.base.update(rows, grads, {k: v for k, v in state.items() if k != "change"}, lr, step)
        change.copy_(rows - before)
