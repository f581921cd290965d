"""RunRanks: the ranks a run is spread over. What they agree on, and each one's part of a batch.

Every rank reads the whole stream of batches and takes its rows of each, so where a run stands in its data
does not depend on how many ranks it has. Rank 0 alone writes what a run leaves behind, checkpoints excepted.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.data import Batch, DataUnavailableError
from megalith.distributed.agreement import agree
from megalith.distributed.exchange import Exchange
from megalith.distributed.ranks import RankGroup, world_size

T = TypeVar("T")


class RunRanks:
    """All ranks of the default process group, or one where there is none. A collective call.

    timeout: seconds of every wait; whoever waited raises RankTimeoutError naming those that did not come.
    group: a process group of theirs with that timeout, for dense weights; None where there is one rank.
    """

    def __init__(self, timeout: float = 600.0) -> None:
        many = world_size() > 1
        self.timeout = timeout
        self.group: Any = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo") if many else None
        self._exchange = Exchange(self.group, timeout=timeout) if many else None
        self._ranks: RankGroup = self._exchange or RankGroup()
        self.rank, self.size = self._ranks.rank, self._ranks.size

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank; for small things."""
        return self._ranks.gather(value)

    def first(self, work: Callable[[], T]) -> T | None:
        """Does something on rank 0 alone; None elsewhere. If it fails, every rank raises."""
        return self._agreed(work if self.is_first else lambda: None)

    def in_turn(self, work: Callable[[], T]) -> T:
        """Does something on rank 0, then on all others: they find what it has fetched."""
        done = self.first(work)
        return self._agreed(lambda: work() if done is None else done)

    def _agreed(self, work: Callable[[], T]) -> T:
        """Does something on every rank; if it fails on one, every rank raises."""
        # Callers fall back to other data when the data is unavailable, and must do so on every rank.
        return agree(self._ranks, work, keep=(DataUnavailableError,))

    # ---- batches

    def part(self, batch: Batch) -> Batch:
        """This rank's rows of a batch; the ranks' parts in order are the batch, some may be empty."""
        return part_of(batch, self.rank, self.size)

    def join(self, own: Tensor, rows: int) -> Tensor:
        """float32 [rows of this rank's part] of every rank -> [rows], in the order of the batch."""
        sizes = [(end - start) * 4 for start, end in (bounds(rows, r, self.size) for r in range(self.size))]
        return self._exchanged(own, [sizes[self.rank]] * self.size, sizes, "predictions").view(torch.float32)

    def sum_on_first(self, sums: Tensor) -> None:
        """Adds the other ranks' to rank 0's, in place; elsewhere they stay as they are."""
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
    """Where part `number` of `parts` nearly equal ones begins and ends."""
    return rows * number // parts, rows * (number + 1) // parts


def part_of(batch: Batch, number: int, parts: int) -> Batch:
    """A batch's rows of that part; the batch itself where there is one part."""
    return batch if parts == 1 else batch.part(*bounds(len(batch), number, parts))
