"""GroupFTRL: FTRL whose l1 penalty sets whole rows to zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megalith.table.optimizers.ftrl import FTRL
from megalith.table.optimizers.rowwise_adagrad import sum_of_squares


@dataclass(frozen=True)
class GroupFTRL(FTRL):
    """FTRL with the length |z| of the segment's z in place of each |z|.

    n' = n + g^2; z += g - (sqrt(n') - sqrt(n)) / lr * w; then w = 0 if |z| <= l1, else
    w = -lr * z * (1 - l1 / |z|) / (sqrt(n') + beta + l2 * lr). The formula is in Monolith's headers, its
    kernel is not in the open release. A learning rate of 0 raises InputError.

    Args:
        lr: The learning rate.
        initial_accumulator_value: Initial value of n.
        beta: Added to sqrt(n').
        l1: Length of z below which the row is zero.
        l2: Weight of the l2 penalty.
    """

    initial_accumulator_value: float = 0.0
    beta: float = 1.0
    name: ClassVar[str] = "group_ftrl"

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        n, z = state["sum"], state["z"]
        before = n.clone()
        n.copy_(n + grads * grads)
        z.copy_(z + (grads - (n.sqrt() - before.sqrt()) / lr * rows))
        norm = sum_of_squares(z).sqrt()[:, None]
        value = -lr * ((norm - self.l1) / norm) * z / (n.sqrt() + self.beta + self.l2 * lr)
        rows.copy_(torch.where((norm <= self.l1) | (z == 0), 0.0, value))
