"""Kernels that remove rows of a table beyond its capacity, in the middle of a call that creates rows.

They choose the rows that `reference_policies.VictimSearch` chooses, which defines the result (and
native/table_evict.hpp the method): a walk over the table takes rows whose score is at most a threshold, which
comes from a sample of all rows. The part of the walk that usually suffices, the window, is visited by many
programs; one program continues it if more rows are needed. A call reads the headers of some rows for each row
that goes, however large the table is, and the host does not learn how many go.

    (number_new)     how many rows must go
    protect_rows     the rows of the call get its number as their stamp: they stay
    count_protected  their number, if begin_search or finish_search needs it, which is rare
    begin_search     a new threshold if the last round has ended; the size of the window
    find_low         which rows of the window may go, and their number in each block
    take_low         these rows in the order of the walk, as many as must go
    finish_search    the rest of the walk, and the lowest rows of samples if it becomes long
    remove_victims   index, headers, the list of free rows and the log of removed ids
    (create_rows)

Without rows to remove, all of these end at once.
"""

# mypy: ignore-errors

from megalith.table.engines.cuda.device_functions import (
    CALL_COUNTERS,
    CALLS,
    COUNTERS,
    EMPTY,
    ENTRIES,
    EVICTED_BEFORE,
    EVICTED_LOG,
    EVICTED_ROOM,
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
    PROTECTED,
    REMOVED,
    ROW_HEADER,
    SCORE,
    SEARCH,
    SPAN_FIELDS,
    STAMPS,
    USED_ROWS,
    VICTIMS,
    field,
    first_slot,
    layout_number,
    pointer_field,
    table_row_address,
)
from megalith.table.engines.cuda.triton_runtime import launched, tl, triton

# The state of a search.
CURSOR = tl.constexpr(0)  # where the walk continues
LEFT = tl.constexpr(1)  # rows of the round that are left
FOUND = tl.constexpr(2)  # rows that the round has taken
THRESHOLD = tl.constexpr(3)
SEARCH_FIELDS = 4

# A window: its first row, its number of rows, and the number of rows up to the last one that goes.
WINDOW_FIRST = tl.constexpr(0)
WINDOW_ROWS = tl.constexpr(1)
WINDOW_END = tl.constexpr(2)
WINDOW_COUNTED = tl.constexpr(3)  # whether the protected rows were counted before its rows were taken
WINDOW_FIELDS = tl.constexpr(4)

LAST_STAMP = tl.constexpr(127)
LOWEST = tl.constexpr(-(2**63))
HIGHEST = tl.constexpr(2**63 - 1)


@triton.jit
def call_number(tables, table, FIELDS: tl.constexpr):
    """The stamp of rows that must stay or were chosen; after the last one `remove_victims` clears all."""
    calls = tl.load(pointer_field(tables, table, FIELDS, COUNTERS, tl.int64) + CALLS)
    return (calls % LAST_STAMP + 1).to(tl.int8)


@triton.jit
def row_scores(
    tables, table, row, inside, call,
    FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, HEADER: tl.constexpr,
):  # fmt: skip
    """Which rows may go, and their scores: unsigned numbers as signed ones of the same order."""
    header = table_row_address(tables, table, row, inside, FIELDS, SHIFT, STRIDE)
    header += layout_number(tables, table, FIELDS, ROW_HEADER, HEADER)
    flags = tl.load((header + HEADER_FLAGS).to(tl.pointer_type(tl.int32)), mask=inside, other=0)
    stamps = pointer_field(tables, table, FIELDS, STAMPS, tl.int8)
    stamp = tl.load(stamps + row, mask=inside, other=0)
    kind = field(tables, table, FIELDS, SCORE)
    place = header + tl.where(kind == 2, HEADER_STEP, HEADER_TIME)
    score = tl.load(place.to(tl.pointer_type(tl.uint32)), mask=inside, other=0).to(tl.int64)
    if kind == 1:
        count = tl.load((header + HEADER_COUNT).to(tl.pointer_type(tl.uint32)), mask=inside, other=0)
        score = score | (count.to(tl.int64) << 32)
    return inside & ((flags & LIVE) != 0) & (stamp != call), score ^ LOWEST


@triton.jit
def kth_lowest(scores, usable, k):
    """The k-th lowest of the usable scores, k > 0: its bits from the highest on."""
    bits = (scores ^ LOWEST).to(tl.uint64, bitcast=True)
    result = tl.zeros((), tl.uint64)
    bit = tl.zeros((), tl.uint64) + 0x8000000000000000
    while bit > 0:
        candidate = result | bit
        below = tl.sum((usable & (bits < candidate)).to(tl.int64), 0)
        result = tl.where(below < k, candidate, result)
        bit = bit >> 1
    return result.to(tl.int64, bitcast=True) ^ LOWEST


