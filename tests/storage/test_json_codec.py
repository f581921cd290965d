"""Strict JSON and records: what is rejected, and that errors name the field and have the caller's type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

import pytest

from megalith.errors import CheckpointError, InputError
from megalith.storage.json_codec import (
    NULL_IS_DEFAULT,
    OPTIONAL,
    JsonFields,
    Limits,
    Natural,
    Pattern,
    Positive,
    from_json,
    parse_json,
    parse_json_object,
    to_json,
)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("{} {}", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        ("[NaN]", "is not valid JSON: NaN is not allowed"),
        ("[-Infinity]", "is not valid JSON: -Infinity is not allowed"),
        ('[{"b": {"a": 1, "a": 1}}]', "is not valid JSON: an object has a key twice"),
        (nested(101), "is nested more than 100 levels deep"),
        (nested(100_000), "is nested more than 100 levels deep"),
        ('{"a": ' * 101 + "1" + "}" * 101, "is nested more than 100 levels deep"),
    ],
)
def test_text_that_is_rejected(text: str | bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^file: {message}"):
        parse_json(text, lambda problem: CheckpointError(f"file: {problem}"))


def test_text_that_is_accepted() -> None:
    assert parse_json('{"a": [1, 2.5, null, true, "x"]}', max_bytes=32) == {"a": [1, 2.5, None, True, "x"]}
    assert parse_json(b'"\xc3\xa9"') == "é"
    depth, data = 0, parse_json(nested(100))
    while data:
        depth, data = depth + 1, data[0]
    assert depth == 99
    assert parse_json("[" + ",".join(["[]"] * 1000) + "]") == [[]] * 1000
    with pytest.raises(ValueError, match="has more than 2 bytes"):
        parse_json("[1]", max_bytes=2)
    assert parse_json_object("{}", InputError).data == {}
    with pytest.raises(InputError, match="is not a JSON object"):
        parse_json_object("[]", InputError)


DATA: dict[str, Any] = {
    "name": "x",
    "half": "\ud800",
    "count": 3,
    "ratio": 0.5,
    "on": True,
    "none": None,
    "object": {"inner": "y"},
    "objects": [{"a": 1}, 7],
    "named": {"\ud800": {}},
    "time": "2026-01-02T03:04:05+01:00",
}


def test_fields_by_type() -> None:
    fields = JsonFields(DATA, InputError)
    assert (fields.string("name"), fields.integer("count"), fields.number("ratio")) == ("x", 3, 0.5)
    assert (fields.boolean("on"), fields.number("count")) == (True, 3.0)
    assert fields.object("object").string("inner") == "y"
    assert fields.time("time") == datetime(2026, 1, 2, 2, 4, 5, tzinfo=UTC)
    assert fields.time("none") is None


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda f: f.string("absent"), "field absent is missing"),
        (lambda f: f.string("count"), "field count must be a string"),
        (lambda f: f.string("name", 0), "field name is longer than 0 characters"),
        (lambda f: f.string("half"), "field half must be a string without unpaired surrogates"),
        (lambda f: f.integer("on"), "field on must be an integer"),
        (lambda f: f.integer("ratio"), "field ratio must be an integer"),
        (lambda f: f.integer("count", 4), "field count must be from 4 to"),
        (lambda f: f.number("on"), "field on must be a number"),
        (lambda f: f.boolean("count"), "field count must be true or false"),
        (lambda f: f.sha256("name"), "field name must be 64 hexadecimal digits"),
        (lambda f: f.time("name"), "field name must be a time like"),
        (lambda f: f.object("object").integer("inner"), "field object.inner must be an integer"),
        (lambda f: f.elements("objects").object("objects[1]"), r"field objects\[1\] must be an object"),
        (lambda f: f.named("named"), "field named has a name with an unpaired surrogate"),
        (lambda f: f.allow_only("name", "half"), "field count is not known"),
    ],
)
def test_a_wrong_field_is_named(read: Callable[[JsonFields], object], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^here: {message}"):
        read(JsonFields(DATA, lambda problem: CheckpointError(f"here: {problem}")))


# ---- records


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
    share: Annotated[float, Limits(0, 1)] = field(default=1.0, metadata=OPTIONAL)


@dataclass(frozen=True)
class Tree:
    leaves: dict[str, list[Leaf]]
    level: Annotated[int, Limits(-2, 2)]
    named: Mapping[Annotated[str, Limits(1, 3)], Annotated[str, Pattern(r"[a-z]+", "lower-case letters")]]
    sizes: Annotated[tuple[Annotated[int, Limits(1, 9)], ...], Limits(1, 2)] = (1,)
    raw: dict[str, Any] = field(default_factory=dict, metadata=NULL_IS_DEFAULT)
    shapes: list[Annotated[dict[str, Any], Shape]] = field(default_factory=list)
    about: Any = None
    note: Annotated[str, Limits(1, 5)] | None = field(default=None, metadata=OPTIONAL)


TREE = Tree(
    {"a": [Leaf("x", 1), Leaf("y", share=0.5)], "b": []},
    -2,
    {"abc": "x"},
    (1, 9),
    {"k": [1, {"z": None}]},
    [{"width": 2, "more": 1}],
)


def read(data: Any, *, lenient: bool = False) -> Tree:
    return from_json(Tree, JsonFields(data, InputError, lenient=lenient))


def test_what_is_written_is_read() -> None:
    data = to_json(TREE)
    assert data["leaves"]["a"][1] == {"name": "y", "size": 3, "share": 0.5}
    assert list(data) == ["leaves", "level", "named", "sizes", "raw", "shapes", "about", "note"]
    assert read(data) == TREE
    del data["note"], data["leaves"]["a"][0]["share"]  # optional
    assert read(data) == TREE


def test_a_lenient_reader_takes_defaults_and_ignores_fields_of_later_versions() -> None:
    data = {"leaves": {"a": [{"name": "x", "later": 1}]}, "level": 0, "named": {}, "raw": None, "later": {}}
    assert read(data, lenient=True) == Tree({"a": [Leaf("x", 3)]}, 0, {})
    for key in ("later", "more"):
        with pytest.raises(InputError, match=f"^field {key} is not known$"):
            read({**to_json(TREE), key: 1})
    data = to_json(TREE)
    del data["shapes"]
    with pytest.raises(InputError, match=r"^field shapes is missing$"):
        read(data)


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("level", 3, "field level must be from -2 to 2"),
        ("level", True, "field level must be an integer"),
        ("leaves", [], "field leaves must be an object"),
        ("leaves", {"a": [1]}, "field leaves.a[0] must be an object"),
        ("leaves", {"a": [{"name": "a b", "size": 1}]}, "field leaves.a[0].name 'a b' has a space"),
        ("leaves", {"a": [{"name": "x" * 9}]}, "field leaves.a[0].name must have a length from 0 to 8"),
        ("leaves", {"a": [{"name": "a", "size": -1}]}, "field leaves.a[0].size must be from 0 to"),
        (
            "leaves",
            {"a": [{"name": "a", "size": 1, "share": 2}]},
            "field leaves.a[0].share must be from 0 to 1, got 2",
        ),
        ("leaves", {"\ud800": []}, "field leaves has a name with an unpaired surrogate"),
        ("named", {"abcd": "x"}, "field named.abcd must have a length from 1 to 3, got 4"),
        ("named", {"a": "X"}, "field named.a must be lower-case letters, got 'X'"),
        ("sizes", [0], "field sizes[0] must be from 1 to 9, got 0"),
        ("sizes", [], "field sizes must have a length from 1 to 2, got 0"),
        ("shapes", [{"width": 0}], "field shapes[0].width must be from 1 to"),
        ("note", "", "field note must have a length from 1 to 5, got 0"),
        ("note", 3, "field note must be a string, got 3"),
    ],
)
def test_an_error_names_the_field(field: str, value: Any, problem: str, lenient: bool) -> None:
    with pytest.raises(InputError) as caught:
        read({**to_json(TREE), field: value}, lenient=lenient)
    assert str(caught.value).startswith(problem)
