"""JSON of files that nobody vouches for: one meaning, or an error.

Stricter than `json.loads`: no NaN, no key twice in an object, no nesting that later code would stumble over.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

MAX_DEPTH = 100


def parse_json(text: str | bytes) -> Any:
    """The data. Raises ValueError saying what is wrong with the text."""
    try:
        text = text if isinstance(text, str) else text.decode()
        data = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_distinct)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    _check_depth(data)
    return data


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("an object has a key twice")
    return data


def _check_depth(data: Any) -> None:
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [x for each in level if isinstance(each, dict | list) for x in _inside(each)]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def _inside(data: dict[str, Any] | list[Any]) -> list[Any]:
    return list(data.values()) if isinstance(data, dict) else data
