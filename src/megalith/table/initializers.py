"""Initial rows: a pure function of (seed, table, id, column), with the same bits on every device.

The generator is a counter-based integer mixer. The normal distribution uses the polynomials of this file
instead of a library's logarithm, so every step is one IEEE operation that CPUs and GPUs round in the same
way. `initial_rows` is the torch reference of native/initialize.inl.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megalith.bits import mix64, signed
from megalith.errors import InputError
from megalith.ops.checks import as_number
from megalith.table.schedules import FLOAT32_MAX

_GOLDEN = 0x9E3779B97F4A7C15


class Initializer(ABC):
    """Draws the weights of a new row. Engines receive it as `kind` and `params`."""

    kind: ClassVar[int]

    @property
    @abstractmethod
    def params(self) -> tuple[float, float]:
        """The two float32 parameters of the distribution."""

    def _check(self, *fields: str) -> None:
        for field in fields:
            value = getattr(self, field)
            number = as_number(value)
            if number is None or not abs(number) <= FLOAT32_MAX:
                raise InputError(f"{type(self).__name__}: {field} must be a finite number, got {value!r}")
            object.__setattr__(self, field, number)


@dataclass(frozen=True)
class Constant(Initializer):
    """Sets every weight to one value.

    Args:
        value: The value.
    """

    value: float
    kind: ClassVar[int] = 0

    def __post_init__(self) -> None:
        self._check("value")

    @property
    def params(self) -> tuple[float, float]:
        """The value."""
        return (self.value, 0.0)


@dataclass(frozen=True)
class Zeros(Initializer):
    """Sets every weight to 0. The dot product of two zero rows has no gradient."""

    kind: ClassVar[int] = 0

    @property
    def params(self) -> tuple[float, float]:
        """Zero."""
        return (0.0, 0.0)


@dataclass(frozen=True)
class Ones(Initializer):
    """Sets every weight to 1."""

    kind: ClassVar[int] = 0

    @property
    def params(self) -> tuple[float, float]:
        """One."""
        return (1.0, 0.0)


@dataclass(frozen=True)
class Uniform(Initializer):
    """Draws from a uniform distribution.

    Args:
        low: Lower bound.
        high: Upper bound.
    """

    low: float = -0.05
    high: float = 0.05
    kind: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self._check("low", "high")
        if self.low > self.high:
            raise InputError(f"Uniform: low {self.low} is above high {self.high}")
        if not self.high - self.low <= FLOAT32_MAX:
            raise InputError(f"Uniform: the range from {self.low} to {self.high} does not fit a float32")

    @property
    def params(self) -> tuple[float, float]:
        """Lower bound and width."""
        low, high = (torch.tensor(x, dtype=torch.float32, device="cpu") for x in (self.low, self.high))
        return (low.item(), (high - low).item())


@dataclass(frozen=True)
class Normal(Initializer):
    """Draws from a normal distribution.

    Args:
        mean: Mean.
        std: Standard deviation.
    """

    mean: float = 0.0
    std: float = 0.01
    kind: ClassVar[int] = 2

    def __post_init__(self) -> None:
        self._check("mean", "std")
        if self.std < 0:
            raise InputError(f"{type(self).__name__}: std must not be negative, got {self.std}")

    @property
    def params(self) -> tuple[float, float]:
        """Mean and standard deviation."""
        return (self.mean, self.std)


@dataclass(frozen=True)
class TruncatedNormal(Normal):
    """Draws from a normal distribution, truncated at two standard deviations from the mean.

    Args:
        mean: Mean before truncation.
        std: Standard deviation before truncation.
    """

    kind: ClassVar[int] = 3


def table_key(seed: int, name: str) -> int:
    """Compute the key of a table's random numbers."""
    text = f"{seed & 0xFFFFFFFFFFFFFFFF}:{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def initial_rows(key: int, ids: Tensor, segments: list[tuple[int, Initializer]]) -> Tensor:
    """Return initial weights."""
    # ids: int64 [n]; returns: float32 [n, sum of dims], on the device of `ids`.
    keys = mix64(ids ^ signed(key))[:, None]
    pieces, start = [], 0
    for dim, initializer in segments:
        columns = torch.arange(start, start + dim, device=ids.device)
        pieces.append(_draw(keys, columns, initializer))
        start += dim
    return torch.cat(pieces, dim=1)


def draw_bits(keys: Tensor, columns: Tensor) -> Tensor:
    """Draw random bits. It is the reference of draw24 in native/hash.hpp."""
    # keys: one per row, int64 [n, 1]; columns: numbers of the columns, int64 [k]; returns: 24 bits per row
    # and column, int64 [n, k].
    bits = mix64(keys + (columns // 2 + 1) * signed(_GOLDEN))
    return (torch.where(columns % 2 == 1, bits >> 32, bits) & 0xFFFFFFFF) >> 8


def _draw(keys: Tensor, columns: Tensor, initializer: Initializer) -> Tensor:
    shape = (keys.shape[0], columns.numel())
    a, b = (torch.tensor(x, dtype=torch.float32, device=keys.device) for x in initializer.params)
    if initializer.kind == Constant.kind:
        return a.expand(shape)
    draws = draw_bits(keys, columns)
    if initializer.kind == Uniform.kind:
        return a + b * (draws.to(torch.float32) * 2.0**-24)
    x = (2 * draws + 1 - (1 << 24)).to(torch.float32) * 2.0**-24
    if initializer.kind == Normal.kind:
        return a + b * (1.4142135 * _inverse_erf(x))
    z = 1.4142135 * _inverse_erf(x * 0.95449974)  # the probability within two standard deviations
    return a + b * z.clamp(-2.0, 2.0)


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        value = value * x + torch.full_like(x, c)
    return value


def _natural_log(y: Tensor) -> Tensor:
    bits = y.view(torch.int32)
    exponent = (bits >> 23) - 126
    m = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)
    low = m < 0.70710677
    exponent = torch.where(low, exponent - 1, exponent).to(torch.float32)
    m = torch.where(low, m + m, m) - 1.0
    square = m * m
    tail = _polynomial(m, _LOG) * m * square
    tail = tail + exponent * -2.1219444e-4
    tail = tail + square * -0.5
    return (m + tail) + exponent * 0.69335938


def _inverse_erf(x: Tensor) -> Tensor:
    w = -_natural_log((1.0 - x) * (1.0 + x))
    centre = _polynomial(w - 2.5, _ERF_CENTRE)
    # Some builds of torch round float32 square roots incorrectly; a float64 root rounds correctly.
    tail = _polynomial(w.double().sqrt().float() - 3.0, _ERF_TAIL)
    return torch.where(w < 5.0, centre, tail) * x


_LOG = (
    7.0376836e-2,
    -1.1514610e-1,
    1.1676999e-1,
    -1.2420141e-1,
    1.4249323e-1,
    -1.6668058e-1,
    2.0000714e-1,
    -2.4999994e-1,
    3.3333331e-1,
)
_ERF_CENTRE = (
    2.8102264e-08,
    3.4327394e-07,
    -3.5233877e-06,
    -4.3915065e-06,
    0.00021858087,
    -0.0012537250,
    -0.0041776816,
    0.24664073,
    1.5014094,
)
_ERF_TAIL = (
    -0.00020021426,
    0.00010095056,
    0.0013493432,
    -0.0036734284,
    0.0057395077,
    -0.0076224613,
    0.0094388705,
    1.0016741,
    2.8329768,
)
