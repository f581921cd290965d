"""HostTier: rows beyond a budget of GPU memory are in pinned host memory, and move to the GPU when used.

Row numbers below `boundary` are in chunks of GPU memory, the others in chunks of pinned host memory, which
kernels read and write through the same addresses, over the bus. The index and 8 bytes per row stay on the
GPU. A row is in one place only. After the rows of a batch were found and before anything reads or writes
them, those in host memory change places with rows in GPU memory (`fetch`):

    a row                 that the batch uses               that the batch does not use
    new                   gets a free place, or a place at the end: in host memory once the GPU is full
    in GPU memory         a hit: stays                      leaves if it is among the least used of a window
    in host memory        a miss: takes the place of one    stays
                          that leaves, which takes its
    removed               -                                 its place is free; it is not exchanged

So a missed row travels once over the bus, in order of address, and another one travels back; the batch is
then read and updated on the GPU. If fewer rows may leave than are wanted, the others are used in host memory.
A scan or a snapshot in progress keeps all rows in place, and rows are used where they are.

An exchange changes the numbers of two rows, so rows that were found before must be found again. The host does
not wait for the device and does not learn whether rows moved, so it assumes that they did.

A use is a lookup, or an update without one. Uses fade: one of HALF_LIFE fetches ago counts half. So that
nothing has to be updated for rows that were not used, a row's score is the binary logarithm of its uses, each
weighted by 2 to the power of its time in half-lives. Which rows move depends on the sequence of calls alone.

The launches of a fetch:

    note_uses       each distinct row of the batch gets the tick as its stamp; its use is added to its score;
                    rows in host memory are listed, in any order
    (torch.sort)    the listed rows by their numbers, which is the order of their addresses
    rate_places     the scores of some places in GPU memory; infinite where no row may leave
    (torch.sort)    these places by score
    pair_rows       the k-th listed row gets the number of the k-th place, and the row there gets its number:
                    in the index and in the scores
    exchange_rows   the bytes of these pairs of rows
    renew_rows      the numbers of the batch's rows that were in host memory

Rows in host memory are accessed in order of address because the translation of addresses limits their number
per second: in random order the same rows take twice the time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: SIM102

from __future__ import annotations

import torch
from torch import Tensor

from megalith.table.engines.cuda.device_functions import (
    EMPTY,
    HEADER_FLAGS,
    HEADER_ID,
    LIVE,
    REMOVED,
    first_slot,
    row_address,
)
from megalith.table.engines.cuda.device_table import BLOCK, WARPS, DeviceTable, grid
from megalith.table.engines.cuda.streams import retire
from megalith.table.engines.cuda.triton_runtime import launched, padded, tl, triton
from megalith.table.table_data import HostTierUse

HALF_LIFE = 64  # Number of fetches after which a use counts half
WINDOW = 1 << 16  # Places of the GPU among which a small batch looks for those that are used least
LAST_TICK = 1 << 20  # Ticks start again after this one: scores are float32 and would lose digits
PROGRAMS = 132
"""Programs of an exchange, one for each multiprocessor of an H100 or H200. More of them are slower: they
access host memory in more places at a time."""
NUM_COUNTERS = 3


NO_ROW = tl.constexpr(2**31 - 1)  # Fills the list of wanted rows; greater than any row number

# Counters of a tier.
HITS = tl.constexpr(0)
MISSES = tl.constexpr(1)
MOVED = tl.constexpr(2)


@triton.jit
def own_positions(n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return at, at < n


@triton.jit
def window_place(hand, offset, boundary):
    """Places from the hand on; after the last place comes the first."""
    place = hand + offset.to(tl.int64)
    return tl.where(place >= boundary, place - boundary, place)


@triton.jit
def slot_of(entries, mask, id, active):
    """The slots of ids that are in the index, where `active`."""
    mask = mask.to(tl.int64)
    own = (id == EMPTY) | (id == REMOVED)
    slot = first_slot(id, mask)
    searching = active & (own == 0)
    while tl.max(searching.to(tl.int32), 0) > 0:
        key = tl.load(entries + 2 * slot, mask=searching, other=EMPTY)
        searching = searching & (key != id) & (key != EMPTY)
        slot = tl.where(searching, (slot + 1) & mask, slot)
    return slot


@launched
@triton.jit(do_not_specialize=["n", "boundary", "tick", "counted"])
def note_uses(
    ids,
    rows,
    stamps,
    scores,
    counters,
    wanted,
    wanted_ids,
    listed,
    n,
    boundary,
    tick,
    now,
    counted,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stamp the rows of a batch, count the use of each distinct one, and list those in host memory.

    A score is the binary logarithm of a sum of uses; `now` is the logarithm of the weight of a use. Needs a
    thread per position: the result of an atomic operation is wrong where several threads share one.
    """
    at, inside = own_positions(n, BLOCK)
    row = tl.load(rows + at, mask=inside, other=-1)
    exists = row >= 0
    own = tl.where(exists, row, 0)
    # A plain load first: atomic operations on the stamp of a frequent row would follow each other.
    unseen = exists & (tl.load(stamps + own, mask=exists, other=0) != tick)
    before = tl.atomic_xchg(stamps + own, tl.zeros((BLOCK,), tl.int32) + tick, mask=unseen)
    first = unseen & (before != tick)
    on_host = first & (row >= boundary)
    misses = tl.sum(on_host.to(tl.int32), 0)
    if counted != 0:
        score = tl.load(scores + own, mask=first, other=0.0)
        high = tl.maximum(score, now)
        score = high + tl.log2(1.0 + tl.exp2(tl.minimum(score, now) - high))
        tl.store(scores + own, score, mask=first)
        used = tl.sum(first.to(tl.int32), 0)
        if used > misses:
            tl.atomic_add(counters + HITS, (used - misses).to(tl.int64))
        if misses > 0:
            tl.atomic_add(counters + MISSES, misses.to(tl.int64))
    if LIST:
        if misses > 0:
            place = tl.atomic_add(listed, misses) + tl.cumsum(on_host.to(tl.int32), 0) - 1
            tl.store(wanted + place, row, mask=on_host)
            tl.store(wanted_ids + place, tl.load(ids + at, mask=on_host, other=0), mask=on_host)


