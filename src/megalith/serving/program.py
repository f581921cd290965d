"""The dense program: what torch.export made of a model's `score`, with weights that can be replaced.

There are two copies. Requests run the one in front; new weights go into the other, which then takes its
place, so no request sees half of them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megalith.errors import ExportError, InputError

PREFIX = "model."
"""What torch.export puts before the names of the model's weights."""


class DenseProgram:
    """Rows by name and dense values in, logits [B] out. Threads may share it.

    path: an archive of torch.export. Raises ExportError if it is none.
    """

    def __init__(self, path: Path) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.load(path)
            self._copies = [_Copy(program.module()), _Copy(program.module())]
        except Exception as error:  # whatever torch raises for a damaged archive
            raise ExportError(f"{path} is no program of torch.export: {error}") from None
        self._front = 0
        self._writing = threading.Lock()
        self._exported = {name: weight.clone() for name, weight in self._copies[0].weights.items()}
        for weight in self._copies[1].weights.values():
            weight.data = weight.data.clone()  # of its own, not the first copy's
        self._now = dict(self._exported)

    @property
    def names(self) -> dict[str, tuple[int, ...]]:
        """The weights and their shapes."""
        return {name: tuple(weight.shape) for name, weight in self._exported.items()}

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights in use; not to be written to."""
        return dict(self._now)

    def __call__(self, rows: dict[str, Any], dense: Tensor | None) -> Tensor:
        """The logits, float32 [B]."""
        while True:
            copy = self._copies[self._front]
            with copy:
                if copy is not self._copies[self._front]:
                    continue  # it went behind meanwhile, and may be about to change
                logits: Tensor = copy.module(rows, dense)
                return logits

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raises InputError unless these are weights of the program, finite and of their shapes."""
        for name, weight in weights.items():
            if name not in self._exported:
                raise InputError(f"dense weight {name!r} is unknown (known: {', '.join(self._exported)})")
            known = self._exported[name]
            if weight.dtype != known.dtype or weight.shape != known.shape:
                raise InputError(
                    f"dense weight {name!r} is {weight.dtype} {list(weight.shape)}, "
                    f"not {known.dtype} {list(known.shape)}"
                )
            if weight.is_floating_point() and not bool(torch.isfinite(weight).all()):
                raise InputError(f"dense weight {name!r} holds NaN or Inf")

    def set(self, weights: Mapping[str, Tensor]) -> None:
        """Replaces weights, all at once; those not named stay."""
        self.check(weights)
        with self._writing:
            self._now.update({name: weight.detach().clone() for name, weight in weights.items()})
            back = self._copies[1 - self._front]
            back.wait_idle()
            with torch.no_grad():
                for name, weight in back.weights.items():
                    weight.copy_(self._now[name])
            self._front = 1 - self._front

    def reset(self) -> None:
        """Back to the exported weights."""
        self.set(self._exported)


class _Copy:
    """A copy of the program, and how many run it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = [*module.named_parameters(), *module.named_buffers()]
        self.weights = {name.removeprefix(PREFIX): weight for name, weight in named}
        self._running = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._running -= 1
            if not self._running:
                self._changed.notify_all()

    def wait_idle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
