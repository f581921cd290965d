"""Launches of an update with atomic additions; see atomic_kernels.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.table.engines.cuda import atomic_kernels, update_kernels
from megalith.table.engines.cuda.device_table import BLOCK, WARPS
from megalith.table.engines.cuda.kernel_launch import Bound
from megalith.table.engines.cuda.launch_group import LaunchGroup
from megalith.table.engines.cuda.step_settings import NUM_SETTINGS
from megalith.table.engines.cuda.triton_runtime import PLAIN_ARITHMETIC, padded

ADD_TILE = 2048
"""Gradients that one program adds."""


def step_rows_atomically(
    group: LaunchGroup,
    keys: Tensor,
    sizes: Sequence[int],
    addresses: Tensor,
    factors: Tensor | None,
    aligned: bool,
    calls: Tensor,
) -> None:
    """Sum the gradients of each row by atomic additions, and make one step per row."""
    # addresses: int64 [n], the address of the gradient of each occurrence; factors: float32 [n], factor of
    # each gradient, or None.
    n, layout, tables = keys.numel(), group.layout, group.descriptors()
    # The last launch leaves them as they were.
    num_keys = sum(table.row_capacity + 1 for table in group.tables)
    marks = group.filled("marks", num_keys, atomic_kernels.UNUSED.value, torch.int32)
    sums = group.filled("sums", n * layout.max_dim, 0.0, torch.float32)
    counts = group.scratch("row counts", len(sizes), torch.int32)[: len(sizes)].zero_()
    numbers = group.scratch("row numbers", n, torch.int32)
    row_keys = group.scratch("row keys", n, torch.int64)
    spans, programs = group.spans(sizes, BLOCK), group.grid(sizes, BLOCK)
    if ("claim rows",) not in group.bound:
        common = {"FIELDS": group.fields, "BLOCK": BLOCK, "num_warps": WARPS}
        group.bound["claim rows",] = atomic_kernels.claim_rows.bind(**common)
        group.bound["number rows",] = atomic_kernels.number_rows.bind(**common)
    group.bound["claim rows",](programs, tables, spans, keys, marks)
    group.bound["number rows",](programs, tables, spans, keys, marks, counts, numbers, row_keys)
    columns = min(256, padded(layout.max_dim))
    block = max(1, ADD_TILE // columns)
    key = ("add gradients", factors is not None, aligned)
    if key not in group.bound:
        group.bound[key] = atomic_kernels.add_gradients.bind(
            FIELDS=group.fields,
            WIDTH=layout.dim,
            DIM=layout.max_dim,
            WEIGHTED=factors is not None,
            ALIGNED=aligned,
            BLOCK=block,
            COLUMNS=columns,
            num_warps=WARPS,
        )
    weights = sums if factors is None else factors
    group.bound[key](
        group.grid(sizes, block),
        tables,
        group.spans(sizes, block),
        keys,
        marks,
        numbers,
        addresses,
        weights,
        sums,
    )
    measured = layout.num_segments > 1
    given = (tables, calls, spans, counts, row_keys, marks, sums)
    few = (min(n, group.few_programs), len(sizes))
    fields = calls.numel() // len(sizes)
    measures = group.scratch("measures", n if measured else 1, torch.float32)
    if measured:
        step = _bound_step(group, None, fields, measured=False, last=False)
        step(few, *given, measures, *[0.0] * NUM_SETTINGS)
    for number in range(layout.num_segments):
        last = number == layout.num_segments - 1
        step = _bound_step(group, number, fields, measured=measured, last=last)
        step(few, *given, measures, *layout.rule(number).settings)


def _bound_step(
    group: LaunchGroup, segment: int | None, call_fields: int, *, measured: bool, last: bool
) -> Bound:
    """Return the kernel of a segment's step, or of the measurement of whole rows."""
    layout = group.layout
    key = ("step sums", segment, call_fields)
    if key in group.bound:
        return group.bound[key]
    if segment is None:
        what = layout.whole_row_constants(update_kernels.MEASURE.value)
    else:
        what = layout.step_constants[segment]
    group.bound[key] = atomic_kernels.step_sums.bind(
        CALL_FIELDS=call_fields,
        HEADER=layout.header,
        DIM=layout.max_dim,
        MEASURED=measured,
        COUNTED=layout.counted and segment is not None,
        LAST=last,
        num_warps=max(1, min(8, int(what["COLUMNS"]) // 128)),
        **group.kinds,
        **what,
        **PLAIN_ARITHMETIC,
    )
    return group.bound[key]
