"""LAMB: Adam steps whose length follows the length of the row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megalith.table.optimizers.adam import AdamSettings
from megalith.table.optimizers.rowwise_adagrad import sum_of_squares


@dataclass(frozen=True)
class LAMB(AdamSettings):
    """d = c * m / (sqrt(v) + eps) + weight_decay * w; w -= lr * |w| / |d| * d, with Adam's m and v.

    c is Adam's bias correction. The trust ratio |w| / |d| is computed per row and segment, as in FBGEMM; it
    is 1 where either length is 0.

    Args:
        lr: The learning rate.
        betas: beta1 and beta2, each in [0, 1).
        eps: Added to sqrt(v).
        weight_decay: Factor of the weight in d.
        bias_correction: "step" or "row", see `Adam`.
    """

    name: ClassVar[str] = "lamb"

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        correction = self._average(grads, state, step)
        direction = correction * state["m"] / (state["v"].sqrt() + self.eps) + self.weight_decay * rows
        length, along = (sum_of_squares(x).sqrt()[:, None] for x in (rows, direction))
        trust = torch.where((length > 0) & (along > 0), length / along, 1.0)
        rows.copy_(rows - lr * trust * direction)
