"""A worker that ends its process within a step. Those processes import this module, so it imports little."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megalith.training.training_worker import TrainingWorker


class EndingWorker(TrainingWorker):
    """Ends once at each moment of a file: lines of "worker step moment", of which it removes its own.

    The moments: "push", before the first gradients of the step are sent; "result", after all are applied.
    """

    plan: Path

    def connect(self, number: int, written: Any) -> Any:
        self.number = number
        self.plan = Path(self._setup.log).parents[2] / "ends"
        return super().connect(number, written)

    def _end_at(self, step: int, moment: str) -> None:
        line = f"{self.number} {step} {moment}"
        if self.plan.exists() and line in self.plan.read_text().splitlines():
            rest = [each for each in self.plan.read_text().splitlines() if each != line]
            self.plan.write_text("\n".join(rest))
            os._exit(9)

    def _train(self, step: Any, order: Any) -> Any:
        push = self._tables.apply_gradients

        def ending(*args: Any, **options: Any) -> None:
            self._end_at(order.step, "push")
            push(*args, **options)

        self._tables.apply_gradients = ending  # type: ignore[method-assign]
        try:
            done = super()._train(step, order)
        finally:
            self._tables.apply_gradients = push  # type: ignore[method-assign]
        self._end_at(order.step, "result")
        return done
