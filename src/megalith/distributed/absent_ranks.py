"""Roll call: which ranks came, when an exchange between ranks did not happen.

A collective that fails says "timed out" or "connection closed", never who was missing. Here every rank that
gives up signs the process group's store, and those that have not are named. It costs nothing until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from megalith.errors import RankTimeoutError

GRACE = timedelta(seconds=5)
"""How long those that gave up wait for others to give up too; never longer than the exchange itself."""


def absent_ranks(group: dist.ProcessGroup, key: str, timeout: timedelta) -> list[int]:
    """Signs as present under `key`; the ranks of the group that have not signed when the timeout ends.

    key: a name no other roll call of the group has. Raises RuntimeError if the store does not answer.
    """
    store = group.get_group_store()
    keys = {rank: f"roll call/{key}/{rank}" for rank in dist.get_process_group_ranks(group)}
    store.set(keys[dist.get_rank()], "here")
    try:
        store.wait(list(keys.values()), timeout)
        return []
    except RuntimeError:
        return [rank for rank in keys if not store.check([keys[rank]])]


def call_roll(group: dist.ProcessGroup, what: str, key: str, timeout: timedelta) -> None:
    """Returns when all ranks of the group have called it with this key.

    what: for the message. Raises RankTimeoutError naming this rank and those that did not come in time.
    """
    if absent := absent_ranks(group, key, timeout):
        raise RankTimeoutError(_waited(what, absent, timeout))


@contextmanager
def naming_absent(group: dist.ProcessGroup, what: str, key: str, timeout: timedelta) -> Iterator[None]:
    """Turns a failed collective of the group into a RankTimeoutError naming this rank and the missing.

    what: the exchange in words. key: a name no other exchange of the group has. timeout: the group's own.
    """
    try:
        yield
    except RuntimeError as error:
        raise RankTimeoutError(_explained(group, what, key, timeout, error)) from error


def _explained(group: dist.ProcessGroup, what: str, key: str, timeout: timedelta, error: RuntimeError) -> str:
    reason = str(error).partition("\n")[0][:300]
    try:
        absent = absent_ranks(group, key, min(GRACE, timeout))
    except RuntimeError:
        return f"{what}: rank {dist.get_rank()} reaches neither the others nor the store: {reason}"
    if absent:
        return _waited(what, absent, timeout)
    return f"{what}: rank {dist.get_rank()} came when others had given up, or one of them failed: {reason}"


def _waited(what: str, absent: list[int], timeout: timedelta) -> str:
    missing = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
    return (
        f"{what}: rank {dist.get_rank()} waited for {missing}, which did not come within "
        f"{timeout.total_seconds():g} s; look for an error there, or allow more time"
    )
