"""Kernels of the admission policies, between `claim_slots` and `create_rows`.

An id that `MinCount` counts has a slot in the index like others, without a row: its value is below -1 and
holds the count and a number that ascends in the order in which ids were counted first (`counted_value`).
`claim_slots` replaces the value and keeps the old one for these kernels.

    (claim_slots)  the old values of counted ids, by the occurrence that replaced them
    count_seen     occurrences of each new id, with those of earlier calls, at its first position
    count_new      which new ids are refused, and the number of these and of the others per block
    (number_new)   prefix sums of both
    refuse_ids     refused ids are logged, in the order of their first occurrences, and counted; with
                   `Probability` their slots become removed ones
"""

# mypy: ignore-errors

from megalith.table.engines.cuda.device_functions import (
    ADMISSION,
    ADMISSION_LEVEL,
    CALL_COUNTERS,
    COUNTED,
    COUNTERS,
    EMPTY,
    ENTRIES,
    KEY,
    REFUSED_BEFORE,
    REFUSED_IDS,
    REFUSED_LOG,
    REFUSED_ROOM,
    REMOVED,
    SEQUENCE_BEFORE,
    SPAN_FIELDS,
    draw24,
    field,
    mix64,
    pointer_field,
)
from megalith.table.engines.cuda.index_kernels import PENDING, first_block, is_first, positions
from megalith.table.engines.cuda.triton_runtime import launched, tl, triton

MAX_COUNT = tl.constexpr(2**32 - 1)


@triton.jit
def counted_value(number, count):
    """The value of the slot of a counted id: a number of 31 bits and a count of 32."""
    return -2 - ((number << 32) | count)


@triton.jit
def draw_admits(tables, table, id, first, total, level, step, FIELDS: tl.constexpr):
    """Which ids `Probability` admits: one draw for each occurrence."""
    key = mix64((id ^ field(tables, table, FIELDS, KEY)).to(tl.uint64, bitcast=True))
    key = mix64(key + (step + 1).to(tl.uint64) * 0xD1B54A32D192ED03)
    number = total * 0
    passes = first & (total < 0)
    active = first
    while tl.max(active.to(tl.int32), 0) > 0:
        low = active & (draw24(key, number).to(tl.int64) < level)
        passes = passes | low
        number += 1
        active = active & (low == 0) & (number < total)
    return passes


@launched
@triton.jit
def count_seen(
    tables, spans, missing, absent, slots, occurrences, prior, older, seen,
    FIELDS: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    table = tl.program_id(1)
    count = tl.load(missing + table)
    begin = tl.load(spans + SPAN_FIELDS * table)
    entries = pointer_field(tables, table, FIELDS, ENTRIES, tl.int64)
    block = tl.program_id(0).to(tl.int64) * BLOCK
    while block < count:
        listed = block + tl.arange(0, BLOCK)
        at = tl.load(absent + begin + listed, mask=listed < count, other=0).to(tl.int64)
        slot = tl.load(slots + at, mask=listed < count, other=-1)
        pending = slot >= 0
        value = tl.load(entries + 2 * tl.where(pending, slot, 0) + 1, mask=pending, other=0)
        first = tl.where(pending, PENDING - value, 0)
        old = tl.load(prior + at, mask=pending, other=-1)
        known = pending & (old < -1)
        amount = tl.where(known, (-2 - old) & MAX_COUNT, 0)
        if GIVEN:
            amount += tl.load(occurrences + at, mask=pending, other=0)
        else:
            amount += 1
        tl.atomic_add(seen + first, amount, mask=pending)
        tl.store(older + first, old, mask=known)
        block += tl.num_programs(0) * BLOCK


@launched
@triton.jit
def count_new(
    tables, calls, spans, ids, rows, slots, missing, seen, refused, counts, refusals,
    FIELDS: tl.constexpr, CALL_FIELDS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`index_kernels.count_new` with refused ids: `refused` marks their first occurrences."""
    table, at, inside = positions(spans, BLOCK)
    start = tl.load(spans + SPAN_FIELDS * table)
    some = start + tl.program_id(0).to(tl.int64) * BLOCK < tl.load(spans + SPAN_FIELDS * table + 1)
    if some & (tl.load(missing + table) > 0):
        entries = pointer_field(tables, table, FIELDS, ENTRIES, tl.int64)
        _, first = is_first(entries, rows, slots, at, inside)
        kind = field(tables, table, FIELDS, ADMISSION)
        level = field(tables, table, FIELDS, ADMISSION_LEVEL)
        total = tl.minimum(tl.load(seen + at, mask=first, other=0), MAX_COUNT)
        passes = first
        if kind == 1:
            passes = first & (total >= level)
        if kind == 2:
            id = tl.load(ids + at, mask=first, other=0)
            step = tl.load(calls + table * CALL_FIELDS + STEP)
            passes = draw_admits(tables, table, id, first, total, level, step, FIELDS)
        turned = first & (passes == 0)
        number = tl.sum(turned.to(tl.int32), 0)
        if (number > 0) & (kind == 1):
            counters = pointer_field(tables, table, FIELDS, COUNTERS, tl.int64)
            tl.atomic_add(counters + COUNTED, number.to(tl.int64))
        block = first_block(spans, table, BLOCK) + tl.program_id(0)
        tl.store(counts + block, tl.sum(passes.to(tl.int32), 0))
        tl.store(refusals + block, number)
        tl.store(refused + at, turned.to(tl.int8), mask=inside)


@launched
@triton.jit
def refuse_ids(
    tables, spans, ids, slots, seen, older, refused, refusals, created,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    table, at, inside = positions(spans, BLOCK)
    own = created + CALL_COUNTERS * table
    total = tl.load(own + REFUSED_IDS)
    if total > 0:
        turned = tl.load(refused + at, mask=inside, other=0) != 0
        if tl.max(turned.to(tl.int32), 0) > 0:
            block = first_block(spans, table, BLOCK) + tl.program_id(0)
            rank = tl.load(refusals + block).to(tl.int64) + tl.cumsum(turned.to(tl.int64), 0) - 1
            id = tl.load(ids + at, mask=turned, other=0)
            log = pointer_field(tables, table, FIELDS, REFUSED_LOG, tl.int64)
            room = field(tables, table, FIELDS, REFUSED_ROOM)
            place = (tl.load(own + REFUSED_BEFORE) + rank) % room
            tl.store(log + place, id, mask=turned & (rank >= total - room))
            entries = pointer_field(tables, table, FIELDS, ENTRIES, tl.int64)
            slot = tl.load(slots + at, mask=turned, other=0)
            value = tl.full((BLOCK,), -1, tl.int64)
            if field(tables, table, FIELDS, ADMISSION) == 1:
                old = tl.load(older + at, mask=turned, other=-1)
                number = tl.where(old < -1, (-2 - old) >> 32, tl.load(own + SEQUENCE_BEFORE) + rank)
                count = tl.minimum(tl.load(seen + at, mask=turned, other=0), MAX_COUNT)
                value = counted_value(number, count)
            else:
                special = (id == EMPTY) | (id == REMOVED)
                key = tl.full((BLOCK,), REMOVED, tl.int64)
                tl.store(entries + 2 * slot, key, mask=turned & (special == 0))
            tl.store(entries + 2 * slot + 1, value, mask=turned)
