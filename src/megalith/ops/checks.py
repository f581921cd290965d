"""Input checks that the ops share.

Each function returns the checked value, or raises InputError with the argument's name and what it expects.
A shape is a tuple in which None stands for any size; the shape None accepts any shape.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megalith.bits import show_id_dtype
from megalith.errors import InputError
from megalith.library import native_module

_INTEGERS = (torch.int64, torch.int32)

Shape = Sequence[int | None] | None
Checked = TypeVar("Checked")


def integers(tensor: Any, name: str, shape: Shape = (None,)) -> Tensor:
    if not isinstance(tensor, Tensor) or tensor.dtype not in _INTEGERS:
        got = show_id_dtype(tensor.dtype) if isinstance(tensor, Tensor) else kind(tensor)
        raise InputError(f"{name} must be an int64 or int32 tensor, got {got}")
    return _shaped(tensor, name, shape)


def int64(tensor: Any, name: str, shape: Shape = (None,)) -> Tensor:
    return integers(tensor, name, shape).to(torch.int64)


def int64_vectors(tensors: Any, name: str) -> list[Tensor]:
    return [int64(each, f"{name}[{i}]") for i, each in enumerate(as_list(tensors, name))]


def splits(tensor: Any, name: str, size: int) -> Tensor:
    # tensor: int64 or int32 [rows + 1].
    cuts = int64(tensor, name)
    if cuts.shape[0] < 1:
        raise InputError(f"{name} must have the shape [rows + 1], got [0]")
    with_data(cuts, name)
    message = f"{name} must ascend from 0 to the number of values"
    native = native_module() if cuts.is_cpu and not torch.compiler.is_compiling() else None
    if native is None:
        require((cuts[0] == 0) & (cuts[-1] == size) & (cuts[1:] >= cuts[:-1]).all(), message)
    elif not native.ascends(cuts.contiguous(), size):
        raise InputError(message)
    return cuts


def floats(tensor: Any, name: str, shape: Shape) -> Tensor:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise InputError(f"{name} must be a float tensor, got {kind(tensor)}")
    return _shaped(tensor, name, shape)


def same_floats(tensors: Any, name: str) -> list[Tensor]:
    """Check a list of at least one float tensor, all of one dtype and of any shape."""
    items = as_list(tensors, name)
    if not items:
        raise InputError(f"{name} is empty; pass at least one tensor")
    for i, item in enumerate(items):
        if floats(item, f"{name}[{i}]", None).dtype != items[0].dtype:
            raise InputError(f"{name}[{i}] is {item.dtype}, {name}[0] is {items[0].dtype}: use one dtype")
    return items


def tensor(x: Any, name: str, shape: Shape) -> Tensor:
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a tensor, got {kind(x)}")
    return _shaped(x, name, shape)


def as_list(items: Any, name: str) -> list[Any]:
    if not isinstance(items, list | tuple):
        raise InputError(f"{name} must be a list, got {kind(items)}")
    return list(items)


def items(value: Any, name: str, of: str) -> list[Any]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping | Tensor):
        raise InputError(f"{name} must be a list of {of}, got {kind(value)}")
    return list(value)


def same_length(**lists: Sequence[Any]) -> None:
    lengths = {name: len(items) for name, items in lists.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise InputError(f"lists of different lengths: {counts}")


def integer(value: Any, name: str, least: int = 1, most: int | None = None) -> int:
    """Check an int of Python or numpy, or a symbolic one of torch.compile."""
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < least:
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} must be an integer {limits}, got {value!r}")
    if most is not None and value > most:
        raise InputError(f"{name} must be an integer from {least} to {most}, got {value!r}")
    return value  # type: ignore[return-value]


def scalar(value: Any, name: str) -> int:
    """Check an int of at least 0 that may be given as a tensor. Reading a tensor on a GPU waits for it."""
    # Inside torch.compile a negative tensor raises RuntimeError when the graph runs.
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_floating_point():
            raise InputError(f"{name} must be one integer, got a {kind(value)} tensor {list(value.shape)}")
        if torch.compiler.is_compiling():  # the value may be unknown: the check is a part of the graph
            require(value >= 0, f"{name} must be an integer of at least 0")
            value = int(value)
            torch._check(value >= 0)
            return value  # type: ignore[no-any-return]
        value = int(value)
    return integer(value, name, least=0)


def number(value: Any, name: str) -> Any:
    if isinstance(value, Tensor):
        good = value.dim() == 0 and not value.is_complex() and value.dtype != torch.bool
    else:
        good = isinstance(value, Real | torch.SymFloat | torch.SymInt) and not isinstance(value, bool)
    if not good:
        raise InputError(f"{name} must be one number, got {value!r}")
    return value


def as_integer(value: Any) -> int | None:
    """Convert an integer of Python, numpy or a 0-d tensor."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or (isinstance(value, Tensor) and not _is_scalar(value)):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def as_number(value: Any) -> float | None:
    """Convert a real number of Python, numpy or a 0-d tensor."""
    if type(value) is float:
        return value
    known = _is_scalar(value) if isinstance(value, Tensor) else isinstance(value, Real)
    if isinstance(value, bool) or not known:
        return None
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (OverflowError, TypeError, ValueError, RuntimeError):
        return None


