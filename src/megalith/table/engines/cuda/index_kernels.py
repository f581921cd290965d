"""Kernels of the index: an open-addressing hash table with linear probing.

A slot is two int64, a key and a value, so that one memory access reads both. The value is a row number, -1,
or below that for an id without a row that is counted (admission_kernels.py). Two slots after the others
belong to the ids that equal the keys EMPTY and REMOVED.

Creating rows takes several launches, because which thread claims a slot first is not deterministic and row
numbers must be:

    claim_slots    each missing occurrence finds or claims the slot of its id; the value of a new slot becomes
                   PENDING - the position of its first occurrence (an atomic maximum, so any order will do)
    count_new      number of first occurrences per block (or admission_kernels)
    number_new     prefix sum of these counts, one program per table; updates the table's counters
    (victim_kernels)  rows are removed, if the table has a capacity and the new ones do not fit
    create_rows    the first occurrences get row numbers in input order: free rows first, then unused ones
    (row_kernels)  initial weights and states of the new rows
    finish_keys    all occurrences read their row number

A launch has one program per block of positions (axis 0) and table (axis 1). `spans` holds for each table its
first position and its end.
"""

# mypy: ignore-errors

from megalith.table.engines.cuda.device_functions import (
    ADMISSION,
    BASE,
    CALL_COUNTERS,
    CALLS,
    COUNTED,
    COUNTED_AFTER,
    COUNTERS,
    CREATED,
    EMPTY,
    ENTRIES,
    EVICTED,
    EVICTED_BEFORE,
    FREE,
    FREE_ROWS,
    HEADER_COUNT,
    HEADER_FLAGS,
    HEADER_ID,
    HEADER_STEP,
    HEADER_TIME,
    LIMIT,
    LIVE,
    MASK,
    NEW_ROWS,
    NUM_FREE,
    PROTECTED,
    REFUSED,
    REFUSED_BEFORE,
    REFUSED_IDS,
    REMOVED,
    REMOVED_SLOTS,
    ROW_HEADER,
    ROW_LIMIT,
    SEQUENCE,
    SEQUENCE_BEFORE,
    SLOTS_BEFORE,
    SPAN_FIELDS,
    USED,
    USED_ROWS,
    VICTIMS,
    field,
    first_slot,
    layout_number,
    pointer_field,
    table_row_address,
)
from megalith.table.engines.cuda.triton_runtime import launched, tl, triton

PENDING = tl.constexpr(1 << 62)
MAX_ROW = tl.constexpr(1 << 40)


@triton.jit
def positions(spans, BLOCK: tl.constexpr):
    table = tl.program_id(1)
    start = tl.load(spans + SPAN_FIELDS * table)
    end = tl.load(spans + SPAN_FIELDS * table + 1)
    at = start + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return table, at, at < end


@triton.jit
def first_block(spans, table, BLOCK: tl.constexpr):
    """A number for the first block of a table, such that no two tables of a launch number a block alike."""
    # At most size // BLOCK + 1 blocks follow. So no launch needs numbers that depend on its block size.
    return tl.load(spans + SPAN_FIELDS * table) // BLOCK + table


