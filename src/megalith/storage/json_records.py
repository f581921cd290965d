"""JSON records: frozen dataclasses to canonical JSON and back, by their type hints.

The reader is strict like `strict_json`: every field must be there with its type, no other field may be there,
and what a class itself refuses (InputError) is reported with the place in the document. Supported hints are
bool, int, float, str, `Sha256`, datetime, Literal, enums (by name or, for str enums, by value), unions of
these with None and each other, tuples, Mappings by str or int, and such dataclasses.
`field(metadata=INLINE)` writes the fields of a nested dataclass beside those of its owner,
`field(metadata=NOT_SAVED)` leaves a field out, and `field(metadata=saved_as(name))` gives it another name.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from datetime import datetime
from enum import Enum, StrEnum
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megalith.errors import InputError
from megalith.storage.strict_json import MAX_INT, JsonFields, as_utc

T = TypeVar("T")
Sha256 = Annotated[str, "sha256"]
"""A SHA-256 in hexadecimal."""
INLINE = {"json": "inline"}
NOT_SAVED = {"json": "not saved"}
MAX_TEXT = 1 << 16


def saved_as(name: str) -> dict[str, str]:
    """Return the metadata of a field that has another name in JSON."""
    return {"name": name}


def canonical_json(data: Any) -> bytes:
    """Write data in the one canonical form: ASCII, sorted keys, no spaces, no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def json_digest(data: Any) -> str:
    """Return the SHA-256 of the canonical form."""
    return hashlib.sha256(canonical_json(data)).hexdigest()


def to_json(value: Any) -> Any:
    """Convert a record, or a value that a record may hold."""
    if is_dataclass(value) and not isinstance(value, type):
        found: dict[str, Any] = {}
        for each in _saved(type(value)):
            written = to_json(getattr(value, each.name))
            found |= written if each.metadata.get("json") == "inline" else {_name(each): written}
        return found
    if isinstance(value, Enum):
        return value.value if isinstance(value, StrEnum) else value.name
    if isinstance(value, datetime):
        return as_utc(value).isoformat(timespec="microseconds")
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    return [to_json(each) for each in value] if isinstance(value, tuple | list) else value


def from_json(kind: type[T], source: JsonFields, **given: Any) -> T:
    """Read a record."""
    source.allow_only(*_names(kind))
    return _record(kind, source, given)


def _record(kind: type[T], source: JsonFields, given: Mapping[str, Any]) -> T:
    hints = _hints(kind)  # type: ignore[arg-type]
    values = dict(given)
    for each in _saved(kind):
        hint = hints[each.name]
        inline = each.metadata.get("json") == "inline"
        values[each.name] = _record(hint, source, {}) if inline else _read(hint, source, _name(each))
    try:
        return kind(**values)
    except InputError as error:
        source.reject(str(error))


def _read(hint: Any, source: JsonFields, key: str) -> Any:
    """The value of a field, by its hint."""
    if hint == Sha256:
        return source.sha256(key)
    plain, arguments = get_origin(hint) or hint, get_args(hint)
    if plain in (Union, types.UnionType):
        value = source.data.get(key)
        if value is None and key in source.data and type(None) in arguments:
            return None
        *others, last = (each for each in arguments if each is not type(None))
        return _read(next((each for each in others if type(value) is each), last), source, key)
    if plain is Literal:
        value = source.string(key, 64)
        return value if value in arguments else source.fail(key, f"must be one of {', '.join(arguments)}")
    if plain is tuple:
        return _tuple(arguments, source, key)
    if plain is Mapping or plain is dict:
        nested = source.object(key)
        return {_key(arguments[0], nested, name): _read(arguments[1], nested, name) for name in nested.data}
    if is_dataclass(plain):
        return from_json(plain, source.object(key))  # type: ignore[arg-type]
    if isinstance(plain, type) and issubclass(plain, Enum):
        text = source.string(key, 64)
        known = {to_json(member): member for member in plain}
        return known[text] if text in known else source.fail(key, f"must be one of {', '.join(known)}")
    if plain is int:
        return source.integer(key, -MAX_INT)
    if plain is datetime:
        return source.time(key) or source.fail(key, "must be a time")
    if plain is str:
        return source.string(key, MAX_TEXT)
    return source.boolean(key) if plain is bool else source.number(key)


def _tuple(arguments: tuple[Any, ...], source: JsonFields, key: str) -> tuple[Any, ...]:
    nested = source.elements(key)
    hints = [arguments[0]] * len(nested.data) if arguments[1:] == (...,) else list(arguments)
    if len(nested.data) != len(hints):
        source.fail(key, f"must have {len(hints)} items")
    return tuple(_read(hint, nested, name) for hint, name in zip(hints, nested.data, strict=True))


def _key(hint: Any, source: JsonFields, name: str) -> Any:
    if hint is str:
        return name
    if not name.isascii() or not name.isdecimal() or str(int(name[:20])) != name or int(name) > MAX_INT:
        source.fail(name[:64], "must have a name that is an integer")
    return int(name)


def _saved(kind: type[Any]) -> list[Field[Any]]:
    return [each for each in fields(kind) if each.init and each.metadata.get("json") != "not saved"]


def _names(kind: type[Any]) -> list[str]:
    found = []
    for each in _saved(kind):
        inline = each.metadata.get("json") == "inline"
        found += _names(_hints(kind)[each.name]) if inline else [_name(each)]  # type: ignore[arg-type]
    return found


def _name(each: Field[Any]) -> str:
    return str(each.metadata.get("name", each.name))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
