"""Features and layouts: which columns are looked up in which tables, and which tensors are returned.

They are plain data, validated at construction. `compiled_batch.py` compiles them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megalith.errors import InputError
from megalith.nn.combiners import Combiner, Sum

KINDS = ("concat", "stack", "add", "none")


@dataclass(frozen=True)
class Feature:
    """A named column that is looked up in a table.

    Args:
        name: The name of the column.
        table: The name of the table.
        combiner: `Sum()`, `Mean()`, `Sqrtn()`, `FirstN(n)`, or None for a Ragged of rows.
        shared: Whether the column has one row for the whole batch.
        pad: The id that pads tensors of this feature.

    Raises:
        InputError: For a wrong value.
    """

    name: str
    table: str
    combiner: Combiner | None = field(default_factory=Sum)
    shared: bool = False
    pad: int = field(default=-1, kw_only=True)

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
            raise InputError(f"feature {self.name!r}: pad must be an integer, got {self.pad!r}")
        if self.shared and self.combiner is None:
            raise InputError(f"feature {self.name!r}: a shared feature needs a combiner")


@dataclass(frozen=True)
class Slice:
    """Columns `start:end` of the embedding of a feature, for a layout.

    Args:
        feature: The name of the feature.
        start: The first column.
        end: The column after the last one.

    Raises:
        InputError: For a wrong type or an empty range.
    """

    feature: str
    start: int
    end: int

    def __post_init__(self) -> None:
        if not isinstance(self.feature, str):
            raise InputError(f"Slice: feature must be the name of a feature, got {self.feature!r}")
        if not (isinstance(self.start, int) and isinstance(self.end, int) and 0 <= self.start < self.end):
            raise InputError(f"Slice of {self.feature!r}: {self.start}:{self.end} is not a range of columns")

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.end - self.start


@dataclass(frozen=True)
class Layout:
    """Slices of many features assembled into one named tensor.

        kind        output                 output of FirstN(n) features
        "concat"    [B, sum of widths]     [B, n, sum of widths]
        "stack"     [B, slices, width]     [B, slices, n, width]
        "add"       [B, width]             not possible
        "none"      list of [B, width]     list of [B, n, width]

    Args:
        name: The name of the output.
        slices: The slices, in order.
        kind: How they are assembled.

    Raises:
        InputError: For a wrong value.
    """

    name: str
    slices: Sequence[Slice]
    kind: str = "concat"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"Layout: name must be a non-empty string, got {self.name!r}")
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise InputError(
                f"layout {self.name!r}: kind must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )
        good = isinstance(self.slices, list | tuple) and all(isinstance(s, Slice) for s in self.slices)
        if not good or not self.slices:
            raise InputError(
                f"layout {self.name!r}: slices must be a list of at least one Slice, got {self.slices!r}"
            )
        object.__setattr__(self, "slices", tuple(self.slices))
