"""Optimizer state and random number generators as JSON data: how they are stored without pickle.

Nested Python data become JSON data plus named tensors:

| Python | JSON |
| --- | --- |
| None, bool, int, str | as it is |
| float | {"float": hexadecimal text} (exact, infinities included) |
| list | a list |
| tuple | {"tuple": a list} |
| dict | {"dict": a list of [key, value]} |
| Tensor | {"tensor": its name among the tensors} |

The state of the generators is saved so that a resumed run draws the numbers of an uninterrupted one.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.errors import CheckpointError, InputError


def pack(data: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split nested data into JSON data and tensors."""
    tensors: dict[str, Tensor] = {}
    return _pack(data, "", tensors), tensors


def unpack(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Restore the data that was given to `pack`."""
    if isinstance(data, list):
        return [unpack(x, tensors) for x in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise CheckpointError(f"optimizer state: an object must have one field, not {len(data)}")
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
    raise CheckpointError(f"optimizer state: {kind!r} is not a known kind of value")


def _float(text: str) -> float:
    try:
        return float.fromhex(text)
    except (ValueError, OverflowError):
        raise CheckpointError(f"optimizer state: {text!r} is not a float") from None


def _key(key: Any) -> Any:
    if isinstance(key, str | int):
        return key
    raise CheckpointError(f"optimizer state: {key!r} cannot be a key")


def _pack(data: Any, at: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(data, Tensor):
        name = at.lstrip(".") or "value"
        tensors[name] = data.detach()
        return {"tensor": name}
    if isinstance(data, float):
        return {"float": data.hex()}
    if data is None or isinstance(data, bool | int | str):
        return data
    if isinstance(data, list):
        return [_pack(x, f"{at}.{i}", tensors) for i, x in enumerate(data)]
    if isinstance(data, tuple):
        return {"tuple": [_pack(x, f"{at}.{i}", tensors) for i, x in enumerate(data)]}
    if isinstance(data, dict):
        for key in data:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise InputError(
                    f"state at {at or 'the top'} has the key {key!r}; keys must be strings or integers"
                )
        return {"dict": [[k, _pack(v, f"{at}.{k}", tensors)] for k, v in data.items()]}
    raise InputError(f"state at {at or 'the top'} contains a {type(data).__name__}, which cannot be saved")


def rng_state() -> dict[str, Any]:
    """Return the state of torch's CPU generator and of Python's `random` as JSON data.

    Pass it to `save(progress=...)`.
    """
    version, numbers, gauss = random.getstate()
    state = torch.get_rng_state().numpy().tobytes()
    return {"torch": base64.b64encode(state).decode(), "python": [version, list(numbers), gauss]}


def set_rng_state(state: dict[str, Any]) -> None:
    """Set both generators to a state.

    Args:
        state: The result of `rng_state`.

    Raises:
        CheckpointError: The data is not such a state.
    """
    try:
        raw = bytearray(base64.b64decode(state["torch"], validate=True))
        version, numbers, gauss = state["python"]
        torch.set_rng_state(torch.frombuffer(raw, dtype=torch.uint8))
        random.setstate((version, tuple(numbers), gauss))
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"not a state of random number generators: {error}") from None
