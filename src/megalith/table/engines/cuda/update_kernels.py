"""Kernels of an update: sums per distinct row, and one optimizer step on each sum.

In a fixed order: the occurrences are sorted by row (stably, so the occurrences of a row keep their
order). One program walks over CHUNK sorted occurrences with a running sum. A row whose occurrences all
lie in the chunk gets its step at once: its weights and states are read and written there and nowhere
else. A row that crosses the border of a chunk leaves its partial sums in `parts`, and a second launch
adds them in order and makes the step.

    chunk        0             1             2
    rows         a a b b b c   c c c c c c   c d d e e e
    first launch   step b      parts[1]: c   step d, e        (a: step; c crosses: one part per chunk)
    second                     c: part of chunk 0 + part of chunk 1 + part of chunk 2, step

No result depends on the scheduling of programs, so two runs give the same bits.

What happens with a sum (`flush`) depends on RULE: an optimizer step, MEASURE (write the factor of the
row's gradient, which needs all its columns: scale and clip_norm, NaN if the sum is not finite) or SUM
(write the sum itself).

With atomic additions (`TableConfig(deterministic=False)`), occurrences are not sorted; the sum of a row
depends on the order in which programs run, in its last bits:

    claim_rows      the first occurrence of each row: an atomic minimum of positions in `marks`, by key
    number_rows     a number for each row of the call, from the first position of its table on; any order
    add_gradients   atomic additions into `sums`, one row per number
    step_sums       one optimizer step per number; clears `sums` and `marks` for the next call
"""

from megalith.table.engines.cuda.device_functions import (
    BASE,
    COUNTERS,
    COUNTS_UPDATES,
    HEADER_COUNT,
    HEADER_FLAGS,
    HEADER_ID,
    HEADER_STEP,
    HEADER_TIME,
    KEY,
    LIMIT,
    ROW_DIM,
    ROW_HEADER,
    SEGMENT_OFFSET,
    SEGMENT_START,
    SEGMENT_STATE,
    SEGMENT_WIDTH,
    SKIPPED,
    SPAN_FIELDS,
    TRACKED,
    aligned_pointer,
    draw24,
    field,
    layout_number,
    load_weights,
    mix64,
    pointer_field,
    rounded_weights,
    segment_number,
    stochastic_weights,
    store_weights,
    table_row_address,
    weight_pointer,
)
from megalith.table.engines.cuda.index_kernels import first_block, positions
from megalith.table.engines.cuda.step_rules import optimizer_step
from megalith.table.engines.cuda.triton_runtime import launched, tl, triton

# mypy: ignore-errors
# ruff: noqa: SIM102, SIM108


SUM = tl.constexpr(-1)
MEASURE = tl.constexpr(0)

# Fields of a call's descriptor, int64 each; floats as their bits.
GRADS = tl.constexpr(0)
GRADS_STRIDE = tl.constexpr(1)
TIME = tl.constexpr(2)
STEP = tl.constexpr(3)
SCALE = tl.constexpr(4)
CLIP = tl.constexpr(5)
RATES = tl.constexpr(6)  # lr, correction, extra of each segment


@triton.jit
def float_field(call, number):
    return tl.load(call + number).to(tl.int32).to(tl.float32, bitcast=True)


