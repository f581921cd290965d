"""Absent ranks: which ranks did not take part in a collective call that failed.

A failed collective reports "timed out" or "connection closed", but not which rank is missing. Here every rank
that fails writes a key to the store of the process group; the ranks without a key are absent. It costs
nothing until a collective fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from megalith.errors import RankTimeoutError

GRACE = 5.0
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
    try:
        yield
    except RuntimeError as error:
        raise RankTimeoutError(_explain(group, what, key, timeout, error)) from error


def timeout_message(what: str, absent: Sequence[int], seconds: float) -> str:
    """Return the message for ranks that did not take part."""
    missing = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
    return (
        f"{what}: rank {dist.get_rank()} waited for {missing}, which did not arrive within {seconds:g} s; "
        "check the log of that rank for an error, or increase the timeout"
    )


def _explain(group: dist.ProcessGroup, what: str, key: str, timeout: float, error: RuntimeError) -> str:
    reason = str(error).partition("\n")[0][:300]
    try:
        absent = absent_ranks(group, key, min(GRACE, timeout))
    except RuntimeError:
        return f"{what}: rank {dist.get_rank()} can reach neither the other ranks nor the store: {reason}"
    if absent:
        return timeout_message(what, absent, timeout)
    return f"{what}: rank {dist.get_rank()} arrived after other ranks had timed out, or one failed: {reason}"
