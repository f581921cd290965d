"""MicroStepGuard: notices rows that are updated more often than the dense weights of the same model.

With update="backward" every backward is an update of the rows. A loop that accumulates dense gradients over
several backwards, or scales its loss, then trains the rows wrongly without an error. The guard watches one
dense parameter of each optimizer, from the optimizer's first step on:

    event                              what the guard does
    a backward updates rows            remembers the backward and the one before; checks
    the parameter's gradient arrives   remembers the backward and the one before, and whether this gradient
                                       was added to the last one; checks
    an optimizer makes a step          forgets both; raises if an enabled GradScaler made the step

The check raises if the gradient was added to the last one, and both belong to backwards that updated rows. A
gradient was added to the last one if it is the same tensor, modified in place exactly once since. So neither
form of zero_grad, nor a skipped step, nor several forwards in one loss, nor another model raises. DDP writes
into gradients, which hides an accumulation without no_sync(): that is not noticed.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from megalith.errors import UsageError
from megalith.shards.lookup import version

_NONE = -1
_RECIPE = (
    'use EmbeddingCollection(update="step") and call collection.step() once per step of the optimizer '
    "({scale}), or pass allow_micro_steps=True if every backward should update the rows"
)
_SCALER_FRAMES = 8
"""The scaler is this close to the hook of the optimizer that it calls."""


class MicroStepGuard:
    """Watches the updates of one collection; see the module."""

    def __init__(self) -> None:
        self._watches: dict[int, _Watch] = {}  # by id(optimizer), while it lives
        self._last = self._before = _NONE
        reference = weakref.ref(self)

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            guard = reference()
            if guard is not None:
                guard._stepped(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def updating(self) -> None:
        """Record that a backward is about to update rows.

        Raises:
            UsageError: If the dense part accumulates gradients.
        """
        task = torch._C._current_graph_task_id()
        if task != self._last:
            self._before, self._last = self._last, task
        for watch in tuple(self._watches.values()):
            self.check(watch)

    def check(self, watch: _Watch) -> None:
        """Check that a watched gradient was not accumulated over two backwards that update rows.

        Args:
            watch: The watched parameter.

        Raises:
            UsageError: It was.
        """
        if watch.added and (watch.before, watch.last) == (self._before, self._last):
            self._last = self._before = _NONE
            raise UsageError(
                'EmbeddingCollection(update="backward"): a second backward before the step of the dense '
                "optimizer. Dense gradients are accumulated, but each backward is an optimizer step of its "
                "own for the rows. For gradient accumulation "
                + _RECIPE.format(scale="scale=1/N if the loss is not divided by N")
            )

    def _stepped(self, optimizer: Optimizer) -> None:
        watch = self._watches.get(id(optimizer))
        if watch is None:
            parameter = None if self._last == _NONE else _smallest(optimizer)
            if parameter is not None:
                self._watches[id(optimizer)] = _Watch(self, parameter)
                weakref.finalize(optimizer, self._watches.pop, id(optimizer), None)
        else:
            if watch.last == self._last != _NONE and not watch.scaler_checked:
                watch.scaler_checked = True
                _check_scaler()
            watch.forget()
        self._last = self._before = _NONE


class _Watch:
    """One parameter of an optimizer.

    Attributes:
        last: The last backward that brought a gradient.
        before: The one before it.
        added: Whether the last gradient was added to that of `before`.
        scaler_checked: Whether a step was checked for a GradScaler.
    """

    def __init__(self, guard: MicroStepGuard, parameter: Tensor) -> None:
        self.last = self.before = _NONE
        self.added = False
        self.scaler_checked = False
        self._grad: Tensor | None = None
        self._version = 0
        reference = weakref.ref(self)
        guard_reference = weakref.ref(guard)

        def arrived(parameter: Tensor) -> None:
            watch, guard = reference(), guard_reference()
            if watch is not None and guard is not None:
                watch._arrived(parameter.grad)
                guard.check(watch)

        weakref.finalize(self, parameter.register_post_accumulate_grad_hook(arrived).remove)

    def forget(self) -> None:
        """Forget the gradient: the optimizer has used it."""
        self.last = self.before = _NONE
        self.added = False
        self._grad = None

    def _arrived(self, grad: Tensor | None) -> None:
        task = torch._C._current_graph_task_id()
        if grad is None:
            self.forget()
            return
        self.added = grad is self._grad and version(grad) == self._version + 1 and task != self.last
        self.before, self.last = self.last, task
        self._grad, self._version = grad, version(grad)


def _smallest(optimizer: Optimizer) -> Tensor | None:
    """Return the smallest parameter with a gradient: the guard keeps a reference to its gradient."""
    found: Tensor | None = None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            trained = parameter.is_leaf and parameter.requires_grad and parameter.grad is not None
            if trained and (found is None or parameter.numel() <= found.numel()):
                found = parameter
    return found


def _check_scaler() -> None:
    """Raise UsageError if an enabled GradScaler is among the callers."""
    frame = sys._getframe()
    for _ in range(_SCALER_FRAMES):
        if frame.f_back is None:
            return
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            scaler = frame.f_locals.get("self")
            if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
                raise UsageError(
                    'EmbeddingCollection(update="backward"): a GradScaler scales the loss. It unscales dense '
                    "gradients, but the rows were updated with scaled ones. With a GradScaler "
                    + _RECIPE.format(scale="scale=1/scaler.get_scale()")
                )
            return
