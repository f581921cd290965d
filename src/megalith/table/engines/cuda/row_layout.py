"""The bytes of a stored row.

    weights of segment 0, 1, ...   each in its precision; another precision starts at a multiple of 16 bytes
    states                         float32, in the order of `TableConfig.state_columns`
    header                         id, time, flags, count, step: 24 bytes

Rows are multiples of 32 bytes, the unit of access to the caches of the GPU; wide ones are multiples of 64,
the unit of access to its memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalith.table.engines.cuda.step_settings import StepRule, find_rule
from megalith.table.serving_view import ServingView
from megalith.table.table_config import PRECISIONS, TableConfig

HEADER_BYTES = 24
SECTOR, WIDE_SECTOR, WIDE_ROW = 32, 64, 512
CHUNK_BYTES = 16 << 20
"""Bytes of a chunk of rows, about."""
MIN_CHUNK_SHIFT = 4


@dataclass(frozen=True)
class ColumnRun:
    """Columns of equal precision that lie next to each other."""

    start: int
    """The first column."""
    end: int
    """The column after the last one."""
    offset: int
    """Bytes from the start of the row."""
    precision: int
    """Number of the precision: 0 float32, 1 float16, 2 bfloat16."""

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.end - self.start


@dataclass(frozen=True)
class SegmentPlace:
    """Where a segment lies in a row, and its step."""

    start: int
    width: int
    offset: int
    precision: int
    stochastic: bool
    state: int
    """Bytes from the start of the row to the first state of the segment."""
    rule: StepRule | None


@dataclass(frozen=True)
class RowLayout:
    """The layout of the rows of a table."""

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
        """Compute the layout of a table's rows."""
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
