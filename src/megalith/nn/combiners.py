"""Combiners: the rows of a column's values -> one tensor for the batch.

A combiner says which values take part, into how many bags a row of the column is cut, and by what each
bag's sum is divided. `EmbeddingCollection` compiles that into a Pooling; `combine` does it to rows at hand.

Weights of a column multiply its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.move_runs import pad_rows
from megalith.ops.pool_rows import pool_rows, segment_sum
from megalith.ops.pooling import Bags, OutputSlice
from megalith.ragged import Ragged


class Combiner:
    """Rows of a Ragged -> one tensor. One of `Sum`, `Mean`, `Sqrtn`, `FirstN`."""

    inner: int = 1
    """Bags that a row of the column is cut into."""

    def cut(self, column: Ragged) -> Ragged:
        """The values that take part."""
        return column

    def offsets(self, column: Ragged) -> Tensor:
        """Where each bag begins, int64 [rows * inner + 1], of a column that is cut."""
        return column.row_splits

    def divisor(self, column: Ragged, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """What each bag's sum is divided by, [rows], None for 1."""
        return None

    def output_shape(self, dim: int) -> tuple[int, ...]:
        """What becomes of a row of the column."""
        return (dim,)

    def combine(self, ragged: Ragged, rows: Tensor) -> Tensor:
        """Rows [n, dim], one per value -> [batch, dim], or [batch, n, dim] for FirstN. Differentiable."""
        if rows.dim() != 2 or rows.shape[0] != ragged.values.shape[0]:
            raise InputError(f"rows must be [{ragged.values.shape[0]}, dim], got {list(rows.shape)}")
        batch, dim = ragged.row_splits.shape[0] - 1, rows.shape[1]
        index, offsets, weights = self._occurrences(ragged)
        divisor = self.divisor(ragged, torch.promote_types(rows.dtype, torch.float32))
        bags = Bags(offsets, (OutputSlice(0, 0, 0, dim, self.inner),), weights, divisor)
        (out,) = pool_rows(rows, index, [bags], [(batch, self.inner * dim)], name="ragged")
        return out.view(batch, *self.output_shape(dim))

    def _occurrences(self, ragged: Ragged) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """The row of each occurrence, where each bag begins, the occurrences' weights."""
        return None, ragged.row_splits, ragged.weights

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Sum(Combiner):
    """The sum of a row's embeddings; zeros for an empty row."""


class Mean(Combiner):
    """Their mean, with weights sum(w x) / sum(w); zeros for an empty row.

    Where weights add up to 0 it is sum(w x).
    """

    def divisor(self, column: Ragged, dtype: torch.dtype = torch.float32) -> Tensor:
        """The number of values, or the sum of their weights."""
        if column.weights is None:
            return column.lengths().clamp(min=1).to(dtype)
        weights = column.weights.detach()[:, None].to(dtype)
        return _nonzero(segment_sum(weights, column.row_splits)[:, 0])


class Sqrtn(Combiner):
    """sum / sqrt(n), with weights sum(w x) / sqrt(sum(w^2)); zeros for an empty row.

    Not `monolith.reduce_sqrtn`, Monolith's name for the L2 norm of each column.
    """

    def divisor(self, column: Ragged, dtype: torch.dtype = torch.float32) -> Tensor:
        """The root of the number of values, or of the sum of their squared weights."""
        if column.weights is None:
            return column.lengths().clamp(min=1).to(dtype).sqrt()
        squares = column.weights.detach()[:, None].to(dtype).square()
        return _nonzero(segment_sum(squares, column.row_splits)[:, 0].sqrt())


class FirstN(Combiner):
    """The embeddings of a row's first n values side by side, [batch, n, dim]; zeros where it has fewer.

    Values beyond are not looked up. Raises InputError (a ValueError) unless n >= 1.
    """

    def __init__(self, n: int) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InputError(f"FirstN: n must be a whole number of at least 1, got {n!r}")
        self._places = (None,) * n  # torch.compile takes a length for known, a number for a symbol

    @property
    def n(self) -> int:
        """How many rows stay."""
        return len(self._places)

    @property
    def inner(self) -> int:  # type: ignore[override]
        """One bag for each place."""
        return self.n

    def cut(self, column: Ragged) -> Ragged:
        """The first n values of each row."""
        lengths = column.lengths()
        if not lengths.numel() or int(lengths.max()) <= self.n:
            return column
        begin = torch.repeat_interleave(column.row_splits[:-1], lengths, output_size=column.values.shape[0])
        kept = torch.arange(column.values.shape[0], device=column.device) - begin < self.n
        weights = None if column.weights is None else column.weights[kept]
        return Ragged.from_lengths(column.values[kept], lengths.clamp(max=self.n), weights=weights)

    def offsets(self, column: Ragged) -> Tensor:
        """A bag of one value, or none, for each place."""
        splits = column.row_splits
        places = torch.arange(self.n, device=splits.device)
        starts = torch.minimum(splits[:-1, None] + places, splits[1:, None])
        return torch.cat([starts.flatten(), splits[-1:]])

    def output_shape(self, dim: int) -> tuple[int, ...]:
        """n rows."""
        return (self.n, dim)

    def combine(self, ragged: Ragged, rows: Tensor) -> Tensor:
        """Rows [n, dim], one per value -> [batch, n, dim]. Differentiable."""
        if ragged.weights is not None or rows.dim() != 2 or rows.shape[0] != ragged.values.shape[0]:
            return super().combine(ragged, rows)
        return pad_rows(rows, ragged.row_splits, self.n)

    def __repr__(self) -> str:
        return f"FirstN({self.n})"

    def _occurrences(self, ragged: Ragged) -> tuple[Tensor, Tensor, Tensor | None]:
        splits = ragged.row_splits
        at = splits[:-1, None] + torch.arange(self.n, device=splits.device)
        index = torch.where(at < splits[1:, None], at, -1).flatten()
        weights = ragged.weights
        if weights is not None:
            weights = torch.nn.functional.pad(weights, (0, 1), value=1.0)[index]
        return index, torch.arange(index.shape[0] + 1, device=splits.device), weights


ReduceSum = Sum
ReduceMean = Mean


def _nonzero(divisor: Tensor) -> Tensor:
    return torch.where(divisor == 0, 1.0, divisor)
