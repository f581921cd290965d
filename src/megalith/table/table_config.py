"""What a table is made of: `Segment` and `TableConfig`, checked when they are made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megalith.errors import InputError
from megalith.routing import MODES
from megalith.table.initializers import Initializer, Uniform
from megalith.table.optimizers import Optimizer, State

PRECISIONS = ("float32",)
MISSING = ("initial", "zeros")
MAX_ROW_FLOATS = 2**24


@dataclass(frozen=True, repr=False)
class Segment:
    """A contiguous part of a row with its own dim, optimizer, initializer and precision."""

    dim: int
    optimizer: Optimizer = field(kw_only=True)
    initializer: Initializer = field(default_factory=Uniform, kw_only=True)
    precision: str = field(default="float32", kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int) or self.dim < 1:
            raise InputError(f"Segment: dim must be a positive integer, got {self.dim!r}")
        if not isinstance(self.optimizer, Optimizer):
            raise InputError(f"Segment: optimizer must be an Optimizer, got {self.optimizer!r}")
        if not isinstance(self.initializer, Initializer):
            raise InputError(f"Segment: initializer must be an Initializer, got {self.initializer!r}")
        if self.precision not in PRECISIONS:
            raise InputError(
                f"Segment: precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}"
            )

    def __repr__(self) -> str:
        return f"Segment({self.dim}, optimizer={self.optimizer}, initializer={self.initializer})"


@dataclass(frozen=True)
class StateColumn:
    """Where a piece of a segment's optimizer state lies in a stored row: floats `start:end`."""

    segment: int
    name: str
    start: int
    end: int
    initial: float

    @property
    def key(self) -> str:
        """Its name in a Chunk."""
        return f"{self.segment}/{self.name}"


@dataclass(frozen=True, repr=False, init=False)
class TableConfig:
    """A table: its name and the segments of its rows.

    Give either `segments`, or `dim` and `optimizer` for a row of one segment.
    missing: what an id without a row reads as, "initial" (the row it would start with) or "zeros".
    dist_type: how rows spread over shards; None takes the shards' own routing.
    trainable: False makes updates an error.
    """

    name: str
    segments: tuple[Segment, ...]
    missing: str
    dist_type: str | None
    trainable: bool

    def __init__(
        self,
        name: str,
        *,
        dim: int | None = None,
        segments: Iterable[Segment] | None = None,
        optimizer: Optimizer | None = None,
        initializer: Initializer | None = None,
        precision: str = "float32",
        admission: None = None,
        eviction: tuple[()] = (),
        missing: str = "initial",
        dist_type: str | None = None,
        trainable: bool = True,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise InputError(f"TableConfig: name must be a text that is not empty, got {name!r}")
        where = f"TableConfig {name!r}"
        if segments is None:
            if dim is None or optimizer is None:
                raise InputError(f"{where}: give dim and optimizer, or segments")
            segments = (
                Segment(
                    dim,
                    optimizer=optimizer,
                    initializer=Uniform() if initializer is None else initializer,
                    precision=precision,
                ),
            )
        elif (dim, optimizer, initializer, precision) != (None, None, None, "float32"):
            raise InputError(
                f"{where}: give segments, or dim, optimizer, initializer and precision, not both"
            )
        segments = tuple(segments)
        if not segments:
            raise InputError(f"{where}: segments is empty")
        for segment in segments:
            if not isinstance(segment, Segment):
                raise InputError(f"{where}: segments must hold Segments, got {segment!r}")
        if admission is not None:
            raise InputError(f"{where}: admission policies are not supported yet, got {admission!r}")
        if tuple(eviction):
            raise InputError(f"{where}: eviction policies are not supported yet, got {eviction!r}")
        if missing not in MISSING:
            raise InputError(f"{where}: missing must be one of {', '.join(MISSING)}, got {missing!r}")
        if dist_type is not None and dist_type not in MODES:
            raise InputError(f"{where}: dist_type must be one of {', '.join(MODES)}, got {dist_type!r}")
        for attribute, value in (
            ("name", name),
            ("segments", segments),
            ("missing", missing),
            ("dist_type", dist_type),
            ("trainable", bool(trainable)),
        ):
            object.__setattr__(self, attribute, value)
        if self.row_floats > MAX_ROW_FLOATS:
            raise InputError(
                f"{where}: a row of {self.row_floats} floats, state included; at most {MAX_ROW_FLOATS}"
            )

    @property
    def dim(self) -> int:
        """Weights of a row, all segments."""
        return sum(segment.dim for segment in self.segments)

    @property
    def row_floats(self) -> int:
        """Floats of a stored row: weights, then optimizer state."""
        columns = self.state_columns
        return columns[-1].end if columns else self.dim

    @property
    def state_columns(self) -> tuple[StateColumn, ...]:
        """The optimizer state in a stored row; keys are "segment number/state name"."""
        columns: list[StateColumn] = []
        at = self.dim
        for number, segment in enumerate(self.segments):
            states: tuple[State, ...] = segment.optimizer.state(segment.dim)
            for state in states:
                columns.append(StateColumn(number, state.name, at, at + state.size, state.initial))
                at += state.size
        return tuple(columns)

    def __repr__(self) -> str:
        if len(self.segments) == 1:
            only = self.segments[0]
            inside = f"dim={only.dim}, optimizer={only.optimizer}, initializer={only.initializer}"
        else:
            inside = "segments=[" + ", ".join(map(repr, self.segments)) + "]"
        extras = "".join(
            f", {name}={getattr(self, name)!r}"
            for name, usual in (("missing", "initial"), ("dist_type", None), ("trainable", True))
            if getattr(self, name) != usual
        )
        return f"TableConfig({self.name!r}, {inside}{extras})"
