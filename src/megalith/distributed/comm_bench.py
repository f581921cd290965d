"""Communication benchmark: the time of collectives with the shapes of table exchanges, by size.

All-to-all exchanges are measured over gloo and through shared memory, the two transports of `Exchange`; an
all-reduce over gloo only. `measure` makes the exchanges and times them inside the ranks of a process group.

The ranks are those of a launcher (`measure_launched`), or local processes started for it (`measure_local`).
Local ranks use gloo over loopback and shared memory. Rank 0 sends each measurement to the parent as JSON;
the parent kills all ranks when it stops reading. Printing the numbers is not handled here.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.distributed.exchange import Exchange
from megalith.distributed.launcher_environment import Launch, check_address
from megalith.errors import InputError, RankFailedError, RankTimeoutError, UnknownNameError, UsageError

TRANSPORTS = ("gloo", "shared_memory")
MAX_SIZE = 1 << 32  # The maximum number of bytes that a rank sends at once

START_SECONDS = 60  # Seconds beyond the budget for the start of processes and the end of the last exchange

_WARM_UPS = 2
_FEWEST = 3


@dataclass(frozen=True)
class RankLink:
    """How the ranks of a measurement are connected."""

    group: dist.ProcessGroup | None = None  # Their process group; None: the default group
    exchange: Exchange | None = None  # The exchange for all-to-all, with shared memory; None: gloo

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)


class MeasuredExchange(NamedTuple):
    """A collective that can be called repeatedly; it returns what was received."""

    call: Callable[[], Tensor]
    size: int  # Bytes that this rank passes to the collective
    sent: int  # Bytes that count for goodput: all for an all-reduce, those to other ranks for an all-to-all


@dataclass(frozen=True, kw_only=True)
class CommSettings:
    """What to measure. Raises InputError, which names the field, for a wrong value."""

    patterns: Sequence[str] = ("all_reduce", "even", "uneven", "ids", "rows")
    """Names in PATTERNS."""
    transports: Sequence[str] = TRANSPORTS
    """Names in TRANSPORTS. Shared memory is left out with gloo if the ranks are on several hosts."""
    sizes: Sequence[int] = tuple(1 << power for power in (10, 13, 16, 19, 22, 25))
    """Bytes that a rank passes to one exchange."""
    dim: int = 64
    """Floats of a row, for the pattern rows."""
    pieces: int = 26
    """Pieces per rank, one per table, for the pattern ids."""
    seconds: float = 0.3
    """Seconds to measure each size; at least three calls are made."""
    max_calls: int = 200
    """Maximum number of calls of a size."""
    budget: float = 60.0
    """Seconds in total; sizes that have not started by then are skipped."""

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            if pattern not in PATTERNS:
                raise UnknownNameError(f"unknown pattern {pattern!r} (known: {', '.join(PATTERNS)})")
        for transport in self.transports:
            if transport not in TRANSPORTS:
                raise UnknownNameError(f"unknown transport {transport!r} (known: {', '.join(TRANSPORTS)})")
        for name in ("patterns", "transports", "sizes"):
            if not getattr(self, name):
                raise InputError(f"bench: {name} must not be empty")
        for size in self.sizes:
            if not 1 <= size <= MAX_SIZE:
                raise InputError(f"bench: sizes must be within 1 .. {MAX_SIZE} bytes, got {size}")
        for name in ("dim", "pieces", "seconds", "max_calls", "budget"):
            if not getattr(self, name) > 0:
                raise InputError(f"bench: {name} must be above 0, got {getattr(self, name)}")
        if not self.pairs:
            raise InputError("bench: all_reduce has no shared memory: add the transport gloo or a pattern")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [
            (pattern, transport)
            for pattern in self.patterns
            for transport in self.transports
            if pattern != "all_reduce" or transport == "gloo"
        ]

    @property
    def num_points(self) -> int:
        return len(self.pairs) * len(self.sizes)


@dataclass(frozen=True)
class Measurement:
    """One pattern at one size. Times are those of the slowest rank in each call."""

    pattern: str
    transport: str
    size: int  # Bytes that a rank passed to an exchange, rounded to complete elements
    calls: int  # Number of timed calls
    latency: float  # Median seconds of a call
    best: float  # Seconds of the fastest call
    goodput: float
    """Bytes per second, mean of all ranks: of the buffer for all_reduce, else of the bytes to other ranks."""


def measure(settings: CommSettings, group: dist.ProcessGroup | None = None) -> Iterator[Measurement]:
    """Yield measurements by pattern, transport, then ascending size; the results are equal on all ranks."""
    # This is a collective call. It ends early when the budget is spent.
    begin = time.perf_counter()
    links = _links(settings, group)
    for pattern, transport in settings.pairs:
        for size in sorted(settings.sizes) if transport in links else ():
            spent = torch.tensor([time.perf_counter() - begin], device="cpu")
            if _slowest(spent, group)[0] > settings.budget:
                return
            yield _measure_one(pattern, transport, size, settings, links[transport])


def _links(settings: CommSettings, group: dist.ProcessGroup | None) -> dict[str, RankLink]:
    links = {}
    for transport in settings.transports:
        if transport == "gloo":
            links[transport] = RankLink(group)
            continue
        try:
            exchange = Exchange(group, transport=transport, timeout=settings.budget + START_SECONDS)
            links[transport] = RankLink(group, exchange)
        except UsageError:  # on all ranks: they are on several hosts
            if len(settings.transports) == 1:
                raise
    return links


def _measure_one(
    pattern: str, transport: str, size: int, settings: CommSettings, link: RankLink
) -> Measurement:
    group = link.group
    exchange = PATTERNS[pattern](size, settings, link)
    guess = min(_slowest(_timed(exchange, _WARM_UPS), group))
    calls = max(_FEWEST, min(settings.max_calls, int(settings.seconds / max(guess, 1e-9))))
    times = sorted(_slowest(_timed(exchange, calls), group))
    sent = torch.tensor(float(exchange.sent), device="cpu")
    dist.all_reduce(sent, group=group)
    median = times[len(times) // 2]
    goodput = float(sent) / link.size / median
    return Measurement(pattern, transport, exchange.size, calls, median, times[0], goodput)


def _timed(exchange: MeasuredExchange, calls: int) -> Tensor:
    seconds = []
    for _ in range(calls):
        begin = time.perf_counter()
        exchange.call()
        seconds.append(time.perf_counter() - begin)
    return torch.tensor(seconds, device="cpu")


def _slowest(seconds: Tensor, group: dist.ProcessGroup | None) -> list[float]:
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    found: list[float] = seconds.tolist()
    return found


# ---- the patterns; each rank sends its own rank, so that tests can check the routes


def _all_reduce(size: int, settings: CommSettings, link: RankLink) -> MeasuredExchange:
    own = torch.zeros(_count(size, 4), device="cpu")

    def call() -> Tensor:
        dist.all_reduce(own, group=link.group)
        return own

    return MeasuredExchange(call, own.nbytes, own.nbytes)


def _even(size: int, settings: CommSettings, link: RankLink) -> MeasuredExchange:
    return _all_to_all(_shares(_count(size, 4), [1.0] * link.size), (), link)


def _uneven(size: int, settings: CommSettings, link: RankLink) -> MeasuredExchange:
    """Rank 0 receives the most, each next rank less: 1, 1/2, 1/3, ..."""
    weights = [1 / (1 + rank) for rank in range(link.size)]
    return _all_to_all(_shares(_count(size, 4), weights), (), link)


def _rows(size: int, settings: CommSettings, link: RankLink) -> MeasuredExchange:
    num_rows = _count(size, 4 * settings.dim)
    return _all_to_all(_shares(num_rows, [1.0] * link.size), (settings.dim,), link)


def _ids(size: int, settings: CommSettings, link: RankLink) -> MeasuredExchange:
    """One piece of ids per rank and table, concatenated before the exchange and split after it."""
    world, rank = link.size, link.rank
    lengths = _shares(_count(size, 8), [1.0] * (world * settings.pieces))
    pieces = [torch.full((length,), rank, dtype=torch.int64, device="cpu") for length in lengths]
    sent = [sum(lengths[peer * settings.pieces : (peer + 1) * settings.pieces]) for peer in range(world)]
    from_each = lengths[rank * settings.pieces : (rank + 1) * settings.pieces]
    transfer = _transfer(torch.empty(sent[rank] * world, dtype=torch.int64, device="cpu"), sent, link)

    def call() -> Tensor:
        received = transfer(torch.cat(pieces))
        received.split(from_each * world)
        return received

    return MeasuredExchange(call, 8 * sum(sent), 8 * (sum(sent) - sent[rank]))


def _all_to_all(counts: list[int], width: tuple[int, ...], link: RankLink) -> MeasuredExchange:
    """Every rank sends counts[peer] elements of float32 [*width] to each peer."""
    own = torch.full((sum(counts), *width), float(link.rank), device="cpu")
    received = torch.empty(counts[link.rank] * link.size, *width, device="cpu")
    transfer = _transfer(received, counts, link)
    return MeasuredExchange(lambda: transfer(own), own.nbytes, own.nbytes - received.nbytes // link.size)


def _transfer(received: Tensor, counts: list[int], link: RankLink) -> Callable[[Tensor], Tensor]:
    """Return an all-to-all in which every rank sends counts[peer] elements, into memory like `received`."""
    into = [counts[link.rank]] * link.size
    exchange = link.exchange
    if exchange is None:

        def over_gloo(own: Tensor) -> Tensor:
            dist.all_to_all_single(received, own, into, counts, group=link.group)
            return received

        return over_gloo
    each = received.element_size() * math.prod(received.shape[1:])
    send_sizes, recv_sizes = [n * each for n in counts], [n * each for n in into]

    def through_memory(own: Tensor) -> Tensor:
        data = exchange.all_to_all(own.view(-1).view(torch.uint8), send_sizes, recv_sizes, "bench")
        return data.view(received.dtype).view(received.shape)

    return through_memory


PATTERNS: dict[str, Callable[[int, CommSettings, RankLink], MeasuredExchange]] = {
    "all_reduce": _all_reduce,
    "even": _even,
    "uneven": _uneven,
    "ids": _ids,
    "rows": _rows,
}
"""all_reduce uses float32; the others are all-to-all exchanges of float32, or int64 for ids."""


def _count(size: int, each: int) -> int:
    return max(1, size // each)


def _shares(total: int, weights: list[float]) -> list[int]:
    whole = sum(weights)
    ends = [round(total * done / whole) for done in accumulate(weights)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


_MAX_MESSAGE = 1 << 16


def measure_local(settings: CommSettings, num_ranks: int) -> Iterator[Measurement]:
    if num_ranks < 2:
        raise InputError(f"bench: at least 2 ranks are needed, got {num_ranks}")
    context = multiprocessing.get_context("forkserver")  # imports torch once, not once a rank
    context.set_forkserver_preload([__name__])
    deadline = time.monotonic() + settings.budget + START_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        started: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (theirs, os.path.join(folder, "store"), rank, num_ranks, settings)
                process = context.Process(target=_local_rank, args=arguments, daemon=True)
                process.start()
                theirs.close()
                started.append((process, ours))
            yield from _received({pipe: rank for rank, (_, pipe) in enumerate(started)}, deadline)
        finally:
            for child, pipe in started:
                child.kill()
                child.join()  # no limit: it was killed
                pipe.close()


def measure_launched(settings: CommSettings, launch: Launch) -> Iterator[Measurement]:
    """Yield measurements among the ranks of a launcher. A collective call with equal results on all ranks."""
    check_address(launch)
    with _grouped("env://", launch.rank, launch.size, settings):
        yield from measure(settings)


@contextmanager
def _grouped(init_method: str, rank: int, size: int, settings: CommSettings) -> Iterator[None]:
    timeout = timedelta(seconds=settings.budget + START_SECONDS)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- local ranks


def _received(pipes: dict[Connection, int], deadline: float) -> Iterator[Measurement]:
    """Yield the measurements of rank 0, until all ranks are done."""
    open_pipes = dict(pipes)
    while open_pipes:
        ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(rank) for rank in open_pipes.values())
            raise RankTimeoutError(f"bench: ranks {late} took too long; measure fewer sizes or smaller ones")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                message = json.loads(pipe.recv_bytes(_MAX_MESSAGE))
            except EOFError:
                raise RankFailedError(f"bench: rank {open_pipes[pipe]} exited before it finished") from None
            if message is None:
                open_pipes.pop(pipe)
            elif "error" in message:
                raise RankFailedError(f"bench: rank {open_pipes[pipe]} failed: {message['error']}")
            else:
                yield Measurement(**message)


def _local_rank(pipe: Connection, store: str, rank: int, size: int, settings: CommSettings) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with closing(pipe):
        try:
            with _grouped(f"file://{store}", rank, size, settings):
                for measurement in measure(settings):
                    if rank == 0:
                        pipe.send_bytes(json.dumps(asdict(measurement)).encode())
            pipe.send_bytes(b"null")
        except Exception as error:
            pipe.send_bytes(json.dumps({"error": f"{type(error).__name__}: {error}"[:4000]}).encode())
