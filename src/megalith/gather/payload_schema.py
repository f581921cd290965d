"""The schema: how a model's tensors are divided into chunks, and what a peer must send for each.

Every side computes it from the model; plans and payloads hold its digest. A tensor is treated as a matrix
(1-D: one line; more than 2-D: the first dimension against the rest) and divided into chunks of `chunk` lines
and columns. A chunk is one *row* of a payload. Payloads and values are not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor, nn

from megalith.distributed.dense_parameters import dense_parameters, is_anchor
from megalith.distributed.elastic_ranks import ElasticRanks
from megalith.distributed.tensor_parts import Fingerprint, fingerprint
from megalith.errors import InputError
from megalith.ops import checks
from megalith.storage.json_codec import json_digest, to_json

MAX_CHUNK = 4096
"""Positions of a chunk at most: an index has 12 bits."""
MAX_NAME = 1024
MAX_ELEMENTS = 1 << 48
LOOKUP_BYTES = 4
Weights = nn.Module | Mapping[str, Tensor]
"""A model, or its parameters by name."""


@dataclass(frozen=True)
class ParameterSpec:
    """How one tensor is sent. Chunks at the lower and right border may extend beyond the tensor; positions
    there are zero when sent and dropped when received."""

    name: str
    """The name of the parameter."""
    shape: tuple[int, ...]
    """The shape of the tensor."""
    chunk: tuple[int, int]
    """Lines and columns of a chunk."""
    keep: int
    """Positions that are sent of each chunk."""
    bins: int = 4
    """Number of different values that a code stands for, per parameter."""
    dct: bool = False
    """Whether chunks are sent as their cosine transform."""

    def __post_init__(self) -> None:
        where = f"parameter {checks.text(self.name, 'parameter: name', MAX_NAME)[:64]!r}"
        for name, length in (("shape", None), ("chunk", 2)):
            sides = getattr(self, name)
            good = isinstance(sides, tuple) and all(type(side) is int for side in sides)
            if not good or len(sides) > 16 or (length is not None and len(sides) != length):
                raise InputError(f"{where}: {name} must be a tuple of integers, got {sides!r:.80}")
        checks.integer(self.bins, f"{where}: bins", 2, 256)
        checks.flag(self.dct, f"{where}: dct")
        if any(side < 0 for side in self.shape) or prod(self.shape) > MAX_ELEMENTS:
            raise InputError(f"{where}: shape {self.shape} is not usable")
        if min(self.chunk) < 1 or prod(self.chunk) > MAX_CHUNK:
            raise InputError(f"{where}: a chunk of {self.chunk} must have 1 to {MAX_CHUNK} positions")
        checks.integer(self.keep, f"{where}: keep", 1, self.size)

    @cached_property
    def matrix(self) -> tuple[int, int]:
        """Lines and columns of the tensor as a matrix."""
        if len(self.shape) < 2:
            return 1, prod(self.shape)
        return self.shape[0], prod(self.shape[1:])

    @cached_property
    def bands(self) -> tuple[int, int]:
        """The number of chunks down and across."""
        (lines, columns), (height, width) = self.matrix, self.chunk
        return -(-lines // height), -(-columns // width)

    @property
    def band(self) -> tuple[int, int]:
        """Lines of the first dimension that a band of chunks covers, and the number of its chunks."""
        return (self.chunk[1], 1) if len(self.shape) < 2 else (self.chunk[0], self.bands[1])

    @property
    def rows(self) -> int:
        """The number of chunks, band by band."""
        return prod(self.bands)

    @property
    def size(self) -> int:
        """The number of positions of a chunk."""
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
        """Whether every position is sent, so that indices carry no information."""
        return self.keep == self.size

    @property
    def kept(self) -> int:
        """The number of positions that are sent."""
        return self.rows * self.keep


@dataclass(frozen=True)
class TableSpec:
    """An embedding table whose changed rows are sent uncompressed."""

    name: str
    """The name of the table."""
    dim: int
    """The number of columns of a row."""

    def __post_init__(self) -> None:
        name = checks.text(self.name, "table: name", MAX_NAME)
        checks.integer(self.dim, f"table {name[:64]!r}: dim", 1, 1 << 20)


@dataclass(frozen=True)
class PayloadSchema:
    """Everything that a payload holds, in this order. Names are distinct."""

    parameters: tuple[ParameterSpec, ...]
    """The parameters, in the order of the model."""
    tables: tuple[TableSpec, ...] = ()
    """The embedding tables."""

    def __post_init__(self) -> None:
        for kind, specs, wanted in (
            ("parameters", self.parameters, ParameterSpec),
            ("tables", self.tables, TableSpec),
        ):
            if not isinstance(specs, tuple) or not all(isinstance(spec, wanted) for spec in specs):
                raise InputError(f"schema: {kind} must be a tuple of {wanted.__name__}, got {specs!r:.80}")
            if len({spec.name for spec in specs}) != len(specs):
                raise InputError(f"schema: two {kind} have the same name")

    @classmethod
    def of(
        cls,
        model: Weights,
        *,
        tables: Mapping[str, int] | None = None,
        chunk: int = 64,
        keep: int = 64,
        bins: int = 4,
        dct: bool = False,
        padding: bool = True,
    ) -> PayloadSchema:
        """Return the schema of a model's parameters, in their order. Frozen parameters are left out.

        Args:
            model: The model, also wrapped by DDP or torch.compile, or its parameters by name.
            tables: The dim of each embedding table whose changed rows are sent too.
            chunk: Lines and columns of a chunk at most; each side is the largest divisor of the tensor's.
            keep: Positions sent per chunk, made even.
            bins: See `ParameterSpec`.
            dct: See `ParameterSpec`.
            padding: Divide a side without a good divisor (a prime, for example) by `chunk` and pad it; with
                False sides are divided by divisors only.

        Returns:
            The schema.

        Raises:
            InputError: A parameter is not floating point, or an option is wrong.
        """
        checks.integer(chunk, "schema: chunk", 1, 64)
        checks.integer(keep, "schema: keep")
        checks.flag(padding, "schema: padding")
        specs = []
        for name, tensor in named_weights(model).items():
            if not tensor.is_floating_point():
                raise InputError(f"parameter {name!r} is {tensor.dtype}: only floating point can be sent")
            shape = tuple(tensor.shape)
            lines, columns = (1, prod(shape)) if len(shape) < 2 else (shape[0], prod(shape[1:]))
            sides = _side(lines, chunk, padding), _side(columns, chunk, padding)
            kept = min(keep, prod(sides))
            specs.append(ParameterSpec(name, shape, sides, max(1, kept - kept % 2), bins, dct))
        dims = checks.mapping({} if tables is None else tables, "schema: tables", '{"users": 16}')
        return cls(tuple(specs), tuple(TableSpec(name, dim) for name, dim in dims.items()))

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of names, shapes, chunks, keep, bins and transform, which two sides compare."""
        return json_digest(to_json(self))

    def fingerprint(self, model: Weights, *, ranks: ElasticRanks | None = None) -> Fingerprint:
        """Compute the fingerprint of the weights that are sent. A collective call if they are sharded.

        Args:
            model: The model, or its parameters by name. Rows of tables are not covered.
            ranks: The ranks over which parameters are sharded.

        Returns:
            The fingerprint, equal for any number of ranks; `Label(weights=...)` takes its hash.
        """
        return fingerprint(self.weights(model), ranks=ranks)

    def weights(self, model: Weights) -> dict[str, Tensor]:
        """Return the parameters of the schema, detached.

        Args:
            model: The model, or its parameters by name.

        Returns:
            The tensors by name.

        Raises:
            InputError: A parameter is missing, or has another shape or type.
        """
        given, found = named_weights(model, frozen=True), {}
        for spec in self.parameters:
            tensor = given.get(spec.name)
            if tensor is None:
                raise InputError(f"parameter {spec.name!r} of the schema was not given")
            if tuple(tensor.shape) != spec.shape or not tensor.is_floating_point():
                raise InputError(
                    f"parameter {spec.name!r} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"its schema has floating point {spec.shape}"
                )
            if tensor.is_meta or not tensor.is_contiguous():
                raise InputError(f"parameter {spec.name!r} is not contiguous: use .contiguous()")
            found[spec.name] = tensor.detach()
        return found

    @property
    def names(self) -> list[str]:
        """Names of parameters, then of tables: the order of norms."""
        return [p.name for p in self.parameters] + [t.name for t in self.tables]


