"""Combiners: how the embeddings of a column become one tensor for the batch.

A combiner defines which values take part, into how many bags an example is split, and the divisor of each
bag's sum. `EmbeddingCollection` compiles it into a Pooling; `combine` applies it to given rows.

The weights of a column multiply its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.checks import kind, with_data
from megalith.ops.move_runs import pad_rows
from megalith.ops.pooling import Bags, OutputSlice, pool_rows, segment_sum
from megalith.ragged import Ragged


class Combiner:
    """Reduces the rows of a Ragged to one tensor. Subclasses: `Sum`, `Mean`, `Sqrtn`, `FirstN`."""

    inner: int = 1
    """The number of bags per example."""

    def cut(self, column: Ragged) -> Ragged:
        """Return the values that take part.

        Args:
            column: The column of a feature.

        Returns:
            The column itself, or one with fewer values per example.
        """
        return _ragged(column)

    def offsets(self, column: Ragged) -> Tensor:
        """Return where each bag begins.

        Args:
            column: The result of `cut`.

        Returns:
            int64 [B * inner + 1], positions among the values.
        """
        return _ragged(column).row_splits

    def divisor(self, column: Ragged, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Return the divisor of each bag's sum.

        Args:
            column: The result of `cut`.
            dtype: The dtype of the divisor.

        Returns:
            [B], without zeros; None for 1.
        """
        return None

    def output_shape(self, dim: int) -> tuple[int, ...]:
        """Return the output shape of one example.

        Args:
            dim: The dim of the table.

        Returns:
            (dim,), or (n, dim) for FirstN(n).
        """
        return (dim,)

    def combine(self, ragged: Ragged, rows: Tensor) -> Tensor:
        """Combine rows. Differentiable.

        Args:
            ragged: The column, with n values.
            rows: [n, dim], one row per value.

        Returns:
            [B, dim], or [B, n, dim] for FirstN(n).

        Raises:
            InputError: If `ragged` is not a Ragged or the rows have another type, shape or device.
        """
        _check_rows(_ragged(ragged), rows)
        batch, dim = ragged.row_splits.shape[0] - 1, rows.shape[1]
        index, offsets, weights = self._occurrences(ragged)
        divisor = self.divisor(ragged, torch.promote_types(rows.dtype, torch.float32))
        bags = Bags(offsets, (OutputSlice(0, 0, 0, dim, self.inner),), weights, divisor)
        (out,) = pool_rows(rows, index, [bags], [(batch, self.inner * dim)], name="ragged")
        return out.view(batch, *self.output_shape(dim))

    def _occurrences(self, ragged: Ragged) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Return the row of each occurrence, where each bag begins, and the weights of the occurrences."""
        return None, ragged.row_splits, ragged.weights

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Sum(Combiner):
    """The sum of the embeddings of an example; zeros if it has no ids."""


class Mean(Combiner):
    """The mean of the embeddings of an example, with weights sum(w x) / sum(w); zeros if it has no ids.

    If the weights sum to 0, it is sum(w x).
    """

    def divisor(self, column: Ragged, dtype: torch.dtype = torch.float32) -> Tensor | None:
        # The number of values, or the sum of their weights.
        _ragged(column)
        _float_dtype(dtype)
        if column.single and column.weights is None:
            return None
        if column.weights is None:
            return column.lengths().clamp(min=1).to(dtype)
        weights = column.weights.detach()[:, None].to(dtype)
        return _nonzero(segment_sum(weights, column.row_splits)[:, 0])


class Sqrtn(Combiner):
    """sum / sqrt(n), with weights sum(w x) / sqrt(sum(w^2)); zeros for an example without ids.

    This differs from `monolith.reduce_sqrtn`, Monolith's name for the L2 norm of each column.
    """

    def divisor(self, column: Ragged, dtype: torch.dtype = torch.float32) -> Tensor | None:
        # The root of the number of values, or of the sum of squared weights.
        _ragged(column)
        _float_dtype(dtype)
        if column.single and column.weights is None:
            return None
        if column.weights is None:
            return column.lengths().clamp(min=1).to(dtype).sqrt()
        squares = column.weights.detach()[:, None].to(dtype).square()
        return _nonzero(segment_sum(squares, column.row_splits)[:, 0].sqrt())


class FirstN(Combiner):
    """The embeddings of the first n ids of an example, [B, n, dim]; zeros if it has fewer.

    Further ids are not looked up.

    Args:
        n: The number of ids.

    Raises:
        InputError: If n is not an integer >= 1.
    """

    def __init__(self, n: int) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InputError(f"FirstN: n must be an integer >= 1, got {n!r}")
        self._positions = (None,) * n  # torch.compile treats a length as a constant, an int as a symbol

    @property
    def n(self) -> int:
        """The number of ids that are kept."""
        return len(self._positions)

    @property
    def inner(self) -> int:  # type: ignore[override]
        """One bag per position."""
        return self.n

    def cut(self, column: Ragged) -> Ragged:
        # The first n values of each example.
        lengths = with_data(_ragged(column).lengths(), "the column")
        if not lengths.numel() or int(lengths.max()) <= self.n:
            return column
        begin = torch.repeat_interleave(column.row_splits[:-1], lengths, output_size=column.values.shape[0])
        kept = torch.arange(column.values.shape[0], device=column.device) - begin < self.n
        weights = None if column.weights is None else column.weights[kept]
        return Ragged.from_lengths(column.values[kept], lengths.clamp(max=self.n), weights=weights)

    def offsets(self, column: Ragged) -> Tensor:
        # One bag per position, with one value or none.
        splits = _ragged(column).row_splits
        positions = torch.arange(self.n, device=splits.device)
        starts = torch.minimum(splits[:-1, None] + positions, splits[1:, None])
        return torch.cat([starts.flatten(), splits[-1:]])

    def output_shape(self, dim: int) -> tuple[int, ...]:
        # (n, dim).
        return (self.n, dim)

    def combine(self, ragged: Ragged, rows: Tensor) -> Tensor:
        _check_rows(_ragged(ragged), rows)
        if ragged.weights is not None:
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


def _ragged(column: Ragged) -> Ragged:
    if not isinstance(column, Ragged):
        raise InputError(
            f"a combiner needs a Ragged, got {type(column).__name__}; see Ragged.from_lists and from_padded"
        )
    return column


def _check_rows(ragged: Ragged, rows: Tensor) -> None:
    """Raise InputError unless `rows` are float [n, dim] on the device of the n values."""
    n = ragged.values.shape[0]
    if not isinstance(rows, Tensor) or not rows.is_floating_point():
        raise InputError(f"rows must be a float tensor [{n}, dim], got {kind(rows)}")
    if rows.layout != torch.strided or rows.dim() != 2 or rows.shape[0] != n:
        raise InputError(f"rows must be [{n}, dim], got {list(rows.shape)}")
    if rows.device != ragged.device:
        raise InputError(f"rows are on {rows.device}, the ids on {ragged.device}")


def _float_dtype(dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(f"dtype must be a float dtype, got {dtype!r}")


def _nonzero(divisor: Tensor) -> Tensor:
    return torch.where(divisor == 0, 1.0, divisor)
