"""Nested Python data as JSON plus named tensors: how optimizer state is stored without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megalith.errors import CheckpointError, InputError


def pack(data: Any) -> tuple[Any, dict[str, Tensor]]:
    """JSON-able data and the tensors taken out of it.

    Takes None, bool, int, float, str, lists, tuples, dicts with str or int keys, and tensors; anything else
    raises InputError naming the place.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(data, "", tensors), tensors


def unpack(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack` was given."""
    if isinstance(data, list):
        return [unpack(x, tensors) for x in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise CheckpointError(f"optimizer state: an object of {len(data)} fields has no meaning")
    ((kind, value),) = data.items()
    if kind == "tensor" and isinstance(value, str):
        if value not in tensors:
            raise CheckpointError(f"optimizer state: tensor {value!r} is missing")
        return tensors[value]
    if kind == "tuple" and isinstance(value, list):
        return tuple(unpack(x, tensors) for x in value)
    if kind == "float" and isinstance(value, str):
        return _float(value)
    if kind == "dict" and isinstance(value, list) and all(isinstance(p, list) and len(p) == 2 for p in value):
        return {_key(k): unpack(v, tensors) for k, v in value}
    raise CheckpointError(f"optimizer state: {kind!r} has no meaning")


def _float(text: str) -> float:
    try:
        return float.fromhex(text)
    except (ValueError, OverflowError):
        raise CheckpointError(f"optimizer state: {text!r} is no float") from None


def _key(key: Any) -> Any:
    if isinstance(key, str | int):
        return key
    raise CheckpointError(f"optimizer state: {key!r} is no key")


def _pack(data: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(data, Tensor):
        name = place.lstrip(".") or "value"
        tensors[name] = data.detach().clone()
        return {"tensor": name}
    if isinstance(data, float):
        return {"float": data.hex()}  # exact, infinities included
    if data is None or isinstance(data, bool | int | str):
        return data
    if isinstance(data, list):
        return [_pack(x, f"{place}.{i}", tensors) for i, x in enumerate(data)]
    if isinstance(data, tuple):
        return {"tuple": [_pack(x, f"{place}.{i}", tensors) for i, x in enumerate(data)]}
    if isinstance(data, dict):
        for key in data:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise InputError(f"state at {place or 'the top'} has a key {key!r}; keys are text or numbers")
        return {"dict": [[k, _pack(v, f"{place}.{k}", tensors)] for k, v in data.items()]}
    raise InputError(f"state at {place or 'the top'} holds a {type(data).__name__}, which cannot be saved")