@triton.jit
def sample_rows(
    tables, table, cursor, high, call, need, candidates,
    FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, HEADER: tl.constexpr,
    SAMPLE: tl.constexpr, PADDED: tl.constexpr, LOW_PART: tl.constexpr,
):  # fmt: skip
    """Rows from all over the table, which of them may go, their scores, how many may go and are low."""
    k = tl.arange(0, PADDED).to(tl.int64)
    count = tl.minimum(high, SAMPLE)
    row = (cursor + k * high // count) % high
    usable, score = row_scores(tables, table, row, k < count, call, FIELDS, SHIFT, STRIDE, HEADER)
    number = tl.sum(usable.to(tl.int64), 0)
    low = tl.maximum(number // LOW_PART, (need * number + candidates - 1) // candidates)
    return row, usable, score, number, low


@triton.jit
def new_threshold(
    tables, table, cursor, high, call, need, candidates, found,
    FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, HEADER: tl.constexpr,
    SAMPLE: tl.constexpr, PADDED: tl.constexpr, LOW_PART: tl.constexpr,
):  # fmt: skip
    """The threshold of a round. If the round before found no row, its sample had none: any row will do."""
    _, usable, score, number, low = sample_rows(
        tables, table, cursor, high, call, need, candidates, FIELDS, SHIFT, STRIDE, HEADER, SAMPLE, PADDED,
        LOW_PART,
    )  # fmt: skip
    threshold = tl.zeros((), tl.int64) + HIGHEST
    if (found > 0) & (low >= 1) & (low <= number):
        threshold = kth_lowest(score, usable, low)
    return threshold


@triton.jit
def num_candidates(tables, table, own, taken, FIELDS: tl.constexpr):
    """The number of rows that do not belong to the call, at least 1; of those counted, some were taken."""
    counters = pointer_field(tables, table, FIELDS, COUNTERS, tl.int64)
    rows = tl.load(own + USED_ROWS) - (tl.load(own + FREE_ROWS) - tl.load(own + VICTIMS))
    return tl.maximum(rows - tl.load(counters + PROTECTED) + taken, 1)


@triton.jit
def window_places(spans, table, LOW_PART: tl.constexpr, SAMPLE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the marks of a table's window are, and the numbers of its blocks; see `first_block`."""
    first = 2 * LOW_PART * tl.load(spans + SPAN_FIELDS * table) + SAMPLE * table
    return first, first // BLOCK + table


@triton.jit
def sum_counts(counts, n, SCAN: tl.constexpr):
    total = tl.zeros((), tl.int64)
    done = n * 0
    while done < n:
        at = done + tl.arange(0, SCAN)
        total += tl.sum(tl.load(counts + at, mask=at < n, other=0).to(tl.int64), 0)
        done += SCAN
    return total


@launched
@triton.jit
def protect_rows(tables, spans, rows, created, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Stamp the rows of the call. A few programs: a frequent row then has its stamp when most of them see it,
    and many writes to one place are slow."""
    table = tl.program_id(1)
    if tl.load(created + CALL_COUNTERS * table + VICTIMS) > 0:
        stamps = pointer_field(tables, table, FIELDS, STAMPS, tl.int8)
        call = call_number(tables, table, FIELDS)
        block = tl.load(spans + SPAN_FIELDS * table) + tl.program_id(0).to(tl.int64) * BLOCK
        end = tl.load(spans + SPAN_FIELDS * table + 1)
        while block < end:
            at = block + tl.arange(0, BLOCK)
            row = tl.load(rows + at, mask=at < end, other=-1)
            own = row >= 0
            own = own & (tl.load(stamps + row, mask=own, other=0) != call)
            tl.store(stamps + row, tl.zeros((BLOCK,), tl.int8) + call, mask=own)
            block += tl.num_programs(0) * BLOCK


@launched
@triton.jit
def count_protected(
    tables, spans, created, windows, counts,
    FIRST: tl.constexpr, FIELDS: tl.constexpr, SAMPLE: tl.constexpr, LOW_PART: tl.constexpr,
    BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Count the rows with the stamp of the call. FIRST: before begin_search; else before finish_search."""
    table = tl.program_id(1)
    own = created + CALL_COUNTERS * table
    need = tl.load(own + VICTIMS)
    if need > 0:
        if FIRST:
            needed = tl.load(pointer_field(tables, table, FIELDS, SEARCH, tl.int64) + LEFT) == 0
        else:
            window = windows + WINDOW_FIELDS * table
            blocks = (tl.load(window + WINDOW_ROWS) + BLOCK - 1) // BLOCK
            _, block = window_places(spans, table, LOW_PART, SAMPLE, BLOCK)
            needed = sum_counts(counts + block, blocks, SCAN) < need
            needed = needed & (tl.load(window + WINDOW_COUNTED) == 0)
        if needed:
            stamps = pointer_field(tables, table, FIELDS, STAMPS, tl.int8)
            call = call_number(tables, table, FIELDS)
            rows = tl.load(own + USED_ROWS)
            total = tl.zeros((), tl.int64)
            row = tl.program_id(0).to(tl.int64) * BLOCK
            while row < rows:
                at = row + tl.arange(0, BLOCK)
                total += tl.sum((tl.load(stamps + at, mask=at < rows, other=0) == call).to(tl.int64), 0)
                row += tl.num_programs(0) * BLOCK
            if total > 0:
                tl.atomic_add(pointer_field(tables, table, FIELDS, COUNTERS, tl.int64) + PROTECTED, total)


@launched
@triton.jit
def begin_search(
    tables, created, windows,
    FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, HEADER: tl.constexpr,
    SAMPLE: tl.constexpr, PADDED: tl.constexpr, LOW_PART: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    table = tl.program_id(0)
    own = created + CALL_COUNTERS * table
    need = tl.load(own + VICTIMS)
    if need > 0:
        state = pointer_field(tables, table, FIELDS, SEARCH, tl.int64)
        high = tl.load(own + USED_ROWS)
        cursor = tl.load(state + CURSOR)
        left = tl.load(state + LEFT)
        window = windows + WINDOW_FIELDS * table
        tl.store(window + WINDOW_COUNTED, (left == 0).to(tl.int64))
        if left == 0:
            candidates = num_candidates(tables, table, own, 0, FIELDS)
            threshold = new_threshold(
                tables, table, cursor, high, call_number(tables, table, FIELDS), need, candidates,
                tl.load(state + FOUND), FIELDS, SHIFT, STRIDE, HEADER, SAMPLE, PADDED, LOW_PART,
            )  # fmt: skip
            left = high
            tl.store(state + LEFT, left)
            tl.store(state + FOUND, left * 0)
            tl.store(state + THRESHOLD, threshold)
        tl.store(window + WINDOW_FIRST, tl.where(cursor >= high, 0, cursor))
        size = (2 * LOW_PART if 2 * LOW_PART < WALK else WALK) * need + SAMPLE
        tl.store(window + WINDOW_ROWS, tl.minimum(size, tl.minimum(left, high)))


@launched
@triton.jit
def find_low(
    tables, spans, created, windows, marks, counts,
    FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, HEADER: tl.constexpr,
    SAMPLE: tl.constexpr, LOW_PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    table = tl.program_id(1)
    own = created + CALL_COUNTERS * table
    if tl.load(own + VICTIMS) > 0:
        window = windows + WINDOW_FIELDS * table
        start = tl.load(window + WINDOW_FIRST)
        size = tl.load(window + WINDOW_ROWS)
        high = tl.load(own + USED_ROWS)
        place, block = window_places(spans, table, LOW_PART, SAMPLE, BLOCK)
        threshold = tl.load(pointer_field(tables, table, FIELDS, SEARCH, tl.int64) + THRESHOLD)
        call = call_number(tables, table, FIELDS)
        number = tl.program_id(0).to(tl.int64)
        while number * BLOCK < size:
            at = number * BLOCK + tl.arange(0, BLOCK)
            row = start + at
            row = tl.where(row >= high, row - high, row)
            usable, score = row_scores(tables, table, row, at < size, call, FIELDS, SHIFT, STRIDE, HEADER)
            hit = usable & (score <= threshold)
            tl.store(marks + place + at, hit.to(tl.int8), mask=at < size)
            tl.store(counts + block + number, tl.sum(hit.to(tl.int32), 0))
            number += tl.num_programs(0)


@launched
@triton.jit
def take_low(
    tables, spans, created, windows, marks, counts, victims,
    FIELDS: tl.constexpr, SAMPLE: tl.constexpr, LOW_PART: tl.constexpr, BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    table = tl.program_id(1)
    own = created + CALL_COUNTERS * table
    need = tl.load(own + VICTIMS)
    if need > 0:
        window = windows + WINDOW_FIELDS * table
        start = tl.load(window + WINDOW_FIRST)
        size = tl.load(window + WINDOW_ROWS)
        high = tl.load(own + USED_ROWS)
        place, block = window_places(spans, table, LOW_PART, SAMPLE, BLOCK)
        stamps = pointer_field(tables, table, FIELDS, STAMPS, tl.int8)
        stamp = tl.zeros((BLOCK,), tl.int8) + call_number(tables, table, FIELDS)
        begin = tl.load(spans + SPAN_FIELDS * table)
        number = tl.program_id(0).to(tl.int64)
        while number * BLOCK < size:
            at = number * BLOCK + tl.arange(0, BLOCK)
            hit = tl.load(marks + place + at, mask=at < size, other=0).to(tl.int64)
            rank = sum_counts(counts + block, number, SCAN) + tl.cumsum(hit, 0) - 1
            chosen = (hit != 0) & (rank < need)
            row = start + at
            row = tl.where(row >= high, row - high, row)
            tl.store(victims + begin + rank, row.to(tl.int32), mask=chosen)
            tl.store(stamps + row, stamp, mask=chosen)
            tl.store(window + WINDOW_END + at * 0, at + 1, mask=chosen & (rank == need - 1))
            number += tl.num_programs(0)


@launched
@triton.jit
def finish_search(
    tables, spans, created, windows, counts, sampled, victims,
    FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, HEADER: tl.constexpr,
    SAMPLE: tl.constexpr, PADDED: tl.constexpr, LOW_PART: tl.constexpr, WALK: tl.constexpr,
    BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    table = tl.program_id(0)
    own = created + CALL_COUNTERS * table
    need = tl.load(own + VICTIMS)
    if need > 0:
        window = windows + WINDOW_FIELDS * table
        start = tl.load(window + WINDOW_FIRST)
        walked = tl.load(window + WINDOW_ROWS)
        high = tl.load(own + USED_ROWS)
        _, block = window_places(spans, table, LOW_PART, SAMPLE, BLOCK)
        count = sum_counts(counts + block, (walked + BLOCK - 1) // BLOCK, SCAN)
        if count >= need:
            walked = tl.load(window + WINDOW_END)
            count = need
        state = pointer_field(tables, table, FIELDS, SEARCH, tl.int64)
        cursor = start + walked
        cursor = tl.where(cursor > high, cursor - high, cursor)
        left = tl.load(state + LEFT) - walked
        found = tl.load(state + FOUND) + count
        threshold = tl.load(state + THRESHOLD)
        places = WALK * need + SAMPLE - walked
        stamps = pointer_field(tables, table, FIELDS, STAMPS, tl.int8)
        call = call_number(tables, table, FIELDS)
        taken = tl.where(tl.load(window + WINDOW_COUNTED) == 0, count, 0)
        candidates = num_candidates(tables, table, own, taken, FIELDS)
        victims += tl.load(spans + SPAN_FIELDS * table)
        while count < need:
            if left == 0:
                threshold = new_threshold(
                    tables, table, cursor, high, call, need - count, candidates, found,
                    FIELDS, SHIFT, STRIDE, HEADER, SAMPLE, PADDED, LOW_PART,
                )  # fmt: skip
                left = high
                found = found * 0
            if places <= 0:
                # The lowest rows of samples, by score, then place in the sample.
                scores = sampled + PADDED * table
                low = need
                while (count < need) & (low > 0):
                    row, usable, score, number, low = sample_rows(
                        tables, table, cursor, high, call, need - count, candidates,
                        FIELDS, SHIFT, STRIDE, HEADER, SAMPLE, PADDED, LOW_PART,
                    )  # fmt: skip
                    low = tl.minimum(low, number)
                    left = high
                    found = found * 0 + 1
                    threshold = threshold * 0 + HIGHEST
                    if low > 0:
                        threshold = kth_lowest(score, usable, low)
                        more = tl.minimum(low, need - count)
                        last = kth_lowest(score, usable, more)
                        below = usable & (score < last)
                        equal = (usable & (score == last)).to(tl.int64)
                        rest = more - tl.sum(below.to(tl.int64), 0)
                        chosen = below | ((equal != 0) & (tl.cumsum(equal, 0) <= rest))
                        k = tl.arange(0, PADDED)
                        tl.store(scores + k, tl.where(chosen, score, HIGHEST))
                        tl.debug_barrier()
                        rank = tl.zeros((PADDED,), tl.int64)
                        for first in range(0, PADDED, 16):
                            other = first + tl.arange(0, 16)
                            value = tl.load(scores + other)
                            lower = value[None, :] < score[:, None]
                            same = (value[None, :] == score[:, None]) & (other[None, :] < k[:, None])
                            rank += tl.sum((lower | same).to(tl.int64), 1)
                        tl.store(victims + count + rank, row.to(tl.int32), mask=chosen)
                        tl.store(stamps + row, tl.zeros((PADDED,), tl.int8) + call, mask=chosen)
                        cursor = tl.sum(tl.where(chosen & (rank == 0), row, 0), 0) + 1
                        count += more
                        tl.debug_barrier()
            if count < need:
                cursor = tl.where(cursor >= high, 0, cursor)
                rows = tl.minimum(tl.minimum(left, high - cursor), tl.minimum(tl.maximum(places, 1), BLOCK))
                at = tl.arange(0, BLOCK)
                row = cursor + at
                usable, score = row_scores(tables, table, row, at < rows, call, FIELDS, SHIFT, STRIDE, HEADER)
                hit = usable & (score <= threshold)
                rank = tl.cumsum(hit.to(tl.int64), 0) - 1
                hits = tl.sum(hit.to(tl.int64), 0)
                chosen = hit & (rank < need - count)
                if hits >= need - count:
                    rows = tl.max(tl.where(chosen, at, -1), 0).to(tl.int64) + 1
                    hits = need - count
                tl.store(victims + count + rank, row.to(tl.int32), mask=chosen)
                tl.store(stamps + row, tl.zeros((BLOCK,), tl.int8) + call, mask=chosen)
                tl.debug_barrier()
                count += hits
                found += hits
                cursor += rows
                left -= rows
                places -= rows
        tl.store(state + CURSOR, cursor)
        tl.store(state + LEFT, left)
        tl.store(state + FOUND, found)
        tl.store(state + THRESHOLD, threshold)


@launched
@triton.jit
def remove_victims(
    tables, spans, created, victims,
    FIELDS: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr, HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Remove the chosen rows; the list of free rows and the log get them in their order."""
    table = tl.program_id(1)
    own = created + CALL_COUNTERS * table
    need = tl.load(own + VICTIMS)
    if need > 0:
        victims += tl.load(spans + SPAN_FIELDS * table)
        entries = pointer_field(tables, table, FIELDS, ENTRIES, tl.int64)
        mask = field(tables, table, FIELDS, MASK)
        free = pointer_field(tables, table, FIELDS, FREE, tl.int32) + tl.load(own + FREE_ROWS) - need
        log = pointer_field(tables, table, FIELDS, EVICTED_LOG, tl.int64)
        room = field(tables, table, FIELDS, EVICTED_ROOM)
        before = tl.load(own + EVICTED_BEFORE)
        number = tl.program_id(0).to(tl.int64)
        while number * BLOCK < need:
            at = number * BLOCK + tl.arange(0, BLOCK)
            active = at < need
            row = tl.load(victims + at, mask=active, other=0)
            header = table_row_address(tables, table, row, active, FIELDS, SHIFT, STRIDE)
            header += layout_number(tables, table, FIELDS, ROW_HEADER, HEADER)
            id = tl.load((header + HEADER_ID).to(tl.pointer_type(tl.int64)), mask=active, other=0)
            zero = tl.zeros((BLOCK,), tl.int32)
            tl.store((header + HEADER_FLAGS).to(tl.pointer_type(tl.int32)), zero, mask=active)
            tl.store(free + at, row, mask=active)
            tl.store(log + (before + at) % room, id, mask=active & (at >= need - room))
            special = (id == EMPTY) | (id == REMOVED)
            slot = first_slot(id, mask)
            while tl.max(active.to(tl.int32), 0) > 0:
                key = tl.load(entries + 2 * slot, mask=active, other=EMPTY)
                hit = active & ((key == id) | special)
                tl.store(entries + 2 * slot + 1, tl.full((BLOCK,), -1, tl.int64), mask=hit)
                tl.store(entries + 2 * slot, tl.full((BLOCK,), REMOVED, tl.int64), mask=hit & (special == 0))
                active = active & (key != EMPTY) & (hit == 0)
                slot = (slot + 1) & mask
            number += tl.num_programs(0)
        stamp = call_number(tables, table, FIELDS)
        if stamp == LAST_STAMP:
            stamps = pointer_field(tables, table, FIELDS, STAMPS, tl.int8)
            rows = field(tables, table, FIELDS, LIMIT)
            row = tl.program_id(0).to(tl.int64) * BLOCK
            while row < rows:
                at = row + tl.arange(0, BLOCK)
                tl.store(stamps + at, tl.zeros((BLOCK,), tl.int8), mask=at < rows)
                row += tl.num_programs(0) * BLOCK
