"""MicroBatches: one step out of a fixed number of micro-batches, with the same bits on any number of ranks.

Every micro-batch is computed by itself, wherever that is. Gradients are then added by a binary tree over the
micro-batches' index: first those of a rank, then those of the ranks. As the tree does not know where ranks
begin, tables and dense weights are bit-identical whether one rank computes all micro-batches or each has its
share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.distributed.absent_ranks import naming_absent
from megalith.distributed.ranks import current_rank, world_size
from megalith.errors import InputError, UsageError
from megalith.nn.collection import EmbeddingCollection


class MicroBatches:
    """Runs a model's micro-batches and leaves the mean of their gradients.

    model: its collections must have update="step" and reduction="mean". num: micro-batches of a step, all
    ranks together: a power of two that the ranks divide, or as many as there are ranks (bits then depend on
    their number, unless it is a power of two). group: a process group (None: the default group, or one rank
    where there is none). timeout: seconds to wait for other ranks, as the group has it.

    loss: the mean of all ranks' micro-batches in the last step, the same everywhere.

    Dropout and batch norm draw or average per rank, which no order of sums can undo.
    """

    def __init__(self, model: nn.Module, num: int, *, group: Any = None, timeout: float = 600.0) -> None:
        self.rank, self.size = current_rank(group), world_size(group)
        if num != self.size and (num < 1 or num & (num - 1) or num % self.size):
            raise InputError(
                f"MicroBatches: num must be a power of two that {self.size} ranks divide, got {num}"
            )
        self.num = num
        self.loss = math.nan
        self._group = group
        self._timeout = timedelta(seconds=timeout)
        self._steps = 0
        self._collections = [m for m in model.modules() if isinstance(m, EmbeddingCollection)]
        for collection in self._collections:
            if collection.update != "step" or collection.reduction != "mean":
                raise UsageError('MicroBatches: collections need update="step" and reduction="mean"')
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    @property
    def mine(self) -> range:
        """The indices of this rank's micro-batches."""
        share = self.num // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def step(self, losses: Iterable[Callable[[], Tensor]]) -> list[float]:
        """Computes this rank's micro-batches and updates the tables; dense gradients are left in `.grad`.

        losses: for each index in `mine`, a function that gives the mean loss of that micro-batch. The dense
        optimizer's step is the caller's. Returns the losses. Raises InputError, on every rank and before any
        row is updated, if their mean over all ranks is not finite.
        """
        values, gradients = [], []
        for loss_of in losses:
            self._clear()
            loss = loss_of()
            loss.backward()
            values.append(float(loss.detach()))
            gradients.append(self._flat(loss))
        if len(values) != len(self.mine):
            raise UsageError(f"MicroBatches: {len(self.mine)} losses are needed, got {len(values)}")
        summed = _tree(self._from_all_ranks(_tree(gradients))) / self.num
        self.loss = float(summed[-1])
        if not math.isfinite(self.loss):
            for collection in self._collections:
                collection.zero_grad()
            raise InputError(
                f"the loss of all micro-batches together is {self.loss}, and nothing was updated: check the "
                "labels and dense columns of the data, or lower the learning rates"
            )
        self._set(summed[:-1])
        for collection in self._collections:
            collection.step(scale=1.0 / len(self.mine))
        return values

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _flat(self, loss: Tensor) -> Tensor:
        """All dense gradients and the loss in one vector; a parameter without a gradient counts as zeros."""
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return torch.cat([piece.detach().reshape(-1) for piece in (*pieces, loss)])

    def _from_all_ranks(self, own: Tensor) -> list[Tensor]:
        if self.size == 1:
            return [own]
        self._steps += 1
        every = [torch.empty_like(own) for _ in range(self.size)]
        group: Any = dist.group.WORLD if self._group is None else self._group
        what, key = f"dense gradients of step {self._steps}", f"MicroBatches/{self._steps}"
        with naming_absent(group, what, key, self._timeout):
            dist.all_gather(every, own, group=group)
        return every

    def _set(self, flat: Tensor) -> None:
        sizes = [p.numel() for p in self._parameters]
        for parameter, gradient in zip(self._parameters, flat.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype, copy=True)


def _tree(level: list[Tensor]) -> Tensor:
    """Sums neighbours, then sums of neighbours."""
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]