def instance(value: Any, expected: type[Checked], name: str) -> Checked:
    if not isinstance(value, expected):
        raise InputError(f"{name} must be a {expected.__name__}, got {kind(value)}")
    return value


def callback(value: Any, name: str, *, required: bool = False) -> None:
    if not callable(value) and (required or value is not None):
        raise InputError(f"{name} must be a function, got {kind(value)}")


def one_of(value: Any, choices: Sequence[str], name: str) -> str:
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def mapping(value: Any, name: str, example: str) -> Mapping[str, Any]:
    """Check a dict with strings as keys. Its values are not checked."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{name} must be a dict such as {example}, got {kind(value)}")
    return value


def seconds(value: Any, name: str, *, zero: bool = False) -> float:
    """Check a finite number of seconds above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (0 < value < math.inf or (zero and value == 0)):
        limit = "of 0 or more" if zero else "above 0"
        raise InputError(f"{name} must be a number of seconds {limit}, got {value!r}")
    return value  # type: ignore[no-any-return]


def path(value: Any, name: str) -> Path:
    """Check the path of a file or directory, which need not exist."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise InputError(f"{name} must be a path, got {kind(value)}")
    return Path(value)


def text(value: Any, name: str, most: int | None = None) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} must be text, got {kind(value)}")
    if most is not None and not 0 < len(value) <= most:
        raise InputError(f"{name} must have 1 to {most} characters, got {len(value)}")
    return value


def flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {kind(value)}")
    return value


def with_data(tensor: Tensor, name: str) -> Tensor:
    """Check that the values of a tensor can be read: those of the meta device cannot."""
    if tensor.device.type == "meta":
        raise InputError(f"{name} is on the meta device, but its values are needed")
    return tensor


def sizes(items: Any, name: str, least: int = 1) -> list[int]:
    return [integer(item, f"{name}[{i}]", least) for i, item in enumerate(as_list(items, name))]


def require(condition: Tensor, message: str) -> None:
    """Raise unless every element of a condition is true."""
    # Inside torch.compile the check is part of the graph and raises RuntimeError with the same message.
    if torch.compiler.is_compiling():
        torch._assert_async(condition.all(), message)
        return
    if condition.device.type == "meta":
        raise InputError(f"{message}; tensors on the meta device have no values to check")
    if not bool(condition.all()):
        raise InputError(message)


def all_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or Inf."""
    # Testing the minimum and the maximum is several times as fast as `isfinite` on every value.
    return not values.numel() or all(bool(torch.isfinite(x)) for x in torch.aminmax(values))


def index_range(index: Tensor, low: int, high: int, name: str) -> None:
    """Raise unless every index is in a range. It reads the values, so on a GPU it waits."""
    if index.numel() == 0:
        return
    least, most = torch.aminmax(index)
    if int(least) < low or int(most) >= high:
        position = int(((index < low) | (index >= high)).flatten().nonzero()[0])
        value = int(index.flatten()[position])
        raise InputError(f"{name}[{position}] = {value} is out of range: expected 0 to {high - 1}")


def kind(x: Any) -> str:
    """Name the type of an argument, for error messages."""
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__


def _is_scalar(tensor: Tensor) -> bool:
    return tensor.dim() == 0 and tensor.dtype != torch.bool and not tensor.is_complex() and not tensor.is_meta


def _shaped(tensor: Tensor, name: str, shape: Shape) -> Tensor:
    if tensor.layout != torch.strided:
        raise InputError(f"{name} must be a dense tensor, got {tensor.layout}")
    if shape is None:
        return tensor
    matches = tensor.dim() == len(shape) and all(
        want is None or size == want for size, want in zip(tensor.shape, shape, strict=True)
    )
    if not matches:
        wanted = ", ".join("?" if want is None else str(want) for want in shape)
        raise InputError(f"{name} must have the shape [{wanted}], got {list(tensor.shape)}")
    return tensor
