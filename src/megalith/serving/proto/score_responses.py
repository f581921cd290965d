"""Responses with scores as bytes, without protobuf's objects: those take as long as a small model.

PredictResponse  1 outputs, entries of a map (1 name, 2 TensorProto)   2 model_spec
ModelSpec        1 name    2 version (1 value)    3 signature_name
TensorProto      1 dtype   2 tensor_shape (2 dim (1 size))   4 tensor_content   5 float_val   6 double_val
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.serving.proto.message_types import DataType

_TYPES = {
    np.dtype(np.float32): (int(DataType.DT_FLOAT), 5),
    np.dtype(np.float64): (int(DataType.DT_DOUBLE), 6),
}
"""dtype -> its number, and the number of its typed field."""
_CONTENT = 4


def encode_scores(
    model: str, signature: str, version: int, outputs: Mapping[str, NDArray[Any]], *, typed: bool
) -> bytes | None:
    """Return the bytes of a PredictResponse.

    Args:
        model: Name of the model.
        signature: Name of the signature.
        version: Number of the version that computed the scores.
        outputs: Arrays by name.
        typed: Write elements to typed fields, as TF Serving does; False: to `tensor_content`.

    Returns:
        The serialized message; None if an array is not of float32 or float64.
    """
    parts = []
    for name, array in outputs.items():
        known = _TYPES.get(array.dtype)
        if known is None:
            return None
        dtype, field = known
        shape = b"".join([_field(2, b"\x08" + _varint(size)) for size in array.shape])
        tensor = bytes((8, dtype)) + _field(2, shape) + _field(field if typed else _CONTENT, array.tobytes())
        parts.append(_field(1, _field(1, name.encode()) + _field(2, tensor)))
    spec = _field(1, model.encode()) + _field(2, b"\x08" + _varint(version)) + _field(3, signature.encode())
    parts.append(_field(2, spec))
    return b"".join(parts)


def _field(number: int, data: bytes) -> bytes:
    """Return a length-delimited field."""
    size = len(data)
    if size < 0x80:
        return bytes((number << 3 | 2, size)) + data
    return bytes((number << 3 | 2,)) + _varint(size) + data


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1  # of two's complement
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
