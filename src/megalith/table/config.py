"""Segment and TableConfig: the configuration of a table, validated at construction.

A config says what a row is made of: its segments, and the optimizer states that follow the weights
(`StateColumn`). How an engine lays out these columns in memory is up to the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megalith.errors import InputError
from megalith.routing import MODES
from megalith.table.initializers import Initializer, Uniform
from megalith.table.optimizers import Optimizer, State
from megalith.table.policies import ADMISSIONS, Admission, Capacity, Eviction, MinCount, check_integer
from megalith.table.serving_precision import FixedPoint, OneBit, ServingPrecision

PRECISIONS = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a stored weight by precision."""
ROUNDINGS = ("nearest", "stochastic")
SERVING_FLOATS = ("float32", "float16")
"""Serving precisions without codes: training sees the stored weights."""
SERVING_PRECISIONS: dict[str, type[ServingPrecision]] = {cls.name: cls for cls in (FixedPoint, OneBit)}
"""Serving precisions with codes, by name."""
MISSING = ("initial", "zeros")
MAX_ROW_FLOATS = 2**24


@dataclass(frozen=True, repr=False)
class Segment:
    """A contiguous part of a row with its own dim, optimizer, initializer and precision.

    Args:
        dim: Number of weights.
        optimizer: Updates the weights.
        initializer: Draws the weights of a new row.
        precision: Stored type of the weights: "float32", "float16" or "bfloat16". Lookups and gradients are
            float32 in any case, and so is optimizer state.
        rounding: How a step rounds to a precision of 16 bits: "nearest" (ties to even) or "stochastic".
        serving: How servers store the weights: `FixedPoint`, `OneBit`, "float32" or "float16"; None: in the
            precision of the export. With `FixedPoint` and `OneBit`, lookups return what is served.

    Raises:
        InputError: A field has the wrong type or value.
    """

    dim: int
    optimizer: Optimizer = field(kw_only=True)
    initializer: Initializer = field(default_factory=Uniform, kw_only=True)
    precision: str = field(default="float32", kw_only=True)
    rounding: str = field(default="nearest", kw_only=True)
    serving: ServingPrecision | str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int) or self.dim < 1:
            raise InputError(f"Segment: dim must be a positive integer, got {self.dim!r}")
        if not isinstance(self.optimizer, Optimizer):
            raise InputError(f"Segment: optimizer must be an Optimizer, got {self.optimizer!r}")
        _check_states(self.optimizer, self.optimizer.states(self.dim))
        if not isinstance(self.initializer, Initializer):
            raise InputError(f"Segment: initializer must be an Initializer, got {self.initializer!r}")
        for name, known in (("precision", tuple(PRECISIONS)), ("rounding", ROUNDINGS)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                raise InputError(f"Segment: {name} must be one of {', '.join(known)}, got {value!r}")
        if self.rounding != "nearest" and self.precision == "float32":
            raise InputError("Segment: float32 is not rounded; set precision to float16 or bfloat16")
        if not (
            self.serving is None
            or type(self.serving) in SERVING_PRECISIONS.values()
            or (isinstance(self.serving, str) and self.serving in SERVING_FLOATS)
        ):
            raise InputError(
                "Segment: serving must be FixedPoint(...), OneBit(...), 'float32', 'float16' or None, "
                f"got {self.serving!r}"
            )

    def __repr__(self) -> str:
        return f"Segment({self.dim}, {self.settings})"

    @property
    def settings(self) -> str:
        """The fields except dim, as they are passed to the constructor."""
        extras = "".join(
            f", {name}={getattr(self, name)!r}"
            for name, usual in (("precision", "float32"), ("rounding", "nearest"), ("serving", None))
            if getattr(self, name) != usual
        )
        return f"optimizer={self.optimizer}, initializer={self.initializer}{extras}"


def _check_states(optimizer: Optimizer, states: object) -> None:
    """Raise InputError unless the states, which a user's optimizer may return, are distinct States."""
    if not isinstance(states, list | tuple) or not all(isinstance(state, State) for state in states):
        raise InputError(f"{optimizer.name}: states() must return a tuple of State, got {states!r}")
    names = [state.name for state in states]
    if len(set(names)) != len(names):
        raise InputError(f"{optimizer.name}: states() returns a name twice: {', '.join(names)}")


@dataclass(frozen=True)
class StateColumn:
    """One optimizer state of a segment: floats `start:end` of a stored row."""

    segment: int
    name: str
    start: int
    end: int
    initial: float

    @property
    def key(self) -> str:
        """Its key in `Chunk.state`."""
        return f"{self.segment}/{self.name}"


@dataclass(frozen=True, repr=False, init=False)
class TableConfig:
    """The configuration of a table.

    Pass either `segments`, or `dim` and `optimizer` (and optionally `initializer`, `precision`, `rounding`
    and `serving`) for rows of one segment.

    Args:
        name: Name of the table.
        dim: Number of weights of a row.
        segments: The parts of a row.
        optimizer: As for `Segment`.
        initializer: As for `Segment`.
        precision: As for `Segment`.
        rounding: As for `Segment`.
        serving: As for `Segment`.
        admission: Which new ids of an update get a row: `MinCount` or `Probability`. None: all.
        eviction: Which rows are removed: any of `TTL`, `MinNorm` and `Capacity`, or a tuple of them.
        missing: What an id without a row reads as: "initial" (its initial row) or "zeros".
        dist_type: The routing mode of the table; None: the mode of the shards.
        trainable: With False, an update raises UsageError.
        huge_pages: Whether the cpu engine asks for pages of 2 MiB for this table, which make random access in
            a large table faster. With False it does not, even if the process uses them
            (`megalith.table.engines.cpu.set_huge_pages`).
        device_bytes: On the cuda engine, the largest number of bytes of rows in GPU memory; rows beyond it
            are in pinned host memory, and rows in use move to the GPU. The index comes on top. None: all rows
            are in GPU memory. Other engines ignore it.
        deterministic: On the cuda engine, whether updates add gradients in a fixed order. With False they add
            with atomic operations: sums differ in their last bits from run to run. Other engines ignore it.

    Raises:
        InputError: An argument has the wrong type or value.
    """

    name: str
    segments: tuple[Segment, ...]
    admission: Admission | None
    eviction: tuple[Eviction, ...]
    missing: str
    dist_type: str | None
    trainable: bool
    huge_pages: bool
    device_bytes: int | None
    deterministic: bool

    def __init__(
        self,
        name: str,
        *,
        dim: int | None = None,
        segments: Iterable[Segment] | None = None,
        optimizer: Optimizer | None = None,
        initializer: Initializer | None = None,
        precision: str = "float32",
        rounding: str = "nearest",
        serving: ServingPrecision | str | None = None,
        admission: Admission | None = None,
        eviction: Eviction | Iterable[Eviction] = (),
        missing: str = "initial",
        dist_type: str | None = None,
        trainable: bool = True,
        huge_pages: bool = True,
        device_bytes: int | None = None,
        deterministic: bool = True,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise InputError(f"TableConfig: name must be a non-empty string, got {name!r}")
        where = f"TableConfig {name!r}"
        if segments is None:
            if dim is None or optimizer is None:
                raise InputError(f"{where}: pass dim and optimizer, or segments")
            segments = (
                Segment(
                    dim,
                    optimizer=optimizer,
                    initializer=Uniform() if initializer is None else initializer,
                    precision=precision,
                    rounding=rounding,
                    serving=serving,
                ),
            )
        elif any(x is not None for x in (dim, optimizer, initializer, serving)) or not (
            isinstance(precision, str)
            and precision == "float32"
            and isinstance(rounding, str)
            and rounding == "nearest"
        ):
            raise InputError(
                f"{where}: pass segments, or dim, optimizer, initializer, precision, rounding and serving, "
                "not both"
            )
        if not isinstance(segments, list | tuple | Iterator):
            raise InputError(f"{where}: segments must be a list of Segments, got {segments!r}")
        segments = tuple(segments)
        if not segments:
            raise InputError(f"{where}: segments is empty")
        for segment in segments:
            if not isinstance(segment, Segment):
                raise InputError(f"{where}: segments must hold Segments, got {segment!r}")
        if admission is not None and type(admission) not in ADMISSIONS.values():
            raise InputError(f"{where}: admission must be MinCount, Probability or None, got {admission!r}")
        eviction = _eviction_policies(where, eviction)
        if not isinstance(missing, str) or missing not in MISSING:
            raise InputError(f"{where}: missing must be one of {', '.join(MISSING)}, got {missing!r}")
        if dist_type is not None and not (isinstance(dist_type, str) and dist_type in MODES):
            raise InputError(f"{where}: dist_type must be one of {', '.join(MODES)}, got {dist_type!r}")
        flags = {"trainable": trainable, "huge_pages": huge_pages, "deterministic": deterministic}
        for key, flag in flags.items():
            if not isinstance(flag, int):
                raise InputError(f"{where}: {key} must be True or False, got {flag!r}")
        if device_bytes is not None:
            check_integer(f"{where}: device_bytes", device_bytes, 1)
        for attribute, value in (
            ("name", name),
            ("segments", segments),
            ("admission", admission),
            ("eviction", eviction),
            ("missing", missing),
            ("dist_type", dist_type),
            ("trainable", bool(trainable)),
            ("huge_pages", bool(huge_pages)),
            ("device_bytes", device_bytes),
            ("deterministic", bool(deterministic)),
        ):
            object.__setattr__(self, attribute, value)
        if self.row_floats > MAX_ROW_FLOATS:
            raise InputError(
                f"{where}: a row has {self.row_floats} floats, including state; the limit is {MAX_ROW_FLOATS}"
            )

    @property
    def dim(self) -> int:
        """Number of weights of a row."""
        return sum(segment.dim for segment in self.segments)

    @property
    def capacity(self) -> Capacity | None:
        """The limit of the size of the table."""
        return next((policy for policy in self.eviction if isinstance(policy, Capacity)), None)

    @property
    def counted(self) -> bool:
        """Whether rows store their number of updates and the step of the last one, for a policy."""
        capacity = self.capacity
        by_count = capacity is not None and capacity.score not in (None, "lru")
        return by_count or isinstance(self.admission, MinCount)

    @property
    def precision(self) -> str:
        """The precision that holds the weights of all segments: theirs if they agree, otherwise float32."""
        found = {segment.precision for segment in self.segments}
        return found.pop() if len(found) == 1 else "float32"

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row: weights, each in the precision of its segment, and optimizer state."""
        at = 0
        for segment in self.segments:
            width = PRECISIONS[segment.precision]
            at = -(-at // width) * width + segment.dim * width
        return -(-at // 4) * 4 + 4 * (self.row_floats - self.dim)

    @property
    def row_floats(self) -> int:
        """Number of floats of a row: weights, then optimizer state."""
        columns = self.state_columns
        return columns[-1].end if columns else self.dim

    @property
    def state_columns(self) -> tuple[StateColumn, ...]:
        """The optimizer states of a stored row, in storage order."""
        columns: list[StateColumn] = []
        at = self.dim
        for number, segment in enumerate(self.segments):
            states: tuple[State, ...] = segment.optimizer.states(segment.dim)
            for state in states:
                columns.append(StateColumn(number, state.name, at, at + state.size, state.initial))
                at += state.size
        return tuple(columns)

    def __repr__(self) -> str:
        if len(self.segments) == 1:
            inside = f"dim={self.dim}, {self.segments[0].settings}"
        else:
            inside = "segments=[" + ", ".join(map(repr, self.segments)) + "]"
        extras = "".join(
            f", {name}={getattr(self, name)!r}"
            for name, usual in (
                ("admission", None),
                ("eviction", ()),
                ("missing", "initial"),
                ("dist_type", None),
                ("trainable", True),
                ("huge_pages", True),
                ("device_bytes", None),
                ("deterministic", True),
            )
            if getattr(self, name) != usual
        )
        return f"TableConfig({self.name!r}, {inside}{extras})"


def _eviction_policies(where: str, eviction: Any) -> tuple[Eviction, ...]:
    if isinstance(eviction, Eviction):
        eviction = (eviction,)
    if not isinstance(eviction, list | tuple) or not all(isinstance(p, Eviction) for p in eviction):
        raise InputError(
            f"{where}: eviction must be TTL, MinNorm, Capacity or a tuple of them, got {eviction!r}"
        )
    kinds = [type(policy).__name__ for policy in eviction]
    twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
    if twice:
        raise InputError(f"{where}: eviction has {twice[0]} twice; pass each policy once")
    return tuple(eviction)
