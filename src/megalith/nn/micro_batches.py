"""MicroBatches: one step from a fixed number of micro-batches, with the same bits on any number of ranks.

Each micro-batch is computed separately, on any rank. Gradients are then added by a binary tree over the
indices of the micro-batches: first those of a rank, then those of all ranks. The tree does not depend on the
ranks, so tables and dense weights are bit-identical whether one rank computes all micro-batches or each has a
share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.distributed.dense_parameters import dense_parameters
from megalith.distributed.ranks import current_rank, naming_absent_ranks, world_size
from megalith.errors import InputError, UsageError
from megalith.nn.collection import EmbeddingCollection
from megalith.ops import checks


class MicroBatches:
    """Runs the micro-batches of a model and averages their gradients.

    Dropout and batch norm draw or average per rank, so they depend on the number of ranks.

    Args:
        model: The model; its collections must have update="step" and reduction="mean".
        num: The number of micro-batches of a step on all ranks together: a power of two that is a multiple of
            the number of ranks, or the number of ranks (bits then depend on it, unless it is a power of two).
        group: A process group; None: the default group, or one rank if there is none.
        timeout: The timeout of the group in seconds.
        part: The number of this process and the number of processes, for workers of parameter servers, which
            have no process group: `step` then leaves the share of this process in `.grad` and `loss`, and the
            sums over all processes are the gradients and the loss of the step.

    Attributes:
        loss: The mean loss of all micro-batches of the last step, the same on all ranks.
        stopped: Whether a rank passed stop=True to the last step, the same on all ranks.

    Raises:
        InputError: For a wrong `num`.
        UsageError: For a collection with another update or reduction.
    """

    def __init__(
        self,
        model: nn.Module,
        num: int,
        *,
        group: Any = None,
        timeout: float = 600.0,
        part: tuple[int, int] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"MicroBatches: model must be an nn.Module, got {type(model).__name__}")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise InputError(f"MicroBatches: group must be a process group, got {type(group).__name__}")
        if isinstance(num, bool) or not isinstance(num, int):
            raise InputError(f"MicroBatches: num must be an integer, got {num!r}")
        self._alone = part is not None or world_size(group) == 1
        self.rank, self.size = (current_rank(group), world_size(group)) if part is None else _check_part(part)
        if num != self.size and (num < 1 or num & (num - 1) or num % self.size):
            raise InputError(
                f"MicroBatches: num must be a power of two and a multiple of {self.size} ranks, got {num}"
            )
        self.num = num
        self.loss = math.nan
        self.stopped = False
        self._group = group
        self._timeout = timeout
        self._steps = 0
        self._collections = [m for m in model.modules() if isinstance(m, EmbeddingCollection)]
        for collection in self._collections:
            if collection.update != "step" or collection.reduction != "mean":
                raise UsageError('MicroBatches: collections need update="step" and reduction="mean"')
            if len(self.mine) > collection.max_pending:
                raise InputError(
                    f"MicroBatches: {len(self.mine)} micro-batches per step need "
                    f"EmbeddingCollection(max_pending={len(self.mine)}), got {collection.max_pending}"
                )
        self._parameters = [p for _, p in dense_parameters(model) if p.requires_grad]

    @property
    def mine(self) -> range:
        """The indices of the micro-batches of this rank."""
        share = self.num // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def step(self, losses: Iterable[Callable[[], Tensor]], *, stop: bool = False) -> list[float]:
        """Compute the micro-batches of this rank and update the tables.

        Dense gradients are left in `.grad`; the caller makes the step of the dense optimizer.

        Args:
            losses: For each index in `mine`, a function that returns the mean loss of that micro-batch.
            stop: Whether this rank wants to stop after this step; see `stopped`.

        Returns:
            The losses of this rank.

        Raises:
            InputError: On all ranks, before any row is updated, if the mean loss is not finite.
        """
        if isinstance(losses, Tensor) or not isinstance(losses, Iterable):
            raise InputError(f"MicroBatches: losses must be a list of functions, got {type(losses).__name__}")
        checks.flag(stop, "MicroBatches: stop")
        values, gradients = [], []
        for loss_of in losses:
            self._clear()
            if not callable(loss_of):
                raise InputError(f"MicroBatches: a loss must be a function, got {type(loss_of).__name__}")
            loss = loss_of()
            if not isinstance(loss, Tensor):
                raise InputError(f"MicroBatches: a loss must be a tensor, got {type(loss).__name__}")
            loss.backward()
            values.append(float(loss.detach()))
            gradients.append(self._flat(loss, stop))
        if len(values) != len(self.mine):
            raise UsageError(f"MicroBatches: expected {len(self.mine)} losses, got {len(values)}")
        summed = _tree(self._from_all_ranks(_tree(gradients))) / self.num
        self.loss, self.stopped = float(summed[-2]), bool(summed[-1] > 0)
        if not math.isfinite(self.loss):
            for collection in self._collections:
                collection.zero_grad()
            raise InputError(
                f"the mean loss of all micro-batches is {self.loss}; nothing was updated: check the "
                "labels and dense columns of the data, or lower the learning rates"
            )
        self._set(summed[:-2])
        for collection in self._collections:
            collection.step(scale=1.0 / len(self.mine))
        return values

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _flat(self, loss: Tensor, stop: bool) -> Tensor:
        """Return all dense gradients (or zeros), the loss and the stop flag as one vector."""
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        flag = loss.new_tensor(float(stop))
        return torch.cat([piece.detach().reshape(-1) for piece in (*pieces, loss, flag)])

    def _from_all_ranks(self, own: Tensor) -> list[Tensor]:
        if self._alone:
            return [own]
        self._steps += 1
        group: Any = dist.group.WORLD if self._group is None else self._group
        sent = own if dist.get_backend(group) == "nccl" else own.cpu()
        every = [torch.empty_like(sent) for _ in range(self.size)]
        what, key = f"dense gradients of step {self._steps}", f"MicroBatches/{self._steps}"
        with naming_absent_ranks(group, what, key, self._timeout):
            dist.all_gather(every, sent, group=group)
        return [each.to(own.device) for each in every]

    def _set(self, flat: Tensor) -> None:
        sizes = [p.numel() for p in self._parameters]
        for parameter, gradient in zip(self._parameters, flat.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype, copy=True)


def _check_part(part: object) -> tuple[int, int]:
    if not isinstance(part, list | tuple) or len(part) != 2:
        raise InputError(f"MicroBatches: part must be a number and a count, got {part!r}")
    count = checks.integer(part[1], "MicroBatches: part")
    number = checks.integer(part[0], "MicroBatches: part", 0)
    if number >= count:
        raise InputError(f"MicroBatches: part must be below {count}, got {number}")
    return number, count


def _tree(level: list[Tensor]) -> Tensor:
    """Return the sum by a binary tree: neighbours, then sums of neighbours."""
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]
