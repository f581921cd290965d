"""What the tests of collections share: small tables, small batches, and what a collection holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalith import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingCollection,
    Feature,
    Normal,
    Ragged,
    Segment,
    TableConfig,
    Zeros,
)


def ints(*values: int) -> Tensor:
    """An int64 tensor."""
    return torch.tensor(values, dtype=torch.int64)


def floats(*values: Any) -> Tensor:
    """A float32 tensor."""
    return torch.tensor(values, dtype=torch.float32)


def column(*rows: list[int], weights: list[list[float]] | None = None) -> Ragged:
    """A Ragged of these rows."""
    return Ragged.from_lists(rows, weights=weights)


class Keyed:
    """What a KeyedJaggedTensor looks like from outside."""

    def __init__(
        self, keys: list[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> None:
        self._parts = (keys, values, lengths, weights)

    def keys(self) -> list[str]:
        return self._parts[0]

    def values(self) -> Tensor:
        return self._parts[1]

    def lengths(self) -> Tensor:
        return self._parts[2]

    def weights_or_none(self) -> Tensor | None:
        return self._parts[3]


def zeros(name: str = "t", dim: int = 1, lr: Any = 1.0, **options: Any) -> TableConfig:
    """A table that starts at zero and makes plain SGD steps: row = -lr * summed gradient."""
    return TableConfig(name, dim=dim, optimizer=SGD(lr), initializer=Zeros(), **options)


def collection(*features: Feature, dim: int = 1, **options: Any) -> EmbeddingCollection:
    """Features of one table "t" that starts at zero; by default feature "a"."""
    return EmbeddingCollection([zeros(dim=dim)], list(features) or [Feature("a", "t")], **options)


def contents(of: EmbeddingCollection, table: str = "t") -> dict[int, list[float]]:
    """The rows of a table by id."""
    return {
        int(i): row.tolist()
        for chunk in of.shards.scan(table)
        for i, row in zip(chunk.ids, chunk.rows, strict=True)
    }


def times(of: EmbeddingCollection, table: str = "t") -> dict[int, int]:
    """The last-update time of each id."""
    chunks = of.shards.scan(table)
    return {int(i): int(t) for chunk in chunks for i, t in zip(chunk.ids, chunk.time, strict=True)}


def assign(of: EmbeddingCollection, rows: dict[int, list[float]], table: str = "t") -> None:
    """Gives ids their rows."""
    of.shards.assign({table: (ints(*rows), floats(*rows.values()))})


def two_tables(engine: str = "cpu") -> EmbeddingCollection:
    """Tables "user" of Adam and Adagrad, dim 4, and "item" of SGD, dim 2, with a feature of the same name."""
    user = [Segment(1, optimizer=Adam(0.1)), Segment(3, optimizer=Adagrad(0.1))]
    item = TableConfig("item", dim=2, optimizer=SGD(0.5), initializer=Normal())
    features = [Feature("user", "user"), Feature("item", "item")]
    return EmbeddingCollection([TableConfig("user", segments=user), item], features, engine=engine)
