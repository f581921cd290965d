"""MinNorm: rows whose weights are close to zero are removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megalith.table.policies.policy import Eviction, check_real
from megalith.table.schedules import FLOAT32_MAX
from megalith.table.table_data import Chunk


@dataclass(frozen=True)
class MinNorm(Eviction):
    """Removes rows whose L2 norm over all weights is below `norm`.

    Optimizers with L1 or group regularisation (`FTRL`, `GroupAdagrad`) set the weights of unimportant ids to
    zero; this policy then frees their memory.

    Args:
        norm: Smallest norm of a row that stays.

    Raises:
        InputError: `norm` is not a positive, finite number.
    """

    norm: float
    name: ClassVar[str] = "min_norm"
    needs_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", check_real("MinNorm: norm", self.norm, above=0, most=FLOAT32_MAX))

    def expired(self, chunk: Chunk, now: int) -> Tensor:
        small: Tensor = torch.linalg.vector_norm(chunk.rows, dim=1, dtype=torch.float64) < self.norm
        return small
