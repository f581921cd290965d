"""RowFormat: how the rows of one table are stored in an export, and sent to servers.

A row consists of the parts of its segments. A part of one of these kinds takes so many bytes:

    kind           bytes            value of a column                           step
    float32        4 * dim          the number                                  not used
    float16        2 * dim          the number                                  not used
    int8           dim              the number of steps times the step          from the largest weight
    fixed_point    dim              the number of steps times the step          `FixedPoint.unit`
    one_bit        (dim + 7) // 8   the step if its bit is set, else -step      `OneBit.unit`, the amplitude

int8 is Monolith's fixed point: a value is an integer number of steps, with one step size for each segment.
Values beyond the range are clamped. Rows of one kind of numbers are stored as a matrix of that type. Other
rows are stored as bytes, with their parts concatenated; numbers are little-endian. In parameter sync, parts
of `fixed_point` and `one_bit` travel as these bytes, and all others as float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.checks import one_of
from megalith.table import ServingPrecision, TableConfig
from megalith.table.config import SERVING_PRECISIONS
from megalith.table.serving_precision import fixed_point_codes

PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
_MAX_HALF = 65504.0
_SMALLEST_STEP = torch.finfo(torch.float32).tiny


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of stored rows."""
    return PRECISIONS[one_of(precision, list(PRECISIONS), "precision")]


def steps_for(largest: Sequence[float], precision: str) -> list[float]:
    """Return the step size of each segment."""
    if precision != "int8":
        return [1.0] * len(largest)
    return [max(each / 127.0, _SMALLEST_STEP) if each > 0 else 1.0 for each in largest]


def encode_numbers(rows: Tensor, precision: str, steps: Tensor) -> Tensor:
    """Convert rows to their stored form."""
    # rows: float32 [n, dim]; steps: step size of each column, float32 [dim], or of all, float32 []; returns:
    # [n, dim], of the dtype of the precision.
    if not bool(torch.isfinite(rows).all()):
        raise InputError("a row holds NaN or Inf")
    if precision == "float32":
        return rows
    if precision == "float16":
        if rows.numel() and float(rows.abs().max()) > _MAX_HALF:
            raise InputError(f"a row holds {float(rows.abs().max()):g}, beyond float16: export as float32")
        return rows.to(torch.float16)
    return fixed_point_codes(rows, steps)


def decode_numbers(stored: Tensor, steps: Tensor) -> Tensor:
    """Convert stored rows back; the inverse of `encode`."""
    # stored: float32, float16 or int8 [n, dim]; steps: step size of each column, float32 [dim], or of all,
    # float32 []; returns: float32 [n, dim].
    rows = stored.to(torch.float32)
    return rows * steps if stored.dtype == torch.int8 else rows


KINDS = (*PRECISIONS, *SERVING_PRECISIONS)
# The numbers of `Stored` in native/frozen.hpp
_NATIVE_KINDS = {"float32": 0, "float16": 1, "int8": 2, "fixed_point": 2, "one_bit": 3}


