"""Monolith's combiners: its own vectors, its abstract base, and use in an EmbeddingCollection."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalith import SGD, EmbeddingCollection, Feature, Mean, Ragged, Sum, TableConfig
from megalith import FirstN as OurFirstN
from megalith.compat.monolith import Combiner, FirstN, ReduceMean, ReduceSum
from megalith.errors import InputError
from megalith.serving.export.signature import FeatureSpec

KEY = Ragged.from_lengths(torch.zeros(6, dtype=torch.int64), torch.tensor([1, 2, 3]))
ROWS = torch.arange(1.0, 7.0)[:, None]


def test_monoliths_vectors() -> None:
    short = Ragged.from_lengths(torch.zeros(3, dtype=torch.int64), torch.tensor([1, 2]))
    assert ReduceSum().combine(short, ROWS[:3], name="c").tolist() == [[1], [5]]
    assert ReduceMean().combine(key=short, embedding=ROWS[:3]).tolist() == [[1], [2.5]]
    first = FirstN(seq_length=2).combine(key=KEY, embedding=ROWS, name=None)
    assert first.tolist() == [[[1], [0]], [[2], [3]], [[4], [5]]]


def test_first_n_of_a_batch_of_any_size() -> None:
    """Monolith's test of unknown shapes: [None, 2, 6] for embeddings [None, 6]."""
    for batch in (0, 1, 3):
        key = Ragged.from_lengths(torch.zeros(batch, dtype=torch.int64), torch.ones(batch, dtype=torch.int64))
        assert FirstN(2).combine(key, torch.ones(batch, 6)).shape == (batch, 2, 6)


def test_max_seq_length() -> None:
    assert [c.max_seq_length for c in (ReduceSum(), ReduceMean(), FirstN(3))] == [0, 0, 3]
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(InputError, match="FirstN: seq_length must be"):
            FirstN(wrong)  # type: ignore[arg-type]


def test_the_base_is_abstract_and_a_subclass_defines_combine() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Combiner(0)  # type: ignore[abstract]

    class Longest(Combiner):
        """The number of ids, next to each example."""

        def combine(self, key: Ragged, embedding: Tensor, name: str | None = None) -> Tensor:
            return key.lengths()[:, None].to(embedding.dtype)

    assert Longest(max_seq_length=0).combine(KEY, ROWS).tolist() == [[1], [2], [3]]
    with pytest.raises(InputError, match="max_seq_length must be"):
        Longest(-1)
    with pytest.raises(InputError, match="combiner must be"):  # a collection would not call combine
        Feature("f", "t", Longest(0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("theirs", "ours"), [(ReduceSum(), Sum()), (ReduceMean(), Mean()), (FirstN(2), OurFirstN(2))]
)
def test_a_collection_and_an_export_take_them(theirs: Sum, ours: Sum) -> None:
    tables = [TableConfig("t", dim=2, optimizer=SGD(0.1))]
    batch = {"f": Ragged.from_lists([[1, 2, 3], []])}
    outputs = [EmbeddingCollection(tables, [Feature("f", "t", c)])(batch)["f"] for c in (theirs, ours)]
    assert torch.equal(*outputs)
    assert FeatureSpec.of(Feature("f", "t", theirs)) == FeatureSpec.of(Feature("f", "t", ours))


def test_a_combiner_that_pools_in_another_way_cannot_be_exported() -> None:
    class Doubled(Sum):
        """Divides by one half."""

        def divisor(self, column: Ragged, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((column.row_splits.shape[0] - 1,), 0.5, dtype=dtype)

    with pytest.raises(InputError, match="cannot be exported"):
        FeatureSpec.of(Feature("f", "t", Doubled()))
