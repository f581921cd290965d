"""Checks that ops share: every message names the argument and says what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.library import native_module

_INTEGERS = (torch.int64, torch.int32)


def integers(tensor: Any, name: str, shape: Sequence[int | None] | None = (None,)) -> Tensor:
    """An int64 or int32 tensor of this shape (None in it: any size; None: any shape)."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in _INTEGERS:
        raise InputError(f"{name} must be an int64 or int32 tensor, got {kind(tensor)}")
    return _shaped(tensor, name, shape)


def whole(tensor: Any, name: str, shape: Sequence[int | None] | None = (None,)) -> Tensor:
    """An int64 tensor of this shape from an int64 or int32 one."""
    return integers(tensor, name, shape).to(torch.int64)


def splits(tensor: Any, name: str, size: int) -> Tensor:
    """int64 [rows + 1] that ascend from 0 to `size`."""
    cuts = whole(tensor, name)
    if cuts.shape[0] < 1:
        raise InputError(f"{name} must have the shape [rows + 1], got [0]")
    message = f"{name} must ascend from 0 to the number of values"
    native = native_module() if cuts.is_cpu and not torch.compiler.is_compiling() else None
    if native is None:
        require((cuts[0] == 0) & (cuts[-1] == size) & (cuts[1:] >= cuts[:-1]).all(), message)
    elif not native.ascends(cuts.contiguous(), size):
        raise InputError(message)
    return cuts


def floats(tensor: Any, name: str, shape: Sequence[int | None] | None) -> Tensor:
    """A float tensor of this shape (None in it: any size; None: any shape)."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise InputError(f"{name} must be a float tensor, got {kind(tensor)}")
    return _shaped(tensor, name, shape)


def tensor(x: Any, name: str, shape: Sequence[int | None] | None) -> Tensor:
    """A tensor of any type and this shape (None in it: any size; None: any shape)."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a tensor, got {kind(x)}")
    return _shaped(x, name, shape)


def tensors(items: Any, name: str) -> list[Any]:
    """A list from a list or tuple."""
    if not isinstance(items, list | tuple):
        raise InputError(f"{name} must be a list, got {kind(items)}")
    return list(items)


def same_length(**lists: Sequence[Any]) -> None:
    """Raises unless the lists have one length."""
    lengths = {name: len(items) for name, items in lists.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise InputError(f"lists of different lengths: {told}")


def positive(value: Any, name: str, least: int = 1) -> int:
    """A whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value  # type: ignore[return-value]


def sizes(items: Any, name: str, least: int = 1) -> list[int]:
    """A list of whole numbers of at least `least` from a list or tuple."""
    return [positive(item, f"{name}[{i}]", least) for i, item in enumerate(tensors(items, name))]


def require(condition: Tensor, message: str) -> None:
    """Raises InputError unless every element of the condition is true.

    Inside torch.compile the check stays in the graph and raises RuntimeError with the same message.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(condition.all(), message)
    elif not bool(condition.all()):
        raise InputError(message)


def all_finite(values: Tensor) -> bool:
    """Whether there is no NaN and no Inf; several times as fast as isfinite, since extremes show them."""
    return not values.numel() or all(bool(torch.isfinite(x)) for x in torch.aminmax(values))


def index_range(index: Tensor, low: int, high: int, name: str) -> None:
    """Raises InputError unless every index lies in low:high."""
    if index.numel() == 0:
        return
    least, most = torch.aminmax(index)
    if int(least) < low or int(most) >= high:
        position = int(((index < low) | (index >= high)).flatten().nonzero()[0])
        value = int(index.flatten()[position])
        raise InputError(f"{name}[{position}] = {value} is out of range: expected 0 to {high - 1}")


def kind(x: Any) -> str:
    """What a message calls a wrong argument."""
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__


def _shaped(tensor: Tensor, name: str, shape: Sequence[int | None] | None) -> Tensor:
    if tensor.layout != torch.strided:
        raise InputError(f"{name} must be a dense tensor, got {tensor.layout}")
    if shape is None:
        return tensor
    fits = tensor.dim() == len(shape) and all(
        want is None or size == want for size, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("?" if want is None else str(want) for want in shape)
        raise InputError(f"{name} must have the shape [{wanted}], got {list(tensor.shape)}")
    return tensor
