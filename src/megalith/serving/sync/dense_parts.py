"""Dense weights that do not fit into one message: they are sent in parts, and used when all have arrived.

    input              | value
    -------------------+---------------------------------------------------------------------------
    dense_part:{name}  | consecutive elements of the weight in row-major order, [k], in its own dtype
    dense_begin:{name} | the number of elements before them, int64 [1]

The parts of a weight arrive in order, from 0 on; a part that begins at 0 starts the weight again. A part that
does not follow the one before it is refused, and a weight of which a part is missing is never used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.serving.proto.tf_tensors import Strings

PART, BEGIN = "dense_part:", "dense_begin:"


@dataclass(frozen=True)
class DensePart:
    """Consecutive elements of a dense weight."""

    begin: int  # The number of elements before them
    values: Tensor  # The elements, [k]


def split_weight(name: str, weight: Tensor, room: int) -> Iterator[dict[str, Tensor]]:
    """Divide a weight into parts."""
    flat = weight.reshape(-1)
    step = max(1, room // flat.element_size())
    for begin in range(0, flat.numel(), step):
        yield {
            f"{PART}{name}": flat[begin : begin + step],
            f"{BEGIN}{name}": torch.tensor([begin], device="cpu"),
        }


def read_parts(left: dict[str, Tensor | Strings], names: Mapping[str, object]) -> dict[str, DensePart]:
    """Validate the parts of a message, and remove their inputs from `left`."""
    parts = {}
    for name in names:
        values, begin = left.pop(f"{PART}{name}", None), left.pop(f"{BEGIN}{name}", None)
        if values is None and begin is None:
            continue
        if not isinstance(values, Tensor) or values.dim() != 1 or not values.numel():
            raise InputError(f"input {PART + name!r} must be a tensor [k] of at least one element")
        if (
            not isinstance(begin, Tensor)
            or begin.dtype != torch.int64
            or begin.numel() != 1
            or int(begin) < 0
        ):
            raise InputError(f"input {BEGIN + name!r} must be one int64 of 0 or more")
        parts[name] = DensePart(int(begin), values)
    return parts


class DenseAssembly:
    """The weights of one publisher of which some parts have arrived. Not safe to share between threads."""

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}
        self._filled: dict[str, int] = {}

    def check(self, parts: Mapping[str, DensePart], known: Mapping[str, Tensor]) -> None:
        """Raise unless parts follow those before them; change nothing."""
        for name, part in parts.items():
            like, count = known[name], part.values.numel()
            if part.values.dtype != like.dtype:
                raise InputError(f"dense weight {name!r}: a part is {part.values.dtype}, not {like.dtype}")
            if part.values.is_floating_point() and not bool(torch.isfinite(part.values).all()):
                raise InputError(f"dense weight {name!r}: a part holds NaN or Inf")
            begun = self._weights.get(name)
            same = begun is not None and (begun.dtype, begun.numel()) == (like.dtype, like.numel())
            expected = self._filled[name] if same else 0
            if part.begin not in (0, expected):
                raise InputError(
                    f"dense weight {name!r}: a part begins at element {part.begin}, not at {expected}"
                )
            if count > like.numel() - part.begin:
                raise InputError(f"dense weight {name!r}: its parts have more than {like.numel()} elements")

    def add(self, parts: Mapping[str, DensePart], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add parts that passed `check`."""
        complete = {}
        for name, part in parts.items():
            like, end = known[name], part.begin + part.values.numel()
            if part.begin == 0:
                self._weights[name] = torch.empty(like.numel(), dtype=like.dtype, device="cpu")
            self._weights[name][part.begin : end] = part.values
            self._filled[name] = end
            if end == like.numel():
                complete[name] = self._weights.pop(name).view(like.shape)
                del self._filled[name]
        return complete

    def check_last(self, parts: Mapping[str, DensePart], known: Mapping[str, Tensor]) -> None:
        """Raise unless all weights are complete with the parts of a message; change nothing."""
        missing = set(self._weights) - set(parts)
        missing |= {n for n, part in parts.items() if part.begin + part.values.numel() < known[n].numel()}
        if missing:
            raise InputError(f"dense weight {min(missing)!r}: the interval ends before its last part")
