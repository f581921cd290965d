"""Ranks: which process this is, how many there are, and how they learn of each other's failures.

The functions at the top describe torch.distributed's process groups, and a single process where there is
none. `Ranks` is the ranks that a process works with: this process alone, or those of a process group.
`Exchange` is a faster implementation of it for large exchanges, and `ElasticRanks` one that survives the loss
of ranks.

A rank that fails alone would leave the others waiting in their next collective call. `Ranks.agree` exchanges
the outcomes first, so that every rank knows of every failure.

A failed collective reports "timed out" or "connection closed", but not which rank is missing. With
`naming_absent_ranks` every rank that fails writes a key to the store of the process group; the ranks
without a key are absent. It costs nothing until a collective fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.errors import MegalithError, RankFailedError, RankTimeoutError


def has_process_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def current_rank(group: Any = None) -> int:
    return dist.get_rank(group) if has_process_group() else 0


def world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if has_process_group() else 1


T = TypeVar("T")


class BrokenExchange(MegalithError, RuntimeError):
    """An exchange that failed: a rank is gone, or did not respond in time."""


class Ranks:
    """The ranks of a process group, or a process that works alone. Calls with an exchange are collective."""

    rank: int = 0  # The rank of this process in the group
    size: int = 1  # The number of ranks in the group
    timeout: float = 600.0  # Seconds that an exchange waits for the others
    _group: Any = None

    def __init__(self, group: Any = None) -> None:
        if group is not None:
            self._group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on every rank. For small values."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        return value if self._group is None else self.gather(value)[0]

    def all_to_all(self, data: Tensor, send: Sequence[int], receive: Sequence[int], what: str) -> Tensor:
        """Send one part of a tensor to each rank; return the parts received, concatenated in rank order."""
        if self._group is None:
            return data
        received = torch.empty(sum(receive), dtype=data.dtype, device=data.device)
        dist.all_to_all_single(received, data, list(receive), list(send), group=self._group)
        return received

    def agree(
        self,
        work: Callable[[], T],
        *,
        error: type[MegalithError] = RankFailedError,
        keep: tuple[type[MegalithError], ...] = (),
    ) -> T:
        """Run a function on every rank; if it fails on one, raise on all."""
        # Without other ranks the outcome needs no exchange.
        return self._agree(work, self.gather, error, keep) if self.size > 1 else work()

    def _agree(
        self,
        work: Callable[[], T],
        gather: Callable[[Any], list[Any]],
        error: type[MegalithError],
        keep: tuple[type[MegalithError], ...],
        prefix: str = "",
    ) -> T:
        failure: Exception | None = None
        try:
            result = work()
        except BrokenExchange:  # the others have noticed it too: nobody would take part in the next exchange
            raise
        except Exception as raised:
            failure = raised
        try:
            outcomes = gather(failure and (type(failure).__name__, str(failure)))
        finally:
            if failure is not None:
                raise failure
        for rank, outcome in zip(self._numbers(), outcomes, strict=True):
            if outcome is not None:
                name, text = outcome
                kept = next((kind for kind in keep if kind.__name__ == name), None)
                raise (kept or error)(f"{prefix}rank {rank}: {text if kept else f'{name}: {text}'}")
        return result

    def _numbers(self) -> Sequence[int]:
        """The number of each rank by which errors name it."""
        return range(self.size)


ABSENCE_SECONDS = 1.5
"""Seconds that a rank whose collective failed waits for the keys of others; at most the group's timeout."""


def absent_ranks(group: dist.ProcessGroup, key: str, timeout: float) -> list[int]:
    """Register this rank as present under a key, and wait for the others to do the same."""
    store = group.get_group_store()
    keys = {rank: f"present/{key}/{rank}" for rank in dist.get_process_group_ranks(group)}
    store.set(keys[dist.get_rank()], "present")
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout))
        return []
    except RuntimeError:
        return [rank for rank in keys if not store.check([keys[rank]])]


def wait_for_all_ranks(group: dist.ProcessGroup, what: str, key: str, timeout: float) -> None:
    """Wait until all ranks of the group have called this function with the same key."""
    if absent := absent_ranks(group, key, timeout):
        raise RankTimeoutError(timeout_message(what, absent, timeout))


@contextmanager
def naming_absent_ranks(group: dist.ProcessGroup, what: str, key: str, timeout: float) -> Iterator[None]:
    """Turn a failed collective of the group into a RankTimeoutError that names the absent ranks."""
    began = time.monotonic()
    try:
        yield
    except MegalithError:
        raise
    except RuntimeError as error:
        waited = time.monotonic() - began
        raise RankTimeoutError(_explain_failure(group, what, key, timeout, waited, error)) from error


def timeout_message(what: str, absent: Sequence[int], seconds: float) -> str:
    return (
        f"{what}: rank {dist.get_rank()} waited for {_names(absent)}, which did not arrive within "
        f"{seconds:g} s; check the log of that rank for an error, or increase the timeout"
    )


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _explain_failure(
    group: dist.ProcessGroup, what: str, key: str, timeout: float, waited: float, error: RuntimeError
) -> str:
    reason = str(error).partition("\n")[0][:300]
    rank = f"{what}: rank {dist.get_rank()}"
    try:
        absent = absent_ranks(group, key, min(ABSENCE_SECONDS, timeout))
    except RuntimeError:
        return f"{rank} can reach neither the other ranks nor the store, whose process has ended: {reason}"
    if not absent:
        return f"{rank} arrived after other ranks had timed out, or one failed: {reason}"
    if waited >= timeout:
        return timeout_message(what, absent, timeout)
    return f"{rank} lost a connection after {waited:.1f} s; {_names(absent)} did not arrive: {reason}"
