"""Tensors of a file: the safetensors format, written from memory as it lies and read without a copy.

Eight bytes of length, that many bytes of JSON, then the tensors' bytes one behind the other.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from megalith.errors import CheckpointError, InputError
from megalith.storage.strict_json import parse_json

MAX_HEADER = 100 << 20
_MAX_BYTES = 1 << 40
_MAX_DIMS = 64
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


@dataclass(frozen=True)
class Place:
    """A tensor of a file: its type and shape, and the bytes of the file that hold it."""

    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int


def encode(tensors: Mapping[str, Tensor]) -> list[Any]:
    """The buffers of a file that holds these tensors. Raises InputError for a type it cannot hold."""
    header, placed = lay_out({name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()})
    flat = (tensors[name].detach().cpu().contiguous().reshape(-1) for name in placed)
    return [header, *(each.view(torch.uint8).numpy() for each in flat)]


def lay_out(forms: Mapping[str, tuple[torch.dtype, list[int]]]) -> tuple[bytes, dict[str, Place]]:
    """The beginning of a file of such tensors, and where each lies in the file, in its order."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in sorted(forms.items(), key=lambda item: -item[1][0].itemsize):
        if dtype not in _NAMES or len(shape) > _MAX_DIMS:
            raise InputError(
                f"{name!r} is {dtype} of {len(shape)} dimensions, which a checkpoint cannot hold"
            )
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    placed = {
        name: Place(_TYPES[entry["dtype"]], entry["shape"], *(start + at for at in entry["data_offsets"]))
        for name, entry in header.items()
    }
    return struct.pack("<Q", len(text)) + text, placed


def decode(data: Tensor, where: str) -> dict[str, Tensor]:
    """The tensors of a file's bytes (uint8), in the same memory. Raises CheckpointError if they are none."""
    size = data.numel()
    start = header_end(data[:8], size, where)
    tensors: dict[str, Tensor] = {}
    for name, place in places(data[:start], size, where).items():
        piece = data[place.begin : place.end]
        if piece.storage_offset() % place.dtype.itemsize:
            piece = piece.clone()
        tensors[name] = piece.view(place.dtype).view(place.shape)
    return tensors


def header_end(head: Tensor, size: int, where: str) -> int:
    """Where the tensors begin in a file of `size` bytes. head: its first eight bytes, uint8."""
    if head.numel() < 8:
        raise CheckpointError(f"{where} is no safetensors file: it has {size} bytes")
    (length,) = struct.unpack("<Q", head.numpy().tobytes())
    if length > min(MAX_HEADER, size - 8):
        raise CheckpointError(f"{where} is no safetensors file: its header would have {length} bytes")
    return 8 + int(length)


def places(head: Tensor, size: int, where: str) -> dict[str, Place]:
    """Where each tensor lies in a file of `size` bytes. head: the bytes up to `header_end`, uint8.

    Raises CheckpointError unless the tensors fill the rest of the file, one behind the other.
    """
    try:
        header = parse_json(head[8:].numpy().tobytes())
    except ValueError as error:
        raise CheckpointError(f"{where} is no safetensors file: its header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{where} is no safetensors file: its header is no object")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{where} is no safetensors file: its metadata are no texts")
    start = head.numel()
    found = {
        name: _place(name, info, start, where) for name, info in header.items() if name != "__metadata__"
    }
    at = start
    for name, place in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin != at:
            raise CheckpointError(
                f"{where}: tensor {name!r} begins at byte {place.begin}, where {at} is the next one's place"
            )
        at = place.end
    if at > size:
        raise CheckpointError(f"{where}: its tensors end at byte {at}, behind its end at {size}")
    if at < size:
        raise CheckpointError(f"{where}: {size - at} bytes belong to no tensor")
    return found


def _place(name: str, info: Any, start: int, where: str) -> Place:
    if isinstance(info, dict):
        dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
        if isinstance(dtype, str) and dtype in _TYPES and _are_sizes(shape) and _are_sizes(offsets):
            bytes = math.prod(shape) * _TYPES[dtype].itemsize  # Python's numbers do not wrap around
            if len(offsets) == 2 and offsets[1] - offsets[0] == bytes and _fits_memory(shape):
                return Place(_TYPES[dtype], shape, start + offsets[0], start + offsets[1])
    raise CheckpointError(f"{where}: the header's entry of tensor {name!r} is wrong: {str(info)[:200]!r}")


def _are_sizes(numbers: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(numbers, list)
        and len(numbers) <= _MAX_DIMS
        and all(type(n) is int and 0 <= n < _MAX_BYTES for n in numbers)
    )


def _fits_memory(shape: list[int]) -> bool:
    """Whether torch can make strides of it; a dimension of 0 does not excuse the others."""
    return math.prod(n for n in shape if n) < _MAX_BYTES
