"""Limits on the tensors of a message, checked before memory is allocated.

The shape of a tensor is a few bytes that can ask for any amount of memory. Shapes are checked against the
size of their elements; an empty dimension counts as one, so that no product or stride overflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.errors import InputError
from megalith.library import MessageBuffers, native_module
from megalith.serving.wire_names import MAX_REQUEST_BYTES

MAX_BYTES = MAX_REQUEST_BYTES
"""Default maximum total size of the tensors of one request."""
MAX_RANK = 32
POINTER_BYTES = 8
"""Size of a string in addition to its own bytes, which are in the message already."""

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
"""The dtypes that can be sent, and the numpy type that holds their bits."""


def checked_shape(sizes: Sequence[int], item_bytes: int, max_bytes: int, name: str) -> tuple[int, ...]:
    if len(sizes) > MAX_RANK:
        raise InputError(f"{name}: the shape has more than {MAX_RANK} dimensions")
    shape = tuple(sizes)
    if any(size < 0 for size in shape):
        raise InputError(f"{name}: shape {list(shape)} has a negative size")
    if math.prod(max(size, 1) for size in shape) * item_bytes > max_bytes:
        raise InputError(
            f"{name}: shape {list(shape)} with {item_bytes} bytes per element exceeds the {max_bytes} "
            "bytes left for this request; send fewer rows at a time"
        )
    return shape


def tensor_of_bytes(
    data: bytes | memoryview,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    name: str,
    buffers: MessageBuffers | None = None,
) -> Tensor:
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise InputError(f"{name}: {len(data)} bytes, but {_kind(dtype)} {list(shape)} takes {expected}")
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if dtype == torch.bool:
        # A byte other than 0 and 1 would make a bool that is neither true nor false.
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).ne(0).reshape(shape)
    if buffers is None:
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    native = native_module()
    if native is not None and isinstance(data, memoryview):
        array = native.view_array(data)
        if array.ctypes.data % dtype.itemsize == 0:
            return torch.from_numpy(array).view(dtype).reshape(shape)
    copy = buffers.new(len(data))
    np.copyto(copy.numpy(), np.frombuffer(data, dtype=np.uint8))
    return copy.view(dtype).reshape(shape)


def bytes_of_tensor(tensor: Tensor, name: str) -> bytes:
    if tensor.dtype not in BITS:
        raise InputError(f"{name}: {_kind(tensor.dtype)} cannot be sent; use one of {', '.join(_kinds())}")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def tensor_of_bits(bits: NDArray[np.generic], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    flat = torch.from_numpy(np.ascontiguousarray(bits))
    if dtype in (torch.float16, torch.bfloat16):
        flat = flat.view(dtype)
    return flat.reshape(shape)


def in_range(values: NDArray[np.generic], target: type[np.generic], name: str) -> NDArray[np.generic]:
    """Convert integers to a narrower type."""
    low, high = np.iinfo(target).min, np.iinfo(target).max  # type: ignore[type-var]
    wrong = (values < low) | (values > high)  # type: ignore[operator]
    if wrong.any():
        raise InputError(f"{name}: {values[wrong][0]} is not within {low} .. {high}")
    return values.astype(target)


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kinds() -> list[str]:
    return sorted(map(_kind, BITS))
