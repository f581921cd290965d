"""Functions that several kernels use: hashing, random draws, initial weights, addresses and precisions.

They give the bits of megalith/bits.py, table/initializers.py and table/rounding.py: every operation is one
IEEE operation, and kernels are launched without fused multiply-add.
"""

# mypy: ignore-errors

from megalith.table.engines.cuda.triton_runtime import tl, triton

EMPTY = tl.constexpr(-0x5BD1E995_27D4EB2F)  # Key of a slot that was never used
REMOVED = tl.constexpr(-0x1B873593_CC9E2D51)
"""Key of a slot whose id was removed. The ids that equal these two keys have slots of their own."""

# Fields of a table's descriptor, int64 each.
ENTRIES = tl.constexpr(0)
MASK = tl.constexpr(1)
CHUNKS = tl.constexpr(2)
KEY = tl.constexpr(3)
COUNTERS = tl.constexpr(4)
FREE = tl.constexpr(5)
BASE = tl.constexpr(6)
LIMIT = tl.constexpr(7)
STATE_VALUES = tl.constexpr(8)
TRACKED = tl.constexpr(9)
READS_INITIAL = tl.constexpr(10)  # whether an id without a row reads as its initial row, 0 or 1
COUNTS_UPDATES = tl.constexpr(11)  # whether the updates of rows are counted, 0 or 1
# Its capacity; see victim_kernels.py.
ROW_LIMIT = tl.constexpr(12)  # rows that it may have; 0 if kernels need not make room
SCORE = tl.constexpr(13)  # 0 lru, 1 lfu, 2 step
STAMPS = tl.constexpr(14)  # int8 per row: the number of the last call with evictions that must keep the row
SEARCH = tl.constexpr(15)  # int64 [4], the position of the search for low scores
EVICTED_LOG = tl.constexpr(16)  # int64, a ring of the ids that kernels removed
EVICTED_ROOM = tl.constexpr(17)  # number of ids of the ring
# Its admission policy; see admission_kernels.py.
ADMISSION = tl.constexpr(18)  # 0 none, 1 MinCount, 2 Probability
ADMISSION_LEVEL = tl.constexpr(19)  # the count that admits an id; the limit of its random bits
REFUSED_LOG = tl.constexpr(20)  # int64, a ring of the refused ids
REFUSED_ROOM = tl.constexpr(21)  # number of ids of the ring
# The layout of its rows; see row_layout.py.
ROW_SHIFT = tl.constexpr(22)
ROW_STRIDE = tl.constexpr(23)
ROW_HEADER = tl.constexpr(24)
ROW_DIM = tl.constexpr(25)
ROW_STATE_OFFSET = tl.constexpr(26)
ROW_STATES = tl.constexpr(27)
SEGMENTS = tl.constexpr(28)
SEGMENT_FIELDS = tl.constexpr(8)
# Fields of a segment: the initializer (kind, a, b), columns (first, end, number), offset and state.
SEGMENT_START = tl.constexpr(3)
SEGMENT_END = tl.constexpr(4)
SEGMENT_WIDTH = tl.constexpr(5)
SEGMENT_OFFSET = tl.constexpr(6)
SEGMENT_STATE = tl.constexpr(7)
# After the segments, the fields of each run of columns.
RUN_FIELDS = tl.constexpr(3)
RUN_START = tl.constexpr(0)
RUN_WIDTH = tl.constexpr(1)
RUN_OFFSET = tl.constexpr(2)

# Counters of a table, int64 each.
USED = tl.constexpr(0)
NUM_FREE = tl.constexpr(1)
CREATED = tl.constexpr(2)
SKIPPED = tl.constexpr(3)
REMOVED_SLOTS = tl.constexpr(4)  # slots of removed ids in the index
EVICTED = tl.constexpr(5)  # ids that kernels removed to make room
CALLS = tl.constexpr(6)  # calls that made room
PROTECTED = tl.constexpr(7)  # rows that the latest of these calls keeps, if they were counted
REFUSED = tl.constexpr(8)  # refused ids
COUNTED = tl.constexpr(9)  # ids without a row that are counted
SEQUENCE = tl.constexpr(10)  # the number of the next id that is counted
NUM_COUNTERS = tl.constexpr(11)

