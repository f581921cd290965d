"""Launches of an update with atomic additions; see atomic_kernels.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.table.engines.cuda import atomic_kernels, update_kernels
from megalith.table.engines.cuda.device_table import BLOCK, WARPS
from megalith.table.engines.cuda.kernel_launch import Bound
from megalith.table.engines.cuda.launch_group import LaunchGroup
from megalith.table.engines.cuda.row_layout import SegmentPlace
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
    """Sum the gradients of each row by atomic additions, and make one step per row.

    Args:
        group: The tables.
        keys: From `LaunchGroup.finish`.
        sizes: Number of occurrences of each table.
        addresses: int64 [n], the address of the gradient of each occurrence; 0 for none.
        factors: float32 [n], factor of each gradient, or None.
        aligned: Whether all addresses are multiples of 16.
        calls: What `call_fields` returned, on the device.
    """
    n, layout, tables = keys.numel(), group.layout, group.descriptors()
    # The last launch leaves them as they were.
    num_keys = sum(table.row_capacity + 1 for table in group.tables)
    marks = group.filled("marks", num_keys, atomic_kernels.UNUSED.value, torch.int32)
    sums = group.filled("sums", n * layout.dim, 0.0, torch.float32)
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
    columns = min(256, padded(layout.dim))
    block = max(1, ADD_TILE // columns)
    key = ("add gradients", factors is not None, aligned)
    if key not in group.bound:
        group.bound[key] = atomic_kernels.add_gradients.bind(
            FIELDS=group.fields,
            DIM=layout.dim,
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
    measured = len(layout.segments) > 1
    given = (tables, calls, spans, counts, row_keys, marks, sums)
    few = (min(n, group.few_programs), len(sizes))
    fields = calls.numel() // len(sizes)
    measures = group.scratch("measures", n if measured else 1, torch.float32)
    if measured:
        step = _bound_step(group, None, fields, measured=False, last=False)
        step(few, *given, measures, *[0.0] * NUM_SETTINGS)
    for number, place in enumerate(layout.segments):
        assert place.rule is not None
        last = number == len(layout.segments) - 1
        step = _bound_step(group, (number, place), fields, measured=measured, last=last)
        step(few, *given, measures, *place.rule.settings)


def _bound_step(
    group: LaunchGroup,
    segment: tuple[int, SegmentPlace] | None,
    call_fields: int,
    *,
    measured: bool,
    last: bool,
) -> Bound:
    """Return the kernel of a segment's step, or of the measurement of whole rows."""
    layout = group.layout
    key = ("step sums", None if segment is None else segment[0], call_fields)
    if key in group.bound:
        return group.bound[key]
    what: dict[str, float] = {
        "OFFSET": 0,
        "STATE": 0,
        "START": 0,
        "WIDTH": layout.dim,
        "SEGMENT": 0,
        "PRECISION": 0,
        "STOCHASTIC": False,
        "RULE": update_kernels.MEASURE.value,
        "OPTIONS": 0,
        "DELAY": -1.0,
    }
    if segment is not None:
        number, place = segment
        what = place.step_constants(number)
    columns = padded(int(what["WIDTH"]))
    group.bound[key] = atomic_kernels.step_sums.bind(
        FIELDS=group.fields,
        CALL_FIELDS=call_fields,
        SHIFT=layout.shift,
        STRIDE=layout.stride,
        HEADER=layout.header,
        DIM=layout.dim,
        MEASURED=measured,
        COUNTED=layout.counted and segment is not None,
        COLUMNS=columns,
        LAST=last,
        num_warps=max(1, min(8, columns // 128)),
        **what,
        **PLAIN_ARITHMETIC,
    )
    return group.bound[key]
