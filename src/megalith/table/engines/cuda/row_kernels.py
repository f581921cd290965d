"""Kernels that read and write rows: weights, states and headers, by row number.

A row lies in a chunk of memory: weights in the precision of their segments, optimizer states, then the
header (id, time, flags, count, step). Chunks never move.
"""

# mypy: ignore-errors

from megalith.table.engines.cuda.device_functions import (
    CALL_COUNTERS,
    HEADER_COUNT,
    HEADER_FLAGS,
    HEADER_ID,
    HEADER_STEP,
    HEADER_TIME,
    NEW_ROWS,
    READS_INITIAL,
    ROW_HEADER,
    ROW_STATE_OFFSET,
    ROW_STATES,
    RUN_OFFSET,
    RUN_START,
    RUN_WIDTH,
    SPAN_FIELDS,
    STATE_VALUES,
    TRACKED,
    aligned_pointer,
    field,
    initial_weights,
    layout_number,
    load_weights,
    matrix_rows,
    pointer_field,
    rounded_weights,
    row_address,
    row_places,
    run_number,
    store_weights,
    table_row_address,
    weight_pointer,
)
from megalith.table.engines.cuda.index_kernels import list_missing, positions, search
from megalith.table.engines.cuda.triton_runtime import launched, tl, triton


