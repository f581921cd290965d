"""HostTier: rows beyond a budget of GPU memory are in pinned host memory, and rows in use move to the GPU.

Row numbers below `boundary` are in chunks of GPU memory, the others in chunks of pinned host memory, which
kernels read and write through the same addresses, over the bus. The index and 4 bytes per row stay on the
GPU. A row is in one place only, so there is nothing to write back:

    row            place                             moves
    new            GPU memory, then host memory      -
    used again     stays on the GPU                  -
                   host memory                       changes places with a row of the GPU that was used less
                                                     than half as often lately
    removed        its place is used again           -

A swap changes the numbers of two rows, so rows that were found before must be found again. A use is an
update; lookups do not count. Uses fade: one of HALF_LIFE updates ago counts half. So that nothing has to be
updated for rows that were not used, a row's score is the binary logarithm of its uses, each weighted by 2 to
the power of its time in half-lives. A scan in progress keeps all rows in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.table.engines.cuda import index_kernels
from megalith.table.engines.cuda.device_functions import LIVE
from megalith.table.engines.cuda.device_table import BLOCK, WARPS, DeviceTable, grid
from megalith.table.table_data import HostTierUse

HALF_LIFE = 64
"""Number of updates after which a use counts half."""
MARGIN = 1.0
"""A row of the host moves if its score is higher by more than this: fewer moves, and about as many hits."""
WINDOW = 1 << 16
"""Rows of the GPU among which an update looks for those that are used least."""


class HostTier:
    """The places of one table's rows.

    Args:
        table: The memory of the table; it has a limit of chunks in GPU memory.

    Attributes:
        hits: Distinct rows of updates that were in GPU memory.
        misses: Distinct rows of updates that were in host memory.
        moved: Rows that moved to GPU memory.
    """

    def __init__(self, table: DeviceTable) -> None:
        self._table = table
        self._scores = torch.empty(0, dtype=torch.float32, device=table.device)
        self._clock = 0
        self._hand = 0
        self.hits = self.misses = self.moved = 0

    @property
    def boundary(self) -> int:
        """The first row number in host memory."""
        return self._table.device_rows

    def use(self, rows: int) -> HostTierUse:
        """Return the numbers of the tier.

        Args:
            rows: Number of row numbers in use.

        Returns:
            Places in use and hits.
        """
        host = max(0, rows - self.boundary)
        return HostTierUse(rows - host, host, self.hits, self.misses, self.moved)

    def forget(self) -> None:
        """Forget the uses: rows have other numbers now."""
        self._scores.fill_(-torch.inf)

    def used(self, rows: Tensor, *, move: bool) -> bool:
        """Count the uses of rows, and move some of those in host memory to the GPU. Waits for the device.

        Args:
            rows: int32 [n], the rows of an update; they may repeat, and are negative where there is none.
            move: Whether rows may change places.

        Returns:
            Whether rows changed places.
        """
        if self._table.row_capacity <= self.boundary:
            return False
        missing = self._table.row_capacity - self._scores.numel()
        if missing > 0:
            self._scores = torch.cat([self._scores, self._scores.new_full((missing,), -torch.inf)])
        distinct = torch.unique(rows[rows >= 0])
        self._clock += 1
        on_host = distinct[distinct >= self.boundary]
        self.hits += distinct.numel() - on_host.numel()
        self.misses += on_host.numel()
        again = on_host[self._scores[on_host.long()] > -torch.inf]
        now = self._scores.new_tensor(self._clock / HALF_LIFE)
        self._scores[distinct.long()] = torch.logaddexp2(self._scores[distinct.long()], now)
        return move and self._exchange(again)

    def _exchange(self, wanted: Tensor) -> bool:
        """Swap rows of the host with rows of the GPU that are used less."""
        count = min(wanted.numel(), self.boundary)
        if not count:
            return False
        scores, order = self._scores[wanted.long()].sort(descending=True, stable=True)
        wanted, scores = wanted[order[:count]], scores[:count]
        places = torch.arange(min(self.boundary, max(WINDOW, 8 * count)), device=wanted.device)
        places = (places + self._hand) % self.boundary
        self._hand = (self._hand + places.numel()) % self.boundary
        headers = self._table.headers(places.to(torch.int32))
        live = (headers[2] & LIVE.value) != 0
        lowest, order = self._scores[places].masked_fill(~live, torch.inf).sort(stable=True)
        good = (lowest[:count] + MARGIN < scores).nonzero()[:, 0]
        if not good.numel():
            return False
        chosen, wanted = order[good], wanted[good].contiguous()
        self._swap(places[chosen].to(torch.int32), headers[0][chosen].contiguous(), wanted)
        self.moved += wanted.numel()
        return True

    def _swap(self, victims: Tensor, victim_ids: Tensor, wanted: Tensor) -> None:
        table, n = self._table, victims.numel()
        wanted_ids = table.headers(wanted)[0].contiguous()
        table.move(wanted, victims, swap=True)
        for ids, rows in ((victim_ids, wanted), (wanted_ids, victims)):
            index_kernels.renumber_rows[grid(n, BLOCK)](
                table.entries, table.slots - 1, ids, rows, n, BLOCK=BLOCK, num_warps=WARPS
            )
        one, other = victims.long(), wanted.long()
        self._scores[one], self._scores[other] = self._scores[other], self._scores[one]
