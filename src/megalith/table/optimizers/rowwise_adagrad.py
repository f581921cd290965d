"""Row-wise Adagrad: one learning rate per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megalith.table.optimizers.adagrad import AdagradSettings
from megalith.table.optimizers.optimizer import State


@dataclass(frozen=True)
class RowWiseAdagrad(AdagradSettings):
    """g += weight_decay * w; n += mean(g^2) over the segment; w -= lr * g / (sqrt(n) + eps).

    It keeps one float of state per row instead of one per weight. Formula and eps are those of FBGEMM's
    EXACT_ROWWISE_ADAGRAD; torch.optim has no such optimizer.

    Args:
        lr: The learning rate.
        initial_accumulator_value: Initial value of the sum n.
        eps: Added to sqrt(n).
        weight_decay: Factor of the weight that is added to its gradient.
    """

    eps: float = 1e-8
    name: ClassVar[str] = "rowwise_adagrad"

    def states(self, dim: int) -> tuple[State, ...]:
        # The sum of mean squared gradients.
        return (State("sum", 1, self.initial_accumulator_value),)

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        grads = grads + self.weight_decay * rows
        mean = sum_of_squares(grads) / float(grads.shape[1])
        state["sum"].copy_(state["sum"] + mean[:, None])
        rows.copy_(rows - lr * grads / (state["sum"].sqrt() + self.eps))


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum the squares of each row."""
    # The order of additions is the same in every engine: eight lanes, then a tree over the lanes.
    #
    # x: float32 [n, dim]; returns: float32 [n].
    columns = -(-x.shape[1] // 8) * 8
    padded = torch.nn.functional.pad(x, (0, columns - x.shape[1]))
    lanes = torch.zeros(x.shape[0], 8, dtype=x.dtype, device=x.device)
    for block in padded.view(x.shape[0], columns // 8, 8).unbind(1):
        lanes = lanes + block * block
    a, b, c, d = ((lanes[:, k] + lanes[:, k + 4]) for k in range(4))
    return (a + c) + (b + d)
