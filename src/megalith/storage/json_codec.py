"""Strict JSON: text that is not trusted to data, and frozen dataclasses to canonical JSON and back.

`parse_json` is stricter than `json.loads`: it limits size and nesting and rejects NaN, Infinity and duplicate
keys. `JsonFields` reads the fields of an object by name and type. The caller passes the error type.

`to_json` and `from_json` convert dataclasses by their type hints: every field must be there with its type, no
other field may be there, and what a class itself refuses (InputError) is reported with the place in the
document. With `JsonFields(lenient=True)`, for files that later versions extend, a missing field has its
default and other fields are ignored.

    hint                                read as
    bool, int, float, str, datetime     themselves
    Sha256, Literal, Enum               text: an enum by its name, a str enum by its value
    tuple, list, Mapping, dict          a list or an object; the keys of an object are str or int
    a dataclass                         an object
    X | Y                               the one of its type; None is null
    Any                                 any JSON data
    Annotated[hint, Limits(...)]        a number, or a length of a string, list or object, within limits
    Annotated[str, Pattern(...)]        a string of a form
    Annotated[hint, ..., check]         a value that the function does not refuse (InputError)
    Annotated[Mapping, a dataclass]     an object that has at least the fields of the dataclass, as it is

    metadata of a field                 effect
    INLINE                              the fields of a nested dataclass are next to those of its owner
    NOT_SAVED                           the field is left out
    OPTIONAL                            the field may be absent, also if not lenient; it then has its default
    NULL_IS_DEFAULT                     null is read as the default, if lenient
    saved_as(name)                      the field has another name
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum, StrEnum
from functools import cache
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from megalith.errors import InputError

MAX_BYTES = 1 << 28
MAX_DEPTH = 100
MAX_INT = (1 << 63) - 1

ErrorFactory = Callable[[str], Exception]
"""Makes the exception to raise from a message. An exception class is one."""


def parse_json(text: str | bytes, error: ErrorFactory = ValueError, *, max_bytes: int = MAX_BYTES) -> Any:
    """Parse JSON text that is not trusted."""
    if not isinstance(text, str | bytes):
        raise error(f"is a {type(text).__name__}, not text")
    if len(text) > max_bytes:
        raise error(f"has more than {max_bytes} bytes")
    try:
        text = text if isinstance(text, str) else text.decode()
        data = json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise error(_TOO_DEEP) from None
    except ValueError as problem:
        raise error(f"is not valid JSON: {problem}") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and is_nested_deeper(data, MAX_DEPTH):
        raise error(_TOO_DEEP)
    return data


def is_nested_deeper(data: Any, levels: int) -> bool:
    """Return whether the objects and lists of JSON data are nested more than some levels deep."""
    level = [data] if isinstance(data, dict | list) else []
    for _ in range(levels):
        level = [x for each in level for x in _children(each) if isinstance(x, dict | list)]
    return bool(level)


def parse_json_object(
    text: str | bytes, error: ErrorFactory, *, max_bytes: int = MAX_BYTES, lenient: bool = False
) -> JsonFields:
    """Parse JSON text that must be an object, see `parse_json`."""
    data = parse_json(text, error, max_bytes=max_bytes)
    if not isinstance(data, dict):
        raise error("is not a JSON object")
    return JsonFields(data, error, lenient=lenient)


class JsonFields:
    """The fields of a JSON object, read by name and type.

    Every method raises what `error` makes of a message that names the field, such as
    "field tables[2].dim must be an integer, got '3'".
    """

    def __init__(
        self, data: dict[str, Any], error: ErrorFactory, path: str = "", *, lenient: bool = False
    ) -> None:
        self.data = data
        self.lenient = lenient
        self._error = error
        self._path = path

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raise the error of a field."""
        raise self._error(f"field {self._path}{key} {problem}")

    def reject(self, problem: str) -> NoReturn:
        """Raise the error of this object."""
        raise self._error(f"{self._path.rstrip('.')}: {problem}" if self._path else problem)

    def allow_only(self, *names: str) -> None:
        """Raise if there are other fields, unless they are ignored."""
        extra = sorted(set(self.data) - set(names))
        if extra and not self.lenient:
            self.fail(extra[0][:64], "is not known")

    def string(self, key: str, max_length: int = 4096) -> str:
        """Read a string without unpaired surrogates."""
        value = str(self._typed(key, str, "a string"))
        if len(value) > max_length:
            self.fail(key, f"is longer than {max_length} characters")
        if not _is_text(value):
            self.fail(key, "must be a string without unpaired surrogates")
        return value

    def sha256(self, key: str) -> str:
        """Read a SHA-256 in hexadecimal."""
        return self.matching(key, _SHA256)

    def matching(self, key: str, pattern: Pattern) -> str:
        """Read a string of a form."""
        value = str(self._typed(key, str, "a string"))
        if not re.fullmatch(pattern.regex, value):
            self.fail(key, f"must be {pattern.meaning}, got {_shown(value)}")
        return value

    def integer(self, key: str, least: int = 0, most: int = MAX_INT) -> int:
        """Read an integer."""
        value = int(self._typed(key, int, "an integer"))
        if not least <= value <= most:
            self.fail(key, f"must be from {least} to {most}, got {_shown(value)}")
        return value

    def number(self, key: str) -> float:
        """Read a finite number."""
        value = self._typed(key, int | float, "a number")
        if abs(value) > 1e300:
            self.fail(key, "is too large")
        return float(value)

    def boolean(self, key: str) -> bool:
        """Read true or false."""
        value = self.data.get(key)
        if not isinstance(value, bool):
            self._fail_type(key, "true or false")
        return value

    def time(self, key: str) -> datetime | None:
        """Read a time in ISO format; one without a zone is in UTC."""
        if key in self.data and self.data[key] is None:
            return None
        text = self.string(key, 40)
        try:
            return as_utc(datetime.fromisoformat(text))
        except (ValueError, OverflowError):
            self.fail(key, "must be a time like 2026-01-02T03:04:05.000000+00:00")

    def elements(self, key: str) -> JsonFields:
        """Read a list whose items are read like fields."""
        items = {f"{key}[{i}]": item for i, item in enumerate(self._typed(key, list, "a list"))}
        return self._fields(items, self._path)

    def object(self, key: str) -> JsonFields:
        """Read a nested object."""
        return self._fields(self._typed(key, dict, "an object"), f"{self._path}{key}.")

    def named(self, key: str) -> JsonFields:
        """Read an object whose names are chosen by the writer."""
        found = self.object(key)
        if not all(map(_is_text, found.data)):
            self.fail(key, "has a name with an unpaired surrogate")
        return found

    def _fields(self, data: dict[str, Any], path: str) -> JsonFields:
        return JsonFields(data, self._error, path, lenient=self.lenient)

    def _typed(self, key: str, kind: Any, name: str) -> Any:
        value = self.data.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            self._fail_type(key, name)
        return value

    def _fail_type(self, key: str, name: str) -> NoReturn:
        known = key in self.data
        self.fail(key, f"must be {name}, got {_shown(self.data[key])}" if known else "is missing")


