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
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.table.engines.cuda import tier_kernels
from megalith.table.engines.cuda.device_table import BLOCK, WARPS, DeviceTable, grid
from megalith.table.engines.cuda.streams import retire
from megalith.table.engines.cuda.triton_runtime import padded
from megalith.table.table_data import HostTierUse

HALF_LIFE = 64
"""Number of fetches after which a use counts half."""
WINDOW = 1 << 16
"""Places of the GPU among which a small batch looks for those that are used least."""
LAST_TICK = 1 << 20
"""Ticks start again after this one: scores are float32 and would lose digits."""
PROGRAMS = 132
"""Programs of an exchange, one for each multiprocessor of an H100 or H200. More of them are slower: they
access host memory in more places at a time."""
NUM_COUNTERS = 3


class HostTier:
    """The places of one table's rows."""

    def __init__(self, table: DeviceTable) -> None:
        self._table = table
        self._scores = torch.empty(0, dtype=torch.float32, device=table.device)
        self._stamps = torch.empty(0, dtype=torch.int32, device=table.device)
        self._counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=table.device)
        self._tick = 0
        self._hand = 0

    @property
    def boundary(self) -> int:
        """The first row number in host memory."""
        return self._table.device_rows

    @property
    def active(self) -> bool:
        """Whether rows may be in host memory."""
        return self._table.row_capacity > self.boundary

    @property
    def bytes(self) -> int:
        """GPU memory for the uses of rows."""
        return 4 * (self._scores.numel() + self._stamps.numel())

    def use(self, rows: int) -> HostTierUse:
        """Return the numbers of the tier. Waits for the device."""
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
        wanted = torch.full((n,), tier_kernels.NO_ROW.value, dtype=torch.int32, device=rows.device)
        wanted_ids = torch.empty_like(ids)
        self._note(ids, rows, (wanted, wanted_ids), counted=counted)
        wanted, wanted_order = torch.sort(wanted)  # distinct, so the order is the same in each run
        ratings = torch.empty(window, dtype=torch.float32, device=rows.device)
        where = {"SHIFT": layout.shift, "STRIDE": layout.stride, "HEADER": layout.header}
        tier_kernels.rate_places[grid(window, BLOCK)](
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
        tier_kernels.pair_rows[grid(pairs, BLOCK)](
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
        tier_kernels.renew_rows[grid(n, BLOCK)](
            table.entries, ids, rows, table.slots - 1, n, boundary, BLOCK=BLOCK, num_warps=WARPS
        )
        self._hand = (self._hand + window) % boundary

    def _note(self, ids: Tensor, rows: Tensor, lists: tuple[Tensor, Tensor] | None, *, counted: bool) -> None:
        """Stamp and count rows, and list those in host memory."""
        listed = torch.zeros(1, dtype=torch.int32, device=rows.device)
        wanted, wanted_ids = (rows, ids) if lists is None else lists
        tier_kernels.note_uses[grid(rows.numel(), BLOCK)](
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
        """Exchange rows with those in other places."""
        layout, pairs, block = self._table.layout, places.numel(), 8
        tier_kernels.exchange_rows[(min(PROGRAMS, -(-pairs // block)),)](
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
