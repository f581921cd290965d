"""A launcher that starts ranks on this machine and lets the others continue when one dies.

It hosts the store at which ranks connect, so that it survives every rank, and records there which ranks have
ended, so that nobody waits for them. Other launchers end all ranks when one fails.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from megalith.distributed.surviving_ranks import lost_key
from megalith.ops import checks

_POLL = 0.05
_ENDING = 5.0
_ROOMS = ("", "/worker/attempt_0")
"""The prefixes under which ranks see the store that a launcher hosts; they depend on torch's version."""


@dataclass(frozen=True)
class EndedRank:
    """How a rank ended."""

    rank: int
    code: int  # Its exit code: 0 is success, a negative one is a signal
    running: int  # The number of ranks that are still running


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    on_end: Callable[[EndedRank], None] = lambda ended: None,
    on_wait: Callable[[], None] = lambda: None,
) -> list[EndedRank]:
    """Run a command as several ranks and wait until all have ended."""
    # Ranks that still run when this call is left by an exception are ended too.
    checks.integer(ranks, "launch: ranks")
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    rooms = [PrefixStore(room, server) if room else server for room in _ROOMS]
    running: dict[int, subprocess.Popen[bytes]] = {}
    done: dict[int, EndedRank] = {}
    end = None if timeout is None else time.monotonic() + timeout
    try:
        for rank in range(ranks):
            own = _environment(rank, ranks, server.port)
            running[rank] = subprocess.Popen(command, env={**os.environ, **own, **(environment or {})})
        while running:
            for rank, process in list(running.items()):
                code = process.poll()
                if code is not None:
                    del running[rank]
                    done[rank] = EndedRank(rank, code, len(running))
                    for room in rooms:
                        room.set(lost_key(rank), str(code))
                    on_end(done[rank])
            on_wait()
            if end is not None and time.monotonic() > end:
                _end(running.values())
                end = None
            time.sleep(_POLL)
    finally:
        _end(running.values())
    return [done[rank] for rank in sorted(done)]


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables by which ranks connect, as torchrun sets them."""
    size = str(ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    listed = list(processes)
    for process in listed:
        process.terminate()
    for process in listed:
        try:
            process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
