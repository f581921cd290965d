"""Communication measured: how long collectives of the shapes that tables exchange take, by size.

This file makes the exchanges and times them inside the ranks of a process group; who starts the ranks and who
shows the numbers is others' business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.errors import InputError, UnknownNameError

MAX_SIZE = 1 << 32
"""Bytes a rank may send at once."""

_WARM_UPS = 2
_FEWEST = 3


class MeasuredExchange(NamedTuple):
    """A collective ready to be called again and again; it gives what was received."""

    call: Callable[[], Tensor]
    size: int
    """Bytes this rank puts in."""
    sent: int
    """Those that count for goodput: all of an all-reduce; of an all-to-all what leaves this rank."""


@dataclass(frozen=True, kw_only=True)
class CommSettings:
    """What to measure. Raises InputError, naming the field, if a value makes no sense."""

    patterns: Sequence[str] = ("all_reduce", "even", "uneven", "ids", "rows")
    """Names out of PATTERNS."""
    sizes: Sequence[int] = tuple(1 << power for power in (10, 13, 16, 19, 22, 25))
    """Bytes a rank puts into one exchange."""
    dim: int = 64
    """Width of a row, of the pattern rows."""
    pieces: int = 26
    """Pieces for each rank, of the pattern ids: one a table."""
    seconds: float = 0.3
    """How long to measure each size; at least three calls are made."""
    max_calls: int = 200
    """At most so many calls of a size."""
    budget: float = 60.0
    """Seconds for everything; sizes that are not begun by then are left out."""

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            if pattern not in PATTERNS:
                raise UnknownNameError(f"unknown pattern {pattern!r} (known: {', '.join(PATTERNS)})")
        for name in ("patterns", "sizes"):
            if not getattr(self, name):
                raise InputError(f"bench: {name} must not be empty")
        for size in self.sizes:
            if not 1 <= size <= MAX_SIZE:
                raise InputError(f"bench: sizes must be within 1 .. {MAX_SIZE} bytes, got {size}")
        for name in ("dim", "pieces", "seconds", "max_calls", "budget"):
            if not getattr(self, name) > 0:
                raise InputError(f"bench: {name} must be above 0, got {getattr(self, name)}")

    @property
    def num_points(self) -> int:
        """How many measurements there are to make."""
        return len(self.patterns) * len(self.sizes)


@dataclass(frozen=True)
class Measurement:
    """One pattern at one size. Times are those of the slowest rank in each call."""

    pattern: str
    size: int
    """Bytes a rank put into an exchange, a whole number of elements."""
    calls: int
    """How many were timed."""
    latency: float
    """Seconds of a call, the median."""
    best: float
    """Seconds of the quickest call."""
    goodput: float
    """Bytes a second: for all_reduce of the buffer, else of what leaves a rank, the mean of all ranks."""


def measure(settings: CommSettings, group: dist.ProcessGroup | None = None) -> Iterator[Measurement]:
    """Measures pattern by pattern, sizes ascending; a collective call, with equal results on all ranks.

    Ends early when the budget is spent.
    """
    begin = time.perf_counter()
    for pattern in settings.patterns:
        for size in sorted(settings.sizes):
            if _slowest(torch.tensor([time.perf_counter() - begin]), group)[0] > settings.budget:
                return
            yield _measure_one(pattern, size, settings, group)


def _measure_one(
    pattern: str, size: int, settings: CommSettings, group: dist.ProcessGroup | None
) -> Measurement:
    exchange = PATTERNS[pattern](size, settings, group)
    guess = min(_slowest(_timed(exchange, _WARM_UPS), group))
    calls = max(_FEWEST, min(settings.max_calls, int(settings.seconds / max(guess, 1e-9))))
    times = sorted(_slowest(_timed(exchange, calls), group))
    sent = torch.tensor(float(exchange.sent))
    dist.all_reduce(sent, group=group)
    median = times[len(times) // 2]
    goodput = float(sent) / dist.get_world_size(group) / median
    return Measurement(pattern, exchange.size, calls, median, times[0], goodput)


def _timed(exchange: MeasuredExchange, calls: int) -> Tensor:
    """Seconds of each call, one after the other."""
    seconds = []
    for _ in range(calls):
        begin = time.perf_counter()
        exchange.call()
        seconds.append(time.perf_counter() - begin)
    return torch.tensor(seconds)


def _slowest(seconds: Tensor, group: dist.ProcessGroup | None) -> list[float]:
    """Of all ranks, place by place."""
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    found: list[float] = seconds.tolist()
    return found


# ---- the patterns; what is sent is the sender's number, so that tests see where it went


def _all_reduce(size: int, settings: CommSettings, group: dist.ProcessGroup | None) -> MeasuredExchange:
    own = torch.zeros(_count(size, 4))

    def call() -> Tensor:
        dist.all_reduce(own, group=group)
        return own

    return MeasuredExchange(call, own.nbytes, own.nbytes)


def _even(size: int, settings: CommSettings, group: dist.ProcessGroup | None) -> MeasuredExchange:
    return _all_to_all(_shares(_count(size, 4), [1.0] * dist.get_world_size(group)), (), group)


def _uneven(size: int, settings: CommSettings, group: dist.ProcessGroup | None) -> MeasuredExchange:
    """Rank 0 is sent most, each next one less: 1, 1/2, 1/3, ..."""
    weights = [1 / (1 + rank) for rank in range(dist.get_world_size(group))]
    return _all_to_all(_shares(_count(size, 4), weights), (), group)


def _rows(size: int, settings: CommSettings, group: dist.ProcessGroup | None) -> MeasuredExchange:
    num_rows = _count(size, 4 * settings.dim)
    return _all_to_all(_shares(num_rows, [1.0] * dist.get_world_size(group)), (settings.dim,), group)


def _ids(size: int, settings: CommSettings, group: dist.ProcessGroup | None) -> MeasuredExchange:
    """Pieces of ids for each rank and table, joined before travel and cut apart after, as look-ups do."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    lengths = _shares(_count(size, 8), [1.0] * (world * settings.pieces))
    pieces = [torch.full((length,), rank, dtype=torch.int64) for length in lengths]
    sent = [sum(lengths[peer * settings.pieces : (peer + 1) * settings.pieces]) for peer in range(world)]
    from_each = lengths[rank * settings.pieces : (rank + 1) * settings.pieces]
    received = torch.empty(sent[rank] * world, dtype=torch.int64)

    def call() -> Tensor:
        dist.all_to_all_single(received, torch.cat(pieces), [sent[rank]] * world, sent, group=group)
        received.split(from_each * world)
        return received

    return MeasuredExchange(call, 8 * sum(sent), 8 * (sum(sent) - sent[rank]))


def _all_to_all(
    counts: list[int], width: tuple[int, ...], group: dist.ProcessGroup | None
) -> MeasuredExchange:
    """Every rank sends counts[peer] elements of float32 [*width] to each peer."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    own = torch.full((sum(counts), *width), float(rank))
    received = torch.empty(counts[rank] * world, *width)

    def call() -> Tensor:
        dist.all_to_all_single(received, own, [counts[rank]] * world, counts, group=group)
        return received

    return MeasuredExchange(call, own.nbytes, own.nbytes - received.nbytes // world)


PATTERNS: dict[str, Callable[[int, CommSettings, dist.ProcessGroup | None], MeasuredExchange]] = {
    "all_reduce": _all_reduce,
    "even": _even,
    "uneven": _uneven,
    "ids": _ids,
    "rows": _rows,
}
"""all_reduce is of float32; the others are all-to-all, of float32 but for ids, which are int64."""


def _count(size: int, each: int) -> int:
    return max(1, size // each)


def _shares(total: int, weights: list[float]) -> list[int]:
    """A total cut into whole parts by weight."""
    whole = sum(weights)
    ends = [round(total * done / whole) for done in accumulate(weights)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