@triton.jit
def copy_weights(
    tables, spans, table, row, at, inside, out,
    DIM: tl.constexpr, FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, OFFSET: tl.constexpr,
    RUN: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, WIDEST: tl.constexpr,
    PRECISION: tl.constexpr, NUM_SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy one run of columns of rows to `out`; zeros for no row."""
    exists = row >= 0
    offset = run_number(tables, table, FIELDS, NUM_SEGMENTS, RUN, RUN_OFFSET, OFFSET)
    start = run_number(tables, table, FIELDS, NUM_SEGMENTS, RUN, RUN_START, START)
    width = run_number(tables, table, FIELDS, NUM_SEGMENTS, RUN, RUN_WIDTH, WIDTH)
    address = table_row_address(tables, table, row, exists, FIELDS, SHIFT, STRIDE)
    pointer = weight_pointer(address, offset, OFFSET, PRECISION)[:, None]
    target = out + matrix_rows(tables, spans, table, at, FIELDS, DIM)[:, None] + start
    for first in tl.static_range(0, WIDEST, COLUMNS):
        column = (first + tl.arange(0, COLUMNS))[None, :]
        wide = column < width
        value = load_weights(pointer + column, exists[:, None] & wide, PRECISION)
        tl.store(target + column, value, mask=inside[:, None] & wide)


@launched
@triton.jit
def read_rows(
    tables, spans, rows, out,
    DIM: tl.constexpr, FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, OFFSET: tl.constexpr,
    RUN: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, WIDEST: tl.constexpr,
    PRECISION: tl.constexpr, NUM_SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Read one run of columns of equal precision; an id without a row reads as zeros."""
    table, at, inside = positions(spans, BLOCK)
    row = tl.load(rows + at, mask=inside, other=-1)
    copy_weights(
        tables, spans, table, row, at, inside, out, DIM, FIELDS, SHIFT, STRIDE, OFFSET, RUN, START, WIDTH,
        WIDEST, PRECISION, NUM_SEGMENTS, COLUMNS,
    )  # fmt: skip


@launched
@triton.jit
def find_and_read(
    tables, spans, ids, missing, absent, out,
    DIM: tl.constexpr, FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, OFFSET: tl.constexpr,
    RUN: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, WIDEST: tl.constexpr,
    PRECISION: tl.constexpr, NUM_SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`find_rows` and `read_rows` in one launch, for rows of one precision."""
    table, at, inside = positions(spans, BLOCK)
    row = search(tables, table, ids, at, inside, FIELDS, BLOCK)
    list_missing(spans, table, at, inside & (row < 0), missing, absent)
    copy_weights(
        tables, spans, table, row, at, inside, out, DIM, FIELDS, SHIFT, STRIDE, OFFSET, RUN, START, WIDTH,
        WIDEST, PRECISION, NUM_SEGMENTS, COLUMNS,
    )  # fmt: skip


@launched
@triton.jit
def read_missing(
    tables, spans, ids, missing, absent, out,
    DIM: tl.constexpr, FIELDS: tl.constexpr, RUN: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr,
    WIDEST: tl.constexpr, PRECISION: tl.constexpr, NUM_SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the initial rows of ids without a row: the positions that `find_rows` listed.

    It is a launch of its own, because the registers that it needs would slow down `read_rows`. A few programs
    walk over the list.
    """
    table = tl.program_id(1)
    count = tl.load(missing + table) * field(tables, table, FIELDS, READS_INITIAL)
    begin = tl.load(spans + SPAN_FIELDS * table)
    start = run_number(tables, table, FIELDS, NUM_SEGMENTS, RUN, RUN_START, START)
    width = run_number(tables, table, FIELDS, NUM_SEGMENTS, RUN, RUN_WIDTH, WIDTH)
    block = tl.program_id(0).to(tl.int64) * BLOCK
    while block < count:
        listed = block + tl.arange(0, BLOCK)
        inside = listed < count
        at = tl.load(absent + begin + listed, mask=inside, other=0).to(tl.int64)
        id = tl.load(ids + at, mask=inside, other=0)[:, None]
        target = out + matrix_rows(tables, spans, table, at, FIELDS, DIM)[:, None] + start
        for first in tl.static_range(0, WIDEST, COLUMNS):
            column = (first + tl.arange(0, COLUMNS))[None, :]
            value = initial_weights(tables, table, FIELDS, id, start + column, NUM_SEGMENTS)
            value = rounded_weights(value, PRECISION)
            tl.store(target + column, value, mask=inside[:, None] & (column < width))
        block += tl.num_programs(0) * BLOCK


@launched
@triton.jit(do_not_specialize=["n", "dim"])
def write_rows(
    chunks,
    rows,
    values,
    n,
    dim,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write one run of columns of distinct rows, rounded to the nearest; negative numbers are left out."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    row = tl.load(rows + at, mask=inside, other=-1)
    inside &= row >= 0
    address = row_address(chunks, row, SHIFT, STRIDE, inside)
    pointer = weight_pointer(address, OFFSET, OFFSET, PRECISION)[:, None]
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column = (first + tl.arange(0, COLUMNS))[None, :]
        both = inside[:, None] & (column < WIDTH)
        value = tl.load(values + (at * dim)[:, None] + START + column, mask=both, other=0.0)
        store_weights(pointer + column, rounded_weights(value, PRECISION), both, PRECISION)


@launched
@triton.jit(do_not_specialize=["n"])
def copy_states(
    chunks,
    rows,
    values,
    n,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Read or write the float32 states of distinct rows, [n, WIDTH]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    row = tl.load(rows + at, mask=inside, other=-1)
    inside &= row >= 0
    address = row_address(chunks, row, SHIFT, STRIDE, inside)
    pointer = aligned_pointer(address, tl.float32, OFFSET, OFFSET)[:, None]
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column = (first + tl.arange(0, COLUMNS))[None, :]
        both = inside[:, None] & (column < WIDTH)
        own = pointer + column
        other = values + (at * WIDTH)[:, None] + column
        if WRITE:
            tl.store(own, tl.load(other, mask=both, other=0.0), mask=both)
        else:
            tl.store(other, tl.load(own, mask=both, other=0.0), mask=both)


@launched
@triton.jit(do_not_specialize=["n"])
def read_headers(
    chunks, rows, out, n, SHIFT: tl.constexpr, STRIDE: tl.constexpr, HEADER: tl.constexpr, BLOCK: tl.constexpr
):
    """Read headers into int64 [5, n]: id, time, flags, count, step."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    row = tl.load(rows + at, mask=inside, other=0)
    header = row_address(chunks, row, SHIFT, STRIDE, inside) + HEADER
    id = tl.load((header + HEADER_ID).to(tl.pointer_type(tl.int64)), mask=inside, other=0)
    time = tl.load((header + HEADER_TIME).to(tl.pointer_type(tl.uint32)), mask=inside, other=0)
    flags = tl.load((header + HEADER_FLAGS).to(tl.pointer_type(tl.uint32)), mask=inside, other=0)
    count = tl.load((header + HEADER_COUNT).to(tl.pointer_type(tl.uint32)), mask=inside, other=0)
    step = tl.load((header + HEADER_STEP).to(tl.pointer_type(tl.uint32)), mask=inside, other=0)
    wide = n.to(tl.int64)
    tl.store(out + at, id, mask=inside)
    tl.store(out + wide + at, time.to(tl.int64), mask=inside)
    tl.store(out + 2 * wide + at, flags.to(tl.int64), mask=inside)
    tl.store(out + 3 * wide + at, count.to(tl.int64), mask=inside)
    tl.store(out + 4 * wide + at, step.to(tl.int64), mask=inside)


@launched
@triton.jit(do_not_specialize=["n"])
def write_header_field(
    chunks,
    rows,
    values,
    n,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    OPERATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Change one 32-bit field of distinct rows: 0 sets it, 1 sets bits, 2 keeps only these bits."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    row = tl.load(rows + at, mask=inside, other=-1)
    inside &= row >= 0
    address = row_address(chunks, row, SHIFT, STRIDE, inside) + OFFSET
    target = address.to(tl.pointer_type(tl.int32))
    value = tl.load(values + at, mask=inside, other=0).to(tl.int32)
    if OPERATION == 1:
        value = tl.load(target, mask=inside, other=0) | value
    elif OPERATION == 2:
        value = tl.load(target, mask=inside, other=0) & value
    tl.store(target, value, mask=inside)


@launched
@triton.jit
def initialize_rows(
    tables, spans, rows, counts,
    FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, HEADER: tl.constexpr,
    OFFSET: tl.constexpr, RUN: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, WIDEST: tl.constexpr,
    PRECISION: tl.constexpr, STATE_OFFSET: tl.constexpr, STATES: tl.constexpr, MOST_STATES: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Set rows to their initial weights (one run of columns) and, with the first run, states.

    The number of rows of a table is its NEW_ROWS in `counts`; a few programs walk over all of them.
    """
    table = tl.program_id(1)
    n = tl.load(counts + CALL_COUNTERS * table + NEW_ROWS)
    begin = tl.load(spans + SPAN_FIELDS * table)
    chunks, shift, stride = row_places(tables, table, FIELDS, SHIFT, STRIDE)
    header = layout_number(tables, table, FIELDS, ROW_HEADER, HEADER)
    offset = run_number(tables, table, FIELDS, NUM_SEGMENTS, RUN, RUN_OFFSET, OFFSET)
    start = run_number(tables, table, FIELDS, NUM_SEGMENTS, RUN, RUN_START, START)
    width = run_number(tables, table, FIELDS, NUM_SEGMENTS, RUN, RUN_WIDTH, WIDTH)
    first_row = tl.program_id(0).to(tl.int64) * BLOCK
    while first_row < n:
        at = first_row + tl.arange(0, BLOCK)
        inside = at < n
        row = tl.load(rows + begin + at, mask=inside, other=0)
        address = row_address(chunks, row, shift, stride, inside)
        own_id = (address + header + HEADER_ID).to(tl.pointer_type(tl.int64))
        id = tl.load(own_id, mask=inside, other=0)[:, None]
        for first in tl.static_range(0, WIDEST, COLUMNS):
            column = (first + tl.arange(0, COLUMNS))[None, :]
            both = inside[:, None] & (column < width)
            value = initial_weights(tables, table, FIELDS, id, start + column, NUM_SEGMENTS)
            place = weight_pointer(address, offset, OFFSET, PRECISION)[:, None] + column
            store_weights(place, rounded_weights(value, PRECISION), both, PRECISION)
        if RUN == 0:
            states = layout_number(tables, table, FIELDS, ROW_STATES, STATES)
            state_offset = layout_number(tables, table, FIELDS, ROW_STATE_OFFSET, STATE_OFFSET)
            values = pointer_field(tables, table, FIELDS, STATE_VALUES, tl.float32)
            for first in tl.static_range(0, MOST_STATES, COLUMNS):
                column = (first + tl.arange(0, COLUMNS))[None, :]
                both = inside[:, None] & (column < states)
                place = aligned_pointer(address, tl.float32, state_offset, STATE_OFFSET)[:, None] + column
                tl.store(place, tl.load(values + column, mask=column < states, other=0.0), mask=both)
        first_row += BLOCK * tl.num_programs(0)


@launched
@triton.jit(do_not_specialize=["n", "time", "dim"])
def assign_rows(
    tables,
    chunks,
    sorted_rows,
    order,
    values,
    n,
    time,
    dim,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    HEADER: tl.constexpr,
    OFFSET: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    ADD: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Assign or add the occurrences of a row one after another; one program per row and block of columns."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(sorted_rows + at)
    before = tl.load(sorted_rows + at - 1, mask=at > 0, other=-1)
    if row != before:
        address = row_address(chunks, row, SHIFT, STRIDE, row >= 0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        wide = column < WIDTH
        pointer = weight_pointer(address, OFFSET, OFFSET, PRECISION) + column
        value = load_weights(pointer, wide, PRECISION)
        next_row = row
        while next_row == row:
            source = tl.load(order + at)
            given = tl.load(values + source * dim + START + column, mask=wide, other=0.0)
            if ADD:
                given = value + given
            value = rounded_weights(given, PRECISION)
            at += 1
            next_row = tl.load(sorted_rows + at, mask=at < n, other=-1)
        store_weights(pointer, value, wide, PRECISION)
        if START == 0:
            header = address + HEADER
            tracked = field(tables, 0, 0, TRACKED).to(tl.int32)
            flags = (header + HEADER_FLAGS).to(tl.pointer_type(tl.int32))
            tl.store(flags, tl.load(flags) | tracked)
            tl.store((header + HEADER_TIME).to(tl.pointer_type(tl.uint32)), time.to(tl.uint32))


@launched
@triton.jit(do_not_specialize=["n"])
def move_rows(
    chunks,
    sources,
    targets,
    n,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy whole rows, 8 bytes at a time; all rows are distinct."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    source = row_address(chunks, tl.load(sources + at, mask=inside, other=0), SHIFT, STRIDE, inside)
    target = row_address(chunks, tl.load(targets + at, mask=inside, other=0), SHIFT, STRIDE, inside)
    for first in tl.static_range(0, STRIDE // 8, WORDS):
        word = (first + tl.arange(0, WORDS))[None, :]
        both = inside[:, None] & (word < STRIDE // 8)
        one = source[:, None].to(tl.pointer_type(tl.int64)) + word
        other = target[:, None].to(tl.pointer_type(tl.int64)) + word
        tl.store(other, tl.load(one, mask=both, other=0), mask=both)
