"""Batch and Samples: rows of training data as tensors.

`Samples` are any number of rows, column by column; readers cut them into `Batch`es, which are what a
model is given. Where rows come from is the readers' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops import take
from megalith.ragged import Ragged

Position = dict[str, Any]
"""Where a reader stands: a small dict that JSON can hold."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Some rows, and where the reader stands after them.

    features: a Ragged of int64 ids per name. labels: float32 [B]; NaN where the data has no label column.
    dense: float32 [B, k] or None. weights: float32 [B] or None. time: seconds, of the newest row, or None.
    position: `reader.seek(position)` goes on with the batch after this one.
    """

    features: dict[str, Ragged]
    labels: Tensor
    dense: Tensor | None = None
    weights: Tensor | None = None
    time: int | None = None
    position: Position = field(default_factory=dict)

    def __len__(self) -> int:
        return self.labels.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same on another device."""
        return self._moved(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same in pinned memory; DataLoader calls it."""
        return self._moved(lambda x: x.pin_memory())

    def part(self, start: int, end: int) -> Self:
        """Rows start to end, maybe none, in the same memory; time and position stay those of the batch."""
        return self._moved(lambda x: x[start:end])

    def _moved(self, move: Any) -> Self:
        moved: dict[str, Any] = {"features": {name: move(ragged) for name, ragged in self.features.items()}}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                moved[each.name] = move(value)
        return replace(self, **moved)


@dataclass(frozen=True, eq=False)
class Samples:
    """Rows in memory, column by column.

    features: a Ragged of n rows per name. labels: float32 [n]. dense: float32 [n, k] or None.
    weights: float32 [n] or None. times: int64 [n], seconds, or None. Raises InputError if they differ in n.
    """

    features: dict[str, Ragged]
    labels: Tensor
    dense: Tensor | None = None
    weights: Tensor | None = None
    times: Tensor | None = None

    def __post_init__(self) -> None:
        n = len(self)
        columns: dict[str, Any] = {"dense": self.dense, "weights": self.weights, "times": self.times}
        for name, column in (*self.features.items(), *columns.items()):
            if column is not None and len(column) != n:
                raise InputError(f"samples: {name!r} has {len(column)} rows, but there are {n} labels")

    def __len__(self) -> int:
        return self.labels.shape[0]

    def __getitem__(self, rows: slice) -> Samples:
        """Some rows one after the other, without copying them."""
        return Samples(
            {name: ragged[rows] for name, ragged in self.features.items()},
            self.labels[rows],
            *(None if x is None else x[rows] for x in (self.dense, self.weights, self.times)),
        )

    def select(self, rows: Tensor) -> Samples:
        """The rows with these numbers, int64 [m], in this order."""
        return Samples(
            {name: take(ragged, rows) for name, ragged in self.features.items()},
            self.labels[rows],
            *(None if x is None else x[rows] for x in (self.dense, self.weights, self.times)),
        )

    def to_batch(self, position: Position) -> Batch:
        """These rows as a batch after which a reader stands at `position`."""
        time = None if self.times is None or len(self) == 0 else int(self.times.max())
        return Batch(self.features, self.labels, self.dense, self.weights, time, position)

    @classmethod
    def concat(cls, parts: Sequence[Samples]) -> Samples:
        """The rows of all parts, one after the other; all must have the same columns."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        return cls(
            {name: Ragged.concat([part.features[name] for part in parts]) for name in first.features},
            torch.cat([part.labels for part in parts]),
            *(_concat([getattr(part, name) for part in parts]) for name in ("dense", "weights", "times")),
        )


def _concat(columns: list[Tensor | None]) -> Tensor | None:
    present = [column for column in columns if column is not None]
    return torch.cat(present) if present else None
