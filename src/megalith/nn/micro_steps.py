"""MicroStepGuard: notices rows that are updated more often than the dense weights of the same model.

With update="backward" every backward is an update of the rows. A loop that accumulates dense gradients over
several backwards, or scales its loss, then trains the rows wrongly without an error. The guard watches one
dense parameter of each optimizer, from the optimizer's first step on:

    event                              what the guard does
    a backward updates rows            counts the backward; checks
    the parameter's gradient arrives   before it is added: notes whether the parameter already has a gradient
                                       of an earlier backward that updated rows; checks
    an optimizer makes a step          forgets everything; raises if an enabled GradScaler made the step

The check raises if a gradient is about to be added to that of an earlier backward, and both backwards update
rows. A parameter has a gradient if `.grad` is not None and not all zero. So neither form of zero_grad, nor a
skipped step, nor several forwards in one loss, nor another model raises, and what DDP or clipping write into
gradients does not matter.

FSDP writes the gradients of its parameters itself, so they never arrive. There the guard compares counts: it
raises if the same number of backwards, at least two, updated rows before each of two steps in a row.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from megalith.errors import UsageError

_NONE = -1
_RECIPE = (
    'use EmbeddingCollection(update="step") and collection.follow(optimizer), or call collection.step() once '
    "per step of the optimizer ({scale}), or pass allow_micro_steps=True if every backward should update the "
    "rows"
)
_SCALER_FRAMES = 8
"""The scaler is this close to the hook of the optimizer that it calls."""
# All guards share one hook, which stays: torch iterates over its hooks, so none may be removed when Python
# frees a guard, which happens at any time.
_GUARDS: dict[int, weakref.ref[MicroStepGuard]] = {}
_NUMBERS = itertools.count()


class MicroStepGuard:
    """Watches the updates of one collection; see the module."""

    def __init__(self) -> None:
        self._watches: dict[int, _Watch] = {}  # by id(optimizer), while it lives
        self.forget()
        number = next(_NUMBERS)
        _GUARDS[number] = weakref.ref(self, lambda _: _GUARDS.pop(number, None))
        if not number:
            register_optimizer_step_post_hook(_stepped)

    def forget(self) -> None:
        """Forget all backwards: an optimizer has used their gradients."""
        self.task, self._backwards = _NONE, 0
        for watch in tuple(self._watches.values()):
            watch.forget()

    def updating(self) -> None:
        """Record that a backward is about to update rows."""
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.task = task
            self._backwards += 1
        for watch in tuple(self._watches.values()):
            watch.with_rows |= watch.task == task
            self.check(watch)

    def check(self, watch: _Watch) -> None:
        """Check that a watched gradient is not accumulated over two backwards that update rows."""
        if watch.accumulates and watch.with_rows:
            self.forget()
            raise _accumulated("a second backward before the step of the dense optimizer")

    def stepped(self, optimizer: Optimizer) -> None:
        """Record that an optimizer has made a step."""
        watch, backwards = self._watches.get(id(optimizer)), self._backwards
        if watch is None:
            parameter = _watched_parameter(optimizer) if backwards else None
            if parameter is not None:
                self._watches[id(optimizer)] = _Watch(self, parameter, backwards)
                weakref.finalize(optimizer, self._watches.pop, id(optimizer), None)
            self.forget()
            return
        counted = watch.counted and watch.task == _NONE
        trained = backwards > 0 if counted else watch.with_rows
        repeated, watch.backwards = backwards == watch.backwards, backwards
        self.forget()
        if trained and not watch.scaler_checked:
            watch.scaler_checked = True
            _check_scaler()
        if counted and repeated and backwards > 1:
            raise _accumulated(f"{backwards} backwards before each step of the dense optimizer")


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for reference in tuple(_GUARDS.values()):
        guard = reference()
        if guard is not None:
            guard.stepped(optimizer)


class _Watch:
    """One parameter of an optimizer."""

    def __init__(self, guard: MicroStepGuard, parameter: Tensor, backwards: int) -> None:
        self.forget()
        self.backwards = backwards
        self.scaler_checked = False
        self.counted = _by_fsdp(parameter)
        if hasattr(parameter, "_fsdp_flattened"):
            return  # a gradient may arrive, but after FSDP1 has put the present one aside
        own, guard_reference, leaf = weakref.ref(self), weakref.ref(guard), weakref.ref(parameter)

        def arriving(grad: Tensor) -> None:
            watch, guard, parameter = own(), guard_reference(), leaf()
            if watch is not None and guard is not None and parameter is not None:
                watch._arriving(parameter.grad, guard.task)
                guard.check(watch)

        weakref.finalize(self, parameter.register_hook(arriving).remove)

    def forget(self) -> None:
        """Forget the gradient: an optimizer has made a step."""
        self.task = _NONE
        self.with_rows = self.accumulates = False

    def _arriving(self, present: Tensor | None, updating: int) -> None:
        task = torch._C._current_graph_task_id()
        if task != self.task:
            earlier = self.accumulates or self.with_rows
            self.accumulates = earlier and _is_nonzero(present)
            self.task, self.with_rows = task, task == updating


def _accumulated(what: str) -> UsageError:
    return UsageError(
        f'EmbeddingCollection(update="backward"): {what}. Dense gradients are accumulated, but each backward '
        "is an optimizer step of its own for the rows. For gradient accumulation "
        + _RECIPE.format(scale="scale=1/N if the loss is not divided by N")
    )


def _is_nonzero(grad: Tensor | None) -> bool:
    """Return whether a parameter has a gradient; of a DTensor, the part of this rank."""
    if grad is None:
        return False
    if hasattr(grad, "to_local"):
        grad = grad.to_local()
    values = grad._values() if grad.is_sparse else grad
    return bool(values.any())


def _watched_parameter(optimizer: Optimizer) -> Tensor | None:
    """Return the smallest parameter with a gradient: testing it for zeros takes the least time."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = [p for p in parameters if p.is_leaf and p.requires_grad and (p.grad is not None or _by_fsdp(p))]
    # Not whether this rank's part is zero: all ranks must watch.
    return next((p for p in sorted(found, key=torch.numel) if _by_fsdp(p) or _is_nonzero(p.grad)), None)


def _by_fsdp(parameter: Tensor) -> bool:
    """Return whether FSDP may write the gradient of a parameter: a DTensor (FSDP2), or flattened (FSDP1)."""
    return hasattr(parameter, "device_mesh") or hasattr(parameter, "_fsdp_flattened")


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
