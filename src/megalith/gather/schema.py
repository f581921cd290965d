"""The schema: how a model's tensors are cut into chunks, and what a peer must send for each.

Every side computes it from the model; its digest stands in plans and payloads. A tensor is seen as a matrix
(1-D: one line; more than 2-D: the first dimension against the rest) and cut into chunks of `chunk` lines
and columns. A chunk is one *row* of a payload. It knows no payload and no values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor, nn

from megalith.errors import InputError, UnknownNameError
from megalith.gather.fields import digest
from megalith.storage.strict_json import JsonFields

MAX_CHUNK = 4096
"""Positions of a chunk at most: an index has 12 bits."""
MAX_NAME = 1024
MAX_ELEMENTS = 1 << 48
LOOKUP_BYTES = 4


@dataclass(frozen=True)
class ParameterSpec:
    """How one tensor travels: cut into chunks, `keep` positions of each, coded in `bins` values.

    chunk: (lines, columns). Chunks at the lower and right border may reach past the tensor; what lies there
    is zero when sent and dropped when received.
    """

    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, int]
    keep: int
    bins: int = 4
    dct: bool = False

    def __post_init__(self) -> None:
        where = f"parameter {self.name[:64]!r}"
        if not 0 < len(self.name) <= MAX_NAME:
            raise InputError(f"{where}: a name has 1 to {MAX_NAME} characters")
        if any(side < 0 for side in self.shape) or prod(self.shape) > MAX_ELEMENTS:
            raise InputError(f"{where}: shape {self.shape} is not usable")
        if min(self.chunk) < 1 or prod(self.chunk) > MAX_CHUNK:
            raise InputError(f"{where}: a chunk of {self.chunk} must have 1 to {MAX_CHUNK} positions")
        if not 1 <= self.keep <= self.size:
            raise InputError(f"{where}: keep must be from 1 to {self.size}, got {self.keep}")
        if not 2 <= self.bins <= 256:
            raise InputError(f"{where}: bins must be from 2 to 256, got {self.bins}")

    @cached_property
    def matrix(self) -> tuple[int, int]:
        """The tensor as lines and columns."""
        if len(self.shape) < 2:
            return 1, prod(self.shape)
        return self.shape[0], prod(self.shape[1:])

    @cached_property
    def bands(self) -> tuple[int, int]:
        """Chunks down and chunks across."""
        (lines, columns), (height, width) = self.matrix, self.chunk
        return -(-lines // height), -(-columns // width)

    @property
    def rows(self) -> int:
        """Chunks in all, band by band."""
        return prod(self.bands)

    @property
    def size(self) -> int:
        """Positions of a chunk."""
        return prod(self.chunk)

    @property
    def bits(self) -> int:
        """Bits of a code: 2, 4 or 8."""
        return 2 if self.bins <= 4 else 4 if self.bins <= 16 else 8

    @property
    def index_bytes(self) -> int:
        """Bytes of one row's indices."""
        return -(-12 * self.keep // 8)

    @property
    def code_bytes(self) -> int:
        """Bytes of one row's codes."""
        return -(-self.bits * self.keep // 8)

    @property
    def full(self) -> bool:
        """Whether every position is sent, so that indices tell nothing."""
        return self.keep == self.size

    @property
    def kept(self) -> int:
        """Positions sent in all."""
        return self.rows * self.keep

    def to_json(self) -> dict[str, Any]:
        """Its fields as headers and digests have them."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "chunk": list(self.chunk),
            "keep": self.keep,
            "bins": self.bins,
            "dct": self.dct,
        }

    @classmethod
    def from_json(cls, fields: JsonFields) -> ParameterSpec:
        """Reads its fields; others may stand beside them."""
        chunk = fields.integers("chunk", 1, MAX_CHUNK)
        shape = fields.integers("shape", 0, MAX_ELEMENTS)
        if len(chunk) != 2 or len(shape) > 16:
            fields.fail("chunk" if len(chunk) != 2 else "shape", "has the wrong length")
        try:
            return cls(
                name=fields.string("name", MAX_NAME),
                shape=tuple(shape),
                chunk=(chunk[0], chunk[1]),
                keep=fields.integer("keep", 1, MAX_CHUNK),
                bins=fields.integer("bins", 2, 256),
                dct=fields.boolean("dct"),
            )
        except InputError as error:
            fields.fail("name", f"leads to a parameter that cannot be: {error}")


@dataclass(frozen=True)
class TableSpec:
    """An embedding table whose changed rows travel whole: ids and float32 rows of `dim` columns."""

    name: str
    dim: int

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME or not 1 <= self.dim <= 1 << 20:
            raise InputError(f"table {self.name[:64]!r} with dim {self.dim} is not usable")

    @property
    def row_bytes(self) -> int:
        """Bytes of an id and its row."""
        return 8 + 4 * self.dim

    def to_json(self) -> dict[str, Any]:
        """Its fields as headers and digests have them."""
        return {"name": self.name, "dim": self.dim}

    @classmethod
    def from_json(cls, fields: JsonFields) -> TableSpec:
        """Reads its fields; others may stand beside them."""
        try:
            return cls(fields.string("name", MAX_NAME), fields.integer("dim", 1, 1 << 20))
        except InputError as error:
            fields.fail("name", f"leads to a table that cannot be: {error}")


@dataclass(frozen=True)
class Schema:
    """All that a payload holds, in this order. Names are distinct."""

    parameters: tuple[ParameterSpec, ...]
    tables: tuple[TableSpec, ...] = ()

    def __post_init__(self) -> None:
        for kind, names in (
            ("parameters", [p.name for p in self.parameters]),
            ("tables", [t.name for t in self.tables]),
        ):
            if len(set(names)) != len(names):
                raise InputError(f"two {kind} of a schema have the same name")

    @classmethod
    def of(
        cls,
        model: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        tables: Mapping[str, int] | None = None,
        chunk: int = 64,
        keep: int = 64,
        bins: int = 4,
        dct: bool = False,
        padding: bool = True,
    ) -> Schema:
        """The schema of a model's parameters, in their order.

        tables: dim by name, of tables whose changed rows travel too. chunk: lines and columns of a chunk at
        most, 64 at most; each side is the largest divisor of the tensor's. keep: positions sent per chunk,
        made even. padding: sides without a good divisor (a prime, say) are cut by `chunk` and padded; False
        keeps to divisors.
        """
        if not 1 <= chunk <= 64 or keep < 1:
            raise InputError(
                f"chunk must be from 1 to 64 and keep at least 1, got chunk={chunk}, keep={keep}"
            )
        if isinstance(model, nn.Module):
            named: Iterable[tuple[str, Tensor]] = model.named_parameters()
        else:
            named = model.items() if isinstance(model, Mapping) else model
        specs = []
        for name, tensor in named:
            if not tensor.is_floating_point():
                raise InputError(f"parameter {name!r} is {tensor.dtype}: only floating point travels")
            shape = tuple(tensor.shape)
            lines, columns = (1, prod(shape)) if len(shape) < 2 else (shape[0], prod(shape[1:]))
            sides = _side(lines, chunk, padding), _side(columns, chunk, padding)
            kept = min(keep, prod(sides))
            specs.append(ParameterSpec(name, shape, sides, max(1, kept - kept % 2), bins, dct))
        return cls(tuple(specs), tuple(TableSpec(name, dim) for name, dim in (tables or {}).items()))

    @cached_property
    def digest(self) -> str:
        """What two sides compare: names, shapes, chunking, keep, bins, transform."""
        return digest(self.to_json())

    def parameter(self, name: str) -> ParameterSpec:
        """The parameter of this name."""
        for spec in self.parameters:
            if spec.name == name:
                return spec
        known = ", ".join(repr(spec.name) for spec in self.parameters[:20])
        raise UnknownNameError(f"unknown parameter {name!r} (known: {known})")

    @property
    def names(self) -> list[str]:
        """Names of parameters, then of tables: the order of norms."""
        return [p.name for p in self.parameters] + [t.name for t in self.tables]

    def to_json(self) -> dict[str, Any]:
        """As manifests have it."""
        return {
            "parameters": [p.to_json() for p in self.parameters],
            "tables": [t.to_json() for t in self.tables],
        }

    @classmethod
    def from_json(cls, fields: JsonFields) -> Schema:
        """Reads what `to_json` wrote."""
        try:
            return cls(
                tuple(ParameterSpec.from_json(each) for each in fields.objects("parameters")),
                tuple(TableSpec.from_json(each) for each in fields.objects("tables")),
            )
        except InputError as error:
            fields.fail("parameters", str(error))


def _side(length: int, most: int, padding: bool) -> int:
    """A chunk's side: the largest divisor up to `most`, or `most` with padding where divisors are poor."""
    if length == 0:
        return 1
    divisor = next(side for side in range(min(length, most), 0, -1) if length % side == 0)
    wanted = min(length, most)
    return wanted if padding and divisor * 4 <= wanted else divisor
