"""The bytes of a stored row, and what tables must have in common to share launches.

    weights of segment 0, 1, ...   each in its precision; another precision starts at a multiple of 16 bytes
    states                         float32, in the order of `TableConfig.state_columns`
    header                         id, time, flags, count, step: 24 bytes

Rows are multiples of 32 bytes, the unit of access to the caches of the GPU; wide ones are multiples of
64, the unit of access to its memory.

Tables share launches (`SharedLayout`) if they have the same segments apart from their exact dims: the
same optimizers with the same settings, precisions, and dims that are equal when padded to a power of two,
the size of a kernel's block of columns. So tables of dims 33 to 64 can share launches. Learning rates,
initializers, sizes, and what an id without a row reads as may differ.

Kernels receive the numbers of a layout as constants, which is fastest. A number that differs between
tables of a launch is negative instead, and the kernel reads it from the descriptor of the table
(`layout_number` in device_functions.py):

    all tables have 64      64
    12 and 8                -4     all are multiples of 4, so a thread can access 4 columns at once
    16 and 48               -16    16 is the largest: 16 bytes are the widest access
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megalith.table.config import PRECISIONS, TableConfig
from megalith.table.engines.cuda.step_rules import StepRule, find_rule
from megalith.table.engines.cuda.triton_runtime import padded
from megalith.table.serving_precision import ServingView

HEADER_BYTES = 24
SECTOR, WIDE_SECTOR, WIDE_ROW = 32, 64, 512
CHUNK_BYTES = 16 << 20  # Bytes of a chunk of rows, about
MIN_CHUNK_SHIFT = 4


@dataclass(frozen=True)
class ColumnRun:
    """Columns of equal precision that lie next to each other."""

    start: int
    end: int
    offset: int  # Bytes from the start of the row
    precision: int  # 0 float32, 1 float16, 2 bfloat16

    @property
    def width(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class SegmentPlace:
    """Where a segment lies in a row, and its step."""

    start: int
    width: int
    offset: int
    precision: int
    stochastic: bool
    state: int  # Bytes from the start of the row to the first state of the segment
    rule: StepRule | None


@dataclass(frozen=True)
class RowLayout:
    dim: int
    runs: tuple[ColumnRun, ...]
    segments: tuple[SegmentPlace, ...]
    state_offset: int
    state_floats: int
    header: int
    stride: int
    shift: int
    initial: bool
    counted: bool
    optimizers: tuple[str, ...]
    deterministic: bool = True

    @classmethod
    def of(cls, config: TableConfig, chunk_bytes: int = CHUNK_BYTES) -> RowLayout:
        view = ServingView.of(config)
        in_torch = view is not None and view.depends_on_step
        numbers = {name: number for number, name in enumerate(PRECISIONS)}
        runs: list[ColumnRun] = []
        places, at, column = [], 0, 0
        for segment in config.segments:
            precision, width = numbers[segment.precision], PRECISIONS[segment.precision]
            if runs and runs[-1].precision == precision:
                runs[-1] = ColumnRun(runs[-1].start, column + segment.dim, runs[-1].offset, precision)
            else:
                at = -(-at // 16) * 16
                runs.append(ColumnRun(column, column + segment.dim, at, precision))
            places.append((column, at, precision))
            at += segment.dim * width
            column += segment.dim
        state_offset = -(-at // 16) * 16
        segments = []
        for number, (segment, place) in enumerate(zip(config.segments, places, strict=True)):
            states = [c.start for c in config.state_columns if c.segment == number]
            state = state_offset + 4 * ((states[0] if states else config.dim) - config.dim)
            # Gradients of a view that depends on the step are computed in torch.
            rule = None if in_torch else find_rule(segment.optimizer)
            stochastic = segment.rounding == "stochastic"
            start, offset, precision = place
            segments.append(SegmentPlace(start, segment.dim, offset, precision, stochastic, state, rule))
        state_floats = config.row_floats - config.dim
        header = -(-(state_offset + 4 * state_floats) // 8) * 8
        sector = WIDE_SECTOR if header >= WIDE_ROW else SECTOR
        stride = -(-(header + HEADER_BYTES) // sector) * sector
        shift = max(MIN_CHUNK_SHIFT, (chunk_bytes // stride).bit_length() - 1)
        return cls(
            dim=config.dim,
            runs=tuple(runs),
            segments=tuple(segments),
            state_offset=state_offset,
            state_floats=state_floats,
            header=header,
            stride=stride,
            shift=shift,
            initial=config.missing == "initial",
            counted=config.counted,
            optimizers=tuple(s.optimizer.name for s in config.segments),
            deterministic=config.deterministic,
        )


WIDEST = 16


def launch_kind(layout: RowLayout) -> Hashable:
    """Return what tables must have in common to share launches."""
    # Optimizers without a rule compare by name; their steps are made one table after another.
    segments = [
        (padded(each.width), each.precision, each.stochastic, each.rule, name)
        for each, name in zip(layout.segments, layout.optimizers, strict=True)
    ]
    runs = [(padded(run.width), run.precision) for run in layout.runs]
    return padded(layout.dim), tuple(segments), tuple(runs), layout.deterministic


def shared_number(values: Iterable[int]) -> int:
    """Return a number of several tables as kernels receive it."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else -math.gcd(WIDEST, *distinct)


