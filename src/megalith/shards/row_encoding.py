"""Wire: the encoding of rows and gradients for an exchange, exact or compressed.

The rows of several tables are stored in blocks, by peer, then by table. "float32" is exact; "float16" and
"bfloat16" round, and clamp values that are too large; "int8" stores one byte per number and one float32 scale
per row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import mul
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError

ROW_WIRES = ("float32", "float16", "bfloat16", "int8")
GRAD_WIRES = ("float32", "float16", "bfloat16")


class Wire(ABC):
    """An encoding of floats.

    In all methods `counts` is int64 [peers, tables], the rows of each block; `dims` lists the dim per table.
    """

    exact = False

    @abstractmethod
    def row_bytes(self, dim: int) -> int:
        """Return the size of one row."""

    @abstractmethod
    def sizes(self, counts: Tensor, dims: Sequence[int]) -> list[int]:
        """Return the size of the data for each peer."""

    @abstractmethod
    def encode(self, flat: Tensor, counts: Tensor, dims: Sequence[int]) -> Tensor:
        """Encode rows."""
        # flat: float32 [n], all blocks concatenated; returns: uint8 [sum of sizes].

    @abstractmethod
    def decode(self, data: Tensor, counts: Tensor, dims: Sequence[int]) -> Tensor:
        """Decode what `encode` returned."""
        # data: uint8 [sum of sizes]; returns: float32 [n], all blocks concatenated.


def make_wire(name: str) -> Wire:
    """Return the wire of a precision."""
    if name == "int8":
        return _Int8()
    return _Floats({"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name])


def check_wire(wire: str | dict[str, str]) -> tuple[str, str]:
    """Check the precisions of an exchange."""
    given: Any = wire
    if isinstance(wire, str):
        given = {"rows": wire, "grads": "float32" if wire == "int8" else wire}
    known = isinstance(given, dict) and set(given) <= {"rows", "grads"}
    rows, grads = (given.get("rows", "float32"), given.get("grads", "float32")) if known else ("", "")
    if rows not in ROW_WIRES or grads not in GRAD_WIRES:
        raise InputError(
            f"wire must be one precision, or {{'rows': ..., 'grads': ...}}; rows: {', '.join(ROW_WIRES)}; "
            f"grads: {', '.join(GRAD_WIRES)}; got {wire!r}"
        )
    return rows, grads


class _Floats(Wire):
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.exact = dtype == torch.float32

    def row_bytes(self, dim: int) -> int:
        return dim * self._dtype.itemsize

    def sizes(self, counts: Tensor, dims: Sequence[int]) -> list[int]:
        # In Python: it is faster than a product of small tensors.
        return [sum(map(mul, own, dims)) * self._dtype.itemsize for own in counts.tolist()]

    def encode(self, flat: Tensor, counts: Tensor, dims: Sequence[int]) -> Tensor:
        if self._dtype == torch.float32:
            return flat.view(torch.uint8)
        limit = torch.finfo(self._dtype).max
        return flat.clamp(-limit, limit).to(self._dtype).view(torch.uint8)

    def decode(self, data: Tensor, counts: Tensor, dims: Sequence[int]) -> Tensor:
        return data.view(self._dtype).to(torch.float32)


_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # below it, a division would lose bits or be by zero


class _Int8(Wire):
    """Per peer: the float32 scale of each row (its largest absolute value, at least _SMALLEST_SCALE), then
    one byte per number in units of scale / 127, padded to 8 bytes."""

    def row_bytes(self, dim: int) -> int:
        return dim + 4

    def sizes(self, counts: Tensor, dims: Sequence[int]) -> list[int]:
        sizes = counts @ torch.tensor([self.row_bytes(dim) for dim in dims], dtype=torch.int64, device="cpu")
        return [-(-int(n) // 8) * 8 for n in sizes.tolist()]

    def encode(self, flat: Tensor, counts: Tensor, dims: Sequence[int]) -> Tensor:
        data = torch.zeros(sum(self.sizes(counts, dims)), dtype=torch.uint8, device=flat.device)
        begin = 0
        for scales, codes, n, dim in self._blocks(data, counts, dims):
            rows = flat[begin : begin + n * dim].view(n, dim)
            begin += n * dim
            scales.copy_(rows.abs().amax(1).clamp(min=_SMALLEST_SCALE))
            codes.copy_((rows / scales[:, None] * 127).round().to(torch.int8))
        return data

    def decode(self, data: Tensor, counts: Tensor, dims: Sequence[int]) -> Tensor:
        pieces = [
            (codes.to(torch.float32) / 127 * scales[:, None]).view(-1)
            for scales, codes, _, _ in self._blocks(data, counts, dims)
        ]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.float32, device=data.device)

    def _blocks(
        self, data: Tensor, counts: Tensor, dims: Sequence[int]
    ) -> list[tuple[Tensor, Tensor, int, int]]:
        """Return scales, codes, rows and dim of every block; scales and codes are views of the data."""
        blocks = []
        at = 0
        for peer, size in zip(counts.tolist(), self.sizes(counts, dims), strict=True):
            scale_at, code_at = at, at + 4 * sum(peer)
            for n, dim in zip(peer, dims, strict=True):
                scales = data[scale_at : scale_at + 4 * n].view(torch.float32)
                codes = data[code_at : code_at + n * dim].view(torch.int8).view(n, dim)
                blocks.append((scales, codes, n, dim))
                scale_at, code_at = scale_at + 4 * n, code_at + n * dim
            at += size
        return blocks
