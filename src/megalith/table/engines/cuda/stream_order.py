"""StreamOrder: the calls of an engine run one after another on the device, whatever their streams.

The tables of a group share one order, because most calls use all of them.

torch gives freed memory back to the stream that it was allocated on, although another stream may still use
it. So once calls come from several streams, tensors are marked with the streams that use them.

Kernels are launched on the current device of the thread. So a call of a table on another device makes that
device the current one until it ends.

A tensor that is made under torch.inference_mode cannot be changed later outside of it. The memory of a table
stays, so a call leaves that mode until it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor

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


class StreamOrder:
    """A context manager around the launches of a call: a lock, and an order between CUDA streams.

    On the stream of the previous call it costs about a microsecond. On another stream, the device waits for
    the previous stream; the host does not wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self._owner = 0  # the thread of the calls in progress
        self._last: torch.cuda.Stream | None = None
        self.last_handle = -1
        self._changed: list[ExitStack | None] = []  # of each call in progress

    def __enter__(self) -> None:
        self.lock.acquire()
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
        """Whether this thread is within a call."""
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


def current_handle(device: torch.device) -> int:
    """Return the handle of the current stream."""
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
