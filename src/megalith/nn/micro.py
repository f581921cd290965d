"""MicroBatches: one step out of a fixed number of micro-batches, with the same bits on any number of ranks.

Every micro-batch is computed by itself, wherever that is. Gradients are then added by a binary tree over the
micro-batches' index: first those of a rank, then those of the ranks. As the tree does not know where ranks
begin, tables and dense weights are bit-identical whether one rank computes all micro-batches or each has its
share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.errors import InputError, UsageError
from megalith.nn.collection import EmbeddingCollection


class MicroBatches:
    """Runs a model's micro-batches and leaves the mean of their gradients.

    model: its collections must have update="step" and reduction="mean". num: micro-batches of a step, all
    ranks together, a power of two that the ranks divide. group: a process group (None: the default group, or
    one rank where there is none).

    Dropout and batch norm draw or average per rank, which no order of sums can undo.
    """

    def __init__(self, model: nn.Module, num: int, *, group: Any = None) -> None:
        ready = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(group), dist.get_world_size(group)) if ready else (0, 1)
        if num < 1 or num & (num - 1) or num % self.size:
            raise InputError(
                f"MicroBatches: num must be a power of two that {self.size} ranks divide, got {num}"
            )
        self.num = num
        self._group = group
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
        optimizer's step is the caller's. Returns the losses.
        """
        values, gradients = [], []
        for loss_of in losses:
            self._clear()
            loss = loss_of()
            loss.backward()
            values.append(float(loss.detach()))
            gradients.append(self._flat())
        if len(values) != len(self.mine):
            raise UsageError(f"MicroBatches: {len(self.mine)} losses are needed, got {len(values)}")
        summed = _tree(_from_all_ranks(_tree(gradients), self.size, self._group)) / self.num
        self._set(summed)
        for collection in self._collections:
            collection.step(scale=1.0 / len(self.mine))
        return values

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _flat(self) -> Tensor:
        """All dense gradients in one vector; a parameter without one counts as zeros."""
        pieces = [
            (torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1) for p in self._parameters
        ]
        return torch.cat(pieces) if pieces else torch.zeros(0)

    def _set(self, flat: Tensor) -> None:
        sizes = [p.numel() for p in self._parameters]
        for parameter, gradient in zip(self._parameters, flat.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter).clone()


def _from_all_ranks(own: Tensor, size: int, group: Any) -> list[Tensor]:
    if size == 1:
        return [own]
    every = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(every, own, group=group)
    return every


def _tree(level: list[Tensor]) -> Tensor:
    """Sums neighbours, then sums of neighbours."""
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    return level[0]
