"""StreamOrder: the calls of an engine run one after another on the device, whatever their streams.

torch gives freed memory back to the stream that it was allocated on, although another stream may still use
it. So once calls come from several streams, tensors are marked with the streams that use them.

Kernels are launched on the current device of the thread. So a call of a table on another device makes that
device the current one until it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_SEEN: dict[tuple[int | None, int], torch.cuda.Stream] = {}
"""The streams of all calls so far, by device and handle; all default streams have the same handle."""


def hold(tensors: Iterable[Tensor]) -> None:
    """Note that launches of the current stream use tensors that another stream may have allocated.

    Args:
        tensors: Tensors on the device; some may be on the CPU.
    """
    if len(_SEEN) > 1 and not torch.cuda.is_current_stream_capturing():  # a graph keeps its memory
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


def retire(*tensors: Tensor) -> None:
    """Note that launches of any stream may use tensors that are about to be freed.

    Args:
        tensors: Tensors on the device.
    """
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

    Args:
        device: The device of the engine.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self._last: torch.cuda.Stream | None = None
        self.last_handle = -1
        self._before: list[int] = []  # the current device before each call in progress

    def __enter__(self) -> None:
        self.lock.acquire()
        self._before.append(enter_device(self.device))
        self.follow(current_handle(self.device))

    def __exit__(self, *_: object) -> None:
        leave_device(self._before.pop())
        self.lock.release()

    def follow(self, handle: int) -> None:
        """Make the current stream wait for the stream of the previous call.

        Args:
            handle: The handle of the current stream.
        """
        if handle == self.last_handle:
            return
        current = torch.cuda.current_stream(self.device)
        _SEEN[self.device.index, handle] = current
        if self._last is not None:
            current.wait_stream(self._last)
        self._last, self.last_handle = current, handle


class JointOrder:
    """The orders of several engines as one context manager.

    Args:
        orders: Their orders; always locked in this sequence.
    """

    def __init__(self, orders: Sequence[StreamOrder]) -> None:
        self._orders = list(orders)
        self._before: list[int] = []

    def __enter__(self) -> None:
        device = self._orders[0].device
        handle = current_handle(device)
        for order in self._orders:
            order.lock.acquire()
        self._before.append(enter_device(device))
        for order in self._orders:
            if order.last_handle != handle:
                order.follow(handle)

    def __exit__(self, *_: object) -> None:
        leave_device(self._before.pop())
        for order in reversed(self._orders):
            order.lock.release()


def current_handle(device: torch.device) -> int:
    """Return the handle of the current stream.

    Args:
        device: The device.

    Returns:
        The handle; -1 on a device without streams.
    """
    if device.type != "cuda":
        return -1
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def enter_device(device: torch.device) -> int:
    """Make a device the current one of this thread.

    Args:
        device: The device of a table.

    Returns:
        The current device before, for `leave_device`; -1 if nothing was changed.
    """
    if device.type != "cuda" or torch._C._cuda_getDevice() == device.index:
        return -1
    return int(torch.cuda._exchange_device(device.index))


def leave_device(before: int) -> None:
    """Return to the device before a call.

    Args:
        before: What `enter_device` returned.
    """
    if before >= 0:
        torch.cuda._exchange_device(before)
