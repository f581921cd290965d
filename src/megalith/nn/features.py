"""Features and layouts: what is looked up where, and which tensors come out.

Plain descriptions with their checks. `plan.py` compiles them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from megalith.errors import InputError
from megalith.nn.combiners import Combiner, Sum

KINDS = ("concat", "stack", "add", "none")


@dataclass(frozen=True)
class Feature:
    """A named column looked up in a table, its rows combined.

    combiner: `Sum()`, `Mean()`, `Sqrtn()`, `FirstN(n)`, or None for a Ragged of rows. shared: the column
    has one row that stands for the whole batch. pad: the id that fills up padded tensors of this feature.
    """

    name: str
    table: str
    combiner: Combiner | None = field(default_factory=Sum)
    shared: bool = False
    _: KW_ONLY
    pad: int = -1

    def __post_init__(self) -> None:
        for what in ("name", "table"):
            if not isinstance(getattr(self, what), str) or not getattr(self, what):
                raise InputError(f"Feature: {what} must be a non-empty string, got {getattr(self, what)!r}")
        if self.combiner is not None and not isinstance(self.combiner, Combiner):
            raise InputError(
                f"feature {self.name!r}: combiner must be Sum(), Mean(), Sqrtn(), FirstN(n) or None, "
                f"got {self.combiner!r}"
            )
        if not isinstance(self.shared, bool):
            raise InputError(f"feature {self.name!r}: shared must be True or False, got {self.shared!r}")
        if isinstance(self.pad, bool) or not isinstance(self.pad, int):
            raise InputError(f"feature {self.name!r}: pad must be a whole number, got {self.pad!r}")
        if self.shared and self.combiner is None:
            raise InputError(f"feature {self.name!r}: a shared feature needs a combiner")


@dataclass(frozen=True)
class Slice:
    """Columns `start:end` of a feature's embedding, for a layout."""

    feature: str
    start: int
    end: int

    def __post_init__(self) -> None:
        if not isinstance(self.feature, str):
            raise InputError(f"Slice: feature must be the name of a feature, got {self.feature!r}")
        if not (isinstance(self.start, int) and isinstance(self.end, int) and 0 <= self.start < self.end):
            raise InputError(f"Slice of {self.feature!r}: {self.start}:{self.end} is no range of columns")

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.end - self.start


@dataclass(frozen=True)
class Layout:
    """Slices of many features assembled into one named tensor.

    kind: "concat" [batch, sum of widths], "stack" [batch, slices, width], "add" [batch, width], "none" a
    list of one tensor per slice. FirstN features, all of one n, give [batch, n, sum of widths],
    [batch, slices, n, width], and [batch, n, width] each; they cannot be added.
    """

    name: str
    slices: Sequence[Slice]
    kind: str = "concat"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"Layout: name must be a non-empty string, got {self.name!r}")
        if self.kind not in KINDS:
            raise InputError(
                f"layout {self.name!r}: kind must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )
        good = isinstance(self.slices, list | tuple) and all(isinstance(s, Slice) for s in self.slices)
        if not good or not self.slices:
            raise InputError(
                f"layout {self.name!r}: slices must be a list of at least one Slice, got {self.slices!r}"
            )
        object.__setattr__(self, "slices", tuple(self.slices))
