"""Row-wise Adagrad: one rate for a whole row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megalith.table.optimizers.optimizer import Optimizer, State
from megalith.table.schedules import LearningRate


@dataclass(frozen=True)
class RowWiseAdagrad(Optimizer):
    """n += mean(g^2) over the segment; w -= lr * g / (sqrt(n) + eps), g including weight_decay * w.

    One float of state per row instead of one per weight. The formula and eps are those of
    FBGEMM's EXACT_ROWWISE_ADAGRAD; torch.optim has no such optimizer.
    """

    lr: LearningRate = 1e-2
    initial_accumulator_value: float = 0.0
    eps: float = 1e-8
    weight_decay: float = 0.0
    name: ClassVar[str] = "rowwise_adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("initial_accumulator_value", "eps", "weight_decay")

    @property
    def hyper(self) -> tuple[float, ...]:
        """Initial accumulator, eps, weight decay."""
        return (self.initial_accumulator_value, self.eps, self.weight_decay)

    def state(self, dim: int) -> tuple[State, ...]:
        """The sum of mean squared gradients."""
        return (State("sum", 1, self.initial_accumulator_value),)

    def step(self, weights: Tensor, state: Mapping[str, Tensor], grads: Tensor, lr: float) -> None:
        """One step in place."""
        grads = grads + self.weight_decay * weights
        mean = sum_of_squares(grads) / float(grads.shape[1])
        state["sum"].copy_(state["sum"] + mean[:, None])
        weights.copy_(weights - lr * grads / (state["sum"].sqrt() + self.eps))


def sum_of_squares(x: Tensor) -> Tensor:
    """[n, dim] -> [n], in the order every engine uses: eight lanes, then a tree over the lanes."""
    columns = -(-x.shape[1] // 8) * 8
    padded = torch.nn.functional.pad(x, (0, columns - x.shape[1]))
    lanes = torch.zeros(x.shape[0], 8)
    for block in padded.view(x.shape[0], columns // 8, 8).unbind(1):
        lanes = lanes + block * block
    a, b, c, d = ((lanes[:, k] + lanes[:, k + 4]) for k in range(4))
    return (a + c) + (b + d)
