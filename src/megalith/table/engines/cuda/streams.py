"""CUDA streams: the order of the calls of an engine, and copies between device and host on a side stream.

`StreamOrder`: the calls of an engine run one after another on the device, whatever their streams. The
tables of a group share one order, because most calls use all of them.

torch gives freed memory back to the stream that it was allocated on, although another stream may still
use it. So once calls come from several streams, tensors are marked with the streams that use them
(`hold`, `retire`).

Kernels are launched on the current device of the thread. So a call of a table on another device makes
that device the current one until it ends. A tensor that is made under torch.inference_mode cannot be
changed later outside of it. The memory of a table stays, so a call leaves that mode until it ends.

`HostCopies`: blocks of rows travel between the device and the host through pinned memory.

    to the host     gather on the current stream -> copy on a side stream -> event; the host reads a block
                    while the next one travels
    to the device   the host fills pinned memory -> copy on the side stream -> the current stream waits for
                    it; the host fills a block while the one before travels

Two blocks of at most BLOCK_BYTES are in use at a time in each direction, and chunks that fit in a block
are given to users as they arrive (`HostCopies.lend`). Their memory comes from torch's
cache of pinned memory, so all tables share it. Without CUDA the same calls copy between plain tensors.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from megalith.table.table_data import Chunk

_SEEN: dict[tuple[int | None, int], torch.cuda.Stream] = {}
"""The streams of all calls so far, by device and handle; all default streams have the same handle."""


def hold(tensors: Iterable[Tensor]) -> None:
    """Note that launches of the current stream use tensors that another stream may have allocated."""
    if len(_SEEN) > 1 and not torch.cuda.is_current_stream_capturing():  # a graph keeps its memory
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


def retire(*tensors: Tensor) -> None:
    """Note that launches of any stream may use tensors that are about to be freed."""
    if len(_SEEN) > 1:
        streams = list(_SEEN.values())  # another thread may add one
        for tensor in tensors:
            for stream in streams:
                if tensor.is_cuda and stream.device == tensor.device:
                    tensor.record_stream(stream)


def is_captured(device: torch.device) -> bool:
    """Return whether launches are being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class StreamOrder:
    """A context manager around the launches of a call: a lock, and an order between CUDA streams.

    On the stream of the previous call it costs about a microsecond. On another stream, the device waits for
    the previous stream; the host does not wait.

    It also counts what happens to its tables, so that a call asks once for all of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self._owner = 0  # the thread of the calls in progress
        self._last: torch.cuda.Stream | None = None
        self.last_handle = -1
        self._changed: list[ExitStack | None] = []  # of each call in progress
        self.writes = 0  # Number of calls that wrote, removed or moved rows
        self.num_snapshots = 0  # Number of open snapshots

    def __enter__(self) -> None:
        self.lock.acquire()  # no limit: held for one call
        self._owner = threading.get_ident()
        self._changed.append(enter_call(self.device))
        self.follow(current_handle(self.device))

    def __exit__(self, *_: object) -> None:
        changed = self._changed.pop()
        if changed is not None:
            changed.close()
        if not self._changed:
            self._owner = 0
        self.lock.release()

    @property
    def is_held(self) -> bool:
        return self._owner == threading.get_ident()

    def follow(self, handle: int) -> None:
        """Make the current stream wait for the stream of the previous call."""
        if handle == self.last_handle:
            return
        current = torch.cuda.current_stream(self.device)
        _SEEN[self.device.index, handle] = current
        if self._last is not None:
            current.wait_stream(self._last)
        self._last, self.last_handle = current, handle

    def join(self, other: StreamOrder) -> None:
        """Order the calls of another table too: the next call waits for those that it has made."""
        with self:
            other.follow(self.last_handle)
            # Above both, so that nothing found before is taken for current.
            self.writes = max(self.writes, other.writes) + 1
            self.num_snapshots += other.num_snapshots


def current_handle(device: torch.device) -> int:
    if device.type != "cuda":
        return -1
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def enter_call(device: torch.device) -> ExitStack | None:
    """Make a device the current one of this thread, and leave inference mode."""
    elsewhere = device.type == "cuda" and torch._C._cuda_getDevice() != device.index
    inference = torch.is_inference_mode_enabled()
    if not elsewhere and not inference:
        return None
    changed = ExitStack()
    if elsewhere:
        changed.enter_context(torch.cuda.device(device))
    if inference:
        changed.enter_context(torch.inference_mode(False))
        changed.enter_context(torch.no_grad())
    return changed


BLOCK_BYTES = 64 << 20  # Bytes of pinned memory that a block takes, about
LENT_BYTES = 4 * BLOCK_BYTES
"""Bytes of pinned memory that users may hold as chunks of scans; more chunks are in ordinary memory."""
IN_FLIGHT = 4  # Copies to the device: a restored block is two, one of ids and one of the other columns
ALIGNED_ROWS = 16
"""Blocks have a multiple of this number of rows: Triton compiles a kernel once more for other pointers."""
_ALIGNMENT = 64


def all_columns(chunk: Chunk) -> list[Tensor]:
    extra = [column for column in (chunk.count, chunk.step) if column is not None]
    return [chunk.ids, chunk.time, *chunk.columns(), *extra]


def with_columns(chunk: Chunk, columns: Sequence[Tensor]) -> Chunk:
    """Return a chunk like a given one, of other columns."""
    ids, time, rows, *rest = columns
    states = dict(zip(chunk.state, rest, strict=False))
    counted = rest[len(states) :]
    return Chunk(ids, rows, states, time, *counted)


def block_rows(row_bytes: int) -> int:
    return max(ALIGNED_ROWS, BLOCK_BYTES // max(1, row_bytes) // ALIGNED_ROWS * ALIGNED_ROWS)


class ArrivingColumns:
    """Columns in pinned memory that a copy fills."""

    def __init__(self, columns: list[Tensor], event: torch.cuda.Event | None) -> None:
        self._columns = columns
        self._event = event

    def wait(self) -> list[Tensor]:
        """Wait until the copy has ended, and return the columns."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._columns


