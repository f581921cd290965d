"""The ranks of a communication benchmark: those of a launcher, or local processes started for it.

Local ranks use gloo over loopback and shared memory. Rank 0 sends each measurement to the parent as JSON; the
parent kills all ranks when it stops reading.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

from megalith.distributed.comm_bench import START_SECONDS, CommSettings, Measurement, measure
from megalith.distributed.launcher_environment import Launch
from megalith.distributed.process_group import check_address
from megalith.errors import InputError, RankFailedError, RankTimeoutError

_MAX_MESSAGE = 1 << 16


def measure_local(settings: CommSettings, num_ranks: int) -> Iterator[Measurement]:
    """Yield measurements among processes on this machine, which are started and ended here."""
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
                child.join()
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
