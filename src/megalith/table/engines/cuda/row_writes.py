"""Writes of given rows: assignments in input order, and complete rows."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.table.engines.cuda import row_kernels
from megalith.table.engines.cuda.device_table import DeviceTable
from megalith.table.engines.cuda.launch_group import LaunchGroup
from megalith.table.engines.cuda.triton_runtime import PLAIN_ARITHMETIC, padded
from megalith.table.table_data import Chunk

TIME, COUNT, STEP = 8, 16, 20
"""Fields of a header, in bytes from its start."""


def assign_in_order(group: LaunchGroup, rows: Tensor, values: Tensor, *, add: bool, time: int) -> None:
    """Set weights, or add to them, one occurrence after another."""
    # rows: int32 [n], none negative; values: float32 [n, dim].
    layout = group.tables[0].layout
    sorted_rows, order = torch.sort(rows, stable=True)
    for run in layout.runs:
        columns = min(256, padded(run.width))
        row_kernels.assign_rows[(rows.numel(), -(-run.width // columns))](
            group.descriptors(),
            group.tables[0].chunk_table,
            sorted_rows,
            order,
            values,
            rows.numel(),
            time,
            layout.dim,
            SHIFT=layout.shift,
            STRIDE=layout.stride,
            HEADER=layout.header,
            OFFSET=run.offset,
            START=run.start,
            WIDTH=run.width,
            PRECISION=run.precision,
            ADD=add,
            COLUMNS=columns,
            num_warps=1,
            **PLAIN_ARITHMETIC,
        )


def write_chunk(table: DeviceTable, rows: Tensor, chunk: Chunk) -> None:
    """Write complete rows, except for their times."""
    # rows: int32 [n], distinct.
    device = table.device
    table.write_weights(rows, chunk.rows.to(device))
    if chunk.state:
        states = torch.cat([column.to(device) for column in chunk.state.values()], 1)
        table.copy_states(rows, states, write=True)
    if chunk.count is not None and chunk.step is not None:
        table.write_header(COUNT, rows, chunk.count.to(device))
        table.write_header(STEP, rows, chunk.step.to(device))
