"""RunRanks: the ranks of a run. They agree on outcomes, and each computes its part of a batch.

Only rank 0 writes the files of a run, except for checkpoints. `batches.py` describes which rows a rank reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.data import Batch, DataUnavailableError
from megalith.distributed.exchange import Exchange
from megalith.distributed.ranks import Ranks, agree, world_size

T = TypeVar("T")


class RunRanks:
    """The ranks of the default process group, or one rank without a process group. A collective call."""

    group: Any
    """A process group with that timeout, for dense weights. None with one rank."""

    def __init__(self, timeout: float = 600.0) -> None:
        many = world_size() > 1
        self.timeout = timeout
        self.group = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo") if many else None
        self._exchange = Exchange(self.group, timeout=timeout) if many else None
        self._ranks: Ranks = self._exchange or Ranks()
        self.rank, self.size = self._ranks.rank, self._ranks.size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on every rank. For small values."""
        return self._ranks.gather(value)

    def on_rank_0(self, work: Callable[[], T]) -> T | None:
        """Runs a function on rank 0; other ranks return None. An error raises on every rank."""
        return self.agreed(work if self.is_first else lambda: None)

    def rank_0_first(self, work: Callable[[], T]) -> T:
        """Runs a function on rank 0, then on the others if it succeeded there."""
        done = self.on_rank_0(work)
        return self.agreed(lambda: work() if done is None else done)

    def agreed(self, work: Callable[[], T]) -> T:
        """Runs a function on every rank. An error on one rank raises on every rank."""
        # Callers fall back to other data when the data is unavailable, and must do so on every rank.
        return agree(self._ranks, work, keep=(DataUnavailableError,))

    # ---- batches

    def join(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenates the values of all ranks in the order of the ranks."""
        # returns: float32 [sum of sizes].
        size = [4 * rows for rows in sizes]
        return self._exchanged(own, [size[self.rank]] * self.size, size, "predictions").view(torch.float32)

    def sum_on_first(self, sums: Tensor) -> None:
        """Adds the tensors of all ranks on rank 0 in place. On other ranks the tensor is unchanged."""
        size = sums.nbytes
        sent = [size] + [0] * (self.size - 1)
        got = [size if self.is_first else 0] * self.size
        received = self._exchanged(sums, sent, got, "sums")
        if self.is_first:
            sums.copy_(received.view(sums.dtype).view(self.size, *sums.shape).sum(0))

    def _exchanged(self, own: Tensor, sent: list[int], received: list[int], what: str) -> Tensor:
        data = own.detach().contiguous().view(-1).view(torch.uint8)
        exchange = self._exchange
        if exchange is None:
            return data
        parts = torch.cat([data[:size] for size in sent])
        return exchange.run(lambda: exchange.all_to_all(parts, sent, received, f"exchange of {what}"))


def bounds(rows: int, number: int, parts: int) -> tuple[int, int]:
    """Return start and end of part `number` if `rows` are split into nearly equal `parts`."""
    return rows * number // parts, rows * (number + 1) // parts


def part_of(batch: Batch, number: int, parts: int) -> Batch:
    """Return the rows of part `number` of a batch."""
    return batch if parts == 1 else batch.part(*bounds(len(batch), number, parts))
