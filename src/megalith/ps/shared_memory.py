"""SegmentPool: memory of a worker that servers on the same host read gradients from and write rows to.

A segment is an anonymous file of Linux (memfd) that both processes map. The worker makes it, sends its file
descriptor over the socket once, and later messages name parts of it: (segment, offset, size). The worker does
not use such a part for anything else before the server has answered; if the answer is lost, it never does
(`retire`). The file cannot shrink (it is sealed), so a worker cannot make a server fail by truncating it, and
nothing is left behind when processes are killed.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ps.messages import Array

SHARED_MEMORY = sys.platform == "linux"
SMALLEST = 16 << 10
"""Less than this is sent over the socket, which then costs less than to name a part of a segment."""
_SEGMENT_SIZE = 256 << 10
"""The smallest segment; others are twice, four times, ... as large. Only pages in use take memory."""
_KEPT = 32  # Number of free segments that are kept


@dataclass
class SharedSegment:
    number: int  # Identifies it in messages
    size: int  # Bytes
    file: int  # The file descriptor
    memory: mmap.mmap  # The mapping
    address: int  # Where it begins in this process
    retired: bool = False  # Whether a server may use it at any time from now on


class SegmentPool:
    """Memory is used again when the last tensor that shares it is freed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._free: list[SharedSegment] = []
        self._returned: deque[SharedSegment] = deque()  # memory may be freed at any time, in any thread
        self._segments: dict[int, SharedSegment] = {}
        weakref.finalize(self, _close_files, self._segments)

    @property
    def segments(self) -> Mapping[int, SharedSegment]:
        return self._segments

    def new(self, size: int) -> Tensor:
        # returns: uint8 [size], uninitialized.
        if size < SMALLEST or not SHARED_MEMORY:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        wanted = max(_SEGMENT_SIZE, 1 << (size - 1).bit_length())
        with self._lock:
            self._take_back()
            found = next((each for each in reversed(self._free) if each.size == wanted), None)
            if found is None:
                found = self._make(wanted)
            else:
                self._free.remove(found)
        array = np.frombuffer(found.memory, np.uint8)
        weakref.finalize(array, self._returned.append, found).atexit = False
        return torch.from_numpy(array)[:size]

    def find(self, array: Array) -> tuple[SharedSegment, int] | None:
        address: int = array.__array_interface__["data"][0]
        with self._lock:
            for segment in self._segments.values():
                if segment.address <= address < segment.address + segment.size:
                    return None if segment.retired else (segment, address - segment.address)
        return None

    def retire(self, array: Array) -> None:
        """Never use the segment of an array again; it is unmapped when its last tensor is freed."""
        found = self.find(array)
        if found is not None:
            found[0].retired = True

    def _make(self, size: int) -> SharedSegment:
        file = os.memfd_create("megalith", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = mmap.mmap(file, size)
        except BaseException:
            os.close(file)
            raise
        address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        made = SharedSegment(next(self._numbers), size, file, memory, address)
        self._segments[made.number] = made
        return made

    def _take_back(self) -> None:
        while self._returned:
            segment = self._returned.popleft()
            if segment.retired:
                self._drop(segment)
            else:
                self._free.append(segment)
        while len(self._free) > _KEPT:
            self._drop(self._free.pop(0))

    def _drop(self, segment: SharedSegment) -> None:
        del self._segments[segment.number]
        os.close(segment.file)


def _close_files(segments: Mapping[int, SharedSegment]) -> None:
    for segment in segments.values():  # the memory stays until the last tensor that shares it is freed
        os.close(segment.file)


def map_segment(file: int, size: int) -> Array:
    # returns: uint8 [size], the memory.
    try:
        found = os.fstat(file).st_size
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if found != size or not size or not sealed:
            raise InputError(f"a segment of {size} bytes was announced, its file has {found}")
        return np.frombuffer(mmap.mmap(file, size), np.uint8)
    except OSError as error:
        raise InputError(f"a file that was sent is not a segment: {error}") from None
    finally:
        os.close(file)
