"""Limits: what a message may claim before memory is given to it.

A tensor's shape is a few bytes that may ask for any amount of memory. Shapes are checked here against the
bytes their elements would take, empty dimensions counted as one so that no product or stride overflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.errors import InputError
from megalith.serving.wire_names import MAX_REQUEST_BYTES

MAX_BYTES = MAX_REQUEST_BYTES
"""What the tensors of one request may take, unless told otherwise."""
MAX_RANK = 32
POINTER_BYTES = 8
"""What a string counts for beside its own bytes, which are in the message already."""

BITS: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.bool: np.bool_,
    torch.float16: np.uint16,
    torch.bfloat16: np.uint16,
}
"""The types that travel, and the numpy type that holds their bits."""


def checked_shape(sizes: Sequence[int], item_bytes: int, max_bytes: int, name: str) -> tuple[int, ...]:
    """The sizes as a shape; raises InputError unless its elements fit into max_bytes."""
    if len(sizes) > MAX_RANK:
        raise InputError(f"{name}: a shape of more than {MAX_RANK} dimensions")
    shape = tuple(sizes)
    if any(size < 0 for size in shape):
        raise InputError(f"{name}: shape {list(shape)} has a negative size")
    if math.prod(max(size, 1) for size in shape) * item_bytes > max_bytes:
        raise InputError(
            f"{name}: shape {list(shape)} with {item_bytes} bytes an element is more than the {max_bytes} "
            "bytes left to this request; send fewer rows at a time"
        )
    return shape


def tensor_of_bytes(
    data: bytes | memoryview, dtype: torch.dtype, shape: tuple[int, ...], name: str
) -> Tensor:
    """Little-endian elements in row-major order as a tensor of its own memory."""
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise InputError(f"{name}: {len(data)} bytes, but {_kind(dtype)} {list(shape)} takes {expected}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    if dtype == torch.bool:
        # A byte other than 0 and 1 would be a bool that is neither true nor false.
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).ne(0).reshape(shape)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def bytes_of_tensor(tensor: Tensor, name: str) -> bytes:
    """A tensor's elements, little-endian, row-major; raises InputError for types that do not travel."""
    if tensor.dtype not in BITS:
        raise InputError(f"{name}: {_kind(tensor.dtype)} cannot be sent; use one of {', '.join(_kinds())}")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def tensor_of_bits(bits: NDArray[np.generic], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """An array of `BITS[dtype]` as a tensor; half precisions are given as their bits."""
    flat = torch.from_numpy(np.ascontiguousarray(bits))
    if dtype in (torch.float16, torch.bfloat16):
        flat = flat.view(dtype)
    return flat.reshape(shape)


def in_range(values: NDArray[np.generic], target: type[np.generic], name: str) -> NDArray[np.generic]:
    """Whole numbers as a narrower type; raises InputError for one that does not fit."""
    low, high = np.iinfo(target).min, np.iinfo(target).max  # type: ignore[type-var]
    wrong = (values < low) | (values > high)  # type: ignore[operator]
    if wrong.any():
        raise InputError(f"{name}: {values[wrong][0]} is not within {low} .. {high}")
    return values.astype(target)


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kinds() -> list[str]:
    return sorted(map(_kind, BITS))
