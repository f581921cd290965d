"""Schema: what it refuses, how it normalises, its JSON form."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from megalith.data import DenseColumn, FeatureColumn, Schema
from megalith.errors import InputError, UsageError

ITEM = FeatureColumn("iid", slot=7, hash=True, separator="|")
FULL = Schema(
    label="click",
    features={"user": FeatureColumn("uid", slot=0, hash=False), "item": ITEM},
    dense=["age", DenseColumn("price", "log1p"), DenseColumn("x", "standard", mean=1.5, std=2.0)],
    weight="w",
    time="ts",
)


def test_json_and_back() -> None:
    again = Schema.from_dict(json.loads(json.dumps(FULL.to_dict())))
    assert again == Schema(
        label="click",
        features=FULL.feature_columns,
        dense=list(FULL.dense_columns),
        weight="w",
        time="ts",
    )
    assert again.to_dict() == FULL.to_dict()
    assert FULL.to_dict()["features"] == {
        "user": {"column": "uid", "slot": 0, "hash": False},
        "item": {"column": "iid", "slot": 7, "hash": True, "separator": "|"},
    }


def test_columns_are_named_once_in_a_fixed_order() -> None:
    assert FULL.columns == ["click", "w", "ts", "age", "price", "x", "uid", "iid"]
    assert Schema(label=None, features={"a": "x", "b": "x"}, dense=["x"]).columns == ["x"]


def test_normalising() -> None:
    raw = np.array([[3.0, -3.0, 5.5], [np.nan, np.nan, np.nan]])
    log = math.log(4)
    assert FULL.normalise(raw).tolist() == [pytest.approx([3.0, -log, 2.0]), [0.0, 0.0, 0.0]]


def test_fitting_leaves_given_numbers_and_missing_values_alone() -> None:
    schema = Schema(
        label=None,
        features={},
        dense=[DenseColumn("a", "standard"), DenseColumn("b", "standard", mean=0.0, std=1.0), "c"],
    )
    with pytest.raises(UsageError, match=r"column 'a' has no mean and std.*reader.fit"):
        schema.normalise(np.zeros((1, 3)))
    raw = np.array([[1.0, 5.0, 9.0], [3.0, 5.0, 9.0], [np.nan, 5.0, 9.0]])
    a, b, c = schema.fitted(raw).dense_columns
    assert (a.mean, a.std) == (2.0, 1.0)
    assert (b.mean, b.std) == (0.0, 1.0)
    assert c == DenseColumn("c")
    constant = schema.fitted(np.full((2, 3), 4.0)).dense_columns[0]
    assert (constant.mean, constant.std) == (4.0, 1.0)
    with pytest.raises(InputError, match="column 'a' has no value to fit"):
        schema.fitted(np.full((2, 3), np.nan))


def test_fitting_parts_is_fitting_the_whole() -> None:
    schema = Schema(
        label=None, features={}, dense=[DenseColumn("a", "standard"), DenseColumn("b", "standard")]
    )
    raw = np.random.default_rng(0).normal([1e6, 1.0], [2.0, 3.0], (1000, 2))
    raw[::7, 0] = np.nan
    parts = [raw[:1], raw[1:1], raw[1:400], raw[400:]]
    for column, values in zip(schema.fitted(iter(parts)).dense_columns, raw.T, strict=True):
        assert column.mean == pytest.approx(np.nanmean(values), rel=1e-12)
        assert column.std == pytest.approx(np.nanstd(values), rel=1e-9)
    constant = schema.fitted([np.full((n, 2), 0.1) for n in (3, 7, 1000)]).dense_columns[0]
    assert constant.std == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schema(label="y", features={}), "neither features nor dense columns"),
        (lambda: Schema(label="", features={"a": "a"}), "label must name a column, got ''"),
        (lambda: Schema(label="y", features="a"), r"features must map names to columns, such as .*, got 'a'"),
        (lambda: Schema(label="y", features=["a", "b", "a"]), "lists column 'a' twice; name the features"),
        (lambda: Schema(label="y", features=["a", 3]), "a column is a name or a section"),
        (lambda: Schema(label="y", features={"a": 3}), "feature must name a column, got 3"),
        (lambda: Schema(label="y", features={}, dense="abc"), "dense must be a list of columns"),
        (lambda: FeatureColumn("c", slot=32768), r"slot of column 'c' must be 0 to 32767, got 32768"),
        (lambda: FeatureColumn("c", separator=""), "separator of column 'c'"),
        (lambda: FeatureColumn("c", hash=2), "hash of column 'c'"),
        (lambda: DenseColumn("c", "cube"), "must be one of none, log1p, standard"),
        (lambda: DenseColumn("c", nan="zero"), "nan of column 'c' must be one of error, missing"),
        (lambda: DenseColumn("c", indicator=2), "indicator of column 'c' must be True or False"),
        (lambda: DenseColumn("c", "standard", mean=1.0), "needs both mean and std"),
        (lambda: DenseColumn("c", "standard", mean=1.0, std=0.0), "a std above 0"),
        (lambda: DenseColumn("c", "log1p", mean=1.0, std=1.0), 'need normalise="standard"'),
        (lambda: Schema.from_dict({"features": {"a": "a"}}), "label is missing; a schema has the keys"),
        (lambda: Schema.from_dict({"label": "y", "features": {"a": {"x": 1}}}), "with the key column, got"),
        (
            lambda: Schema.from_dict({"label": "y", "features": {"a": {"column": "a", "seperator": "|"}}}),
            r"column 'a' has no key 'seperator' \(known: column, slot, hash, separator, max_length, keep, .*",
        ),
        (lambda: Schema.from_dict({"label": "y", "features": {"a": "a"}, "more": 1}), "no key 'more' .*time"),
        (lambda: Schema.from_dict([]), "features is missing; a schema has the keys"),
        (lambda: Schema.from_dict({"label": "y", "features": 3}), "features must map names .* got 3"),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_features_may_have_the_names_of_their_columns() -> None:
    tags = FeatureColumn("tags", slot=3)
    schema = Schema(label="y", features=["user", tags])
    assert schema.feature_columns == {"user": FeatureColumn("user"), "tags": tags}
    assert Schema.from_dict(schema.to_dict()).feature_columns == schema.feature_columns
    listed = {"label": "y", "features": ["user", {"column": "tags", "slot": 3}]}
    assert Schema.from_dict(listed).feature_columns == schema.feature_columns