@dataclass(frozen=True)
class SharedLayout:
    layouts: tuple[RowLayout, ...]  # Layouts with equal `launch_kind`

    @classmethod
    def of(cls, layouts: Sequence[RowLayout]) -> SharedLayout:
        assert len({launch_kind(layout) for layout in layouts}) == 1
        return cls(tuple(layouts))

    @cached_property
    def dims(self) -> tuple[int, ...]:
        return tuple(layout.dim for layout in self.layouts)

    @cached_property
    def dim(self) -> int:
        return shared_number(self.dims)

    @cached_property
    def max_dim(self) -> int:
        return max(self.dims)

    @cached_property
    def header(self) -> int:
        return shared_number(layout.header for layout in self.layouts)

    @cached_property
    def places(self) -> dict[str, int]:
        """The constants of kernels that compute the addresses of rows."""
        return {
            "SHIFT": shared_number(layout.shift for layout in self.layouts),
            "STRIDE": shared_number(layout.stride for layout in self.layouts),
        }

    @cached_property
    def state_constants(self) -> dict[str, int]:
        """The constants of kernels that write all states of rows."""
        return {
            "STATE_OFFSET": shared_number(layout.state_offset for layout in self.layouts),
            "STATES": shared_number(layout.state_floats for layout in self.layouts),
            "MOST_STATES": max(layout.state_floats for layout in self.layouts),
        }

    @property
    def num_runs(self) -> int:
        return len(self.layouts[0].runs)

    @property
    def num_segments(self) -> int:
        return len(self.layouts[0].segments)

    @property
    def deterministic(self) -> bool:
        """Whether sums have a fixed order."""
        return self.layouts[0].deterministic

    @cached_property
    def initial(self) -> bool:
        """Whether ids without a row read as their initial rows in some table."""
        return any(layout.initial for layout in self.layouts)

    @cached_property
    def counted(self) -> bool:
        """Whether the updates of rows are counted in some table."""
        return any(layout.counted for layout in self.layouts)

    @cached_property
    def has_rules(self) -> bool:
        """Whether every segment has a kernel for its step."""
        return all(segment.rule is not None for segment in self.layouts[0].segments)

    @cached_property
    def run_constants(self) -> list[dict[str, int]]:
        """For each run, the constants of kernels that read or write its columns, except for its offset."""
        found = []
        for number in range(self.num_runs):
            runs = [layout.runs[number] for layout in self.layouts]
            found.append(
                {
                    "RUN": number,
                    "START": shared_number(run.start for run in runs),
                    "WIDTH": shared_number(run.width for run in runs),
                    "WIDEST": max(run.width for run in runs),
                    "PRECISION": runs[0].precision,
                    "NUM_SEGMENTS": self.num_segments,
                }
            )
        return found

    def run_offset(self, number: int) -> int:
        return shared_number(layout.runs[number].offset for layout in self.layouts)

    def rule(self, number: int) -> StepRule:
        rule = self.layouts[0].segments[number].rule
        assert rule is not None
        return rule

    @cached_property
    def step_constants(self) -> list[dict[str, float]]:
        """For each segment, the constants of the kernels that make its step."""
        found: list[dict[str, float]] = []
        for number in range(self.num_segments):
            places, rule = [layout.segments[number] for layout in self.layouts], self.rule(number)
            found.append(
                {
                    "OFFSET": shared_number(place.offset for place in places),
                    "STATE": shared_number(place.state for place in places),
                    "START": shared_number(place.start for place in places),
                    "WIDTH": shared_number(place.width for place in places),
                    "SEGMENT": number,
                    "PRECISION": places[0].precision,
                    "STOCHASTIC": places[0].stochastic,
                    "RULE": rule.rule,
                    "OPTIONS": rule.options,
                    "DELAY": rule.delay,
                    "COLUMNS": padded(places[0].width),
                }
            )
        return found

    def whole_row_constants(self, rule: int) -> dict[str, float]:
        """Return the constants of kernels that use the gradients of whole rows without a step."""
        nothing = ("OFFSET", "STATE", "START", "SEGMENT", "PRECISION", "OPTIONS")
        return {
            **dict.fromkeys(nothing, 0),
            "STOCHASTIC": False,
            "DELAY": -1.0,
            "WIDTH": self.dim,
            "RULE": rule,
            "COLUMNS": padded(self.max_dim),
        }
