"""Exchange: all-to-all exchange of bytes between the ranks of a group.

It has its own process group and one thread that issues all collectives in program order, so that they do not
interleave with other users of torch.distributed (e.g. the all-reduce of DDP). It handles bytes only, not
tables or ids.

Every wait has a timeout, and the error names the absent ranks. A rank whose process ends is noticed at once:
all exchanges are between all pairs of ranks, so each rank waits for the one that ended; a gloo connection
fails, and `PeerWatch` says which rank has left, and how.

    bytes are       ranks are                        they travel
    on the CPU      on one host                      through shared memory
    on the CPU      on several hosts                 with gloo
    on a GPU        one per GPU, NCCL in the group   with NCCL, from GPU to GPU
    on a GPU        other                            through pinned host memory, then as bytes on the CPU

The calls of the thread are on the default CUDA stream; it waits for the stream of the caller.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
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

from megalith.distributed.peer_watch import PeerWatch
from megalith.distributed.ranks import Ranks, has_process_group, naming_absent_ranks, timeout_message
from megalith.errors import InputError, MegalithError, RankFailedError, RankTimeoutError, UsageError
from megalith.library import MessageBuffers, native_module, span
from megalith.ops import checks

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_SECONDS = 1e7
_SLICE = timedelta(seconds=0.5)
"""How often a wait in gloo looks whether a rank has left."""
TRANSPORTS = ("auto", "shared_memory", "gloo", "nccl")


class Exchange(Ranks):
    """All-to-all exchange between the ranks of a group. Construction is a collective call."""

    def __init__(self, group: Any = None, *, timeout: float = 600.0, transport: str = "auto") -> None:
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not is_number or not 0 < timeout <= MAX_SECONDS:
            raise InputError(
                f"timeout must be seconds above 0 and at most {MAX_SECONDS:.0f}, got {timeout!r}"
            )
        checks.one_of(transport, TRANSPORTS, "transport")
        if not has_process_group():
            raise UsageError("an exchange between ranks needs a process group: call init_process_group first")
        parent = _group_of(group)
        members = dist.get_process_group_ranks(parent)
        self.timeout = timeout
        self.device = torch.device("cpu")
        self._wanted = transport
        self._has_nccl = "nccl" in str(dist.get_backend_config(parent))
        self._nccl: Any = None
        self._arrive(parent, len(members))
        self._group: Any = dist.new_group(
            members, timeout=timedelta(seconds=timeout), backend="gloo", use_local_synchronization=True
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
        self._buffers = MessageBuffers()
        self._mailbox: Any = None
        self._watch: PeerWatch | None = None
        if self.size > 1:
            self._watch = PeerWatch(self.rank, self.size, self.gather, timeout)
        wanted = self.gather(transport)
        if set(wanted) != {transport}:
            raise InputError(f"transport must be the same on all ranks, got {', '.join(map(str, wanted))}")
        if self.size > 1 and transport != "gloo":
            self._mailbox = self.submit(self._open_mailbox).result()  # no limit: that of its collectives
            if self._mailbox is None and transport == "shared_memory":
                raise UsageError("transport='shared_memory': not all ranks are on one host")
        self.transport = "gloo" if self._mailbox is None else "shared_memory"
        logger.debug("rank %d of %d exchanges by %s", self.rank, self.size, self.transport)

    def _arrive(self, parent: Any, size: int) -> None:
        """Wait for all ranks in the group of the caller, whose connections exist: a new one has none yet."""
        if size == 1 or "gloo" not in str(dist.get_backend_config(parent)):
            return
        key = f"exchange/{parent.get_group_store().add(f'exchanges/{dist.get_rank()}', 1)}"
        with naming_absent_ranks(parent, "the first exchange", key, self.timeout):
            nothing = torch.zeros(size, dtype=torch.uint8, device="cpu")
            dist.all_to_all_single(torch.empty_like(nothing), nothing, group=parent)

    def use_device(self, device: torch.device) -> None:
        """Exchange bytes on a device from now on. A collective call; small messages stay on the CPU."""
        self.device = device
        on_gpu = device.type == "cuda"
        if on_gpu:
            self.run(lambda: torch.cuda.set_device(device))  # each thread has its own current device
        wants_nccl = self._wanted == "nccl" or (self._wanted == "auto" and self._has_nccl and self.size > 1)
        gpu = str(torch.cuda.get_device_properties(device).uuid) if on_gpu else ""
        every = self.gather((wants_nccl, gpu))
        distinct = {own for _, own in every if own}
        if all(wanted for wanted, _ in every) and len(distinct) == self.size:
            members = dist.get_process_group_ranks(self._group)
            limit = timedelta(seconds=self.timeout)
            self._nccl = dist.new_group(
                members, timeout=limit, backend="nccl", use_local_synchronization=True
            )
            self.transport = "nccl"
        elif self._wanted == "nccl":
            raise UsageError(
                "transport='nccl': each rank needs a GPU of its own and tables with engine='cuda'"
            )

    # ---- the thread

    def submit(self, work: Callable[[], T], *lent: Tensor | None) -> Future[T]:
        """Run a function in the thread, after everything submitted before.

        `lent` are the tensors of the current CUDA stream that it reads.
        """
        future: Future[T] = Future()
        ready = None
        if self.device.type == "cuda":
            self._hold(lent, to_thread=True)
            ready = torch.cuda.current_stream(self.device).record_event()
        self._tasks.put((lambda: self._attempt(work, ready), future))
        return future

    def take(self, tensor: Tensor) -> Tensor:
        """Let the current CUDA stream wait for a result of the thread."""
        if self.device.type == "cuda":
            self._hold([tensor], to_thread=False)
        return tensor

    def _hold(self, tensors: Sequence[Tensor | None], *, to_thread: bool) -> None:
        """Order memory between the current stream and the default one, that of the thread, if they differ."""
        current, own = torch.cuda.current_stream(self.device), torch.cuda.default_stream(self.device)
        if current == own:
            return
        if not to_thread:
            current.wait_stream(own)
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(own if to_thread else current)

    def run(self, work: Callable[[], T], *lent: Tensor | None) -> T:
        if threading.current_thread() is self._thread:
            return work()
        return self.submit(work, *lent).result()  # no limit: each collective of the thread has one

    def settle(self) -> None:
        """Wait until everything submitted before has ended, with or without an error."""
        wait([self.submit(lambda: None)])  # no limit: each collective of the thread has one

    def _attempt(self, work: Callable[[], T], ready: torch.cuda.Event | None) -> T:
        if self._broken is not None:
            raise UsageError(f"an earlier exchange failed: {self._broken}")
        if ready is not None:
            torch.cuda.current_stream(self.device).wait_event(ready)
        try:
            return work()
        except RankTimeoutError as error:  # the state of the other ranks is unknown from now on
            self._broken = self._broken or error
            raise

    def new_buffer(self, size: int) -> Tensor:
        """Return memory for a message; it is used again when the last tensor that shares it is freed."""
        # returns: uint8 [size], uninitialized, on `device`.
        if self.device.type == "cpu":
            return self._buffers.new(size)
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    # ---- collectives; they run in the thread

    def all_to_all(self, data: Tensor, send: Sequence[int], receive: Sequence[int], what: str) -> Tensor:
        # data: uint8 [sum(send)], on the CPU or on `device`; returns: uint8 [sum(receive)], on the device of
        # `data`.
        if threading.current_thread() is not self._thread:
            return self.run(lambda: self.all_to_all(data, send, receive, what))
        send, receive = list(send), list(receive)
        self.calls += 1
        direct = self._nccl is not None and data.is_cuda
        if self.size == 1 and not direct:
            return data
        with span("megalith.exchange"):
            if direct:
                return self._between_gpus(data, send, receive, what)
            if data.is_cpu:
                return self._all_to_all(data, self._buffers.new(sum(receive)), send, receive, what)
            host = staging_buffer(data.numel()).copy_(data)  # waits for the GPU
            received = self._all_to_all(host, staging_buffer(sum(receive)), send, receive, what)
            return received.to(data.device, non_blocking=True)

    def _between_gpus(self, send: Tensor, send_sizes: list[int], recv_sizes: list[int], what: str) -> Tensor:
        received = self.new_buffer(sum(recv_sizes))
        began = clock.perf_counter()
        with self._naming(what):
            dist.all_to_all_single(received, send.contiguous(), recv_sizes, send_sizes, group=self._nccl)
        self.waited = clock.perf_counter() - began  # of the host; the GPU may still wait
        return received

    def _all_to_all(
        self, send: Tensor, received: Tensor, send_sizes: list[int], recv_sizes: list[int], what: str
    ) -> Tensor:
        began = clock.perf_counter()
        if self._mailbox is not None:
            try:
                missing = self._mailbox.exchange(
                    send, send_sizes, received, recv_sizes, self.timeout, self._left
                )
            except InputError as error:  # shared memory cannot be used after that
                self._broken = RankFailedError(
                    f"{what}: {error}; all ranks must make the same calls in the same order"
                )
                raise self._broken from None
            if missing:
                self._raise_if_left(what, missing)
                names = dist.get_process_group_ranks(self._group)
                raise RankTimeoutError(timeout_message(what, [names[r] for r in missing], self.timeout))
        else:
            with self._naming(what):
                work: Any = dist.all_to_all_single(
                    received, send, recv_sizes, send_sizes, group=self._group, async_op=True
                )
                self._wait(work, what)
        if self._watch is not None:
            self._watch.complete()
        self.waited = clock.perf_counter() - began
        return received

    def _wait(self, work: Any, what: str) -> None:
        """Wait for a collective of gloo, which sometimes waits on for a rank that was killed in it."""
        completed = False
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if completed:
                    self._raise_if_left(what, range(self.size), seconds=min(1.0, self.timeout))
                    raise
            completed = work.is_completed()  # perhaps since the slice ended: the next wait tells how
            if not completed and self._left(range(self.size)):
                with suppress(RuntimeError):
                    work.wait(_SLICE)  # what that rank has sent before may still arrive
                    return
                # Its destructor, at the end of the process, would wait for the collective until the timeout.
                for pending in (self._group, self._group._get_backend(torch.device("cpu"))):
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pending))
                self._raise_if_left(what, range(self.size))

    def _left(self, ranks: Sequence[int], seconds: float = 0.0) -> dict[int, str]:
        return {} if self._watch is None else self._watch.left(ranks, seconds)

    def _raise_if_left(self, what: str, ranks: Sequence[int], seconds: float = 0.0) -> None:
        left = self._left(ranks, seconds)
        if not left:
            return
        names = dist.get_process_group_ranks(self._group)
        told = "; ".join(f"rank {names[rank]} has left: {how}" for rank, how in left.items())
        self._broken = RankFailedError(f"{what}: rank {dist.get_rank()} cannot continue, because {told}")
        raise self._broken

    def gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)

        def work() -> list[Any]:
            size = torch.tensor([data.numel()] * self.size, device="cpu").view(torch.uint8)
            eights = [8] * self.size
            sizes = self._all_to_all(size, torch.empty_like(size), eights, eights, "agreement")
            lengths = sizes.view(torch.int64).tolist()
            received = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
            sent = data.repeat(self.size)
            self._all_to_all(sent, received, [data.numel()] * self.size, lengths, "agreement")
            return [pickle.loads(part.numpy().tobytes()) for part in received.split(lengths)]

        return self.run(work)

    def _naming(self, what: str) -> Any:
        self._number += 1
        return naming_absent_ranks(self._group, what, f"exchange {self._number}", self.timeout)

    def _open_mailbox(self) -> Any:
        """Return the shared memory of all ranks, or None if they are on several hosts."""
        native: Any = native_module()
        mailbox, path = None, ""
        if native is not None and hasattr(native, "Mailbox"):
            folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
            path = os.path.join(folder, f"megalith-{uuid.uuid4().hex}")
            with suppress(OSError):
                mailbox = native.Mailbox(path, self.rank, self.size)
        try:
            paths = self.gather("" if mailbox is None else path)
            try:
                if mailbox is None or not all(paths):
                    raise OSError
                mailbox.connect(paths)
                connected = True
            except (OSError, InputError):
                connected = False
            return mailbox if all(self.gather(connected)) else None
        finally:
            if mailbox is not None:
                mailbox.unlink()


def staging_buffer(size: int) -> Tensor:
    """Return host memory that a GPU copies to and from without another copy."""
    # returns: uint8 [size], uninitialized.
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available(), device="cpu")


def _work(tasks: queue.SimpleQueue[Any]) -> None:
    """Run the thread. It holds no reference to the exchange, so the exchange can be freed and end it."""
    while (task := tasks.get()) is not None:  # no limit: the next piece of work
        work, future = task
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        del task, work, future  # they may hold large tensors


def _group_of(group: Any) -> Any:
    """Return the process group of what a user passes."""
    if group is None:
        return dist.group.WORLD
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise InputError(f"a device mesh must have one dimension, got {group.ndim}: pass a sub-mesh")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError("this process is not in the process group that was passed")
    return group
