"""A worker with faults at chosen moments. Those processes import this module, so it imports little."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Any

from megalith.training import workers
from megalith.training.ps_weights import DenseWeights
from megalith.training.workers import TrainingWorker


class EndingWorker(TrainingWorker):
    """Ends or fails at each moment of a file once: lines of "worker step moment"; it removes its own.

    The moments of a step: "push", before the first gradients are sent; "half", after the first server has
    applied the step and before the second one has its gradients; "between", after the tables are updated and
    before gradients of the dense weights are sent; "result", after all are applied; "error", the step raises.
    Without a step (-1): "stop", the process stops in the midst of joining: it is a worker of the
    tables and not of the dense weights. "slow": each step takes longer.
    """

    plan: Path

    def prepare(self, number: int) -> Any:
        self.plan = Path(self._setup.log).parents[2] / "ends"
        return super().prepare(number)

    def connect(self, written: Any) -> Any:
        def stopping(*args: Any) -> DenseWeights:
            if self._is_at(-1, "stop"):
                os.kill(os.getpid(), signal.SIGSTOP)
            return DenseWeights(*args)

        workers.DenseWeights = stopping  # type: ignore[misc, assignment]
        return super().connect(written)

    def _is_at(self, step: int, moment: str, *, again: bool = False) -> bool:
        line = f"{self.number} {step} {moment}"
        if not self.plan.exists():
            return False
        with open(self.plan, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            lines = file.read().splitlines()
            if line in lines and not again:
                file.seek(0)
                file.truncate()
                file.write("\n".join(each for each in lines if each != line))
        return line in lines

    def _end_at(self, step: int, moment: str) -> None:
        if self._is_at(step, moment):
            os._exit(9)

    def _train(self, step: Any, order: Any) -> Any:
        push, push_dense = self._tables.apply_gradients, self._dense.step
        if self._is_at(order.step, "error"):
            raise ZeroDivisionError("no rows")
        if self._is_at(-1, "slow", again=True):
            time.sleep(0.1)

        def ending(*args: Any, **options: Any) -> None:
            self._end_at(order.step, "push")
            push(*args, **options)

        links = list(self._tables.links)
        write = links[-1].write

        def ending_half(*args: Any, **options: Any) -> Any:
            if self._is_at(order.step, "half", again=True):
                for link, call in self._tables._pushes._pushed[-1]:
                    link.result(call)
                self._end_at(order.step, "half")
            return write(*args, **options)

        def ending_between() -> None:
            if self._is_at(order.step, "between", again=True):
                self._tables.flush()
                self._end_at(order.step, "between")
            push_dense()

        self._tables.apply_gradients = ending  # type: ignore[method-assign]
        self._dense.step = ending_between  # type: ignore[method-assign]
        links[-1].write = ending_half  # type: ignore[method-assign]
        try:
            done = super()._train(step, order)
        finally:
            self._tables.apply_gradients = push  # type: ignore[method-assign]
            self._dense.step = push_dense  # type: ignore[method-assign]
            links[-1].write = write  # type: ignore[method-assign]
        self._end_at(order.step, "result")
        return done
