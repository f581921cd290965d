"""Batch and Samples: rows of training data as tensors.

`Samples` hold any number of rows, column by column. Readers cut them into batches; a `Batch` is the input of
a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops import checks, take
from megalith.ragged import Ragged, without_other_memory

Position = dict[str, Any]
"""The position of a reader: a small JSON-compatible dict."""


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows, and the position of the reader after them."""

    features: dict[str, Ragged]
    """Feature name -> int64 ids, B rows."""
    labels: Tensor
    """float32 [B]; NaN if the data has no label column."""
    dense: Tensor | None = None
    """float32 [B, k]."""
    weights: Tensor | None = None
    """float32 [B]."""
    time: int | None = None
    """Time of the newest row in seconds."""
    position: Position = field(default_factory=dict)
    """`reader.seek(position)` continues with the next batch."""

    def __len__(self) -> int:
        return self.labels.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Return the batch on another device.

        Args:
            device: The device.
            non_blocking: As in `torch.Tensor.to`.

        Returns:
            A batch whose tensors are on that device.

        Raises:
            InputError: The device is unknown.
        """
        checks.flag(non_blocking, "batch: non_blocking")
        return self._moved(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return the batch in pinned memory. DataLoader calls it."""
        return self._moved(lambda x: x.pin_memory())

    def part(self, start: int, end: int) -> Self:
        """Return a range of rows without a copy. Time and position stay those of the batch.

        Args:
            start: First row.
            end: Row after the last one.

        Returns:
            A batch of views.
        """
        checks.integer(start, "batch: start", least=0)
        checks.integer(end, "batch: end", least=0)
        return self._moved(lambda x: x[start:end])

    def __getstate__(self) -> dict[str, Any]:
        return vars(self._moved(lambda x: without_other_memory(x) if isinstance(x, Tensor) else x))

    def _moved(self, move: Any) -> Self:
        moved: dict[str, Any] = {"features": {name: move(ragged) for name, ragged in self.features.items()}}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                moved[each.name] = move(value)
        return replace(self, **moved)


@dataclass(frozen=True, eq=False)
class Samples:
    """n rows in memory, column by column.

    Raises:
        InputError: A column has another number of rows than the labels.
    """

    features: dict[str, Ragged]
    """Feature name -> int64 ids, n rows."""
    labels: Tensor
    """float32 [n]."""
    dense: Tensor | None = None
    """float32 [n, k]."""
    weights: Tensor | None = None
    """float32 [n]."""
    times: Tensor | None = None
    """Times in seconds, int64 [n]."""

    def __post_init__(self) -> None:
        if not isinstance(self.labels, Tensor) or self.labels.dim() != 1:
            raise InputError("samples: labels must be a tensor [n]")
        if not isinstance(self.features, Mapping):
            raise InputError(
                f"samples: features must map names to Raggeds, got {type(self.features).__name__}"
            )
        n = len(self)
        columns: dict[str, Any] = {"dense": self.dense, "weights": self.weights, "times": self.times}
        for name, column in (*self.features.items(), *columns.items()):
            kind = Tensor if name in columns else Ragged | Tensor
            if column is not None and not (
                isinstance(column, kind) and (isinstance(column, Ragged) or column.dim())
            ):
                raise InputError(f"samples: {name!r} must be a column of rows, got {type(column).__name__}")
            if column is not None and len(column) != n:
                raise InputError(f"samples: {name!r} has {len(column)} rows, but there are {n} labels")

    def __len__(self) -> int:
        return self.labels.shape[0]

    def __getitem__(self, rows: slice) -> Samples:
        """Return a range of rows without a copy."""
        return self._rows({name: ragged[rows] for name, ragged in self.features.items()}, rows)

    def _rows(self, features: dict[str, Ragged], rows: slice | Tensor) -> Samples:
        others = (None if x is None else x[rows] for x in (self.dense, self.weights, self.times))
        return Samples(features, self.labels[rows], *others)

    @property
    def columns(self) -> list[str]:
        """Names of the features, and of the other columns that are present."""
        others = [name for name in ("dense", "weights", "times") if getattr(self, name) is not None]
        return [*sorted(self.features), *others]

    def select(self, rows: Tensor) -> Samples:
        """Return some rows.

        Args:
            rows: Indices of the rows in the order of the result, int64 [m].

        Returns:
            m rows.

        Raises:
            InputError: An index is out of range.
        """
        rows = checks.with_data(checks.int64(rows, "samples: rows"), "samples: rows")
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(self):
            raise InputError(f"samples: rows must be from 0 to {len(self) - 1}")
        return self._rows({name: _select(column, rows) for name, column in self.features.items()}, rows)

    def to_batch(self, position: Position) -> Batch:
        """Return the rows as a batch.

        Args:
            position: Position of the reader after the rows.

        Returns:
            The batch. Its time is that of the newest row.
        """
        time = None if self.times is None or len(self) == 0 else int(self.times.max())
        return Batch(self.features, self.labels, self.dense, self.weights, time, position)

    @classmethod
    def concat(cls, parts: Sequence[Samples]) -> Samples:
        """Concatenate the rows of several Samples.

        Args:
            parts: At least one; all with the same columns.

        Returns:
            The rows of all parts, in order; a single part itself.

        Raises:
            InputError: There is no part, or their columns differ.
        """
        if not isinstance(parts, list | tuple) or not parts:
            raise InputError(f"samples: concat takes a list of Samples, got {parts!r}")
        for part in parts:
            checks.instance(part, Samples, "samples: a part")
        if len(parts) == 1:
            return parts[0]
        columns = [part.columns for part in parts]
        if any(other != columns[0] for other in columns):
            raise InputError(f"samples: the columns of the parts differ: {' / '.join(map(str, columns))}")
        first = parts[0]
        return cls(
            {name: _concat([part.features[name] for part in parts]) for name in first.features},
            torch.cat([part.labels for part in parts]),
            *(_concat([getattr(part, name) for part in parts]) for name in ("dense", "weights", "times")),
        )


def _select(column: Ragged | Tensor, rows: Tensor) -> Any:
    return take(column, rows) if isinstance(column, Ragged) else column[rows]


def _concat(columns: Sequence[Any]) -> Any:
    if all(isinstance(column, Ragged) for column in columns):
        return Ragged.concat(columns)
    return None if columns[0] is None else torch.cat(list(columns))
