"""Features, slices, layouts and collections that are put together wrongly say what is wrong, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import (
    EmbeddingCollection,
    Feature,
    FirstN,
    Layout,
    LocalShards,
    Mean,
    Ragged,
    Slice,
    Sum,
)
from megalith.errors import InputError, UnknownNameError, UsageError
from tests.nn.support import collection, column, ints, zeros

# ---- one at a time


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": ""}, "Feature: name must be a non-empty string"),
        ({"table": None}, "Feature: table must be a non-empty string, got None"),
        ({"combiner": "sum"}, "feature 'a': combiner must be Sum"),
        ({"shared": 1}, "feature 'a': shared must be True or False, got 1"),
        ({"shared": True, "combiner": None}, "feature 'a': a shared feature needs a combiner"),
        ({"pad": None}, "feature 'a': pad must be an integer, got None"),
    ],
)
def test_features(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Feature(**{"name": "a", "table": "t", **options})


def test_features_are_plain_values() -> None:
    assert Feature("a", "t") == Feature("a", "t", Sum(), False, pad=-1)
    with pytest.raises(TypeError):
        Feature("a", "t", Sum(), False, 0)  # type: ignore[call-arg]  # pad has a name


def test_slices() -> None:
    for start, end in ((0, 0), (2, 1), (-1, 2), (0, 1.0), (None, 1)):
        with pytest.raises(InputError, match=r"Slice of 'a': .* is not a range of columns"):
            Slice("a", start, end)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Slice: feature must be the name of a feature, got Feature"):
        Slice(Feature("a", "t"), 0, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": ""}, "Layout: name must be a non-empty string"),
        ({"kind": "addn"}, "layout 'deep': kind must be one of concat, stack, add, none, got 'addn'"),
        ({"slices": []}, "layout 'deep': slices must be a list of at least one Slice"),
        ({"slices": [("a", 0, 1)]}, "layout 'deep': slices must be a list of at least one Slice"),
    ],
)
def test_layouts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Layout(**{"name": "deep", "slices": [Slice("a", 0, 1)], **options})


# ---- together


def test_names_must_be_known_and_differ() -> None:
    tables = [zeros("user"), zeros("item")]
    with pytest.raises(KeyError, match="feature 'a': unknown table 'itme' \\(known: 'user', 'item'\\)"):
        EmbeddingCollection(tables, [Feature("a", "itme")])
    with pytest.raises(InputError, match="two features are named 'a'"):
        EmbeddingCollection(tables, [Feature("a", "user"), Feature("a", "item")])
    with pytest.raises(InputError, match="two tables are named 'user'"):
        EmbeddingCollection([zeros("user"), zeros("user")], [Feature("a", "user")])
    layouts = [Layout("x", [Slice("a", 0, 1)]), Layout("x", [Slice("a", 0, 1)])]
    with pytest.raises(InputError, match="two layouts are named 'x'"):
        EmbeddingCollection(tables, [Feature("a", "user")], layouts=layouts)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"features": []}, "features is empty"),
        ({"features": ["a"]}, "features must be a list of Feature, got 'a'"),
        ({"tables": zeros()}, "tables must be a list of TableConfig, or Shards, got TableConfig"),
        ({"tables": LocalShards([zeros()]), "seed": 0}, "engine and seed cannot be combined with Shards"),
        ({"update": "forward"}, "update must be one of .*'backward', 'step'.*, got 'forward'"),
        ({"reduction": "max"}, "reduction must be one of .*'mean', 'sum'.*, got 'max'"),
        ({"clip_value": 0.0}, "clip_value must be a positive, finite number, got 0.0"),
        ({"allow_micro_steps": torch.ones(2)}, "allow_micro_steps must be True or False"),
        ({"clip_norm": -1}, "clip_norm must be a positive, finite number, got -1"),
        ({"engine": "gpu"}, "unknown engine 'gpu'"),
        ({"seed": "x"}, "seed must be an integer, got 'x'"),
        ({"layouts": Layout("x", [Slice("a", 0, 1)])}, "layouts must be a list of Layout, got Layout"),
        ({"layouts": []}, "no layout has a slice of 'a'"),
    ],
)
def test_options_of_a_collection(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        EmbeddingCollection(**{"tables": [zeros()], "features": [Feature("a", "t")], **options})


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout("x", [Slice("a", 0, 4), Slice("z", 0, 1)]), "layout 'x', slice 1: unknown feature 'z'"),
        (Layout("x", [Slice("a", 2, 5)]), "layout 'x', slice 0: columns 2:5 of 'a', which has 4"),
        (Layout("x", [Slice("rows", 0, 1)]), "slice 0: feature 'rows' has combiner=None"),
        (
            Layout("x", [Slice("a", 0, 2), Slice("b", 0, 1)], kind="stack"),
            "layout 'x', slice 1: it has 1 columns, slice 0 has 2",
        ),
        (
            Layout("x", [Slice("a", 0, 1), Slice("b", 0, 2)], kind="add"),
            "layout 'x', slice 1: it has 2 columns, slice 0 has 1",
        ),
        (
            Layout("x", [Slice("first", 0, 2)], kind="add"),
            "layout 'x', slice 0: rows of a FirstN feature cannot be added",
        ),
        (
            Layout("x", [Slice("a", 0, 2), Slice("first", 0, 2)]),
            "layout 'x', slice 1: either all or no slices are FirstN features",
        ),
        (
            Layout("x", [Slice("first", 0, 2), Slice("second", 0, 2)], kind="stack"),
            "layout 'x', slice 1: either all or no slices are FirstN features",
        ),
    ],
)
def test_layouts_and_features_that_do_not_fit(layout: Layout, said: str) -> None:
    features = [
        Feature("a", "t"),
        Feature("b", "t", Mean()),
        Feature("rows", "t", None),
        Feature("first", "t", FirstN(2)),
        Feature("second", "t", FirstN(3)),
    ]
    known = {cut.feature for cut in layout.slices}
    kind: type[Exception] = UnknownNameError if "z" in known else InputError
    with pytest.raises(kind, match=said):
        EmbeddingCollection([zeros(dim=4)], features, layouts=[layout])


def test_a_feature_without_a_layout_is_named() -> None:
    layouts = [Layout("x", [Slice("a", 0, 1)])]
    with pytest.raises(InputError, match="no layout has a slice of 'b', 'c'"):
        collection(Feature("a", "t"), Feature("b", "t"), Feature("c", "t"), layouts=layouts)


# ---- batches


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": 1}, "feature 'a': expected a Ragged or a tensor .* got dict"),
        (torch.ones(1, 1, 1, dtype=torch.int64), r"feature 'a': .* got a tensor \[1, 1, 1\]"),
        (torch.tensor([1.0]), r"feature 'a': ids must be int64 or int32 \[n\], got torch.float32 \[1\]"),
        (torch.tensor([1], dtype=torch.uint8), "feature 'a': ids must be int64 or int32"),
        (Ragged(torch.ones(2, 3), ints(0, 2)), "feature 'a': ids must be int64 or int32"),
        (Ragged(torch.ones(2, 3, dtype=torch.int64), ints(0, 2)), r"feature 'a': .* torch.int64 \[2, 3\]"),
    ],
)
def test_columns_that_are_no_ids(value: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        collection()({"a": value})


def test_a_strided_nested_tensor_is_refused() -> None:
    with pytest.warns(UserWarning, match="nested tensors"):
        nested = torch.nested.nested_tensor([ints(1, 2), ints(3)], layout=torch.strided)
    with pytest.raises(InputError, match=r"feature 'a': a nested tensor must have layout=torch\.jagged"):
        collection()({"a": nested})


def test_a_missing_feature_is_a_key_error_and_a_batch_is_a_mapping() -> None:
    with pytest.raises(KeyError, match="feature 'a' is not in the batch \\(it holds 'b', 'c'\\)"):
        collection()({"b": ints(1), "c": ints(1)})
    with pytest.raises(KeyError, match="feature 'a' is not in the batch \\(it holds nothing\\)"):
        collection()({})
    for batch in ([column([1])], None, ints(1)):
        with pytest.raises(InputError, match="a batch must be a mapping of columns, or have keys"):
            collection()(batch)


def test_columns_have_the_same_number_of_rows_and_are_on_one_device() -> None:
    two = collection(Feature("a", "t"), Feature("b", "t"), Feature("user", "t", shared=True))
    with pytest.raises(InputError, match="feature 'b' has 1 rows, feature 'a' has 2"):
        two({"a": ints(1, 2), "b": ints(1), "user": ints(1)})
    with pytest.raises(InputError, match="feature 'user' is shared: it must have one row, got 2"):
        two({"a": ints(1, 2), "b": ints(1, 2), "user": ints(1, 2)})
    with pytest.raises(InputError, match="feature 'b' is on meta, feature 'a' on cpu"):
        two({"a": ints(1, 2), "b": ints(1, 2).to("meta"), "user": ints(1)})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_must_be_finite(engine: str, bad: float) -> None:
    with pytest.raises(InputError, match=r"table 't': .*(NaN|Inf)"):
        collection(Feature("a", "t", Mean()), engine=engine)({"a": column([1, 2], weights=[[1.0, bad]])})


def test_weights_take_no_gradient() -> None:
    weights = torch.ones(2, requires_grad=True)
    batch = {"a": Ragged(ints(1, 2), ints(0, 2), weights)}
    with pytest.raises(UsageError, match="feature 'a': weights cannot have a gradient"):
        collection()(batch)
    rows = collection(Feature("a", "t", None))(batch)["a"]  # but where the caller multiplies, they do
    (rows.values * rows.weights[:, None]).sum().backward()
    assert isinstance(weights.grad, Tensor)
