"""Frozen dataclasses to JSON and back: hints, limits, defaults of later fields, and errors with the place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from megalith.errors import InputError
from megalith.storage.json_codec import (
    NULL_IS_DEFAULT,
    JsonFields,
    Limits,
    Natural,
    Positive,
    from_json,
    parse_json,
    to_json,
)


def no_spaces(text: str) -> None:
    if " " in text:
        raise InputError(f"{text!r} has a space")


@dataclass(frozen=True)
class Shape:
    width: Positive


@dataclass(frozen=True)
class Leaf:
    name: Annotated[str, Limits(0, 8), no_spaces]
    size: Natural = 3


@dataclass(frozen=True)
class Tree:
    leaves: dict[str, list[Leaf]]
    level: Annotated[int, Limits(-2, 2)]
    raw: dict[str, Any] = field(default_factory=dict, metadata=NULL_IS_DEFAULT)
    shapes: list[Annotated[dict[str, Any], Shape]] = field(default_factory=list)
    about: Any = None


TREE = Tree({"a": [Leaf("x", 1), Leaf("y")], "b": []}, -2, {"k": [1, {"z": None}]}, [{"width": 2, "more": 1}])


def read(data: Any, *, lenient: bool = False) -> Tree:
    return from_json(Tree, JsonFields(data, InputError, lenient=lenient))


def test_what_is_written_is_read() -> None:
    data = to_json(TREE)
    assert data["leaves"]["a"][1] == {"name": "y", "size": 3}
    assert read(data) == TREE
    assert list(data) == ["leaves", "level", "raw", "shapes", "about"]


def test_a_lenient_reader_takes_defaults_and_ignores_fields_of_later_versions() -> None:
    data = {"leaves": {"a": [{"name": "x", "later": 1}]}, "level": 0, "raw": None, "later": {}}
    assert read(data, lenient=True) == Tree({"a": [Leaf("x", 3)]}, 0)
    with pytest.raises(InputError, match=r"^field later is not known$"):
        read({**to_json(TREE), "later": 1})
    with pytest.raises(InputError, match=r"^field shapes is missing$"):
        read({"leaves": {}, "level": 0, "raw": {}, "about": 1})


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("level", 3, "field level must be from -2 to 2"),
        ("level", True, "field level must be an integer"),
        ("leaves", [], "field leaves must be an object"),
        ("leaves", {"a": {}}, "field leaves.a must be a list"),
        ("leaves", {"a": [1]}, "field leaves.a[0] must be an object"),
        ("leaves", {"a": [{"name": "a b", "size": 1}]}, "field leaves.a[0].name 'a b' has a space"),
        (
            "leaves",
            {"a": [{"name": "x" * 9, "size": 1}]},
            "field leaves.a[0].name must have a length from 0 to 8",
        ),
        ("leaves", {"a": [{"name": "a", "size": -1}]}, "field leaves.a[0].size must be from 0 to"),
        ("leaves", {"\ud800": []}, "field leaves has a name with an unpaired surrogate"),
        ("shapes", [{"width": 0}], "field shapes[0].width must be from 1 to"),
        ("shapes", None, "field shapes must be a list"),
        ("raw", [], "field raw must be an object"),
    ],
)
def test_an_error_names_the_field(field: str, value: Any, problem: str, lenient: bool) -> None:
    with pytest.raises(InputError) as caught:
        read({**to_json(TREE), field: value}, lenient=lenient)
    assert str(caught.value).startswith(problem)


def test_duplicate_keys_are_refused_before_records_are_read() -> None:
    with pytest.raises(InputError, match="a key twice"):
        parse_json('{"level": 1, "level": 2}', InputError)
