"""The strict JSON reader: what it rejects, and that errors name the field and have the caller's type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

import pytest

from megalith.errors import CheckpointError, InputError
from megalith.storage.json_codec import (
    OPTIONAL,
    JsonFields,
    Limits,
    Pattern,
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
        ("[NaN]", "NaN is not allowed"),
        ("[-Infinity]", "-Infinity is not allowed"),
        ('{"a": 1, "a": 1}', "an object has a key twice"),
        ('[{"b": {"a": 1, "a": 1}}]', "an object has a key twice"),
        (nested(101), "is nested more than 100 levels deep"),
        (nested(100_000), "is nested more than 100 levels deep"),
        ('{"a": ' * 101 + "1" + "}" * 101, "is nested more than 100 levels deep"),
    ],
)
def test_text_that_is_rejected(text: str | bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^file: {message}|^file: is not valid JSON: {message}"):
        parse_json(text, lambda problem: CheckpointError(f"file: {problem}"))


def test_text_that_is_accepted() -> None:
    assert parse_json('{"a": [1, 2.5, null, true, "x"]}') == {"a": [1, 2.5, None, True, "x"]}
    assert parse_json(b'"\xc3\xa9"') == "é"
    depth, data = 0, parse_json(nested(99))
    while data:
        depth, data = depth + 1, data[0]
    assert depth == 98
    assert parse_json("[" + ",".join(["[]"] * 1000) + "]") == [[]] * 1000


def test_the_size_is_limited() -> None:
    assert parse_json("[1]", max_bytes=3) == [1]
    with pytest.raises(ValueError, match="has more than 2 bytes"):
        parse_json("[1]", max_bytes=2)


def test_only_an_object_has_fields() -> None:
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


@dataclass(frozen=True)
class Inner:
    name: Annotated[str, Pattern(r"[a-z]+", "lower-case letters")]
    share: Annotated[float, Limits(0, 1)] = field(default=1.0, metadata=OPTIONAL)


@dataclass(frozen=True)
class Outer:
    sizes: Annotated[tuple[Annotated[int, Limits(1, 9)], ...], Limits(1, 2)]
    inner: Mapping[Annotated[str, Limits(1, 3)], Inner]
    note: Annotated[str, Limits(1, 5)] | None = field(default=None, metadata=OPTIONAL)


def read_outer(data: Any, *, lenient: bool = False) -> Outer:
    return from_json(Outer, JsonFields(data, InputError, lenient=lenient))


def test_limits_and_fields_that_may_be_absent() -> None:
    outer = Outer((1, 9), {"abc": Inner("x", 0.5)}, "note")
    assert read_outer(to_json(outer)) == outer
    assert read_outer({"sizes": [1], "inner": {"a": {"name": "x"}}}) == Outer((1,), {"a": Inner("x", 1.0)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": [0]}, r"field sizes\[0\] must be from 1 to 9, got 0"),
        ({"sizes": []}, "field sizes must have a length from 1 to 2, got 0"),
        ({"inner": {"abcd": {"name": "x"}}}, "field inner.abcd must have a length from 1 to 3, got 4"),
        ({"inner": {"a": {"name": "X"}}}, "field inner.a.name must be lower-case letters, got 'X'"),
        ({"inner": {"a": {"name": "x", "share": 2}}}, "field inner.a.share must be from 0 to 1, got 2"),
        ({"note": ""}, "field note must have a length from 1 to 5, got 0"),
        ({"note": 3}, "field note must be a string, got 3"),
        ({"more": 1}, "field more is not known"),
    ],
)
def test_a_record_beyond_its_limits_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        read_outer({"sizes": [1], "inner": {}, **changes})


def test_fields_that_are_not_known_may_be_ignored() -> None:
    data = {"sizes": [1], "inner": {"a": {"name": "x", "more": 1}}, "more": 1}
    assert read_outer(data, lenient=True) == Outer((1,), {"a": Inner("x")})
