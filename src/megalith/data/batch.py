"""Batch and Samples: rows of training data as tensors.

`Samples` hold any number of rows, column by column. Readers cut them into batches; a `Batch` is the input of
a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from megalith.errors import InputError
from megalith.ops import checks, take
from megalith.ragged import Ragged, as_tensor, without_other_memory

_Pick = Callable[[Any], Any]
Position = dict[str, Any]
"""The position of a reader: a small JSON-compatible dict."""


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows, and the position of the reader after them."""

    features: dict[str, Ragged]
    """Feature name -> int64 ids, B rows."""
    labels: Tensor
    """float32 [B], or [B, k] for several label columns; NaN if the data has no label column."""
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
        state = vars(self._moved(lambda x: without_other_memory(x) if isinstance(x, Tensor) else x))
        if get_worker_info() is None:
            return state
        # A worker of a DataLoader sends each tensor as a file of its own, which costs more than its bytes.
        return {name: _packed(value) for name, value in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        splits: dict[int, Tensor] = {}
        for name, value in state.items():
            object.__setattr__(self, name, _unpacked(value, splits))

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
    """float32 [n], or [n, k]."""
    dense: Tensor | None = None
    """float32 [n, k]."""
    weights: Tensor | None = None
    """float32 [n]."""
    times: Tensor | None = None
    """Times in seconds, int64 [n]."""

    def __post_init__(self) -> None:
        for each in fields(self)[1:]:
            object.__setattr__(self, each.name, as_tensor(getattr(self, each.name)))
        if not isinstance(self.labels, Tensor) or self.labels.dim() not in (1, 2):
            raise InputError("samples: labels must be a tensor [n] or [n, k]")
        if not isinstance(self.features, Mapping):
            raise InputError(
                f"samples: features must map names to Raggeds, got {type(self.features).__name__}"
            )
        object.__setattr__(self, "features", {k: as_tensor(x) for k, x in self.features.items()})
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
        length = len(range(*rows.indices(len(self))))
        return self._rows(self._columns(length, lambda x: x[rows], lambda x: x[rows]), rows)

    def _columns(self, length: int, single: _Pick, other: _Pick) -> dict[str, Ragged]:
        """Pick rows of features: of the values of a column with one id per row, of other columns as such."""
        # Columns with one id per row share their row_splits, by which a model knows them again.
        splits: Tensor | None = None
        picked: dict[str, Ragged] = {}
        for name, column in self.features.items():
            if _is_single(column):
                splits = torch.arange(length + 1, device=column.device) if splits is None else splits
                picked[name] = Ragged.trusted(single(column.values), splits, single=True)
            else:
                picked[name] = other(column)
        return picked

    def _rows(self, features: dict[str, Ragged], rows: slice | Tensor) -> Samples:
        others = (None if x is None else x[rows] for x in (self.dense, self.weights, self.times))
        return _trusted(features, self.labels[rows], *others)

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
        picked = self._columns(len(rows), lambda x: x[rows], lambda x: _select(x, rows))
        return self._rows(picked, rows)

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
        splits = torch.arange(sum(map(len, parts)) + 1, device=parts[0].labels.device)
        features = {}
        for name in parts[0].features:
            found = [part.features[name] for part in parts]
            if all(map(_is_single, found)):
                features[name] = Ragged.trusted(torch.cat([x.values for x in found]), splits, single=True)
            else:
                features[name] = _concat(found)
        return _trusted(
            features,
            torch.cat([part.labels for part in parts]),
            *(_concat([getattr(part, name) for part in parts]) for name in ("dense", "weights", "times")),
        )


def _trusted(*columns: Any) -> Samples:
    """Samples of columns that are known to have as many rows."""
    made = object.__new__(Samples)
    for each, column in zip(fields(Samples), columns, strict=True):
        object.__setattr__(made, each.name, column)
    return made


class _PackedRagged(NamedTuple):
    """A Ragged as numpy arrays."""

    values: Any
    row_splits: Any
    """None: one value per row."""
    weights: Any


def _packed(value: Any) -> Any:
    """The tensors of a batch as numpy arrays, which are sent with the rest of it."""
    if isinstance(value, dict):
        return {key: _packed(each) for key, each in value.items()}
    if type(value) is Ragged and _is_plain(value.values):
        splits = None if _is_single(value) else value.row_splits.numpy()
        return _PackedRagged(value.values.numpy(), splits, _packed(value.weights))
    return value.numpy() if isinstance(value, Tensor) and _is_plain(value) else value


def _unpacked(value: Any, splits: dict[int, Tensor]) -> Any:
    """What `_packed` packed; columns with one id per row share their row_splits again."""
    if isinstance(value, _PackedRagged):
        values, weights = as_tensor(value.values), as_tensor(value.weights)
        if value.row_splits is not None:
            return Ragged.trusted(values, as_tensor(value.row_splits), weights)
        size = len(values)
        if size not in splits:
            splits[size] = torch.arange(size + 1, device="cpu")
        return Ragged.trusted(values, splits[size], single=True)
    if isinstance(value, dict):
        return {key: _unpacked(each, splits) for key, each in value.items()}
    return as_tensor(value)


def _is_plain(x: Tensor) -> bool:
    return x.is_cpu and x.dtype in (torch.int64, torch.float32) and not x.requires_grad


def _is_single(column: Any) -> bool:
    return type(column) is Ragged and column.single and column.weights is None


def _select(column: Ragged | Tensor, rows: Tensor) -> Any:
    return take(column, rows) if isinstance(column, Ragged) else column[rows]


def _concat(columns: Sequence[Any]) -> Any:
    if all(isinstance(column, Ragged) for column in columns):
        return Ragged.concat(columns)
    return None if columns[0] is None else torch.cat(list(columns))
