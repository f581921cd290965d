"""How a window's payloads become one update, and which overlaps count: settings that every rank must share.

They are part of the plan, so its digest covers them and an artifact replays with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal, TypeVar, get_args

from megalith.errors import InputError
from megalith.storage.strict_json import JsonFields

T = TypeVar("T")

Optimizer = Literal["sgd", "nesterov", "sign"]
Rule = Literal["mean", "trimmed", "median"]
Mean = Literal["contributors", "peers"]
Clip = Literal["median", "none"]
Level = Literal["high", "max", "mega"]
LEVELS: tuple[Level, ...] = ("high", "max", "mega")


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """The outer step: clip, reduce, step."""

    optimizer: Optimizer = "sgd"
    """sgd: w -= lr * g. nesterov: with momentum. sign: w -= lr * sign(g)."""
    lr: float = 1.0
    momentum: float = 0.9
    """Of nesterov; the others have none."""
    rule: Rule = "mean"
    """How the values sent for one position become one: mean, mean without both ends, or middle."""
    mean: Mean = "contributors"
    """Over whom: those that sent the position, or all peers (who sent nothing, sent zero)."""
    trim: float = 0.1
    """Of "trimmed": the share of values left out at each end, below one half."""
    clip: Clip = "median"
    """median: a peer's parameter is scaled down to the median of the peers' norms."""

    def __post_init__(self) -> None:
        for name, kinds in (("optimizer", Optimizer), ("rule", Rule), ("mean", Mean), ("clip", Clip)):
            _check_choice(name, getattr(self, name), get_args(kinds))
        if not math.isfinite(self.lr) or self.lr < 0:
            raise InputError(f"lr must be a finite number, 0 or more, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum must be from 0 to below 1, got {self.momentum}")
        if not 0 <= self.trim < 0.5:
            raise InputError(f"trim must be from 0 to below 0.5, got {self.trim}")

    def to_json(self) -> dict[str, Any]:
        """As plans have it."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: JsonFields) -> UpdateConfig:
        """Reads what `to_json` wrote."""
        given: dict[str, Any] = {k: fields.string(k, 32) for k in ("optimizer", "rule", "mean", "clip")}
        given |= {k: fields.number(k) for k in ("lr", "momentum", "trim")}
        return _made(cls, given, fields)


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """When two peers' indices are too alike, who is to blame, and what follows."""

    threshold: float = 0.4
    """A share of shared positions from here on is a finding of level "high"."""
    max_from: float = 0.5
    mega_from: float = 0.6
    full_rows: bool = False
    """Whether chunks that are sent whole count; they are alike for any two peers."""
    tie: Literal["later", "first"] = "later"
    """Who is blamed for a pair written at the same time: the later uid, or the first (as the baseline)."""
    level: Literal["worst", "last"] = "worst"
    """A uid's level over several pairs: the worst, or that of its last pair (as the baseline)."""
    exclude: Literal["none", "high", "max", "mega"] = "none"
    """From which level on a blamed peer is left out of this very update."""

    def __post_init__(self) -> None:
        _check_choice("tie", self.tie, ("later", "first"))
        _check_choice("level", self.level, ("worst", "last"))
        _check_choice("exclude", self.exclude, ("none", *LEVELS))
        if not 0 < self.threshold <= self.max_from <= self.mega_from:
            raise InputError(
                "threshold, max_from and mega_from must be above 0 and ascend, got "
                f"{self.threshold}, {self.max_from}, {self.mega_from}"
            )

    @property
    def limits(self) -> tuple[tuple[Fraction, Level], ...]:
        """Exact limits, highest first."""
        numbers = (self.mega_from, self.max_from, self.threshold)
        return tuple((Fraction(str(n)), level) for n, level in zip(numbers, reversed(LEVELS), strict=True))

    def to_json(self) -> dict[str, Any]:
        """As plans have it."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: JsonFields) -> OverlapConfig:
        """Reads what `to_json` wrote."""
        given: dict[str, Any] = {k: fields.string(k, 32) for k in ("tie", "level", "exclude")}
        given |= {k: fields.number(k) for k in ("threshold", "max_from", "mega_from")}
        given["full_rows"] = fields.boolean("full_rows")
        return _made(cls, given, fields)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _made(kind: Callable[..., T], given: dict[str, Any], fields: JsonFields) -> T:
    fields.allow_only(*given)
    try:
        return kind(**given)
    except InputError as error:
        fields.fail(str(error).split()[0], f"does not fit: {error}")