@launched
@triton.jit
def sort_gradients(
    calls, spans, order, addresses, factors, sorted_addresses, sorted_factors,
    CALL_FIELDS: tl.constexpr, ADDRESSED: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the address and the factor of each gradient in the order of the sorted occurrences."""
    table, at, inside = positions(spans, BLOCK)
    source = tl.load(order + at, mask=inside, other=0)
    if ADDRESSED:
        address = tl.load(addresses + source, mask=inside, other=0)
    else:
        call = calls + table * CALL_FIELDS
        place = source - tl.load(spans + SPAN_FIELDS * table)
        address = tl.load(call + GRADS) + place * tl.load(call + GRADS_STRIDE)
    tl.store(sorted_addresses + at, address, mask=inside)
    if WEIGHTED:
        tl.store(sorted_factors + at, tl.load(factors + source, mask=inside, other=0.0), mask=inside)


@triton.jit
def step_columns(
    tables, table, FIELDS: tl.constexpr, SEGMENT: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr,
    RULE: tl.constexpr,
):  # fmt: skip
    """The first column and the number of columns of a segment; of the whole row if no step is made."""
    start = segment_number(tables, table, FIELDS, SEGMENT, SEGMENT_START, START)
    if RULE <= MEASURE:
        width = layout_number(tables, table, FIELDS, ROW_DIM, WIDTH)
    else:
        width = segment_number(tables, table, FIELDS, SEGMENT, SEGMENT_WIDTH, WIDTH)
    return start, width


@triton.jit
def load_gradient(
    at, inside, addresses, factors, column, wide, start, WEIGHTED: tl.constexpr, ALIGNED: tl.constexpr
):
    """The gradient of a sorted occurrence: a row of a matrix or of a pooled output, times a factor.

    An occurrence in no bag has the address 0 and no gradient.
    """
    address = tl.load(addresses + at, mask=inside, other=0)
    pointer = address.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    value = tl.load(pointer + start + column, mask=wide & (address != 0), other=0.0)
    if WEIGHTED:
        value = value * tl.load(factors + at, mask=inside, other=0.0)
    return value


@triton.jit
def flush(
    tables, call, table, key, total, head, column, wide, start, width, sums,
    h0, h1, h2, h3, h4, h5,
    FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, HEADER: tl.constexpr,
    OFFSET: tl.constexpr, STATE: tl.constexpr, DIM: tl.constexpr, SEGMENT: tl.constexpr,
    PRECISION: tl.constexpr, STOCHASTIC: tl.constexpr, RULE: tl.constexpr, OPTIONS: tl.constexpr,
    DELAY: tl.constexpr, MEASURED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    row = key - field(tables, table, FIELDS, BASE)
    if row < field(tables, table, FIELDS, LIMIT):
        if RULE == SUM:
            tl.store(sums + head * DIM + column, total, mask=wide)
        else:
            if MEASURED:
                factor = tl.load(sums + head)
            else:
                scale = float_field(call, SCALE)
                clip = float_field(call, CLIP)
                scaled = tl.where(wide, total * scale, 0.0)
                largest = tl.max(tl.abs(scaled), 0)
                bad = tl.max((scaled != scaled).to(tl.int32), 0) > 0
                factor = scale
                if clip > 0:
                    norm = tl.sqrt_rn(tl.sum(scaled * scaled, 0))
                    if norm > clip:
                        # The caller multiplies by the scale first; see `clip_rows`.
                        factor = tl.div_rn(clip, norm)
                    else:
                        factor = 1.0
                if (largest > 3.4028234663852886e38) | bad:
                    factor = float("nan")
            if RULE == MEASURE:
                tl.store(sums + head, factor)
                if factor != factor:
                    counters = pointer_field(tables, table, FIELDS, COUNTERS, tl.int64)
                    tl.atomic_add(counters + SKIPPED, 1)
            elif factor == factor:
                address = table_row_address(tables, table, row, row >= 0, FIELDS, SHIFT, STRIDE)
                offset = segment_number(tables, table, FIELDS, SEGMENT, SEGMENT_OFFSET, OFFSET)
                pointer = weight_pointer(address, offset, OFFSET, PRECISION) + column
                weight = load_weights(pointer, wide, PRECISION)
                if MEASURED:
                    clip = float_field(call, CLIP)
                if clip > 0:
                    grad = total * float_field(call, SCALE) * factor
                else:
                    grad = total * factor
                place = segment_number(tables, table, FIELDS, SEGMENT, SEGMENT_STATE, STATE)
                state = aligned_pointer(address, tl.float32, place, STATE)
                value = optimizer_step(
                    weight, grad, state, column, wide,
                    float_field(call, RATES + 3 * SEGMENT), float_field(call, RATES + 3 * SEGMENT + 1),
                    float_field(call, RATES + 3 * SEGMENT + 2),
                    h0, h1, h2, h3, h4, h5, width, RULE, OPTIONS, DELAY,
                )  # fmt: skip
                header = address + layout_number(tables, table, FIELDS, ROW_HEADER, HEADER)
                if STOCHASTIC:
                    id = tl.load((header + HEADER_ID).to(tl.pointer_type(tl.int64)))
                    table_key = field(tables, table, FIELDS, KEY)
                    moment = (tl.load(call + STEP) + 1).to(tl.uint64) * 0x8CB92BA72F3D8DD7
                    own = mix64(mix64((id ^ table_key).to(tl.uint64, bitcast=True)) + moment)
                    draws = draw24(own, (start + column).to(tl.int64)).to(tl.int64)
                    value = stochastic_weights(value, draws, PRECISION)
                else:
                    value = rounded_weights(value, PRECISION)
                store_weights(pointer, value, wide, PRECISION)
                if SEGMENT == 0:
                    tl.store(
                        (header + HEADER_TIME).to(tl.pointer_type(tl.uint32)),
                        tl.load(call + TIME).to(tl.uint32),
                    )
                    tracked = field(tables, table, FIELDS, TRACKED).to(tl.int32)
                    if tracked != 0:
                        flags = (header + HEADER_FLAGS).to(tl.pointer_type(tl.int32))
                        tl.store(flags, tl.load(flags) | tracked)
                    if COUNTED:
                        counts = field(tables, table, FIELDS, COUNTS_UPDATES) != 0
                        count = (header + HEADER_COUNT).to(tl.pointer_type(tl.uint32))
                        more = tl.minimum(tl.load(count).to(tl.int64) + 1, 4294967295)
                        tl.store(count, more.to(tl.uint32), mask=counts)
                        moment = tl.minimum(tl.load(call + STEP), 4294967295).to(tl.uint32)
                        tl.store((header + HEADER_STEP).to(tl.pointer_type(tl.uint32)), moment, mask=counts)
            elif SEGMENT == 0:
                if not MEASURED:
                    counters = pointer_field(tables, table, FIELDS, COUNTERS, tl.int64)
                    tl.atomic_add(counters + SKIPPED, 1)


@launched
@triton.jit
def walk_chunks(
    tables, calls, spans, keys, addresses, factors, parts, heads, sums,
    h0, h1, h2, h3, h4, h5,
    FIELDS: tl.constexpr, CALL_FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr,
    HEADER: tl.constexpr, OFFSET: tl.constexpr, STATE: tl.constexpr, DIM: tl.constexpr, START: tl.constexpr,
    WIDTH: tl.constexpr, SEGMENT: tl.constexpr, PRECISION: tl.constexpr, STOCHASTIC: tl.constexpr,
    RULE: tl.constexpr, OPTIONS: tl.constexpr, DELAY: tl.constexpr, MEASURED: tl.constexpr,
    COUNTED: tl.constexpr, WEIGHTED: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The first launch: sums within chunks of sorted occurrences."""
    table = tl.program_id(1)
    begin = tl.load(spans + SPAN_FIELDS * table)
    end = tl.load(spans + SPAN_FIELDS * table + 1)
    first = begin + tl.program_id(0).to(tl.int64) * CHUNK
    if first < end:
        last = tl.minimum(first + CHUNK, end)
        chunk = first_block(spans, table, CHUNK) + tl.program_id(0)
        call = calls + table * CALL_FIELDS
        start, width = step_columns(tables, table, FIELDS, SEGMENT, START, WIDTH, RULE)
        column = tl.arange(0, COLUMNS)
        wide = column < width
        key = tl.load(keys + first).to(tl.int64)
        before = tl.load(keys + first - 1, mask=first > begin, other=-1).to(tl.int64)
        continued = before == key
        head = first
        total = tl.zeros((COLUMNS,), tl.float32)
        grad = load_gradient(first, first < last, addresses, factors, column, wide, start, WEIGHTED, ALIGNED)
        at = first
        while at < last:
            total += grad
            next_key = tl.load(keys + at + 1, mask=at + 1 < end, other=-1).to(tl.int64)
            # The next gradient is loaded before the step, so that the two do not wait for each other.
            grad = load_gradient(
                at + 1, at + 1 < last, addresses, factors, column, wide, start, WEIGHTED, ALIGNED
            )
            if next_key != key:
                if continued:
                    tl.store(parts + (2 * chunk * COLUMNS) + column, total)
                else:
                    flush(
                        tables, call, table, key, total, head, column, wide, start, width, sums,
                        h0, h1, h2, h3, h4, h5,
                        FIELDS, SHIFT, STRIDE, HEADER, OFFSET, STATE, DIM, SEGMENT, PRECISION, STOCHASTIC,
                        RULE, OPTIONS, DELAY, MEASURED, COUNTED,
                    )  # fmt: skip
                total = tl.zeros((COLUMNS,), tl.float32)
                continued = before != before
                head = at + 1
            elif at + 1 == last:
                if continued:
                    tl.store(parts + (2 * chunk * COLUMNS) + column, total)
                else:
                    tl.store(parts + ((2 * chunk + 1) * COLUMNS) + column, total)
                    tl.store(heads + chunk, head)
            key = next_key
            at += 1


@launched
@triton.jit
def finish_chunks(
    tables, calls, spans, keys, parts, heads, sums,
    h0, h1, h2, h3, h4, h5,
    FIELDS: tl.constexpr, CALL_FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr,
    HEADER: tl.constexpr, OFFSET: tl.constexpr, STATE: tl.constexpr, DIM: tl.constexpr, START: tl.constexpr,
    WIDTH: tl.constexpr, SEGMENT: tl.constexpr, PRECISION: tl.constexpr, STOCHASTIC: tl.constexpr,
    RULE: tl.constexpr, OPTIONS: tl.constexpr, DELAY: tl.constexpr, MEASURED: tl.constexpr,
    COUNTED: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The second launch: rows that cross chunks. The program of a row's first chunk adds its parts."""
    table = tl.program_id(1)
    begin = tl.load(spans + SPAN_FIELDS * table)
    end = tl.load(spans + SPAN_FIELDS * table + 1)
    first = begin + tl.program_id(0).to(tl.int64) * CHUNK
    last = first + CHUNK
    if last < end:
        key = tl.load(keys + last - 1).to(tl.int64)
        crosses = tl.load(keys + last).to(tl.int64) == key
        before = tl.load(keys + first - 1, mask=first > begin, other=-1).to(tl.int64)
        if crosses & (before != key):
            chunk = first_block(spans, table, CHUNK) + tl.program_id(0)
            start, width = step_columns(tables, table, FIELDS, SEGMENT, START, WIDTH, RULE)
            column = tl.arange(0, COLUMNS)
            wide = column < width
            total = tl.load(parts + ((2 * chunk + 1) * COLUMNS) + column)
            head = tl.load(heads + chunk)
            # AHEAD chunks at once, because a frequent row is a long chain.
            ahead = tl.arange(0, AHEAD)
            together = key * 0 + AHEAD
            while together == AHEAD:
                at = last + ahead * CHUNK
                same = tl.load(keys + at, mask=at < end, other=-1).to(tl.int64) == key
                part = (2 * (chunk + 1 + ahead) * COLUMNS)[:, None] + column[None, :]
                total += tl.sum(tl.load(parts + part, mask=same[:, None], other=0.0), 0)
                together = tl.sum(same.to(tl.int64), 0)
                chunk += AHEAD
                last += AHEAD * CHUNK
            call = calls + table * CALL_FIELDS
            flush(
                tables, call, table, key, total, head, column, wide, start, width, sums,
                h0, h1, h2, h3, h4, h5,
                FIELDS, SHIFT, STRIDE, HEADER, OFFSET, STATE, DIM, SEGMENT, PRECISION, STOCHASTIC, RULE,
                OPTIONS, DELAY, MEASURED, COUNTED,
            )  # fmt: skip


# mypy: ignore-errors


UNUSED = tl.constexpr(2147483647)  # A mark without an occurrence


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
