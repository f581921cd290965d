"""EvictionPass: visits the rows of a table in small parts, removes the expired ones and returns memory.

    state      next part                                             then
    scanning   the next rows: policies decide, expired rows go       scanning; after the last row moving
    moving     rows from the end move into free places               moving; scanning from the start if done

A part visits at least as many rows as when the pass began: if it were counted from the rows that are left,
parts would become smaller and the pass would not end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.table.engines.contract import Engine, ForkSafeLock
from megalith.table.policies import Capacity
from megalith.table.validation import InputChecks

EVICT_PARTS = 64
"""Into how many parts a complete pass is divided, unless they would be small."""
MIN_EVICT_ROWS = 4096
_MOVING = -1


class EvictionPass:
    """The eviction of one table. Several threads may call it; one part runs at a time."""

    def __init__(self, engine: Engine, checks: InputChecks) -> None:
        self._engine = engine
        self._checks = checks
        self._policies = [p for p in checks.config.eviction if not isinstance(p, Capacity)]
        self._lock = ForkSafeLock()
        self._at = 0  # row at which the scan continues, or _MOVING
        self._rows = 0  # number of rows of a part when the pass began

    @property
    def at_start(self) -> bool:
        """Whether the next part begins a pass."""
        return self._at == 0

    def complete(self, now: int) -> Tensor:
        """Make a pass from the start to the end."""
        removed = [torch.empty(0, dtype=torch.int64, device="cpu")]
        with self._lock:
            self._at = 0
            rows = max(MIN_EVICT_ROWS, len(self._engine) // EVICT_PARTS)
            if self._policies:
                with self._engine.scanning():  # a row that moves could be missed
                    while self._at >= 0:
                        removed.append(self._scan(now, rows))
            while not self._engine.return_memory(rows):
                pass
            self._at = 0
        return torch.cat(removed)

    def part(self, now: int, rows: int, start: float | None = None) -> Tensor:
        """Continue a pass; after its end start another one."""
        with self._lock:
            if start is not None:
                self._at = int(start * len(self._engine))
            return self._part(now, rows)[0]

    def remove(self, ids: Tensor) -> None:
        """Remove rows that a user does not want, and return memory. The next pass starts again."""
        # ids: int64 [n].
        with self._lock:
            self._engine.remove(ids)
            while not self._engine.return_memory(MIN_EVICT_ROWS):
                pass
            self._at = 0  # rows may have moved

    def _part(self, now: int, rows: int) -> tuple[Tensor, bool]:
        """Visit some rows. Returns the removed ids, and whether the pass is not finished."""
        removed = torch.empty(0, dtype=torch.int64, device="cpu")
        if self._at == 0:
            self._rows = rows
        rows = max(rows, self._rows)
        if self._policies and self._at != _MOVING:
            removed = self._scan(now, rows)
            if self._at >= 0:
                return removed, True
        # Few rows may be left in many places.
        done = self._engine.return_memory(max(rows, MIN_EVICT_ROWS))
        self._at = 0 if done else _MOVING
        return removed, not done

    def _scan(self, now: int, rows: int) -> Tensor:
        """Visit the next rows and remove the expired ones; moves `_at`, to -1 after the last row."""
        needs_rows = any(policy.needs_rows for policy in self._policies)
        watch = self._engine.open_watch()  # a row that is written from now on stays
        try:
            chunk, self._at = self._engine.scan_on_device(self._at, rows, rows=needs_rows, watch=watch)
            expired = torch.zeros_like(chunk.ids, dtype=torch.bool)
            for policy in self._policies:
                flags = self._checks.flags(policy.expired(chunk, now), expired.shape[0], policy.name)
                expired |= flags.to(expired.device)
            ids = chunk.ids[expired]
            if not ids.numel():
                return ids.cpu()
            # In several calls, so that other threads do not wait long where many rows expire together.
            most = max(MIN_EVICT_ROWS, rows // 8)
            return torch.cat([self._engine.evict(part, watch) for part in ids.split(most)])
        finally:
            self._engine.close_watch(watch)
