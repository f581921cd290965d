"""Blank batches: the columns of a batch as JSON, and a batch of no rows made from it.

What travels is names, types and widths, never data. The text comes from another process and is checked.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from megalith.data.batch import Batch
from megalith.errors import InputError
from megalith.ragged import Ragged

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
    """The columns of a batch: {"features": {name: {"values", "weights"}}, "labels", "dense", "weights"}.

    A column is [type, widths after the first dimension], or null if the batch has none.
    """
    features = {
        name: {"values": _column(ragged.values), "weights": _column(ragged.weights)}
        for name, ragged in batch.features.items()
    }
    return json.dumps({"features": features, **{c: _column(getattr(batch, c)) for c in _COLUMNS}}).encode()


def make_empty_batch(text: bytes, *, where: str) -> Batch:
    """A batch of no rows with the columns described, on the CPU; its time is None, its position empty.

    where: who sent it, for messages. Raises InputError if it is no description.
    """
    try:
        found = json.loads(text)
        features = {
            str(name): Ragged(
                _required(each["values"]), torch.zeros(1, dtype=torch.int64), _empty(each["weights"])
            )
            for name, each in found["features"].items()
        }
        return Batch(features, _required(found["labels"]), _empty(found["dense"]), _empty(found["weights"]))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise InputError(f"{where} sent something else than the columns of a batch: {error}") from None


def _column(column: Tensor | None) -> list[Any] | None:
    return None if column is None else [str(column.dtype).removeprefix("torch."), list(column.shape[1:])]


def _required(column: Any) -> Tensor:
    made = _empty(column)
    if made is None:
        raise ValueError("a column that every batch has is missing")
    return made


def _empty(column: Any) -> Tensor | None:
    if column is None:
        return None
    name, widths = column
    if not isinstance(widths, list) or len(widths) > _MAX_DIMS:
        raise ValueError(f"{widths!r} are no widths")
    for width in widths:
        if type(width) is not int or not 0 <= width <= _MAX_WIDTH:
            raise ValueError(f"{width!r} is no width")
    if name not in _TYPES:
        raise ValueError(f"{name!r} is no type of a column")
    return torch.empty(0, *widths, dtype=_TYPES[name])