class HostCopies:
    """The copies of one table. Calls of `to_device` are ordered by the lock of its engine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sent: deque[torch.cuda.Event] = deque()
        self._lent: list[weakref.ref[np.ndarray]] = []

    def lend(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """Return columns that a user may keep: these, or copies if users hold much pinned memory.

        A copy into new memory is several times slower than the way from the device, because the system must
        provide the pages.
        """
        self._lent = [array for array in self._lent if array() is not None]
        if sum(array.nbytes for lent in self._lent if (array := lent()) is not None) >= LENT_BYTES:
            return [column.clone() for column in columns]
        arrays = [column.numpy() for column in columns]  # a tensor holds its array as long as it is used
        self._lent.extend(map(weakref.ref, arrays))
        return [torch.from_numpy(array) for array in arrays]

    def to_host(self, columns: Sequence[Tensor]) -> ArrivingColumns:
        targets = self._pinned_like(columns)
        if self._stream is None:
            for target, column in zip(targets, columns, strict=True):
                target.copy_(column)
            return ArrivingColumns(targets, None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, column in zip(targets, columns, strict=True):
                target.copy_(column, non_blocking=True)
                column.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)
        return ArrivingColumns(targets, event)

    def to_device(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """Copy columns to the device. The host waits only if several copies are on their way."""
        moving = [column for column in columns if column.device != self._device]
        if not moving:
            return list(columns)
        assert self._stream is not None  # otherwise the device is the host
        while len(self._sent) >= IN_FLIGHT:
            self._sent.popleft().synchronize()
        pinned = self._pinned_like(moving)
        for target, column in zip(pinned, moving, strict=True):
            target.copy_(column)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copies = [source.to(self._device, non_blocking=True) for source in pinned]
            event = torch.cuda.Event()
            event.record(self._stream)
        current.wait_event(event)
        for copy in copies:
            copy.record_stream(current)
        self._sent.append(event)
        arrived = iter(copies)
        return [column if column.device == self._device else next(arrived) for column in columns]

    def _pinned_like(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """Return uninitialized columns in one block of pinned memory."""
        sizes = [column.numel() * column.element_size() for column in columns]
        places = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        block = torch.empty(sum(places), dtype=torch.uint8, pin_memory=self._stream is not None, device="cpu")
        return [
            place[:size].view(column.dtype).view(column.shape)
            for place, size, column in zip(block.split(places), sizes, columns, strict=True)
        ]


class ChunkDownload:
    """The way of one chunk to the host, in blocks. The first block starts at once, on the stream of the
    gather; the later ones follow it on the side stream.
    """

    def __init__(self, copies: HostCopies, source: Chunk, rows: int) -> None:
        self._copies = copies
        self._source = source
        self._rows = rows
        self._at = 0
        self._sent: deque[tuple[int, ArrivingColumns]] = deque()
        self._send()

    def _send(self) -> None:
        if self._at < self._source.ids.numel():
            part = self._source.part(self._at, self._at + self._rows)
            self._sent.append((self._at, self._copies.to_host(all_columns(part))))
            self._at += self._rows

    def finish(self, new: Callable[[], Chunk]) -> Chunk:
        """Wait for the chunk. `new` makes a chunk on the host, for one that has several blocks."""
        if self._sent and self._at >= self._source.ids.numel():
            arrived = self._sent.popleft()[1].wait()  # no limit: a copy of the device
            return with_columns(self._source, self._copies.lend(arrived))
        target = new()
        while self._sent:
            self._send()
            start, arriving = self._sent.popleft()
            arrived = arriving.wait()  # no limit: a copy of the device
            part = target.part(start, start + arrived[0].numel())
            for own, column in zip(all_columns(part), arrived, strict=True):
                own.copy_(column)
        return target
