"""Read the tensors of requests of the Open Inference Protocol, from raw or typed contents.

Requests are untrusted until validated.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.serving.proto.limits import (
    BITS,
    MAX_BYTES,
    POINTER_BYTES,
    checked_shape,
    tensor_of_bytes,
)
from megalith.serving.proto.message_types import Message
from megalith.serving.proto.tf_tensors import Strings

BYTES = "BYTES"
DATATYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.uint16: "UINT16",
    torch.uint32: "UINT32",
    torch.uint64: "UINT64",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FP16",
    torch.float32: "FP32",
    torch.float64: "FP64",
    torch.bfloat16: "BF16",
}
_TORCH = {datatype: dtype for dtype, datatype in DATATYPES.items()}
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


def from_infer_request(request: Message, *, max_bytes: int = MAX_BYTES) -> dict[str, Tensor | Strings]:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InputError(f"{len(raw)} raw_input_contents for {len(request.inputs)} inputs")
    left = max_bytes
    read: dict[str, Tensor | Strings] = {}
    for k, given in enumerate(request.inputs):
        name = f"input {given.name[:100]!r}"
        if given.name in read:
            raise InputError(f"{name} occurs twice")
        has_contents = given.HasField("contents") and given.contents.ListFields()
        if raw and has_contents:
            raise InputError(
                f"{name} has contents, and the request has raw_input_contents; send only one of them"
            )
        if raw:
            value = from_raw(given.datatype, given.shape, raw[k], name=name, max_bytes=left)
        else:
            values = _contents(given, name)
            value = from_values(given.datatype, given.shape, values, name=name, max_bytes=left)
        read[given.name] = value
        left -= value.nbytes if isinstance(value, Tensor) else value.size * POINTER_BYTES
    return read


def from_raw(
    datatype: str, shape: Sequence[int], data: bytes, *, name: str = "tensor", max_bytes: int = MAX_BYTES
) -> Tensor | Strings:
    """Convert raw contents to a tensor, or to an array of bytes objects for BYTES."""
    if datatype == BYTES:
        sizes = checked_shape(shape, POINTER_BYTES, max_bytes, name)
        return _cut(data, math.prod(sizes), name).reshape(sizes)
    dtype = _dtype(datatype, name)
    return tensor_of_bytes(data, dtype, checked_shape(shape, dtype.itemsize, max_bytes, name), name)


def from_values(
    datatype: str,
    shape: Sequence[int],
    values: Sequence[Any],
    *,
    name: str = "tensor",
    max_bytes: int = MAX_BYTES,
) -> Tensor | Strings:
    """Convert values of typed contents or of JSON to a tensor, or to an array of bytes objects for BYTES."""
    dtype = None if datatype == BYTES else _dtype(datatype, name)
    item_bytes = POINTER_BYTES if dtype is None else dtype.itemsize
    sizes = checked_shape(shape, item_bytes, max_bytes, name)
    if len(values) != math.prod(sizes):
        raise InputError(f"{name}: {len(values)} values, but shape {list(sizes)} takes {math.prod(sizes)}")
    if dtype is None:
        return _strings(values, name).reshape(sizes)
    return _tensor(list(values), dtype, name).reshape(sizes)


def datatype_of(value: Tensor | Strings | torch.dtype, name: str = "tensor") -> str:
    if isinstance(value, np.ndarray):
        return BYTES
    dtype = value.dtype if isinstance(value, Tensor) else value
    if dtype not in DATATYPES:
        raise InputError(f"{name}: the protocol does not have the type {dtype}")
    return DATATYPES[dtype]


def _contents(given: Message, name: str) -> Sequence[Any]:
    if given.datatype in ("FP16", "BF16"):
        raise InputError(f"{name}: {given.datatype} must be sent as raw_input_contents")
    if given.datatype not in _CONTENTS:
        raise InputError(f"{name}: datatype {given.datatype[:100]!r} is unknown")
    expected = _CONTENTS[given.datatype]
    filled = [field.name for field, _ in given.contents.ListFields()]
    if filled not in ([], [expected]):
        raise InputError(f"{name}: {given.datatype} must be in {expected}; found {', '.join(filled)}")
    values: Sequence[Any] = getattr(given.contents, expected)
    return values


def _tensor(values: list[Any], dtype: torch.dtype, name: str) -> Tensor:
    """Convert Python numbers to a flat tensor; raise InputError if one has another type or is too large."""
    kinds = {bool} if dtype == torch.bool else {int, float} if dtype.is_floating_point else {int}
    if not kinds.issuperset(map(type, values)):
        raise InputError(f"{name}: values are not all {DATATYPES[dtype]}")
    if dtype.is_floating_point:
        try:
            return torch.from_numpy(np.array(values, np.float64)).to(dtype)
        except OverflowError:
            raise InputError(f"{name}: a value is too large for {DATATYPES[dtype]}") from None
    if dtype != torch.bool and values:
        limits = torch.iinfo(dtype)
        for value in (min(values), max(values)):
            if not limits.min <= value <= limits.max:
                raise InputError(f"{name}: {value} is not within {limits.min} .. {limits.max}")
    return torch.from_numpy(np.array(values, BITS[dtype]))


def _strings(values: Sequence[Any], name: str) -> Strings:
    if not all(isinstance(value, bytes) for value in values):
        raise InputError(f"{name}: values are not all bytes")
    out = np.empty(len(values), dtype=object)
    out[:] = list(values)
    return out


def _cut(data: bytes, count: int, name: str) -> Strings:
    """Split length-prefixed elements; raise InputError unless there are exactly `count`."""
    if len(data) < 4 * count:
        raise InputError(f"{name}: {len(data)} bytes cannot hold {count} elements of BYTES")
    out = np.empty(count, dtype=object)
    at = 0
    for k in range(count):
        if len(data) - at < 4:
            raise InputError(f"{name}: BYTES end in element {k} of {count}")
        (length,) = struct.unpack_from("<I", data, at)
        at += 4
        if len(data) - at < length:
            raise InputError(f"{name}: BYTES element {k} has {length} bytes, but {len(data) - at} are left")
        out[k] = data[at : at + length]
        at += length
    if at != len(data):
        raise InputError(f"{name}: {len(data) - at} bytes follow the {count} elements of BYTES")
    return out


def _dtype(datatype: str, name: str) -> torch.dtype:
    if datatype not in _TORCH:
        raise InputError(f"{name}: datatype {datatype[:100]!r} is unknown; use one of {', '.join(_TORCH)}")
    return _TORCH[datatype]
