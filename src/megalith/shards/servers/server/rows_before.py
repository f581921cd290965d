"""RowsBefore: the rows that the last synchronous step has changed, as they were before it.

A worker may end after one server has its gradients of a step and before another one has them. The first
server has then applied the step, if it has those of the other workers too. The process that replaces the
worker computes the step again, and must read what the worker has read:

    a read that names as its last write          gets
    the push of the step, or a later write       the rows after the step
    the write before that push                   the rows before the step

No server is more than one step ahead: its next step needs the next push of that worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor


class RowsBefore:
    """See the module."""

    def __init__(
        self,
        numbers: Mapping[int, int] = MappingProxyType({}),
        rows: Mapping[str, tuple[Tensor, Tensor]] = MappingProxyType({}),
    ) -> None:
        self._numbers = numbers
        self._rows = rows

    def correction(self, worker: int, after: int) -> Callable[..., None] | None:
        """Return what a read must do with its rows."""
        return self.put if self._numbers.get(worker) == after + 1 else None

    def put(self, ids: Mapping[str, Tensor], rows: Sequence[Tensor]) -> None:
        """Replace rows of a read by those before the step."""
        # rows: float32 [n, dim] per table of `ids`, the rows to correct.
        for (name, wanted), found in zip(ids.items(), rows, strict=True):
            if name not in self._rows:
                continue
            own, before = self._rows[name]
            known, order = own.sort()
            at = torch.searchsorted(known, wanted).clamp_(max=known.numel() - 1)
            changed = known[at] == wanted
            found[changed] = before[order[at[changed]]]