@dataclass(frozen=True)
class RowPart:
    """The columns of one segment."""

    kind: str
    dim: int  # Number of columns
    step: float = 1.0  # See the module; 1 where it is not used

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {str(self.kind)[:100]!r} is not one of {', '.join(KINDS)}")
        if isinstance(self.dim, bool) or not isinstance(self.dim, int) or not 1 <= self.dim <= 1 << 20:
            raise ValueError(f"a part has {self.dim!r} columns")
        if not isinstance(self.step, int | float) or not 0 < self.step < float("inf"):
            raise ValueError(f"a step must be positive and finite, got {str(self.step)[:100]}")
        if self.is_code:
            self._precision  # noqa: B018  its unit is checked

    @property
    def is_code(self) -> bool:
        """Whether training sees what is stored, so that servers hold nothing else."""
        return self.kind in SERVING_PRECISIONS

    @cached_property
    def _precision(self) -> ServingPrecision:
        return SERVING_PRECISIONS[self.kind].from_unit(self.step)

    @property
    def bytes(self) -> int:
        return self._precision.code_bytes(self.dim) if self.is_code else self.dim * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers; uint8 for codes."""
        return torch.uint8 if self.is_code else PRECISIONS[self.kind]

    def encode(self, rows: Tensor) -> Tensor:
        """Convert columns to bytes."""
        # rows: float32 [n, dim]; returns: uint8 [n, bytes].
        if self.is_code:
            if not bool(torch.isfinite(rows).all()):
                raise InputError("a row holds NaN or Inf")
            return self._precision.encode(rows)
        numbers = encode_numbers(rows, self.kind, torch.tensor(self.step, device="cpu"))
        return numbers.clone(memory_format=torch.contiguous_format).view(torch.uint8)

    def decode(self, stored: Tensor) -> Tensor:
        """Convert bytes to columns; the inverse of `encode`."""
        # stored: uint8 [n, bytes]; returns: float32 [n, dim].
        if self.is_code:
            return self._precision.decode(stored, self.dim)
        own = stored.clone(memory_format=torch.contiguous_format)  # also the strides of one row or none
        return decode_numbers(own.view(self.dtype), torch.tensor(self.step, device="cpu"))


@dataclass(frozen=True)
class RowFormat:
    """The parts of the rows of one table."""

    parts: tuple[RowPart, ...]

    @classmethod
    def uniform(cls, precision: str, dims: Sequence[int], steps: Sequence[float]) -> RowFormat:
        return cls(tuple(RowPart(precision, dim, step) for dim, step in zip(dims, steps, strict=True)))

    @classmethod
    def codes_of(cls, config: TableConfig) -> RowFormat | None:
        """Return the format in which a table is sent to servers."""
        parts = []
        for segment in config.segments:
            serving = segment.serving
            if isinstance(serving, ServingPrecision):
                parts.append(RowPart(serving.name, segment.dim, serving.unit))
            else:
                parts.append(RowPart("float32", segment.dim))
        return cls(tuple(parts)).codes

    @property
    def codes(self) -> RowFormat | None:
        """The format in which rows are sent and kept in memory; None if all parts are float32 there."""
        if not any(part.is_code for part in self.parts):
            return None
        return RowFormat(tuple(part if part.is_code else RowPart("float32", part.dim) for part in self.parts))

    @cached_property
    def dim(self) -> int:
        """Number of columns."""
        return sum(part.dim for part in self.parts)

    @cached_property
    def row_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of stored rows: that of the numbers of all parts, or uint8 for rows of bytes."""
        kinds = {part.kind for part in self.parts}
        return self.parts[0].dtype if len(kinds) == 1 else torch.uint8

    @cached_property
    def width(self) -> int:
        """Columns of stored rows, of `dtype`."""
        return self.row_bytes // self.dtype.itemsize

    @cached_property
    def native_parts(self) -> Tensor:
        """Kind and columns of each part for the native reader, int64 [parts, 2]."""
        return torch.tensor([[_NATIVE_KINDS[part.kind], part.dim] for part in self.parts], device="cpu")

    @cached_property
    def column_steps(self) -> Tensor:
        """Step of each column, float32 [dim]."""
        return torch.tensor([part.step for part in self.parts for _ in range(part.dim)], device="cpu")

    def encode(self, rows: Tensor) -> Tensor:
        """Convert rows to their stored form."""
        # rows: float32 [n, dim]; returns: [n, width] of `dtype`.
        if self.dtype != torch.uint8:
            return encode_numbers(rows, self.parts[0].kind, self.column_steps)
        pieces = rows.split([part.dim for part in self.parts], dim=1)
        return torch.cat([part.encode(each) for part, each in zip(self.parts, pieces, strict=True)], dim=1)

    def decode(self, stored: Tensor) -> Tensor:
        """Convert stored rows back; the inverse of `encode`."""
        # stored: [n, width] of `dtype`; returns: float32 [n, dim].
        if self.dtype != torch.uint8:
            return decode_numbers(stored, self.column_steps)
        pieces = stored.split([part.bytes for part in self.parts], dim=1)
        return torch.cat([part.decode(each) for part, each in zip(self.parts, pieces, strict=True)], dim=1)

    def are_finite(self, stored: Tensor) -> bool:
        """Return whether rows of bytes hold finite numbers; codes always do."""
        # stored: uint8 [n, width].
        return all(part.is_code for part in self.parts) or bool(self.decode(stored).isfinite().all())

    def to_data(self) -> list[list[Any]]:
        """Return the parts as data for JSON."""
        return [[part.kind, part.dim, part.step] for part in self.parts]

    @classmethod
    def from_data(cls, data: Any) -> RowFormat:
        """Read what `to_data` returned."""
        if not isinstance(data, list) or not data:
            raise ValueError("a format must be a list of parts")
        parts = []
        for part in data:
            if not isinstance(part, list) or len(part) != 3 or isinstance(part[2], bool):
                raise ValueError("a part must be [kind, columns, step]")
            parts.append(RowPart(*part))
        return cls(tuple(parts))


Formats = Mapping[str, RowFormat]  # Formats by table
