"""IdSets: ids by table, as tensors, each id once in the end.

Adding is cheap: tensors are kept as they come, and put together when they have doubled. So what is held is at
most about twice the distinct ids, and every id is looked at a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megalith.ops.bucketing import dedup

SMALL = 4096
"""Ids that are not worth putting together."""


class IdSets:
    """Sets of int64 ids by table. Not for several threads at once.

    lazy: tensors are put together by whoever asks for `swollen` now and then.
    """

    def __init__(self, *, lazy: bool = False) -> None:
        self._lazy = lazy
        self._parts: dict[str, list[Tensor]] = {}
        self._sizes: dict[str, int] = {}
        self._settled: dict[str, int] = {}

    def __len__(self) -> int:
        """Ids held; some may be twice in it until `settle`."""
        return sum(self._sizes.values())

    def add(self, ids: Mapping[str, Tensor]) -> None:
        """Adds ids, int64 [n], an id once in each; the tensors must not be written to afterwards."""
        for table, given in ids.items():
            if not given.numel():
                continue
            self._parts.setdefault(table, []).append(given)
            self._sizes[table] = self._sizes.get(table, 0) + given.numel()
            self._settled.setdefault(table, given.numel())
            if not self._lazy and self._is_swollen(table):
                self._settle(table)

    def _is_swollen(self, table: str) -> bool:
        return self._sizes[table] > 2 * self._settled[table] + SMALL

    def swollen(self) -> dict[str, tuple[Tensor, ...]]:
        """The tensors that it is time to put together, by table."""
        return {table: tuple(parts) for table, parts in self._parts.items() if self._is_swollen(table)}

    def replace(self, table: str, parts: tuple[Tensor, ...], ids: Tensor) -> None:
        """Takes ids in the place of tensors that `swollen` gave, if they are still there."""
        now = self._parts[table]
        if len(now) >= len(parts) and all(a is b for a, b in zip(now, parts, strict=False)):
            self._parts[table] = [ids, *now[len(parts) :]]
            self._sizes[table] += ids.numel() - sum(part.numel() for part in parts)
            self._settled[table] = ids.numel()

    def settle(self, keep: Callable[[str, Tensor], Tensor] | None = None) -> None:
        """Leaves every id once. keep: which of a table's ids stay."""
        for table in list(self._parts):
            self._settle(table, keep)

    def _settle(self, table: str, keep: Callable[[str, Tensor], Tensor] | None = None) -> None:
        parts = self._parts[table]
        ids = parts[0] if len(parts) == 1 else dedup(torch.cat(parts)).ids
        if keep is not None:
            ids = keep(table, ids)
        self._parts[table] = [ids]
        self._sizes[table] = self._settled[table] = ids.numel()

    def tensors(self) -> dict[str, Tensor]:
        """The ids of each table, each once; none of a table without."""
        self.settle()
        return {table: parts[0] for table, parts in self._parts.items() if parts[0].numel()}

    def take(self, budget: int, costs: Mapping[str, int]) -> dict[str, Tensor]:
        """Removes and returns ids that together cost at most `budget`, at least one id."""
        taken: dict[str, Tensor] = {}
        for table, ids in self.tensors().items():
            count = min(ids.numel(), max(0 if taken else 1, budget // costs[table]))
            if not count:
                break
            taken[table] = ids[:count]
            self._parts[table] = [ids[count:]]
            self._sizes[table] = self._settled[table] = ids.numel() - count
            budget -= count * costs[table]
        return taken