# What a call changes in a table, int64 each: new rows, and what there was before it.
NEW_ROWS = tl.constexpr(0)
FREE_ROWS = tl.constexpr(1)  # free rows, with those that the call frees
USED_ROWS = tl.constexpr(2)
VICTIMS = tl.constexpr(3)  # rows that the call removes
EVICTED_BEFORE = tl.constexpr(4)
SLOTS_BEFORE = tl.constexpr(5)  # REMOVED_SLOTS
REFUSED_IDS = tl.constexpr(6)  # ids that the call refuses
REFUSED_BEFORE = tl.constexpr(7)
SEQUENCE_BEFORE = tl.constexpr(8)
COUNTED_AFTER = tl.constexpr(9)
CALL_COUNTERS = tl.constexpr(10)

SPAN_FIELDS = tl.constexpr(3)
"""Fields of a table's span: first position, end, and first float of its rows in a matrix of the rows of all
tables."""

# Header of a row, in bytes from its start.
HEADER_ID = tl.constexpr(0)
HEADER_TIME = tl.constexpr(8)
HEADER_FLAGS = tl.constexpr(12)
HEADER_COUNT = tl.constexpr(16)
HEADER_STEP = tl.constexpr(20)
LIVE = tl.constexpr(1)


@triton.jit
def mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def first_slot(id, mask):
    """The slot at which the search for an id starts; the two reserved keys have slots after the others."""
    slot = (mix64(id.to(tl.uint64, bitcast=True)) & mask.to(tl.uint64)).to(tl.int64)
    slot = tl.where(id == EMPTY, mask + 1, slot)
    return tl.where(id == REMOVED, mask + 2, slot)


@triton.jit
def field(tables, table, FIELDS: tl.constexpr, number: tl.constexpr):
    return tl.load(tables + table * FIELDS + number)


@triton.jit
def pointer_field(tables, table, FIELDS: tl.constexpr, number: tl.constexpr, dtype: tl.constexpr):
    return tl.load(tables + table * FIELDS + number).to(tl.pointer_type(dtype))


@triton.jit
def number_at(place, CONSTANT: tl.constexpr):
    """A number of a layout, int32: CONSTANT, or what is at `place` if it differs between tables.

    A negative CONSTANT is minus a divisor of the number; see row_layout.py.
    """
    if CONSTANT < 0:
        return tl.multiple_of(tl.load(place).to(tl.int32), -CONSTANT)
    else:
        return tl.full((), CONSTANT, tl.int32)


@triton.jit
def layout_number(tables, table, FIELDS: tl.constexpr, number: tl.constexpr, CONSTANT: tl.constexpr):
    return number_at(tables + table * FIELDS + number, CONSTANT)


@triton.jit
def segment_number(
    tables, table, FIELDS: tl.constexpr, SEGMENT: tl.constexpr, number: tl.constexpr, CONSTANT: tl.constexpr
):
    return number_at(tables + table * FIELDS + SEGMENTS + SEGMENT * SEGMENT_FIELDS + number, CONSTANT)


@triton.jit
def run_number(
    tables, table, FIELDS: tl.constexpr, NUM_SEGMENTS: tl.constexpr, RUN: tl.constexpr,
    number: tl.constexpr, CONSTANT: tl.constexpr,
):  # fmt: skip
    first = SEGMENTS + NUM_SEGMENTS * SEGMENT_FIELDS + RUN * RUN_FIELDS
    return number_at(tables + table * FIELDS + first + number, CONSTANT)


@triton.jit
def row_address(chunks, row, shift, stride, valid):
    """The address of the first byte of rows, int64."""
    row = tl.where(valid, row, 0).to(tl.int64)
    number = row >> shift
    chunk = tl.load(chunks + number, mask=valid, other=0)
    return chunk + (row - (number << shift)) * stride


