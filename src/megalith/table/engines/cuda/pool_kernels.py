"""Kernels of a pooling: rows reduced into outputs, and the way back from output gradients to occurrences.

A launch covers many parts (axis 1), each an OutputSlice of the bags of one feature, in blocks of bags (axis
0). `parts` describes them. START, WIDTH and OFFSET are the columns of all parts in their rows; a negative
number differs between parts, which have it in their fields (see row_layout.py). Offsets of bags are
clamped to the occurrences of the table, because the host does not read them.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102

from megalith.table.engines.cuda.device_functions import (
    READS_INITIAL,
    field,
    initial_weights,
    load_weights,
    number_at,
    rounded_weights,
    row_address,
    row_places,
    table_row_address,
    weight_pointer,
)
from megalith.table.engines.cuda.triton_runtime import launched, tl, triton

# Fields of a part, int64 each.
TABLE = tl.constexpr(0)
OFFSETS = tl.constexpr(1)  # address, or 0 if each bag has one occurrence
BAGS = tl.constexpr(2)
WEIGHTS = tl.constexpr(3)
DIVISOR = tl.constexpr(4)
OUT = tl.constexpr(5)
OUT_COLUMNS = tl.constexpr(6)
COLUMN = tl.constexpr(7)
INNER = tl.constexpr(8)
STEP = tl.constexpr(9)
REPEAT = tl.constexpr(10)  # how often a shared feature fills the rows of the output
FIRST = tl.constexpr(11)  # position of the table's first occurrence
COUNT = tl.constexpr(12)  # number of the table's occurrences
ACCUMULATE = tl.constexpr(13)
BEGIN = tl.constexpr(14)  # without offsets: the table's occurrence that is the first bag
ROW_START = tl.constexpr(15)  # first column of the row
ROW_WIDTH = tl.constexpr(16)  # number of columns
ROW_OFFSET = tl.constexpr(17)  # bytes from the start of the row to the first column
PART_FIELDS = tl.constexpr(18)  # even, so that the descriptors of any part are aligned


@triton.jit
def num_initial(tables, table, missing, FIELDS: tl.constexpr):
    """Number of ids of a table without a row that read as their initial rows."""
    return tl.load(missing + table) * field(tables, table, FIELDS, READS_INITIAL)


@triton.jit
def bags_of(parts, block, BLOCK: tl.constexpr):
    """A block of bags: the part, their numbers, which exist, their first occurrences and lengths."""
    part = parts + tl.program_id(1) * PART_FIELDS
    bag = block * BLOCK + tl.arange(0, BLOCK)
    inside = bag < tl.load(part + BAGS)
    address = tl.load(part + OFFSETS)
    count = tl.load(part + COUNT)
    begin = tl.load(part + BEGIN) + bag
    end = begin + inside.to(tl.int64)
    if address != 0:
        offsets = address.to(tl.pointer_type(tl.int64))
        begin = tl.load(offsets + bag, mask=inside, other=0)
        end = tl.load(offsets + bag + 1, mask=inside, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), count)
    end = tl.minimum(tl.maximum(end, begin), count)
    return part, bag, inside, begin, end - begin


@triton.jit
def output_address(part, bag):
    """The addresses of the output columns that bags fill, int64."""
    inner = tl.load(part + INNER)
    row = bag // inner
    columns = tl.load(part + OUT_COLUMNS)
    at = row * columns + tl.load(part + COLUMN) + (bag - row * inner) * tl.load(part + STEP)
    return tl.load(part + OUT) + at * 4


@triton.jit
def repeat_bytes(part, bag):
    """The distance in bytes from one copy of a shared feature's rows to the next."""
    return tl.load(part + BAGS) // tl.load(part + INNER) * tl.load(part + OUT_COLUMNS) * 4


@triton.jit
def all_found(rows, position, length):
    longest = tl.max(length, 0)
    found = length >= 0
    k = longest * 0
    while k < longest:
        found = found & (tl.load(rows + position + k, mask=k < length, other=0) >= 0)
        k += 1
    return tl.min(found.to(tl.int32), 0) > 0


