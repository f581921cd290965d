"""Convert tensors to TensorFlow's TensorProto and back.

Tensors are written as `tensor_content`, or to the typed field of the dtype. They are read from either, by
TensorFlow's rules: if there are too few typed values, the last one is repeated; without values, all are zero.
Messages are untrusted until validated: the result is a tensor of at most `max_bytes`, or an InputError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.errors import InputError
from megalith.library import MessageBuffers
from megalith.serving.proto.limits import (
    BITS,
    MAX_BYTES,
    MAX_RANK,
    POINTER_BYTES,
    bytes_of_tensor,
    checked_shape,
    in_range,
    tensor_of_bits,
    tensor_of_bytes,
)
from megalith.serving.proto.message_types import DataType, Message, TensorInfo, TensorProto

Strings = NDArray[np.object_]
"""An array of bytes objects."""

DTYPES: dict[torch.dtype, int] = {
    torch.float32: DataType.DT_FLOAT,
    torch.float64: DataType.DT_DOUBLE,
    torch.float16: DataType.DT_HALF,
    torch.bfloat16: DataType.DT_BFLOAT16,
    torch.int8: DataType.DT_INT8,
    torch.int16: DataType.DT_INT16,
    torch.int32: DataType.DT_INT32,
    torch.int64: DataType.DT_INT64,
    torch.uint8: DataType.DT_UINT8,
    torch.uint16: DataType.DT_UINT16,
    torch.uint32: DataType.DT_UINT32,
    torch.uint64: DataType.DT_UINT64,
    torch.bool: DataType.DT_BOOL,
}
_NUMPY = {str(dtype).removeprefix("torch."): number for dtype, number in DTYPES.items()}
_TORCH = {number: dtype for dtype, number in DTYPES.items()}
_FIELDS = {
    DataType.DT_FLOAT: "float_val",
    DataType.DT_DOUBLE: "double_val",
    DataType.DT_HALF: "half_val",
    DataType.DT_BFLOAT16: "half_val",
    DataType.DT_INT8: "int_val",
    DataType.DT_INT16: "int_val",
    DataType.DT_INT32: "int_val",
    DataType.DT_INT64: "int64_val",
    DataType.DT_UINT8: "int_val",
    DataType.DT_UINT16: "int_val",
    DataType.DT_UINT32: "uint32_val",
    DataType.DT_UINT64: "uint64_val",
    DataType.DT_BOOL: "bool_val",
    DataType.DT_STRING: "string_val",
}


def to_tensor_proto(tensor: Tensor) -> Message:
    content = bytes_of_tensor(tensor, "tensor")
    proto = TensorProto(dtype=DTYPES[tensor.dtype], tensor_content=content)
    _set_shape(proto, tensor.shape)
    return proto


def fill_tensor_proto(proto: Message, array: NDArray[np.generic], *, typed: bool) -> None:
    """Write an array to an empty TensorProto."""
    dtype = _NUMPY[array.dtype.name]
    proto.dtype = dtype
    _set_shape(proto, array.shape)
    if not typed:
        proto.tensor_content = array.tobytes()
    elif dtype in (DataType.DT_FLOAT, DataType.DT_DOUBLE):
        # A packed field of floats is its tag, its length and the elements as they are in memory.
        data = array.tobytes()
        field = TensorProto.DESCRIPTOR.fields_by_name[_FIELDS[dtype]].number
        proto.MergeFromString(field_prefix(field, len(data)) + data)
    else:
        getattr(proto, _FIELDS[dtype]).extend(array.reshape(-1).tolist())


def field_prefix(number: int, length: int) -> bytes:
    """Encode the key and the length of a length-delimited protobuf field; its payload follows them."""
    return bytes((number << 3 | 2,)) + varint_bytes(length)


def varint_bytes(number: int) -> bytes:
    number &= (1 << 64) - 1  # of two's complement
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def from_tensor_proto(
    proto: Message,
    *,
    name: str = "tensor",
    max_bytes: int = MAX_BYTES,
    content: memoryview | None = None,
    buffers: MessageBuffers | None = None,
) -> Tensor:
    number = proto.dtype
    if number not in _TORCH:
        hint = "; read it with strings_from_tensor_proto" if number == DataType.DT_STRING else ""
        raise InputError(f"{name}: dtype {_dtype_name(number)} cannot be a tensor{hint}")
    dtype = _TORCH[DataType(number)]
    shape = _shape(proto, dtype.itemsize, max_bytes, name)
    field, values = _only_field(proto, name, content)
    if field == "tensor_content":
        return tensor_of_bytes(values, dtype, shape, name, buffers)
    bits = BITS[dtype]
    if field in ("int_val", "half_val"):
        given = in_range(np.fromiter(values, np.int32, len(values)), bits, name)
    else:
        given = np.fromiter(values, bits, len(values))
    return tensor_of_bits(_filled(given, math.prod(shape), name), dtype, shape)


def from_tensor_protos(
    protos: Mapping[str, Message],
    *,
    max_bytes: int = MAX_BYTES,
    contents: Mapping[str, memoryview] = MappingProxyType({}),
    buffers: MessageBuffers | None = None,
) -> dict[str, Tensor | Strings]:
    left = max_bytes
    read: dict[str, Tensor | Strings] = {}
    for name in sorted(protos):
        proto, shown, content = protos[name], f"input {name[:100]!r}", contents.get(name)
        if proto.dtype == DataType.DT_STRING and content is None:
            strings = strings_from_tensor_proto(proto, name=shown, max_bytes=left)
            left -= strings.size * POINTER_BYTES
            read[name] = strings
        else:
            tensor = from_tensor_proto(proto, name=shown, max_bytes=left, content=content, buffers=buffers)
            left -= tensor.numel() * tensor.element_size()
            read[name] = tensor
    return read


def strings_to_tensor_proto(strings: Strings | Sequence[bytes]) -> Message:
    array = np.asarray(strings, dtype=object)
    flat = array.reshape(-1).tolist()
    for value in flat:
        if not isinstance(value, bytes):
            raise InputError(f"strings must be bytes, got {type(value).__name__}; encode them first")
    proto = TensorProto(dtype=DataType.DT_STRING, string_val=flat)
    _set_shape(proto, array.shape)
    return proto


def strings_from_tensor_proto(proto: Message, *, name: str = "tensor", max_bytes: int = MAX_BYTES) -> Strings:
    """Convert a TensorProto of DT_STRING to an array of bytes objects."""
    if proto.dtype != DataType.DT_STRING:
        raise InputError(f"{name}: dtype {_dtype_name(proto.dtype)} is not DT_STRING")
    shape = _shape(proto, POINTER_BYTES, max_bytes, name)
    if _only_field(proto, name)[0] == "tensor_content":
        raise InputError(f"{name}: strings must be in string_val, not in tensor_content")
    given = np.empty(len(proto.string_val), dtype=object)
    given[:] = list(proto.string_val)
    count = math.prod(shape)
    if count and not len(given):
        return np.full(shape, b"", dtype=object)
    return _filled(given, count, name).reshape(shape)


def tensor_info(name: str, dtype: torch.dtype | None, shape: Iterable[int | None]) -> Message:
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"{name}: TensorFlow does not have the dtype {dtype}")
    info = TensorInfo(name=name, dtype=DataType.DT_STRING if dtype is None else DTYPES[dtype])
    info.tensor_shape.SetInParent()
    for size in shape:
        info.tensor_shape.dim.add(size=-1 if size is None else size)
    return info


def _set_shape(proto: Message, shape: Sequence[int]) -> None:
    proto.tensor_shape.SetInParent()  # a scalar has an empty shape
    for size in shape:
        proto.tensor_shape.dim.add(size=size)


def _shape(proto: Message, item_bytes: int, max_bytes: int, name: str) -> tuple[int, ...]:
    if proto.tensor_shape.unknown_rank:
        raise InputError(f"{name}: the shape is unknown; a request needs the shape of each tensor")
    sizes = [dim.size for dim in proto.tensor_shape.dim[: MAX_RANK + 1]]
    return checked_shape(sizes, item_bytes, max_bytes, name)


def _only_field(proto: Message, name: str, content: memoryview | None = None) -> tuple[str, Any]:
    """The name and the values of the only field that has values; raises InputError if there are others."""
    # Each access to `tensor_content` copies it, so it is read once and returned.
    expected = _FIELDS[DataType(proto.dtype)]
    filled = {f.name: value for f, value in proto.ListFields() if f.name.endswith(("_val", "_content"))}
    if content is not None:
        filled["tensor_content"] = content
    if any(field not in (expected, "tensor_content") for field in filled) or len(filled) > 1:
        raise InputError(
            f"{name}: the values of {_dtype_name(proto.dtype)} must be in tensor_content or in {expected}, "
            f"not in both or elsewhere; found {', '.join(filled)}"
        )
    return next(iter(filled.items()), (expected, ()))


def _filled(given: NDArray[Any], count: int, name: str) -> NDArray[Any]:
    """The values, with the last one repeated up to `count`."""
    if len(given) > count:
        raise InputError(f"{name}: {len(given)} values for a shape of {count}")
    if len(given) == count:
        return given
    out = np.zeros(count, given.dtype)
    out[: len(given)] = given
    if len(given):
        out[len(given) :] = given[-1]
    return out


def _dtype_name(number: int) -> str:
    return DataType(number).name if number in DataType._value2member_map_ else str(number)
