"""Memory budget: a ledger of bytes, and how many bytes a row of an update takes.

Every buffer of a phase is taken from a ledger, so that its peak is known and its budget holds. The ledger
counts what the code declares; tests compare it with the memory that the operating system counts.

    phase of a block          buffers that exist together, per row of a rank's own share
    exchange of codes         packed rows for other ranks, packed rows from other ranks
    reduction                 packed rows from other ranks, sums, counts, one peer's unpacked rows
    delivery and step         own tile, a tile from another rank; the step works in small pieces
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from megalith.errors import BudgetError
from megalith.gather.payload_schema import ParameterSpec
from megalith.gather.plan import UpdateConfig
from megalith.units import show_bytes

STEP_POSITIONS = 1 << 16
"""Positions that a step changes at once."""
STEP_BYTES = 24 * STEP_POSITIONS
BLOCK_BYTES = 32 << 20
"""Memory of a block at most, also with a larger budget: larger blocks are not faster."""
_PEER_BYTES = 48  # one kept position of a peer, unpacked: index, place, code, value
_ENTRY_BYTES = 72  # one value of a robust rule: place and value, sorted, ranked
GRAM_ENTRY_BYTES = 48  # one position in the count of common positions: key, place, peer, comparison


class Ledger:
    """Bytes in use now and at most, against a budget. Threads may share it.

    Args:
        budget: The number of bytes.
        phase: The name of the phase, for messages.

    Attributes:
        used: Bytes in use.
        peak: Bytes that were in use at most.
    """

    def __init__(self, budget: int, phase: str) -> None:
        self.budget = budget
        self.phase = phase
        self.used = 0
        self.peak = 0
        self._lock = threading.Lock()

    def take(self, count: int, purpose: str) -> None:
        """Record bytes as used.

        Args:
            count: The number of bytes.
            purpose: What they are for, for messages.

        Raises:
            BudgetError: They exceed the budget; nothing is recorded.
        """
        with self._lock:
            if self.used + count > self.budget:
                raise BudgetError(
                    f"{self.phase}: {purpose} takes {show_bytes(count)}, but {show_bytes(self.used)} of the "
                    f"budget of {show_bytes(self.budget)} are in use: raise memory_budget"
                )
            self.used += count
            self.peak = max(self.peak, self.used)

    def give(self, count: int) -> None:
        """Record bytes as free again.

        Args:
            count: The number of bytes.
        """
        with self._lock:
            self.used -= count

    @contextmanager
    def hold(self, count: int, purpose: str) -> Iterator[None]:
        """Take bytes for the duration of a `with` block.

        Args:
            count: The number of bytes.
            purpose: What they are for.
        """
        self.take(count, purpose)
        try:
            yield
        finally:
            self.give(count)


class Travel(NamedTuple):
    """How many peers' rows a rank exchanges, on the rank where it is most.

    Attributes:
        sent: Rows that go to other ranks, per row of an own share.
        received: Rows that come from other ranks.
    """

    sent: int
    received: int

    @classmethod
    def of(cls, held: list[int]) -> Travel:
        """Return the numbers for a division of peers over ranks.

        Args:
            held: The number of peers that each rank holds.

        Returns:
            The largest numbers over the ranks.
        """
        total, others = sum(held), len(held) - 1
        return cls(max(held) * others, total - min(held))


def row_bytes(spec: ParameterSpec, config: UpdateConfig, num_peers: int, travel: Travel) -> int:
    """Return the memory of one row of a rank's own share, from packed bytes to the step.

    Args:
        spec: The parameter.
        config: The outer step.
        num_peers: The number of peers.
        travel: What ranks exchange.

    Returns:
        The largest number of bytes over the phases of a block.
    """
    fast = config.exchange == "fast"
    packed = spec.index_bytes + spec.code_bytes  # both travel together if indices were not spooled
    exchange = 0 if fast else (travel.sent + travel.received) * packed
    reduction = packed + (0 if fast else travel.received * packed)
    if config.rule == "mean":
        reduction += 8 * spec.size + _PEER_BYTES * spec.keep
    else:
        reduction += 28 * spec.size + (_PEER_BYTES + _ENTRY_BYTES * num_peers) * spec.keep
    decoding = 12 * spec.size if spec.dct else 0
    delivery = (12 if travel.received else 8) * spec.size  # the tile keeps its counts
    return max(exchange, reduction, decoding, delivery)


def gram_row_bytes(spec: ParameterSpec, num_peers: int, travel: Travel) -> int:
    """Return the memory of one row of a rank's own share while common positions are counted.

    Args:
        spec: The parameter.
        num_peers: The number of peers.
        travel: What ranks exchange.

    Returns:
        The number of bytes.
    """
    exchange = (travel.sent + travel.received) * spec.index_bytes
    counting = num_peers * (spec.index_bytes + spec.keep * GRAM_ENTRY_BYTES) + spec.keep * 16
    return max(exchange, counting)
