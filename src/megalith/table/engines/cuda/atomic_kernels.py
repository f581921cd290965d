"""Kernels of an update with atomic additions: `TableConfig(deterministic=False)`.

Occurrences are not sorted; the sum of a row depends on the order in which programs run, in its last bits:

    claim_rows      the first occurrence of each row: an atomic minimum of positions in `marks`, by key
    number_rows     a number for each row of the call, from the first position of its table on; any order
    add_gradients   atomic additions into `sums`, one row per number
    step_sums       one optimizer step per number; clears `sums` and `marks` for the next call
"""

# mypy: ignore-errors

from megalith.table.engines.cuda.device_functions import (
    BASE,
    LIMIT,
    ROW_DIM,
    SPAN_FIELDS,
    field,
    layout_number,
)
from megalith.table.engines.cuda.index_kernels import positions
from megalith.table.engines.cuda.kernel_launch import launched
from megalith.table.engines.cuda.triton_runtime import tl, triton
from megalith.table.engines.cuda.update_kernels import flush, step_columns

UNUSED = tl.constexpr(2147483647)
"""A mark without an occurrence."""


@triton.jit
def counted_keys(tables, table, keys, at, inside, FIELDS: tl.constexpr):
    """The keys of positions, and which of them have a row."""
    base = field(tables, table, FIELDS, BASE)
    key = tl.load(keys + at, mask=inside, other=0).to(tl.int64)
    return key, inside & (key - base < field(tables, table, FIELDS, LIMIT))


@launched
@triton.jit
def claim_rows(tables, spans, keys, marks, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    table, at, inside = positions(spans, BLOCK)
    key, counted = counted_keys(tables, table, keys, at, inside, FIELDS)
    tl.atomic_min(marks + key, at.to(tl.int32), mask=counted)


@launched
@triton.jit
def number_rows(
    tables, spans, keys, marks, counts, numbers, row_keys, FIELDS: tl.constexpr, BLOCK: tl.constexpr
):
    table, at, inside = positions(spans, BLOCK)
    key, counted = counted_keys(tables, table, keys, at, inside, FIELDS)
    first = counted & (tl.load(marks + key, mask=counted, other=0) == at)
    count = tl.sum(first.to(tl.int32), 0)
    if count > 0:
        place = tl.load(spans + SPAN_FIELDS * table) + tl.atomic_add(counts + table, count)
        place += tl.cumsum(first.to(tl.int32), 0) - 1
        tl.store(numbers + at, place.to(tl.int32), mask=first)
        tl.store(row_keys + place, key, mask=first)


@launched
@triton.jit
def add_gradients(
    tables, spans, keys, marks, numbers, addresses, factors, sums,
    FIELDS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, WEIGHTED: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the gradient of each occurrence to the sum of its row, which has DIM places.

    An address of 0 has no gradient.
    """
    table, at, inside = positions(spans, BLOCK)
    key, counted = counted_keys(tables, table, keys, at, inside, FIELDS)
    first = tl.load(marks + key, mask=counted, other=0)
    number = tl.load(numbers + first, mask=counted, other=0).to(tl.int64)
    address = tl.load(addresses + at, mask=counted, other=0)
    pointer = address.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    width = layout_number(tables, table, FIELDS, ROW_DIM, WIDTH)
    for start in tl.static_range(0, DIM, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        given = (counted & (address != 0))[:, None] & (column < width)
        value = tl.load(pointer[:, None] + column, mask=given, other=0.0)
        if WEIGHTED:
            value = value * tl.load(factors + at, mask=counted, other=0.0)[:, None]
        tl.atomic_add(sums + (number * DIM)[:, None] + column, value, mask=given, sem="relaxed")


@launched
@triton.jit
def step_sums(
    tables, calls, spans, counts, row_keys, marks, sums, measured_factors,
    h0, h1, h2, h3, h4, h5,
    FIELDS: tl.constexpr, CALL_FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr,
    HEADER: tl.constexpr, OFFSET: tl.constexpr, STATE: tl.constexpr, DIM: tl.constexpr, START: tl.constexpr,
    WIDTH: tl.constexpr, SEGMENT: tl.constexpr, PRECISION: tl.constexpr, STOCHASTIC: tl.constexpr,
    RULE: tl.constexpr, OPTIONS: tl.constexpr, DELAY: tl.constexpr, MEASURED: tl.constexpr,
    COUNTED: tl.constexpr, COLUMNS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """One step per row of the call; a few programs walk over all of them. LAST: the last launch clears."""
    table = tl.program_id(1)
    begin = tl.load(spans + SPAN_FIELDS * table)
    count = tl.load(counts + table)
    call = calls + table * CALL_FIELDS
    start, width = step_columns(tables, table, FIELDS, SEGMENT, START, WIDTH, RULE)
    column = tl.arange(0, COLUMNS)
    wide = column < width
    number = tl.program_id(0)
    while number < count:
        place = begin + number
        key = tl.load(row_keys + place)
        own = sums + place * DIM + start + column
        total = tl.load(own, mask=wide, other=0.0)
        flush(
            tables, call, table, key, total, place, column, wide, start, width, measured_factors,
            h0, h1, h2, h3, h4, h5,
            FIELDS, SHIFT, STRIDE, HEADER, OFFSET, STATE, DIM, SEGMENT, PRECISION, STOCHASTIC, RULE,
            OPTIONS, DELAY, MEASURED, COUNTED,
        )  # fmt: skip
        if RULE > 0:
            tl.store(own, tl.zeros((COLUMNS,), tl.float32), mask=wide)
        if LAST:
            tl.store(marks + key, UNUSED)
        number += tl.num_programs(0)