@triton.jit
def pool_block(
    tables, part, bag, inside, begin, length, ids, rows,
    FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, OFFSET: tl.constexpr,
    START: tl.constexpr, WIDTH: tl.constexpr, WIDEST: tl.constexpr, PRECISION: tl.constexpr,
    INITIAL: tl.constexpr, NUM_SEGMENTS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Reduce the rows of a block of bags; an id without a row is its initial row, or zeros."""
    table = tl.load(part + TABLE)
    chunks, shift, stride = row_places(tables, table, FIELDS, SHIFT, STRIDE)
    position = tl.load(part + FIRST) + begin
    weights = tl.load(part + WEIGHTS)
    start = number_at(part + ROW_START, START)
    width = number_at(part + ROW_WIDTH, WIDTH)
    offset = number_at(part + ROW_OFFSET, OFFSET)
    longest = tl.max(length, 0)
    for first in tl.static_range(0, WIDEST, COLUMNS):
        column = (first + tl.arange(0, COLUMNS))[None, :]
        wide = column < width
        total = tl.zeros((BLOCK, COLUMNS), tl.float32)
        k = longest * 0
        while k < longest:
            own = k < length
            row = tl.load(rows + position + k, mask=own, other=-1)
            exists = row >= 0
            address = row_address(chunks, row, shift, stride, exists)
            pointer = weight_pointer(address, offset, OFFSET, PRECISION)[:, None]
            value = load_weights(pointer + column, exists[:, None] & wide, PRECISION)
            if INITIAL:
                if tl.max((own & (exists == 0)).to(tl.int32), 0) > 0:
                    id = tl.load(ids + position + k, mask=own, other=0)[:, None]
                    initial = initial_weights(tables, table, FIELDS, id, start + column, NUM_SEGMENTS)
                    initial = tl.where(own[:, None], rounded_weights(initial, PRECISION), 0.0)
                    value = tl.where(exists[:, None], value, initial)
            if weights != 0:
                factor = tl.load(weights.to(tl.pointer_type(tl.float32)) + begin + k, mask=own, other=0.0)
                value = value * factor[:, None]
            total = tl.where(own[:, None], total + value, total)
            k += 1
        divisor = tl.load(part + DIVISOR)
        if divisor != 0:
            by = tl.load(divisor.to(tl.pointer_type(tl.float32)) + bag, mask=inside, other=1.0)
            total = tl.div_rn(total, by[:, None] + tl.zeros_like(total))
        address = output_address(part, bag)
        distance = repeat_bytes(part, bag)
        both = inside[:, None] & wide
        repeat = tl.load(part + REPEAT)
        while repeat > 0:
            target = address.to(tl.pointer_type(tl.float32))
            if ALIGNED:
                target = tl.multiple_of(target, 16)
            target = target[:, None] + column
            if tl.load(part + ACCUMULATE) != 0:
                tl.store(target, tl.load(target, mask=both, other=0.0) + total, mask=both)
            else:
                tl.store(target, total, mask=both)
            address = address + distance
            repeat -= 1


@launched
@triton.jit
def pool_bags(
    tables, parts, ids, rows, missing,
    FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, OFFSET: tl.constexpr,
    START: tl.constexpr, WIDTH: tl.constexpr, WIDEST: tl.constexpr, PRECISION: tl.constexpr,
    INITIAL: tl.constexpr, NUM_SEGMENTS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Pool blocks of bags; with INITIAL, blocks with an id without a row are left to `pool_missing`."""
    part, bag, inside, begin, length = bags_of(parts, tl.program_id(0).to(tl.int64), BLOCK)
    if INITIAL:
        if num_initial(tables, tl.load(part + TABLE), missing, FIELDS) > 0:
            if not all_found(rows, tl.load(part + FIRST) + begin, length):
                inside = inside & (bag < 0)
                length = length * 0
    pool_block(
        tables, part, bag, inside, begin, length, ids, rows,
        FIELDS, SHIFT, STRIDE, OFFSET, START, WIDTH, WIDEST, PRECISION, False, NUM_SEGMENTS, ALIGNED,
        BLOCK, COLUMNS,
    )  # fmt: skip


@launched
@triton.jit
def pool_missing(
    tables, parts, ids, rows, missing,
    FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, OFFSET: tl.constexpr,
    START: tl.constexpr, WIDTH: tl.constexpr, WIDEST: tl.constexpr, PRECISION: tl.constexpr,
    INITIAL: tl.constexpr, NUM_SEGMENTS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Pool the blocks that `pool_bags` left: those with an id without a row.

    It is a launch of its own, because the registers that initial rows need would slow down `pool_bags`. A few
    programs walk over all blocks, and end at once if `missing`, the number of such ids, is 0.
    """
    table = tl.load(parts + tl.program_id(1) * PART_FIELDS + TABLE)
    if num_initial(tables, table, missing, FIELDS) > 0:
        count = tl.load(parts + tl.program_id(1) * PART_FIELDS + BAGS)
        block = tl.program_id(0).to(tl.int64)
        while block * BLOCK < count:
            part, bag, inside, begin, length = bags_of(parts, block, BLOCK)
            if not all_found(rows, tl.load(part + FIRST) + begin, length):
                pool_block(
                    tables, part, bag, inside, begin, length, ids, rows,
                    FIELDS, SHIFT, STRIDE, OFFSET, START, WIDTH, WIDEST, PRECISION, INITIAL, NUM_SEGMENTS,
                    ALIGNED, BLOCK, COLUMNS,
                )  # fmt: skip
            block += tl.num_programs(0)


@triton.jit
def output_pointer(part, bag, ALIGNED: tl.constexpr):
    pointer = output_address(part, bag).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer[:, None]


@launched
@triton.jit
def place_rows(
    tables, parts, rows,
    FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, OFFSET: tl.constexpr,
    START: tl.constexpr, WIDTH: tl.constexpr, WIDEST: tl.constexpr, PRECISION: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy the rows of bags with one occurrence each to the outputs; an id without a row is zeros."""
    part = parts + tl.program_id(1) * PART_FIELDS
    bag = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = bag < tl.load(part + BAGS)
    row = tl.load(rows + tl.load(part + FIRST) + tl.load(part + BEGIN) + bag, mask=inside, other=-1)
    exists = row >= 0
    address = table_row_address(tables, tl.load(part + TABLE), row, exists, FIELDS, SHIFT, STRIDE)
    source = weight_pointer(address, number_at(part + ROW_OFFSET, OFFSET), OFFSET, PRECISION)[:, None]
    target = output_pointer(part, bag, ALIGNED)
    width = number_at(part + ROW_WIDTH, WIDTH)
    for first in tl.static_range(0, WIDEST, COLUMNS):
        column = (first + tl.arange(0, COLUMNS))[None, :]
        wide = column < width
        value = load_weights(source + column, exists[:, None] & wide, PRECISION)
        tl.store(target + column, value, mask=inside[:, None] & wide)


@launched
@triton.jit
def place_missing(
    tables, parts, ids, missing, absent,
    FIELDS: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, WIDEST: tl.constexpr,
    PRECISION: tl.constexpr, NUM_SEGMENTS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the initial rows of the ids without a row that `find_rows` listed, after `place_rows`."""
    part = parts + tl.program_id(1) * PART_FIELDS
    table = tl.load(part + TABLE)
    count = num_initial(tables, table, missing, FIELDS)
    row_start = number_at(part + ROW_START, START)
    width = number_at(part + ROW_WIDTH, WIDTH)
    block = tl.program_id(0).to(tl.int64) * BLOCK
    while block < count:
        listed = block + tl.arange(0, BLOCK)
        start = tl.load(part + FIRST)
        at = tl.load(absent + start + listed, mask=listed < count, other=-1).to(tl.int64)
        bag = at - start - tl.load(part + BEGIN)
        inside = (at >= 0) & (bag >= 0) & (bag < tl.load(part + BAGS))
        id = tl.load(ids + at, mask=inside, other=0)[:, None]
        target = output_pointer(part, tl.where(inside, bag, 0), ALIGNED)
        for first in tl.static_range(0, WIDEST, COLUMNS):
            column = (first + tl.arange(0, COLUMNS))[None, :]
            value = initial_weights(tables, table, FIELDS, id, row_start + column, NUM_SEGMENTS)
            value = rounded_weights(value, PRECISION)
            tl.store(target + column, value, mask=inside[:, None] & (column < width))
        block += tl.num_programs(0) * BLOCK


@launched
@triton.jit
def expand_bags(parts, wanted, addresses, factors, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Write for each occurrence the address of its bag's gradient, and its factor."""
    part, bag, inside, begin, length = bags_of(parts, tl.program_id(0).to(tl.int64), BLOCK)
    address = output_address(part, bag)
    first = tl.load(part + FIRST)
    weights = tl.load(part + WEIGHTS)
    divisor = tl.load(part + DIVISOR)
    by = tl.full((BLOCK,), 1.0, tl.float32)
    if WEIGHTED:
        if divisor != 0:
            by = tl.load(divisor.to(tl.pointer_type(tl.float32)) + bag, mask=inside, other=1.0)
    longest = tl.max(length, 0)
    k = longest * 0
    while k < longest:
        own = k < length
        at = first + begin + k
        tl.store(addresses + at, address, mask=own)
        tl.store(wanted + at, own.to(tl.int8), mask=own)
        if WEIGHTED:
            factor = tl.full((BLOCK,), 1.0, tl.float32)
            if weights != 0:
                factor = tl.load(weights.to(tl.pointer_type(tl.float32)) + begin + k, mask=own, other=0.0)
            tl.store(factors + at, tl.div_rn(factor, by), mask=own)
        k += 1


@launched
@triton.jit
def unpool_bags(
    parts, wanted, grads,
    DIM: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, WIDEST: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the gradients of one part of each feature to the gradients of the occurrences, [n, DIM]."""
    part, bag, inside, begin, length = bags_of(parts, tl.program_id(0).to(tl.int64), BLOCK)
    first_position = tl.load(part + FIRST)
    weights = tl.load(part + WEIGHTS)
    divisor = tl.load(part + DIVISOR)
    start = number_at(part + ROW_START, START)
    width = number_at(part + ROW_WIDTH, WIDTH)
    for first in tl.static_range(0, WIDEST, COLUMNS):
        column = (first + tl.arange(0, COLUMNS))[None, :]
        wide = column < width
        both = inside[:, None] & wide
        total = tl.zeros((BLOCK, COLUMNS), tl.float32)
        address = output_address(part, bag)
        repeat = tl.load(part + REPEAT)
        while repeat > 0:
            total += tl.load(address[:, None].to(tl.pointer_type(tl.float32)) + column, mask=both, other=0.0)
            address = address + repeat_bytes(part, bag)
            repeat -= 1
        if divisor != 0:
            by = tl.load(divisor.to(tl.pointer_type(tl.float32)) + bag, mask=inside, other=1.0)
            total = tl.div_rn(total, by[:, None] + tl.zeros_like(total))
        longest = tl.max(length, 0)
        k = longest * 0
        while k < longest:
            own = k < length
            at = first_position + begin + k
            value = total
            if weights != 0:
                factor = tl.load(weights.to(tl.pointer_type(tl.float32)) + begin + k, mask=own, other=0.0)
                value = total * factor[:, None]
            target = grads + (at * DIM)[:, None] + start + column
            mine = own[:, None] & wide
            tl.store(target, tl.load(target, mask=mine, other=0.0) + value, mask=mine)
            tl.store(wanted + at, own.to(tl.int8), mask=own)
            k += 1
