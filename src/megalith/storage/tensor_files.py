"""Tensor files: the safetensors format, written without copies of the tensors and read in place.

    8 bytes     length n of the header, little-endian
    n bytes     JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}}, padded with spaces
    the rest    the tensors' bytes, concatenated without gaps

Reading checks every field: a file is untrusted until it is validated. The caller passes the error type.
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

from megalith.errors import InputError
from megalith.storage.json_codec import ErrorFactory, parse_json

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
class TensorPlace:
    """The type and shape of a tensor, and the range of bytes of the file that holds it."""

    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int


def encode(tensors: Mapping[str, Tensor]) -> list[Any]:
    """Encode tensors as a file."""
    header, places = plan_file({name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()})
    flat = (tensors[name].detach().cpu().contiguous().reshape(-1) for name in places)
    return [header, *(each.view(torch.uint8).numpy() for each in flat)]


def plan_file(forms: Mapping[str, tuple[torch.dtype, list[int]]]) -> tuple[bytes, dict[str, TensorPlace]]:
    """Compute the layout of a file before its tensors exist."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in sorted(forms.items(), key=lambda item: -item[1][0].itemsize):
        if dtype not in _NAMES or len(shape) > _MAX_DIMS:
            raise InputError(
                f"tensor {name!r} is {dtype} with {len(shape)} dimensions, which a tensor file cannot hold"
            )
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    places = {
        name: TensorPlace(
            _TYPES[entry["dtype"]], entry["shape"], *(start + at for at in entry["data_offsets"])
        )
        for name, entry in header.items()
    }
    return struct.pack("<Q", len(text)) + text, places


def decode(data: Tensor, where: str, error: ErrorFactory) -> dict[str, Tensor]:
    """Decode a file."""
    # data: the bytes of the file, uint8 [size].
    size = data.numel()
    start = header_end(data[:8], size, where, error)
    tensors: dict[str, Tensor] = {}
    for name, place in read_places(data[:start], size, where, error).items():
        piece = data[place.begin : place.end]
        if piece.storage_offset() % place.dtype.itemsize:
            piece = piece.clone()
        tensors[name] = piece.view(place.dtype).view(place.shape)
    return tensors


def header_end(head: Tensor, size: int, where: str, error: ErrorFactory) -> int:
    """Return where the tensors begin in a file."""
    if head.numel() < 8:
        raise error(f"{where} is not a safetensors file: it has only {size} bytes")
    (length,) = struct.unpack("<Q", head.numpy().tobytes())
    if length > min(MAX_HEADER, size - 8):
        raise error(f"{where} is not a safetensors file: its header would have {length} bytes")
    return 8 + int(length)


def read_places(head: Tensor, size: int, where: str, error: ErrorFactory) -> dict[str, TensorPlace]:
    """Return the place of each tensor of a file."""

    def wrong(problem: str) -> Exception:
        return error(f"{where} is not a safetensors file: its header {problem}")

    header = parse_json(head[8:].numpy().tobytes(), wrong)
    if not isinstance(header, dict):
        raise wrong("is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise wrong("has a metadata value that is not a string")
    start = at = head.numel()
    places = {}
    for name, info in header.items():
        place = _place(info, start)
        if place is None:
            raise error(f"{where}: the header entry of tensor {name!r} is not valid: {str(info)[:200]!r}")
        places[name] = place
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin != at:
            raise error(
                f"{where}: tensor {name!r} begins at byte {place.begin}, but the previous tensor ends at {at}"
            )
        at = place.end
    if at > size:
        raise error(f"{where}: its tensors end at byte {at}, after the end of the file at {size}")
    if at < size:
        raise error(f"{where}: {size - at} bytes at the end belong to no tensor")
    return places


def raw_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().cpu().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]


def tensor_of(data: bytearray | bytes, dtype: torch.dtype) -> Tensor:
    """Return the numbers in some bytes."""
    # returns: [n], in the same memory.
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")


def _place(info: Any, start: int) -> TensorPlace | None:
    if isinstance(info, dict):
        dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
        if isinstance(dtype, str) and dtype in _TYPES and _are_sizes(shape) and _are_sizes(offsets):
            bytes = math.prod(shape) * _TYPES[dtype].itemsize  # Python's integers do not overflow
            if len(offsets) == 2 and offsets[1] - offsets[0] == bytes and _fits_memory(shape):
                return TensorPlace(_TYPES[dtype], shape, start + offsets[0], start + offsets[1])
    return None


def _are_sizes(numbers: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(numbers, list)
        and len(numbers) <= _MAX_DIMS
        and all(type(n) is int and 0 <= n < _MAX_BYTES for n in numbers)
    )


def _fits_memory(shape: list[int]) -> bool:
    """Return whether torch can compute strides for a shape; a dimension of 0 does not excuse the others."""
    return math.prod(n for n in shape if n) < _MAX_BYTES