@launched
@triton.jit(do_not_specialize=["hand", "boundary", "n", "tick"])
def rate_places(
    chunks,
    stamps,
    scores,
    ratings,
    hand,
    boundary,
    n,
    tick,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The scores of the rows in n places from the hand on; infinite for free places and rows of the batch."""
    at, inside = own_positions(n, BLOCK)
    place = window_place(hand, at, boundary)
    flags = (row_address(chunks, place, SHIFT, STRIDE, inside) + HEADER + HEADER_FLAGS).to(
        tl.pointer_type(tl.int32)
    )
    live = (tl.load(flags, mask=inside, other=0) & LIVE) != 0
    may_leave = live & (tl.load(stamps + place, mask=inside, other=0) != tick)
    rating = tl.load(scores + place, mask=may_leave, other=float("inf"))
    tl.store(ratings + at, rating, mask=inside)


@launched
@triton.jit(do_not_specialize=["mask", "hand", "boundary", "n"])
def pair_rows(
    chunks,
    entries,
    wanted,
    wanted_order,
    wanted_ids,
    ratings,
    rating_order,
    scores,
    counters,
    places,
    mask,
    hand,
    boundary,
    n,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Give wanted rows the places of rows that leave. `places` receives them, -1 after the last pair.

    Both lists are sorted, so the pairs come first. The id of a row that leaves is in its header on the GPU;
    that of a wanted row comes from the batch, so that nothing is read over the bus here.
    """
    at, inside = own_positions(n, BLOCK)
    row = tl.load(wanted + at, mask=inside, other=NO_ROW)
    rating = tl.load(ratings + at, mask=inside, other=float("inf"))
    pair = (row != NO_ROW) & (rating < float("inf"))
    place = window_place(hand, tl.load(rating_order + at, mask=pair, other=0), boundary)
    tl.store(places + at, tl.where(pair, place, -1).to(tl.int32), mask=inside)
    pairs = tl.sum(pair.to(tl.int32), 0)
    if pairs > 0:
        header = row_address(chunks, place, SHIFT, STRIDE, pair) + HEADER
        leaving = tl.load((header + HEADER_ID).to(tl.pointer_type(tl.int64)), mask=pair, other=0)
        listed = tl.load(wanted_order + at, mask=pair, other=0)
        coming = tl.load(wanted_ids + listed, mask=pair, other=0)
        tl.store(entries + 2 * slot_of(entries, mask, leaving, pair) + 1, row.to(tl.int64), mask=pair)
        tl.store(entries + 2 * slot_of(entries, mask, coming, pair) + 1, place, mask=pair)
        score = tl.load(scores + row, mask=pair, other=0.0)
        tl.store(scores + row, rating, mask=pair)
        tl.store(scores + place, score, mask=pair)
        tl.atomic_add(counters + MOVED, pairs.to(tl.int64))


@launched
@triton.jit(do_not_specialize=["n"])
def exchange_rows(
    chunks,
    wanted,
    places,
    n,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Exchange the bytes of pairs of rows, 8 at a time, until the first place that is negative.

    The programs take turns, so that those which run at a time access neighbouring host rows.
    """
    start = tl.program_id(0) * BLOCK
    while start < n:
        at = start + tl.arange(0, BLOCK)
        place = tl.load(places + at, mask=at < n, other=-1)
        pair = place >= 0
        row = tl.load(wanted + at, mask=pair, other=0)
        source = row_address(chunks, row, SHIFT, STRIDE, pair)
        target = row_address(chunks, place, SHIFT, STRIDE, pair)
        for first in tl.static_range(0, STRIDE // 8, WORDS):
            word = (first + tl.arange(0, WORDS))[None, :]
            both = pair[:, None] & (word < STRIDE // 8)
            one = source[:, None].to(tl.pointer_type(tl.int64)) + word
            other = target[:, None].to(tl.pointer_type(tl.int64)) + word
            coming = tl.load(one, mask=both, other=0)
            leaving = tl.load(other, mask=both, other=0)
            tl.store(one, leaving, mask=both)
            tl.store(other, coming, mask=both)
        more = tl.min(place, 0) >= 0
        start = tl.where(more, start + tl.num_programs(0) * BLOCK, n)


@launched
@triton.jit(do_not_specialize=["mask", "n", "boundary"])
def renew_rows(entries, ids, rows, mask, n, boundary, BLOCK: tl.constexpr):
    """Read the numbers of rows that were in host memory again. Absent ids and other rows stay as they are."""
    at, inside = own_positions(n, BLOCK)
    row = tl.load(rows + at, mask=inside, other=-1)
    on_host = row >= boundary
    if tl.max(on_host.to(tl.int32), 0) > 0:
        id = tl.load(ids + at, mask=on_host, other=0)
        slot = slot_of(entries, mask, id, on_host)
        row = tl.load(entries + 2 * slot + 1, mask=on_host, other=0).to(tl.int32)
        tl.store(rows + at, row, mask=on_host)


class HostTier:
    def __init__(self, table: DeviceTable) -> None:
        self._table = table
        self._scores = torch.empty(0, dtype=torch.float32, device=table.device)
        self._stamps = torch.empty(0, dtype=torch.int32, device=table.device)
        self._counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=table.device)
        self._tick = 0
        self._hand = 0

    @property
    def boundary(self) -> int:
        return self._table.device_rows

    @property
    def active(self) -> bool:
        return self._table.row_capacity > self.boundary

    @property
    def bytes(self) -> int:
        """GPU memory for the uses of rows."""
        return 4 * (self._scores.numel() + self._stamps.numel())

    def use(self, rows: int) -> HostTierUse:
        host = max(0, rows - self.boundary)
        return HostTierUse(rows - host, host, *self._counters.tolist())

    def forget(self) -> None:
        """Forget the uses: rows have other numbers now, and perhaps fewer."""
        self._replace(self._scores.new_empty(0), self._stamps.new_empty(0))

    def _replace(self, scores: Tensor, stamps: Tensor) -> None:
        retire(self._scores, self._stamps)
        self._scores, self._stamps = scores, stamps

    def _next_tick(self) -> None:
        """Advance the time, and make room for the uses of all rows."""
        capacity, known = self._table.row_capacity, self._scores.numel()
        if capacity > known:
            scores = self._scores.new_full((capacity,), -torch.inf)
            scores[:known] = self._scores
            self._replace(scores, self._stamps.new_zeros(capacity))  # stamps of earlier ticks do not matter
        if self._tick == LAST_TICK:
            self._scores -= self._tick / HALF_LIFE
            self._stamps.zero_()
            self._tick = 0
        self._tick += 1

    def count(self, ids: Tensor, rows: Tensor) -> None:
        """Count the uses of rows without moving them. Does not wait for the device."""
        # ids: int64 [n]; rows: int32 [n], their rows.
        self._next_tick()
        self._note(ids, rows, None, counted=True)

    def fetch(self, ids: Tensor, rows: Tensor, *, counted: bool) -> None:
        """Move rows that are in host memory to the GPU. Does not wait for the device."""
        # ids: int64 [n], n > 0; rows: int32 [n], their rows.
        self._next_tick()
        n, boundary, table, layout = rows.numel(), self.boundary, self._table, self._table.layout
        window = min(boundary, max(WINDOW, n // 2))
        wanted = torch.full((n,), NO_ROW.value, dtype=torch.int32, device=rows.device)
        wanted_ids = torch.empty_like(ids)
        self._note(ids, rows, (wanted, wanted_ids), counted=counted)
        wanted, wanted_order = torch.sort(wanted)  # distinct, so the order is the same in each run
        ratings = torch.empty(window, dtype=torch.float32, device=rows.device)
        where = {"SHIFT": layout.shift, "STRIDE": layout.stride, "HEADER": layout.header}
        rate_places[grid(window, BLOCK)](
            table.chunk_table,
            self._stamps,
            self._scores,
            ratings,
            self._hand,
            boundary,
            window,
            self._tick,
            **where,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
        ratings, rating_order = torch.sort(ratings, stable=True)
        pairs = min(n, window)
        places = torch.empty(pairs, dtype=torch.int32, device=rows.device)
        pair_rows[grid(pairs, BLOCK)](
            table.chunk_table,
            table.entries,
            wanted,
            wanted_order,
            wanted_ids,
            ratings,
            rating_order,
            self._scores,
            self._counters,
            places,
            table.slots - 1,
            self._hand,
            boundary,
            pairs,
            **where,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
        self._exchange(wanted, places)
        renew_rows[grid(n, BLOCK)](
            table.entries, ids, rows, table.slots - 1, n, boundary, BLOCK=BLOCK, num_warps=WARPS
        )
        self._hand = (self._hand + window) % boundary

    def _note(self, ids: Tensor, rows: Tensor, lists: tuple[Tensor, Tensor] | None, *, counted: bool) -> None:
        listed = torch.zeros(1, dtype=torch.int32, device=rows.device)
        wanted, wanted_ids = (rows, ids) if lists is None else lists
        note_uses[grid(rows.numel(), BLOCK)](
            ids,
            rows,
            self._stamps,
            self._scores,
            self._counters,
            wanted,
            wanted_ids,
            listed,
            rows.numel(),
            self.boundary,
            self._tick,
            self._tick / HALF_LIFE,
            int(counted),
            LIST=lists is not None,
            BLOCK=BLOCK,
            num_warps=BLOCK // 32,  # a thread per position, for the results of atomic operations
        )

    def _exchange(self, wanted: Tensor, places: Tensor) -> None:
        layout, pairs, block = self._table.layout, places.numel(), 8
        exchange_rows[(min(PROGRAMS, -(-pairs // block)),)](
            self._table.chunk_table,
            wanted,
            places,
            pairs,
            SHIFT=layout.shift,
            STRIDE=layout.stride,
            BLOCK=block,
            WORDS=min(64, padded(layout.stride // 8)),
            num_warps=WARPS,
        )