@triton.jit
def search(tables, table, ids, at, inside, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows of the ids at these positions, -1 where an id has none."""
    entries = pointer_field(tables, table, FIELDS, ENTRIES, tl.int64)
    mask = field(tables, table, FIELDS, MASK)
    id = tl.load(ids + at, mask=inside, other=0)
    own = (id == EMPTY) | (id == REMOVED)
    slot = first_slot(id, mask)
    row = tl.full((BLOCK,), -1, tl.int64)
    active = inside
    while tl.max(active.to(tl.int32), 0) > 0:
        key = tl.load(entries + 2 * slot, mask=active, other=EMPTY)
        value = tl.load(entries + 2 * slot + 1, mask=active, other=-1)
        hit = active & ((key == id) | own)
        row = tl.where(hit, tl.maximum(value, -1), row)
        active = active & (key != EMPTY) & (hit == 0)
        slot = (slot + 1) & mask
    return row


@triton.jit
def list_missing(spans, table, at, lacks, missing, absent):
    """Count ids without a row in `missing`, and list their positions in `absent`, in any order."""
    count = tl.sum(lacks.to(tl.int32), 0)
    if count > 0:
        place = tl.load(spans + SPAN_FIELDS * table) + tl.atomic_add(missing + table, count)
        place += tl.cumsum(lacks.to(tl.int32), 0) - 1
        tl.store(absent + place, at.to(tl.int32), mask=lacks)


@launched
@triton.jit
def find_rows(tables, spans, ids, rows, missing, absent, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Find rows. `missing` counts the ids of each table without one, `absent` lists their positions.

    The positions of a table are listed from its first position on.
    """
    table, at, inside = positions(spans, BLOCK)
    row = search(tables, table, ids, at, inside, FIELDS, BLOCK)
    tl.store(rows + at, row.to(tl.int32), mask=inside)
    list_missing(spans, table, at, inside & (row < 0), missing, absent)


@launched
@triton.jit
def claim_slots(
    tables,
    spans,
    ids,
    rows,
    missing,
    absent,
    wanted,
    slots,
    prior,
    older,
    seen,
    FIELDS: tl.constexpr,
    ALL: tl.constexpr,
    ADMITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find or claim the slots of missing ids, whose positions are listed; others have no slot.

    A few programs walk over the list. ADMITS: prepares what admission_kernels.py needs.
    """
    table = tl.program_id(1)
    count = tl.load(missing + table)
    begin = tl.load(spans + SPAN_FIELDS * table)
    entries = pointer_field(tables, table, FIELDS, ENTRIES, tl.int64)
    mask = field(tables, table, FIELDS, MASK)
    block = tl.program_id(0).to(tl.int64) * BLOCK
    while block < count:
        listed = block + tl.arange(0, BLOCK)
        inside = listed < count
        at = tl.load(absent + begin + listed, mask=inside, other=0).to(tl.int64)
        lacks = inside
        if not ALL:
            lacks = lacks & (tl.load(wanted + at, mask=inside, other=0) != 0)
        id = tl.load(ids + at, mask=inside, other=0)
        own = (id == EMPTY) | (id == REMOVED)
        slot = first_slot(id, mask)
        claimed = tl.full((BLOCK,), -1, tl.int64)
        active = lacks
        while tl.max(active.to(tl.int32), 0) > 0:
            # To the id or an empty slot with plain loads: atomic operations are slow.
            key = tl.load(entries + 2 * slot, mask=active, other=EMPTY)
            passing = active & (key != EMPTY) & (key != id) & (own == 0)
            while tl.max(passing.to(tl.int32), 0) > 0:
                slot = tl.where(passing, (slot + 1) & mask, slot)
                key = tl.where(passing, tl.load(entries + 2 * slot, mask=passing, other=EMPTY), key)
                passing = passing & (key != EMPTY) & (key != id)
            try_claim = active & (key == EMPTY) & (own == 0)
            # atomic_cas has no mask: a lane that must not write replaces REMOVED by REMOVED.
            expected = tl.where(try_claim, EMPTY, REMOVED)
            old = tl.atomic_cas(entries + 2 * slot, expected, tl.where(try_claim, id, REMOVED))
            key = tl.where(try_claim, old, key)
            hit = active & ((key == id) | own | (try_claim & (old == EMPTY)))
            claimed = tl.where(hit, slot, claimed)
            active = active & (hit == 0)
            slot = tl.where(active, (slot + 1) & mask, slot)
        value = tl.load(entries + 2 * slot + 1, mask=lacks, other=0)
        exists = lacks & (value >= 0) & (value < MAX_ROW)
        tl.store(rows + at, value.to(tl.int32), mask=exists)
        pending = lacks & (exists == 0)
        old = tl.atomic_max(entries + 2 * slot + 1, PENDING - at, mask=pending)
        if ADMITS:
            known = pending & (old < -1)
            tl.store(prior + at, tl.where(known, old, -1), mask=inside)
            tl.store(older + at, tl.full((BLOCK,), -1, tl.int64), mask=inside)
            tl.store(seen + at, tl.zeros((BLOCK,), tl.int64), mask=inside)
            number = tl.sum(known.to(tl.int64), 0)
            if number > 0:
                tl.atomic_add(pointer_field(tables, table, FIELDS, COUNTERS, tl.int64) + COUNTED, -number)
        tl.store(slots + at, tl.where(pending, claimed, -1), mask=inside)
        block += tl.num_programs(0) * BLOCK


@triton.jit
def is_first(entries, rows, slots, at, inside):
    """The slots of positions, and which positions are the first occurrence of a new id."""
    lacks = inside & (tl.load(rows + at, mask=inside, other=0) < 0)
    slot = tl.load(slots + at, mask=lacks, other=-1)
    pending = slot >= 0
    value = tl.load(entries + 2 * tl.where(pending, slot, 0) + 1, mask=pending, other=0)
    return slot, pending & (value == PENDING - at)


@launched
@triton.jit
def count_new(tables, spans, rows, slots, missing, counts, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    table, at, inside = positions(spans, BLOCK)
    start = tl.load(spans + SPAN_FIELDS * table)
    some = start + tl.program_id(0).to(tl.int64) * BLOCK < tl.load(spans + SPAN_FIELDS * table + 1)
    if some & (tl.load(missing + table) > 0):
        entries = pointer_field(tables, table, FIELDS, ENTRIES, tl.int64)
        _, first = is_first(entries, rows, slots, at, inside)
        block = first_block(spans, table, BLOCK) + tl.program_id(0)
        tl.store(counts + block, tl.sum(first.to(tl.int32), 0))


@triton.jit
def scan_counts(counts, blocks, SCAN: tl.constexpr):
    """Replace counts by their exclusive prefix sum; return the sum."""
    total = tl.zeros((), tl.int32)
    done = tl.zeros((), tl.int64)
    while done < blocks:
        at = done + tl.arange(0, SCAN)
        own = at < blocks
        count = tl.load(counts + at, mask=own, other=0)
        tl.store(counts + at, total + tl.cumsum(count, 0) - count, mask=own)
        total += tl.sum(count, 0)
        done += SCAN
    return total


@launched
@triton.jit
def number_new(
    tables,
    spans,
    missing,
    counts,
    refusals,
    created,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
    EVICTS: tl.constexpr,
    ADMITS: tl.constexpr,
):
    """Replace the counts of a table by their exclusive prefix sum; take rows from its counters.

    A table beyond its capacity gets back as many rows as the following launches remove.
    """
    table = tl.program_id(0)
    size = tl.load(spans + SPAN_FIELDS * table + 1) - tl.load(spans + SPAN_FIELDS * table)
    first = first_block(spans, table, BLOCK)
    blocks = (size + BLOCK - 1) // BLOCK
    if tl.load(missing + table) == 0:
        blocks = blocks * 0
    total = scan_counts(counts + first, blocks, SCAN)
    counters = pointer_field(tables, table, FIELDS, COUNTERS, tl.int64)
    used = tl.load(counters + USED)
    free = tl.load(counters + NUM_FREE)
    evicted = tl.load(counters + EVICTED)
    removed = tl.load(counters + REMOVED_SLOTS)
    victims = tl.zeros((), tl.int64)
    if EVICTS:
        limit = field(tables, table, FIELDS, ROW_LIMIT)
        if (limit > 0) & (total > 0):
            victims = tl.maximum(used - free + total - limit, 0)
            if victims > 0:
                free += victims
                tl.store(counters + EVICTED, evicted + victims)
                tl.store(counters + REMOVED_SLOTS, removed + victims)
                tl.store(counters + CALLS, tl.load(counters + CALLS) + 1)
                tl.store(counters + PROTECTED, victims * 0)
    own = created + CALL_COUNTERS * table
    if ADMITS:
        refused = scan_counts(refusals + first, blocks, SCAN).to(tl.int64)
        before = tl.load(counters + REFUSED)
        sequence = tl.load(counters + SEQUENCE)
        tl.store(counters + REFUSED, before + refused)
        tl.store(counters + SEQUENCE, sequence + refused)
        if field(tables, table, FIELDS, ADMISSION) == 2:
            removed += refused
            tl.store(counters + REMOVED_SLOTS, removed + victims)
        tl.store(own + REFUSED_IDS, refused)
        tl.store(own + REFUSED_BEFORE, before)
        tl.store(own + SEQUENCE_BEFORE, sequence)
    else:
        tl.store(own + REFUSED_IDS, victims * 0)
        tl.store(own + REFUSED_BEFORE, tl.load(counters + REFUSED))
        tl.store(own + SEQUENCE_BEFORE, tl.load(counters + SEQUENCE))
    tl.store(own + COUNTED_AFTER, tl.load(counters + COUNTED))
    tl.store(own + NEW_ROWS, total.to(tl.int64))
    tl.store(own + FREE_ROWS, free)
    tl.store(own + USED_ROWS, used)
    tl.store(own + VICTIMS, victims)
    tl.store(own + EVICTED_BEFORE, evicted)
    tl.store(own + SLOTS_BEFORE, removed)
    reused = tl.minimum(total.to(tl.int64), free)
    tl.store(counters + NUM_FREE, free - reused)
    tl.store(counters + USED, used + total - reused)
    tl.store(counters + CREATED, tl.load(counters + CREATED) + total)


@launched
@triton.jit
def create_rows(
    tables,
    spans,
    ids,
    rows,
    slots,
    counts,
    created,
    new_rows,
    fresh,
    FIELDS: tl.constexpr,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    HEADER: tl.constexpr,
    MARK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Give new ids their rows; `new_rows` receives a table's new rows from its first position on."""
    table, at, inside = positions(spans, BLOCK)
    if tl.load(created + CALL_COUNTERS * table + NEW_ROWS) > 0:
        entries = pointer_field(tables, table, FIELDS, ENTRIES, tl.int64)
        slot, first = is_first(entries, rows, slots, at, inside)
        if tl.max(first.to(tl.int32), 0) > 0:
            free_rows = pointer_field(tables, table, FIELDS, FREE, tl.int32)
            free = tl.load(created + CALL_COUNTERS * table + FREE_ROWS)
            used = tl.load(created + CALL_COUNTERS * table + USED_ROWS)
            block = first_block(spans, table, BLOCK) + tl.program_id(0)
            rank = tl.load(counts + block) + tl.cumsum(first.to(tl.int32), 0) - 1
            rank = rank.to(tl.int64)
            reuse = first & (rank < free)
            row = tl.load(free_rows + tl.where(reuse, free - 1 - rank, 0), mask=reuse, other=0).to(tl.int64)
            row = tl.where(reuse, row, used + rank - free)
            id = tl.load(ids + at, mask=first, other=0)
            header = table_row_address(tables, table, row, first, FIELDS, SHIFT, STRIDE)
            header += layout_number(tables, table, FIELDS, ROW_HEADER, HEADER)
            zero = tl.zeros((BLOCK,), tl.int32)
            tl.store((header + HEADER_ID).to(tl.pointer_type(tl.int64)), id, mask=first)
            tl.store((header + HEADER_TIME).to(tl.pointer_type(tl.int32)), zero, mask=first)
            tl.store((header + HEADER_FLAGS).to(tl.pointer_type(tl.int32)), zero + LIVE, mask=first)
            tl.store((header + HEADER_COUNT).to(tl.pointer_type(tl.int32)), zero, mask=first)
            tl.store((header + HEADER_STEP).to(tl.pointer_type(tl.int32)), zero, mask=first)
            start = tl.load(spans + SPAN_FIELDS * table)
            tl.store(new_rows + start + rank, row.to(tl.int32), mask=first)
            tl.store(entries + 2 * tl.where(first, slot, 0) + 1, row, mask=first)
            if MARK:
                tl.store(fresh + at, zero.to(tl.int8) + 1, mask=first)


@launched
@triton.jit
def finish_keys(
    tables,
    spans,
    slots,
    missing,
    rows,
    wanted,
    keys,
    FIELDS: tl.constexpr,
    ALL: tl.constexpr,
    WITH_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Complete the row numbers, and write sort keys: the table's base + row, or + its limit for no row."""
    table, at, inside = positions(spans, BLOCK)
    row = tl.load(rows + at, mask=inside, other=0).to(tl.int64)
    if tl.load(missing + table) > 0:
        slot = tl.load(slots + at, mask=inside & (row < 0), other=-1)
        pending = slot >= 0
        if tl.max(pending.to(tl.int32), 0) > 0:
            entries = pointer_field(tables, table, FIELDS, ENTRIES, tl.int64)
            value = tl.load(entries + 2 * tl.where(pending, slot, 0) + 1, mask=pending, other=0)
            row = tl.where(pending, tl.maximum(value, -1), row)
            tl.store(rows + at, row.to(tl.int32), mask=pending)
    if WITH_KEYS:
        taken = row >= 0
        if not ALL:
            taken = taken & (tl.load(wanted + at, mask=inside, other=0) != 0)
        limit = field(tables, table, FIELDS, LIMIT)
        key = field(tables, table, FIELDS, BASE) + tl.where(taken, row, limit)
        tl.store(keys + at, key.to(keys.dtype.element_ty), mask=inside)


@triton.jit
def own_ids(ids, n, mask, BLOCK: tl.constexpr):
    """The ids of this program: positions, which of them exist, the mask as int64, ids, which of them have a
    slot of their own, and first slots."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    mask = mask.to(tl.int64)
    id = tl.load(ids + at, mask=inside, other=0)
    return at, inside, mask, id, (id == EMPTY) | (id == REMOVED), first_slot(id, mask)


@launched
@triton.jit(do_not_specialize=["n", "mask"])
def remove_ids(entries, mask, ids, n, BLOCK: tl.constexpr):
    """Mark the slots of ids as removed. Ids without a slot are skipped; equal ids may repeat."""
    _, active, mask, id, own, slot = own_ids(ids, n, mask, BLOCK)
    while tl.max(active.to(tl.int32), 0) > 0:
        key = tl.load(entries + 2 * slot, mask=active, other=EMPTY)
        hit = active & ((key == id) | own)
        tl.store(entries + 2 * slot + 1, tl.full((BLOCK,), -1, tl.int64), mask=hit)
        tl.store(entries + 2 * slot, tl.full((BLOCK,), REMOVED, tl.int64), mask=hit & (own == 0))
        active = active & (key != EMPTY) & (hit == 0)
        slot = (slot + 1) & mask


@launched
@triton.jit(do_not_specialize=["n", "mask"])
def insert_rows(entries, mask, ids, rows, n, BLOCK: tl.constexpr):
    """Insert distinct ids with known values, int64, into an index that does not have them."""
    at, active, mask, id, own, slot = own_ids(ids, n, mask, BLOCK)
    row = tl.load(rows + at, mask=active, other=-1)
    while tl.max(active.to(tl.int32), 0) > 0:
        try_claim = active & (own == 0)
        expected = tl.where(try_claim, EMPTY, REMOVED)
        old = tl.atomic_cas(entries + 2 * slot, expected, tl.where(try_claim, id, REMOVED))
        hit = active & (own | (old == EMPTY))
        tl.store(entries + 2 * slot + 1, row, mask=hit)
        active = active & (hit == 0)
        slot = tl.where(active, (slot + 1) & mask, slot)


@launched
@triton.jit(do_not_specialize=["mask", "old_slots"])
def rehash(old, old_slots, entries, mask, BLOCK: tl.constexpr):
    """Insert the ids of another index; its two slots after `old_slots` are copied by the caller."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < old_slots
    mask = mask.to(tl.int64)
    id = tl.load(old + 2 * at, mask=inside, other=EMPTY)
    row = tl.load(old + 2 * at + 1, mask=inside, other=-1)
    active = inside & (id != EMPTY) & (id != REMOVED)
    slot = first_slot(id, mask)
    while tl.max(active.to(tl.int32), 0) > 0:
        expected = tl.where(active, EMPTY, REMOVED)
        old_key = tl.atomic_cas(entries + 2 * slot, expected, tl.where(active, id, REMOVED))
        hit = active & (old_key == EMPTY)
        tl.store(entries + 2 * slot + 1, row, mask=hit)
        active = active & (hit == 0)
        slot = tl.where(active, (slot + 1) & mask, slot)
