"""LaunchMemory: integers on their way to the device, and memory that calls use again.

Recorded launches refer to such memory, so it advances `generation` when it is replaced.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.table.engines.cuda.stream_order import retire


class LaunchMemory:
    """The memory of launches on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generation = 0
        self._scratch: dict[str, Tensor] = {}

    # ---- integers

    def upload(self, values: Sequence[int]) -> Tensor:
        """Copy integers to the device without waiting for it."""
        # returns: int64 [n] on the device.
        return self._pinned(values).to(self.device, non_blocking=True)

    def _pinned(self, values: Sequence[int]) -> Tensor:
        """Return integers in memory from which the device copies without waiting."""
        host = torch.frombuffer(array("q", values), dtype=torch.int64)
        if self.device.type == "cpu":
            return host.clone()
        return torch.empty(len(values), dtype=torch.int64, pin_memory=True, device="cpu").copy_(host)

    def write(self, target: Tensor, values: Sequence[int]) -> Tensor:
        """Copy integers to given memory on the device without waiting for it."""
        # target: int64 [n].
        return target.copy_(self._pinned(values), non_blocking=True)

    def overwrite(self, use: str, values: Sequence[int]) -> Tensor:
        """Copy integers to the same memory at each call, without waiting for the device."""
        # returns: int64 [n] on the device.
        known = self.scratch(use, len(values), torch.int64)
        if known.numel() != len(values):
            retire(self._scratch.pop(use))
            known = self.scratch(use, len(values), torch.int64)
        return self.write(known, values)

    # ---- memory

    def scratch(self, use: str, n: int, dtype: torch.dtype) -> Tensor:
        """Return memory that is needed until the end of a call; later calls use it again."""
        known = self._scratch.get(use)
        if known is None or known.numel() < n or known.dtype != dtype:
            room = n
            if known is not None:
                retire(known)
                room += n // 8
            self.generation += 1
            known = self._scratch[use] = torch.empty(room, dtype=dtype, device=self.device)
        return known

    def filled(self, use: str, n: int, value: float, dtype: torch.dtype) -> Tensor:
        """Return memory that is filled with a value when it is allocated; callers leave it so."""
        known = self._scratch.get(use)
        memory = self.scratch(use, n, dtype)
        return memory if memory is known else memory.fill_(value)