def named_weights(model: Weights, *, frozen: bool = False) -> dict[str, Tensor]:
    """Return the parameters that are sent, by the names that they have in the model itself."""
    # Wrappers of DDP (`.module`) and torch.compile (`._orig_mod`) do not appear in names.
    if isinstance(model, Mapping):
        for name, tensor in model.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise InputError(
                    f"parameters must be tensors by name, got {name!r:.40}: {checks.kind(tensor)}"
                )
        return {name: tensor for name, tensor in model.items() if not is_anchor(name)}
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a model or its parameters by name, got {checks.kind(model)}")
    while isinstance(inner := _inner(model), nn.Module):
        model = inner
    named: Iterable[tuple[str, Any]] = dense_parameters(model)
    return {
        name.replace("_orig_mod.", ""): tensor for name, tensor in named if frozen or tensor.requires_grad
    }


def _inner(model: nn.Module) -> Any:
    """The model inside a wrapper, or None."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return model.module
    return model.__dict__.get("_modules", {}).get("_orig_mod")


def _side(length: int, most: int, padding: bool) -> int:
    """The side of a chunk: the largest divisor up to `most`, or `most` with padding if that is too small."""
    if length == 0:
        return 1
    divisor = next(side for side in range(min(length, most), 0, -1) if length % side == 0)
    wanted = min(length, most)
    return wanted if padding and divisor * 4 <= wanted else divisor