@triton.jit
def row_places(tables, table, FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr):
    """What `row_address` needs to know about a table: its chunks, their shift, and the stride of rows."""
    chunks = pointer_field(tables, table, FIELDS, CHUNKS, tl.int64)
    shift = layout_number(tables, table, FIELDS, ROW_SHIFT, SHIFT)
    return chunks, shift, layout_number(tables, table, FIELDS, ROW_STRIDE, STRIDE)


@triton.jit
def table_row_address(
    tables, table, row, valid, FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr
):
    """The address of the first byte of rows of one of several tables, int64."""
    chunks, shift, stride = row_places(tables, table, FIELDS, SHIFT, STRIDE)
    return row_address(chunks, row, shift, stride, valid)


@triton.jit
def matrix_rows(tables, spans, table, at, FIELDS: tl.constexpr, DIM: tl.constexpr):
    """The places of the rows of positions in a matrix of the rows of all tables, one table after another."""
    if DIM >= 0:
        return at * DIM
    else:
        span = spans + SPAN_FIELDS * table
        first = tl.multiple_of(tl.load(span + 2), -DIM)
        return first + (at - tl.load(span)) * layout_number(tables, table, FIELDS, ROW_DIM, DIM)


@triton.jit
def draw24(keys, columns):
    bits = mix64(keys + (columns // 2 + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (tl.where(columns % 2 == 1, bits >> 32, bits) & 0xFFFFFFFF) >> 8


@triton.jit
def natural_log(y):
    bits = y.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 126
    m = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    low = m < 0.70710677
    exponent = tl.where(low, exponent - 1, exponent).to(tl.float32)
    m = tl.where(low, m + m, m) - 1.0
    square = m * m
    p = m * 7.0376836e-2 + -1.1514610e-1
    p = p * m + 1.1676999e-1
    p = p * m + -1.2420141e-1
    p = p * m + 1.4249323e-1
    p = p * m + -1.6668058e-1
    p = p * m + 2.0000714e-1
    p = p * m + -2.4999994e-1
    p = p * m + 3.3333331e-1
    tail = p * m * square
    tail = tail + exponent * -2.1219444e-4
    tail = tail + square * -0.5
    return (m + tail) + exponent * 0.69335938


@triton.jit
def inverse_erf(x):
    w = -natural_log((1.0 - x) * (1.0 + x))
    c = w - 2.5
    centre = c * 2.8102264e-08 + 3.4327394e-07
    centre = centre * c + -3.5233877e-06
    centre = centre * c + -4.3915065e-06
    centre = centre * c + 0.00021858087
    centre = centre * c + -0.0012537250
    centre = centre * c + -0.0041776816
    centre = centre * c + 0.24664073
    centre = centre * c + 1.5014094
    t = tl.sqrt_rn(w) - 3.0
    tail = t * -0.00020021426 + 0.00010095056
    tail = tail * t + 0.0013493432
    tail = tail * t + -0.0036734284
    tail = tail * t + 0.0057395077
    tail = tail * t + -0.0076224613
    tail = tail * t + 0.0094388705
    tail = tail * t + 1.0016741
    tail = tail * t + 2.8329768
    return tl.where(w < 5.0, centre, tail) * x


@triton.jit
def initial_weights(tables, table, FIELDS: tl.constexpr, ids, columns, NUM_SEGMENTS: tl.constexpr):
    """The float32 initial weights of ids [n, 1] and columns [1, k], before rounding to a precision."""
    key = tl.load(tables + table * FIELDS + KEY)
    keys = mix64((ids ^ key).to(tl.uint64, bitcast=True))
    draws = draw24(keys, columns.to(tl.int64)).to(tl.int64)
    result = draws.to(tl.float32)
    uniform = draws.to(tl.float32) * 5.9604644775390625e-08
    x = (2 * draws + 1 - (1 << 24)).to(tl.float32) * 5.9604644775390625e-08
    for number in tl.static_range(NUM_SEGMENTS):
        settings = tables + table * FIELDS + SEGMENTS + number * SEGMENT_FIELDS
        kind = tl.load(settings)
        a = tl.load(settings + 1).to(tl.int32).to(tl.float32, bitcast=True)
        b = tl.load(settings + 2).to(tl.int32).to(tl.float32, bitcast=True)
        own = (columns >= tl.load(settings + SEGMENT_START)) & (columns < tl.load(settings + SEGMENT_END))
        value = a + tl.zeros_like(result)
        if kind == 1:
            value = a + b * uniform
        if kind == 2:
            value = a + b * (1.4142135 * inverse_erf(x))
        if kind == 3:
            z = 1.4142135 * inverse_erf(x * 0.95449974)
            value = a + b * tl.minimum(tl.maximum(z, -2.0), 2.0)
        result = tl.where(own, value, result)
    return result


@triton.jit
def aligned_pointer(address, dtype: tl.constexpr, offset, OFFSET: tl.constexpr):
    """Addresses + offset as pointers; at multiples of 16 a thread loads 16 bytes at once.

    OFFSET is the offset or minus a divisor of it. The hint must be on the pointer: the compiler loses it in
    the conversion from an integer.
    """
    pointer = (address + offset).to(tl.pointer_type(dtype))
    if OFFSET % 16 == 0:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def weight_pointer(address, offset, OFFSET: tl.constexpr, PRECISION: tl.constexpr):
    """Pointers to weights at aligned addresses + offset; bfloat16 as int16."""
    if PRECISION == 0:
        return aligned_pointer(address, tl.float32, offset, OFFSET)
    elif PRECISION == 1:
        return aligned_pointer(address, tl.float16, offset, OFFSET)
    else:
        return aligned_pointer(address, tl.int16, offset, OFFSET)


@triton.jit
def load_weights(pointer, mask, PRECISION: tl.constexpr):
    if PRECISION == 0:
        return tl.load(pointer, mask=mask, other=0.0)
    elif PRECISION == 1:
        return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    else:
        return (tl.load(pointer, mask=mask, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def clamped(values, PRECISION: tl.constexpr):
    """Values within the finite range of a precision; NaN stays."""
    largest: tl.constexpr = 65504.0 if PRECISION == 1 else 3.3895313892515355e38
    values = tl.where(values > largest, largest, values)
    return tl.where(values < -largest, -largest, values)


@triton.jit
def nearest_bfloat16(values):
    """Values rounded to the nearest bfloat16, ties to even, as float32."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(values != values, values, rounded.to(tl.float32, bitcast=True))


@triton.jit
def rounded_weights(values, PRECISION: tl.constexpr):
    """The nearest values that a precision stores, as float32."""
    if PRECISION == 0:
        return values
    elif PRECISION == 1:
        return clamped(values, PRECISION).to(tl.float16).to(tl.float32)
    else:
        return nearest_bfloat16(clamped(values, PRECISION))


@triton.jit
def store_weights(pointer, values, mask, PRECISION: tl.constexpr):
    """Store float32 values that were rounded to the precision."""
    if PRECISION == 0:
        tl.store(pointer, values, mask=mask)
    elif PRECISION == 1:
        tl.store(pointer, values.to(tl.float16), mask=mask)
    else:
        tl.store(pointer, (values.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=mask)


@triton.jit
def stochastic_weights(values, draws, PRECISION: tl.constexpr):
    """Values rounded up or down by 24 random bits each; see table/rounding.py."""
    inside = clamped(values, PRECISION)
    bits = inside.to(tl.int32, bitcast=True)
    if PRECISION == 2:
        result = ((bits + (draws >> 8).to(tl.int32)) & -65536).to(tl.float32, bitcast=True)
    else:
        usual = ((bits + (draws >> 11).to(tl.int32)) & -8192).to(tl.float32, bitcast=True)
        magnitude = tl.abs(inside)
        scaled = magnitude * 16777216.0
        lower = tl.floor(scaled)
        raised = draws.to(tl.float32) >= 16777216.0 - (scaled - lower) * 16777216.0
        small = (lower + raised.to(tl.float32)) * 5.9604644775390625e-08
        negative = bits < 0
        small = tl.where(negative, -small, small)
        result = tl.where(magnitude < 6.103515625e-05, small, usual)
    return tl.where(inside != inside, inside, result)
