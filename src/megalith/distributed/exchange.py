"""Exchange: bytes between the ranks of a group, all to all.

A group of its own and one thread that issues everything in program order, so that nothing interleaves with
other users of torch.distributed (DDP's all-reduce, for one). Every wait is bounded, and the error names the
ranks that did not come. RankGroup of one host hand bytes over through shared memory, others through gloo.

It knows nothing of tables and ids.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time as clock
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.distributed.absent_ranks import naming_absent
from megalith.distributed.ranks import RankGroup, has_process_group
from megalith.errors import InputError, MegalithError, RankFailedError, RankTimeoutError, UsageError
from megalith.library import native_module

T = TypeVar("T")
TRANSPORTS = ("auto", "shared_memory", "gloo")


class Exchange(RankGroup):
    """All-to-all between the ranks of a group; making one is a collective call.

    group: a process group or a device mesh of one dimension (None: the default group). timeout: seconds of
    every wait. transport: "shared_memory", "gloo", or "auto": shared memory where all ranks are on one host.
    calls: how many exchanges there were.
    """

    def __init__(self, group: Any = None, *, timeout: float = 600.0, transport: str = "auto") -> None:
        if transport not in TRANSPORTS:
            raise InputError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
        if not has_process_group():
            raise UsageError("tables over ranks need torch.distributed: call init_process_group first")
        members = dist.get_process_group_ranks(_group_of(group))
        self.timeout = timeout
        self._limit = timedelta(seconds=timeout)
        self._group: Any = dist.new_group(
            members, timeout=self._limit, backend="gloo", use_local_synchronization=True
        )
        self.rank, self.size = dist.get_rank(self._group), len(members)
        self.calls = 0
        self.waited = 0.0
        self._number = 0
        self._broken: MegalithError | None = None
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._tasks,), name="megalith exchange", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None)  # ends the thread
        self._box: Any = None
        wanted = self.gather(transport)
        if set(wanted) != {transport}:
            raise InputError(f"transport must be the same on all ranks, got {', '.join(map(str, wanted))}")
        if self.size > 1 and transport != "gloo":
            self._box = self.submit(self._open_box).result()
            if self._box is None and transport == "shared_memory":
                raise UsageError("transport='shared_memory': not all ranks are on one host")
        self.transport = "gloo" if self._box is None else "shared_memory"

    # ---- the thread

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs some work in the thread, after everything submitted before."""
        future: Future[T] = Future()
        self._tasks.put((lambda: self._attempt(work), future))
        return future

    def run(self, work: Callable[[], T]) -> T:
        """`submit`, and its result."""
        if threading.current_thread() is self._thread:
            return work()
        return self.submit(work).result()

    def settle(self) -> None:
        """Returns when everything submitted before is done, well or not."""
        wait([self.submit(lambda: None)])

    def _attempt(self, work: Callable[[], T]) -> T:
        if self._broken is not None:
            raise UsageError(f"an exchange has failed before: {self._broken}")
        try:
            return work()
        except RankTimeoutError as error:  # what other ranks are at is not known any more
            self._broken = self._broken or error
            raise

    # ---- collectives; in the thread

    def all_to_all(
        self, send: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], what: str
    ) -> Tensor:
        """Sends a part of `send` to each rank; what the ranks sent here, one behind the other.

        send: uint8 [sum of send_sizes], parts in rank order. what: for messages. Raises RankTimeoutError
        naming the ranks that did not come.
        """
        self.calls += 1
        if self.size == 1:
            return send
        received = torch.empty(sum(recv_sizes), dtype=torch.uint8)
        began = clock.perf_counter()
        if self._box is not None:
            try:
                missing = self._box.exchange(send, list(send_sizes), received, list(recv_sizes), self.timeout)
            except InputError as error:  # the box takes no exchange after that
                self._broken = RankFailedError(
                    f"{what}: {error}; all ranks must make the same calls in the same order"
                )
                raise self._broken from None
            if missing:
                raise RankTimeoutError(self._missing(what, missing))
        else:
            with self._naming(what):
                dist.all_to_all_single(received, send, list(recv_sizes), list(send_sizes), group=self._group)
        self.waited = clock.perf_counter() - began
        return received

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank. Small things: it takes several messages."""

        def work() -> list[Any]:
            values: list[Any] = [None] * self.size
            with self._naming("agreement"):
                dist.all_gather_object(values, value, group=self._group)
            return values

        return [value] if self.size == 1 else self.run(work)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.gather(value)[0]

    def _naming(self, what: str) -> Any:
        self._number += 1
        return naming_absent(self._group, what, f"exchange {self._number}", self._limit)

    def _missing(self, what: str, missing: list[int]) -> str:
        names = dist.get_process_group_ranks(self._group)
        said = ", ".join(str(names[rank]) for rank in missing)
        return (
            f"{what}: rank {dist.get_rank()} waited for rank{'s' * (len(missing) > 1)} {said}, which did not "
            f"come within {self.timeout:g} s; look for an error there, or allow more time"
        )

    def _open_box(self) -> Any:
        """Shared memory with all ranks, or None where they are on several hosts."""
        native: Any = native_module()
        box, path = None, ""
        if native is not None and hasattr(native, "Mailbox"):
            folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
            path = os.path.join(folder, f"megalith-{uuid.uuid4().hex}")
            with suppress(OSError):
                box = native.Mailbox(path, self.rank, self.size)
        try:
            paths = self.gather("" if box is None else path)
            try:
                if box is None or not all(paths):
                    raise OSError
                box.connect(paths)
                connected = True
            except (OSError, InputError):
                connected = False
            return box if all(self.gather(connected)) else None
        finally:
            if box is not None:
                box.unlink()


def _work(tasks: queue.SimpleQueue[Any]) -> None:
    """The thread. It must not hold the exchange, which ends it when nobody else does."""
    while (task := tasks.get()) is not None:
        work, future = task
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        del task, work, future  # what they hold may be large


def _group_of(group: Any) -> Any:
    """A process group, out of what users hold."""
    if group is None:
        return dist.group.WORLD
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise InputError(f"a device mesh must have one dimension here, got {group.ndim}: take a sub-mesh")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError("tables over ranks: this process is not in the group it was given")
    return group
