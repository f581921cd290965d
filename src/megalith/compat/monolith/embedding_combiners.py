"""Monolith's combiners under their own names and arguments, over Megalith's.

`Combiner` is the abstract base: a subclass defines `combine`. `ReduceSum`, `ReduceMean` and `FirstN` are also
Megalith's `Sum`, `Mean` and `FirstN`, so a `megalith.Feature` takes them; a combiner that a user derives from
`Combiner` is called by the user and cannot be the combiner of a `Feature`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from megalith import nn
from megalith.errors import InputError
from megalith.ragged import Ragged


class MonolithCombiner(ABC):
    """Monolith's `Combiner`: reduces the embeddings of each row of a column to one tensor.

    Args:
        max_seq_length: The number of embeddings of a row that are kept as a sequence; 0 if they are pooled.
    """

    def __init__(self, max_seq_length: int) -> None:
        if isinstance(max_seq_length, bool) or not isinstance(max_seq_length, int) or max_seq_length < 0:
            raise InputError(f"Combiner: max_seq_length must be an integer >= 0, got {max_seq_length!r}")
        self._max_seq_length = max_seq_length

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
            name: Ignored; the name of a graph node in Monolith.

        Returns:
            [B, d], or [B, max_seq_length, d] if a sequence is kept.
        """


class ReduceSum(MonolithCombiner, nn.Sum):
    """The sum of the embeddings of a row, [B, d]; zeros for an empty row."""

    def __init__(self) -> None:
        super().__init__(0)

    def combine(self, key: Ragged, embedding: Tensor, name: str | None = None) -> Tensor:
        return nn.Sum.combine(self, key, embedding)


class ReduceMean(MonolithCombiner, nn.Mean):
    """The mean of the embeddings of a row, [B, d]; zeros for an empty row, where Monolith gives NaN."""

    def __init__(self) -> None:
        super().__init__(0)

    def combine(self, key: Ragged, embedding: Tensor, name: str | None = None) -> Tensor:
        return nn.Mean.combine(self, key, embedding)


class MonolithFirstN(MonolithCombiner, nn.FirstN):
    """Monolith's `FirstN`: the first embeddings of a row, [B, seq_length, d], padded with zeros."""

    def __init__(self, seq_length: int) -> None:
        if isinstance(seq_length, bool) or not isinstance(seq_length, int) or seq_length < 1:
            raise InputError(f"FirstN: seq_length must be an integer >= 1, got {seq_length!r}")
        MonolithCombiner.__init__(self, seq_length)
        nn.FirstN.__init__(self, seq_length)

    def combine(self, key: Ragged, embedding: Tensor, name: str | None = None) -> Tensor:
        return nn.FirstN.combine(self, key, embedding)


# Monolith's names. The classes have other names because a class name is used once in this package.
Combiner = MonolithCombiner
FirstN = MonolithFirstN
