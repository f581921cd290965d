"""Segment and TableConfig: what a table is made of, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import megalith
from megalith import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    FixedPoint,
    Normal,
    PolynomialDecay,
    RowWiseAdagrad,
    Segment,
    TableConfig,
    Zeros,
)
from megalith.errors import InputError


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("optimizer", [None, "sgd", SGD]),
        ("initializer", [None, 0.5, Zeros]),
        ("precision", ["float64", None]),
        ("rounding", ["up"]),
    ],
)
def test_a_segment_names_the_field_it_refuses(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InputError, match=f"Segment: {field}"):
            Segment(4, **{"optimizer": SGD(), field: value})


def test_a_dim_is_a_positive_whole_number_and_a_name_is_a_text() -> None:
    for dim in (0, -1, -(2**31), 1.5, 4.0, True, "4", None):
        with pytest.raises(InputError, match="dim must be a positive integer"):
            Segment(dim, optimizer=SGD())  # type: ignore[arg-type]
    for name in ("", None, 3, b"t"):
        with pytest.raises(InputError, match="name"):
            TableConfig(name, dim=4, optimizer=SGD())  # type: ignore[arg-type]


def test_a_stored_row_is_all_weights_then_each_segments_state() -> None:
    config = TableConfig(
        "t",
        segments=[
            Segment(2, optimizer=Adagrad(initial_accumulator_value=0.5)),
            Segment(1, optimizer=SGD()),
            Segment(3, optimizer=Adam(bias_correction="row")),
            Segment(4, optimizer=RowWiseAdagrad(initial_accumulator_value=0.25)),
            Segment(1, optimizer=FTRL(initial_accumulator_value=0.1)),
        ],
    )

    columns = [(c.key, c.start, c.end, c.initial) for c in config.state_columns]

    assert config.dim == 11
    assert columns == [
        ("0/sum", 11, 13, 0.5),
        ("2/m", 13, 16, 0.0),
        ("2/v", 16, 19, 0.0),
        ("2/count", 19, 20, 0.0),
        ("3/sum", 20, 21, 0.25),
        ("4/sum", 21, 22, 0.1),
        ("4/z", 22, 23, 0.0),
    ]
    assert config.row_floats == 23
    assert TableConfig("t", dim=4, optimizer=SGD()).row_floats == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass dim and optimizer, or segments"),
        ({"dim": 4}, "pass dim and optimizer, or segments"),
        ({"optimizer": SGD()}, "pass dim and optimizer, or segments"),
        ({"dim": -3, "optimizer": SGD()}, "dim must be a positive integer"),
        ({"segments": []}, "segments is empty"),
        ({"segments": [4]}, "segments must hold Segments"),
        ({"segments": [Segment(4, optimizer=SGD())], "dim": 4}, "not both"),
        ({"segments": [Segment(4, optimizer=SGD())], "optimizer": SGD()}, "not both"),
        ({"segments": [Segment(4, optimizer=SGD())], "initializer": Zeros()}, "not both"),
        ({"segments": [Segment(4, optimizer=SGD())], "precision": "bogus"}, "not both"),
        ({"dim": 2**30, "optimizer": SGD()}, "'t'.*floats"),
        ({"dim": 4, "optimizer": SGD(), "precision": "int8"}, "precision"),
        ({"dim": 4, "optimizer": SGD(), "missing": "random"}, "'t'.*missing must be one of"),
        ({"dim": 4, "optimizer": SGD(), "admission": object()}, "admission"),
        ({"dim": 4, "optimizer": SGD(), "eviction": (object(),)}, "eviction"),
    ],
)
def test_a_config_is_checked_when_it_is_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        TableConfig("t", **arguments)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    "config",
    [
        TableConfig("t", dim=4, optimizer=SGD(0.5), serving=FixedPoint(0.5)),
        TableConfig("t", dim=4, optimizer=SGD(), precision="bfloat16", rounding="stochastic"),
        TableConfig("it's", dim=4, optimizer=Adam(PolynomialDecay(1.0, 10, 0.1)), missing="zeros"),
        TableConfig(
            "t",
            segments=[
                Segment(1, optimizer=FTRL(l1=0.5), initializer=Zeros()),
                Segment(8, optimizer=Adagrad(weight_decay=0.1), initializer=Normal(1.0, 2.0)),
            ],
            trainable=False,
            dist_type="continuous",
        ),
    ],
)
def test_a_config_prints_as_the_code_that_makes_it(config: TableConfig) -> None:
    assert eval(repr(config), dict(vars(megalith))) == config
    plain = repr(TableConfig("t", dim=4, optimizer=SGD()))
    assert not any(field in plain for field in ("precision", "rounding", "serving"))
