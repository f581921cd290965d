"""Runs a function as several ranks: a process each, gloo over loopback, one thread, a hard time limit.

Processes are forked by one that has imported everything and runs no threads, so that a launch takes a
fraction of a second instead of the many that importing torch takes.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalith import checkpoint

SECONDS = 120
PATIENT = 60.0
"""Seconds that ranks wait for each other where no test depends on it."""
IMPORTED = ["torch._dynamo", "megalith", "megalith.checkpoint", "megalith.training", "pytest", "hypothesis"]
IMPORTED += ["pyarrow.parquet", "torch.utils.tensorboard"]  # if they are installed; a run imports them


def run_ranks(
    work: Callable[..., Any], *args: Any, world_size: int = 2, lost: Collection[int] = ()
) -> list[Any]:
    """What `work(*args)` returns on each rank, by rank. `work` is a function at the top of a module.

    lost: ranks that end without an answer, as they are killed; theirs is None.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, os.path.join(folder, "store"), rank, world_size, work, args)
            process = context.Process(target=_rank, args=arguments)  # no daemon: it may have data workers
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            outcomes = [_receive(rank, pipe, rank in lost) for rank, (_, pipe) in enumerate(started)]
        finally:
            for process, _ in started:
                process.join(5)
                process.kill()
    errors = [said for good, said in outcomes if not good]
    assert not errors, "\n".join(errors)
    return [result for _, result in outcomes]


def forked(work: Callable[..., Any], jobs: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """What `work` returns in a process for each job, all at once, by name; None if the process was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    started = {}
    for name, args in jobs.items():
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(theirs, work, args))
        process.start()
        theirs.close()
        started[name] = process, ours
    try:
        outcomes = {name: _receive(name, pipe, None) for name, (_, pipe) in started.items()}
    finally:
        for process, _ in started.values():
            process.join(5)
            process.kill()
    errors = [said for good, said in outcomes.values() if not good]
    assert not errors, "\n".join(errors)
    return {name: result for name, (_, result) in outcomes.items()}


def error_of(work: Callable[..., object], *args: Any, **options: Any) -> str:
    """The error that a call raises, as "InputError: text"; "" if it raises none."""
    try:
        work(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def assert_same_checkpoints(run: Path, other: Path) -> None:
    """Two runs have saved the same rows, optimizer state, times and dense weights, bit for bit."""
    found = checkpoint.diff(run / "checkpoint", other / "checkpoint")
    assert (found.only_before, found.only_after, found.dense, found.steps) == ([], [], {}, {})
    assert not found.optimizer
    for name, table in found.tables.items():
        assert (table.added, table.removed, table.changed) == (0, 0, 0), name
        assert table.before > 0


def store() -> Any:
    """Where ranks tell each other how far they are, besides the exchanges of a test."""
    return dist.group.WORLD.get_group_store()  # type: ignore[union-attr]


def wait_for(*keys: str) -> None:
    store().wait(list(keys), timedelta(seconds=PATIENT))


def _receive(rank: int | str, pipe: Connection, lost: bool | None) -> tuple[bool, Any]:
    # lost: whether it is to be killed; None: it may be.
    try:
        if pipe.poll(SECONDS):
            outcome: tuple[bool, Any] = pickle.loads(pipe.recv_bytes())
            return outcome if not lost else (False, f"rank {rank}: was to be killed, but answered")
        return False, f"rank {rank}: no answer within {SECONDS} s"
    except EOFError:
        return (True, None) if lost is not False else (False, f"rank {rank}: ended without an answer")


def _answer(pipe: Connection, work: Any, args: Any) -> None:
    signal.alarm(SECONDS)
    try:
        pipe.send_bytes(pickle.dumps((True, work(*args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))


def _rank(pipe: Connection, store: str, rank: int, world_size: int, work: Any, args: Any) -> None:
    signal.alarm(SECONDS)  # whatever it hangs in
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=SECONDS),
        )
        dist.barrier()  # a rank whose work is short must not leave while another one still connects
        result = work(*args)
        pipe.send_bytes(pickle.dumps((True, result)))  # by value: the process is gone when it is read
        dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, f"rank {rank}:\n{traceback.format_exc()}")))
