"""Tensors of a file: the safetensors format, written from memory as it lies and read without a copy.

Eight bytes of length, that many bytes of JSON, then the tensors' bytes one behind the other.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalith.errors import CheckpointError, InputError

MAX_HEADER = 100 << 20
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def encode(tensors: Mapping[str, Tensor]) -> list[Any]:
    """The buffers of a file that holds these tensors. Raises InputError for a type it cannot hold."""
    header: dict[str, Any] = {}
    buffers: list[Any] = []
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if tensor.dtype not in _NAMES:
            raise InputError(f"{name!r} is {tensor.dtype}, which a checkpoint cannot hold")
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        offsets = [at, at + data.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        buffers.append(data)
        at += data.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *buffers]


def decode(data: Tensor, where: str) -> dict[str, Tensor]:
    """The tensors of a file's bytes (uint8), in the same memory. Raises CheckpointError if they are none."""
    header, start = _header(data, where)
    body = data[start:]
    tensors: dict[str, Tensor] = {}
    spans = []
    for name, info in header.items():
        if name == "__metadata__":
            continue
        begin, end, dtype, shape = _entry(name, info, where)
        if end > body.numel():
            raise CheckpointError(f"{where}: tensor {name!r} ends behind the file's end")
        piece = body[begin:end]
        if piece.storage_offset() % dtype.itemsize:
            piece = piece.clone()
        tensors[name] = piece.view(dtype).view(shape)
        spans.append((begin, end))
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise CheckpointError(f"{where}: the tensors do not lie one behind the other")
        at = end
    if at != body.numel():
        raise CheckpointError(f"{where}: {body.numel() - at} bytes belong to no tensor")
    return tensors


def _header(data: Tensor, where: str) -> tuple[dict[str, Any], int]:
    if data.numel() < 8:
        raise CheckpointError(f"{where} is no safetensors file: it has {data.numel()} bytes")
    (length,) = struct.unpack("<Q", data[:8].numpy().tobytes())
    if length > min(MAX_HEADER, data.numel() - 8):
        raise CheckpointError(f"{where} is no safetensors file: its header has {length} bytes")
    try:
        header = json.loads(data[8 : 8 + length].numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is no safetensors file: its header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{where} is no safetensors file: its header is no object")
    return header, 8 + length


def _entry(name: str, info: Any, where: str) -> tuple[int, int, torch.dtype, list[int]]:
    problem = CheckpointError(f"{where}: the header's entry of tensor {name!r} is wrong: {str(info)[:200]}")
    if not isinstance(info, dict):
        raise problem
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if (
        not isinstance(dtype, str)
        or dtype not in _TYPES
        or not isinstance(offsets, list)
        or len(offsets) != 2
    ):
        raise problem
    if not isinstance(shape, list) or len(shape) > 8 or not all(_is_size(n) for n in [*shape, *offsets]):
        raise problem
    begin, end = offsets
    # Python's own numbers: a product of sizes cannot wrap around.
    if begin > end or end - begin != int(np.prod([1, *shape], dtype=object)) * _TYPES[dtype].itemsize:
        raise problem
    return begin, end, _TYPES[dtype], shape


def _is_size(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**40