def as_utc(time: datetime) -> datetime:
    """Convert a time to UTC."""
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep"


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("an object has a key twice")
    return data


def _children(data: dict[str, Any] | list[Any]) -> list[Any]:
    return list(data.values()) if isinstance(data, dict) else data


def _is_text(value: str) -> bool:
    """Return whether the text can be encoded; a JSON escape can hold one half of a surrogate pair."""
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def _shown(value: Any) -> str:
    return reprlib.repr(value)[:100]


@dataclass(frozen=True)
class Limits:
    """The range of a number, or of the length of a string, a tuple or a Mapping."""

    least: int
    most: int = MAX_INT


@dataclass(frozen=True)
class Pattern:
    """The form of a string, as a regular expression and in words."""

    regex: str
    meaning: str


T = TypeVar("T")
_SHA256 = Pattern("[0-9a-f]{64}", "64 hexadecimal digits")
Sha256 = Annotated[str, _SHA256]
"""A SHA-256 in hexadecimal."""
INLINE = {"json": "inline"}
NOT_SAVED = {"json": "not saved"}
OPTIONAL = {"json": "optional"}
NULL_IS_DEFAULT = {"json": "null is default"}
Natural = Annotated[int, Limits(0)]
Positive = Annotated[int, Limits(1)]
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
        if _has_default(each, source):
            continue
        hint, inline = hints[each.name], each.metadata.get("json") == "inline"
        values[each.name] = _record(hint, source, {}) if inline else _read(hint, source, _name(each))
    try:
        return kind(**values)
    except InputError as error:
        source.reject(str(error))


def _has_default(each: Field[Any], source: JsonFields) -> bool:
    """Whether a field has its default, because it is missing or null."""
    form, name = each.metadata.get("json"), _name(each)
    if not (source.lenient or form == "optional") or (
        each.default is MISSING and each.default_factory is MISSING
    ):
        return False
    return name not in source.data or (form == "null is default" and source.data[name] is None)


def _read(hint: Any, source: JsonFields, key: str) -> Any:
    """The value of a field, by its hint."""
    plain, arguments = get_origin(hint) or hint, get_args(hint)
    if plain is Annotated:
        return _annotated(arguments[0], arguments[1:], source, key)
    if plain is Any:
        return source.data[key] if key in source.data else source.fail(key, "is missing")
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
    if plain is list:
        return list(_tuple((*arguments, ...), source, key))
    if plain is Mapping or plain is dict:
        if arguments == (str, Any):
            return source.object(key).data
        nested = source.named(key)
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


def _annotated(plain: Any, rules: tuple[Any, ...], source: JsonFields, key: str) -> Any:
    if is_dataclass(rules[0]) and isinstance(rules[0], type):
        described = source.object(key)
        described.lenient = True
        from_json(rules[0], described)
        return described.data
    if plain is int and isinstance(rules[0], Limits):
        value: Any = source.integer(key, rules[0].least, rules[0].most)
        rules = rules[1:]
    else:
        value = _read(plain, source, key)
    for rule in rules:
        if isinstance(rule, Pattern):
            source.matching(key, rule)
        elif isinstance(rule, Limits):
            _check_size(value, rule, source, key)
        else:
            try:
                rule(value)
            except InputError as error:
                source.fail(key, str(error))
    return value


def _check_size(value: Any, limits: Limits, source: JsonFields, key: str) -> None:
    if isinstance(value, float):
        what, size = "be", value
    else:
        what, size = "have a length", len(value)
    if not limits.least <= size <= limits.most:
        source.fail(key[:64], f"must {what} from {limits.least} to {limits.most}, got {size}")


def _tuple(arguments: tuple[Any, ...], source: JsonFields, key: str) -> tuple[Any, ...]:
    nested = source.elements(key)
    hints = [arguments[0]] * len(nested.data) if arguments[1:] == (...,) else list(arguments)
    if len(nested.data) != len(hints):
        source.fail(key, f"must have {len(hints)} items")
    return tuple(_read(hint, nested, name) for hint, name in zip(hints, nested.data, strict=True))


def _key(hint: Any, source: JsonFields, name: str) -> Any:
    if get_origin(hint) is Annotated:
        hint, limits = get_args(hint)
        _check_size(name, limits, source, name)
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
