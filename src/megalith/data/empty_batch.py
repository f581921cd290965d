"""Empty batches: the columns of a batch as JSON, and a batch with zero rows made from it.

The JSON holds names, dtypes and widths, no data. It comes from another process and is validated.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from megalith.data.batch import Batch
from megalith.errors import InputError
from megalith.ragged import Ragged
from megalith.storage.json_codec import parse_json

_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
    )
}
_MAX_DIMS, _MAX_WIDTH = 8, 1 << 31
_COLUMNS = ("labels", "dense", "weights")


def describe(batch: Batch) -> bytes:
    """Return the columns of a batch as JSON: {"features": {name: {"values", "weights"}}, "labels", ...}."""
    # A column is [dtype, widths after the first dimension], or null if the batch does not have it.
    features = {
        name: {"values": _column(ragged.values), "weights": _column(ragged.weights)}
        for name, ragged in batch.features.items()
    }
    return json.dumps({"features": features, **{c: _column(getattr(batch, c)) for c in _COLUMNS}}).encode()


def make_empty_batch(text: bytes, *, where: str) -> Batch:
    """Return a batch with zero rows and the described columns, on the CPU, without time and position."""
    try:
        found = parse_json(text)
        features = {
            str(name): Ragged(
                _required(each["values"]),
                torch.zeros(1, dtype=torch.int64, device="cpu"),
                _empty(each["weights"]),
            )
            for name, each in found["features"].items()
        }
        return Batch(features, _required(found["labels"]), _empty(found["dense"]), _empty(found["weights"]))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise InputError(f"{where} sent an invalid description of the columns of a batch: {error}") from None


def _column(column: Tensor | None) -> list[Any] | None:
    return None if column is None else [str(column.dtype).removeprefix("torch."), list(column.shape[1:])]


def _required(column: Any) -> Tensor:
    made = _empty(column)
    if made is None:
        raise ValueError("a required column is missing")
    return made


def _empty(column: Any) -> Tensor | None:
    if column is None:
        return None
    name, widths = column
    if not isinstance(widths, list) or len(widths) > _MAX_DIMS:
        raise ValueError(f"widths must be a list of at most {_MAX_DIMS} integers")
    for width in widths:
        if type(width) is not int or not 0 <= width <= _MAX_WIDTH:
            raise ValueError(f"a width must be an integer from 0 to {_MAX_WIDTH}, got {width!r}")
    if name not in _TYPES:
        raise ValueError(f"unknown dtype {name!r}")
    return torch.empty(0, *widths, dtype=_TYPES[name], device="cpu")
