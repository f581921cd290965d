"""Responses with scores as bytes, without protobuf's objects: those take as long as a small model.

PredictResponse     1 outputs, entries of a map (1 name, 2 TensorProto)   2 model_spec
ModelSpec           1 name    2 version (1 value)    3 signature_name
TensorProto         1 dtype   2 tensor_shape (2 dim (1 size))   4 tensor_content   5 float_val   6 double_val
ModelInferResponse  1 model_name   2 model_version   3 id   5 outputs   6 raw_output_contents
InferOutputTensor   1 name         2 datatype        3 shape
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.serving.proto.infer_tensors import DATATYPES
from megalith.serving.proto.message_types import DataType

_TYPES = {
    np.dtype(np.float32): (int(DataType.DT_FLOAT), 5),
    np.dtype(np.float64): (int(DataType.DT_DOUBLE), 6),
}
"""dtype -> its number, and the number of its typed field."""
_DATATYPES = {str(dtype).removeprefix("torch."): datatype for dtype, datatype in DATATYPES.items()}
_CONTENT = 4
_MAX_HEADS = 1024
"""Kept beginnings of outputs: a server has few outputs, but batches of many sizes."""


def encode_predict_response(
    model: str, signature: str, version: int, outputs: Mapping[str, NDArray[Any]], *, typed: bool
) -> bytes | None:
    parts: list[bytes] = []
    for name, array in outputs.items():
        head = _output_head(name, array.dtype, array.shape, typed)
        if head is None:
            return None
        parts += (head, array.tobytes())
    parts.append(_spec(model, signature, version))
    return b"".join(parts)


def encode_infer_response(
    model: str, version: int, request_id: str, outputs: Mapping[str, NDArray[Any]]
) -> bytes:
    parts = [_infer_head(model, version)]
    if request_id:
        parts.append(_field(3, request_id.encode()))
    parts += [_infer_output(name, array.dtype, array.shape) for name, array in outputs.items()]
    for array in outputs.values():
        parts += (_head(6, array.nbytes), array.tobytes())
    return b"".join(parts)


# Requests to one model differ in their elements only, so what precedes the elements is made once.
@functools.lru_cache(_MAX_HEADS)
def _output_head(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], typed: bool) -> bytes | None:
    """Return the bytes of an output before its elements; None for another dtype than those of _TYPES."""
    known = _TYPES.get(dtype)
    if known is None:
        return None
    number, field = known
    sizes = b"".join([_field(2, b"\x08" + _varint(size)) for size in shape])
    elements = math.prod(shape) * dtype.itemsize
    tensor = bytes((8, number)) + _field(2, sizes) + _head(field if typed else _CONTENT, elements)
    entry = _field(1, name.encode()) + _head(2, len(tensor) + elements) + tensor
    return _head(1, len(entry) + elements) + entry


@functools.lru_cache(_MAX_HEADS)
def _spec(model: str, signature: str, version: int) -> bytes:
    spec = _field(1, model.encode()) + _field(2, b"\x08" + _varint(version)) + _field(3, signature.encode())
    return _field(2, spec)


@functools.lru_cache(_MAX_HEADS)
def _infer_head(model: str, version: int) -> bytes:
    return (_field(1, model.encode()) if model else b"") + _field(2, str(version).encode())


@functools.lru_cache(_MAX_HEADS)
def _infer_output(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    sizes = b"".join(map(_varint, shape))
    described = _field(1, name.encode()) + _field(2, _DATATYPES[dtype.name].encode())
    return _field(5, described + (_field(3, sizes) if sizes else b""))


def _field(number: int, data: bytes) -> bytes:
    """Return a length-delimited field."""
    return _head(number, len(data)) + data


def _head(number: int, size: int) -> bytes:
    """Return what precedes the bytes of a length-delimited field."""
    return bytes((number << 3 | 2,)) + _varint(size)


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1  # of two's complement
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
