"""Steps: one update of a model from one batch, as a whole or in micro-batches over ranks.

In both cases the loss is the mean over the batch, and nothing is updated if it is not finite.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from megalith.data import Batch
from megalith.errors import InputError
from megalith.models import forward_batch
from megalith.nn import MicroBatches
from megalith.training.batches import StepBatch
from megalith.training.model import dense_device, moved


class BatchScores(NamedTuple):
    """Rows that this rank computed."""

    batch: Batch
    logits: Tensor
    """float32 [rows]."""


class DenseOptimizer(Protocol):
    """What a step needs of the optimizer of the dense weights; a torch.optim.Optimizer is one."""

    def zero_grad(self) -> None:
        """Drop the gradients."""

    def step(self) -> object:
        """Update the weights."""


class Steps(ABC):
    """Trains a model: one optimizer step per batch."""

    stopped = False
    """Whether a rank passed stop=True to the last `take`, the same on all ranks."""

    @abstractmethod
    def take(self, step: Any, *, stop: bool = False) -> tuple[float, list[BatchScores]]: ...


class WholeBatches(Steps):
    """Steps of one process. The tables are updated in backward."""

    def __init__(self, model: nn.Module, optimizer: DenseOptimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = dense_device(model)

    def take(self, step: StepBatch, *, stop: bool = False) -> tuple[float, list[BatchScores]]:
        batch = step.on_device(self._device)
        self._optimizer.zero_grad()
        logits = forward_batch(self._model, batch)
        loss = _losses(logits, batch).mean()
        # Both wait for a GPU, so they come before backward: it then runs while the next batch is prepared.
        value, scored = float(loss.detach()), [BatchScores(step.batch, logits.detach().cpu())]
        if not math.isfinite(value):
            raise InputError(
                f"the loss is {value}: check the labels and dense columns of the data, or lower the "
                "learning rates"
            )
        loss.backward()
        self._optimizer.step()
        self.stopped = stop
        return value, scored


class PartBatches(Steps):
    """Steps in micro-batches. Every rank computes its rows of a batch; the tables are updated in `step`."""

    def __init__(self, model: nn.Module, optimizer: DenseOptimizer, micro: MicroBatches) -> None:
        self._model = model
        self._optimizer = optimizer
        self._micro = micro

    def take(self, step: StepBatch, *, stop: bool = False) -> tuple[float, list[BatchScores]]:
        scored: list[BatchScores] = []
        self._micro.step((self._loss(step, index, scored) for index in self._micro.mine), stop=stop)
        self.stopped = self._micro.stopped
        self._optimizer.step()
        return self._micro.loss, scored

    def _loss(self, step: StepBatch, index: int, scored: list[BatchScores]) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            own = step.part(index, self._micro.num, self._micro.mine)
            part = moved(self._model, own)
            logits = forward_batch(self._model, part)
            scored.append(BatchScores(own, logits.detach().cpu()))
            # The mean of this over micro-batches is the mean over rows, even if the parts differ in size.
            return _losses(logits, part).sum() * (self._micro.num / step.rows)

        return compute


def _losses(logits: Tensor, batch: Batch) -> Tensor:
    losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
    return losses if batch.weights is None else losses * batch.weights
