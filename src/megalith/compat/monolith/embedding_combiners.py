"""Monolith's combiners under their own names and arguments, over Megalith's.

`Combiner` is the abstract base: a subclass defines `combine`. `ReduceSum`, `ReduceMean` and `FirstN` are also
Megalith's `Sum`, `Mean` and `FirstN`, so a `megalith.Feature` takes them; a combiner that a user derives from
`Combiner` is called by the user and cannot be the combiner of a `Feature`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from megalith import nn
from megalith.compat.monolith.distribution_ops import given
from megalith.ops import checks
from megalith.ragged import Ragged


class MonolithCombiner(ABC):
    """Monolith's `Combiner`: reduces the embeddings of each row of a column to one tensor.

    Args:
        max_seq_length: The number of embeddings of a row that are kept as a sequence; 0 if they are pooled.
    """

    def __init__(self, max_seq_length: int) -> None:
        self._max_seq_length = checks.integer(max_seq_length, "Combiner: max_seq_length", 0)

    @property
    def max_seq_length(self) -> int:
        """The number of embeddings of a row that are kept as a sequence; 0 if they are pooled."""
        return self._max_seq_length

    @abstractmethod
    def combine(self, key: Ragged, embedding: Tensor, name: str | None = None) -> Tensor:
        """Combine the embeddings of each row.

        Args:
            key: The column, with n values in B rows.
            embedding: float [n, d], one row per value.

        Returns:
            [B, d], or [B, max_seq_length, d] if a sequence is kept.
        """


class _Pooling(MonolithCombiner):
    """A combiner whose next base is one of Megalith's."""

    def __init__(self) -> None:
        super().__init__(0)

    def combine(self, key: Ragged, embedding: Tensor, name: str | None = None) -> Tensor:
        combined: Tensor = super(MonolithCombiner, self).combine(key, given(embedding))  # type: ignore[misc]
        return combined


class ReduceSum(_Pooling, nn.Sum):
    """The sum of the embeddings of a row, [B, d]; zeros for an empty row."""


class ReduceMean(_Pooling, nn.Mean):
    """The mean of the embeddings of a row, [B, d]; zeros for an empty row, where Monolith gives NaN."""


class MonolithFirstN(_Pooling, nn.FirstN):
    """Monolith's `FirstN`: the first embeddings of a row, [B, seq_length, d], padded with zeros."""

    def __init__(self, seq_length: int) -> None:
        seq_length = checks.integer(seq_length, "FirstN: seq_length")
        MonolithCombiner.__init__(self, seq_length)
        nn.FirstN.__init__(self, seq_length)


# Monolith's names. The classes have other names because a class name is used once in this package.
Combiner = MonolithCombiner
FirstN = MonolithFirstN
