"""RecordedCalls: launches that repeat with the same arguments become one CUDA graph.

A training loop with static shapes makes the same launches in every step, and on the host they take longer
than on the device. Where all arguments of a call are in buffers that stay (`SearchSlot`, scratch memory,
descriptors that are written before the call), the launches are recorded after some calls and replayed
from then on, in one call of the driver.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from megalith.table.engines.cuda.launch_group import LaunchGroup, RowSearch
from megalith.table.engines.cuda.streams import retire

CALLS_BEFORE = 3
"""Plain calls before the launches are recorded; they also compile the kernels."""
MAX_GRAPHS = 8
MAX_SLOTS = 4
RECENT = 16
"""Lookups among which sizes must repeat to get memory of their own. Sizes of ragged batches come and go."""


class RecordedCalls:
    """The recorded launches of one launch group."""

    def __init__(self, group: LaunchGroup) -> None:
        self._group = group
        self._generation = -1
        self._calls: dict[tuple[object, ...], int] = {}
        self._graphs: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}

    def run(self, key: tuple[object, ...], launch: Callable[[], None]) -> None:
        """Launch, or replay the launches of an earlier call."""
        if self._group.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return launch()
        self._group.descriptors()  # a table may have grown
        if self._generation != self._group.generation:  # buffers were replaced
            self._generation = self._group.generation
            self._calls.clear()
            self._graphs.clear()
        graph = self._graphs.get(key)
        if graph is not None:
            return graph.replay()
        seen = self._calls[key] = self._calls.get(key, 0) + 1
        if seen != CALLS_BEFORE + 1 or len(self._graphs) >= MAX_GRAPHS:
            if len(self._calls) > 16 * MAX_GRAPHS:
                self._calls.clear()
            return launch()
        graph = _record(launch)
        if self._generation == self._group.generation:
            self._graphs[key] = graph
        return graph.replay()


def _record(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
    current.wait_stream(side)
    return graph


class SearchSlot:
    """Memory for one lookup of fixed sizes: its ids and what was found."""

    def __init__(self, group: LaunchGroup, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.ids = torch.empty(sum(sizes), dtype=torch.int64, device=group.device)
        self.memory = group.new_search(sum(sizes))
        self._group = group
        self._values: list[int] = []
        self._fields = torch.empty(0, dtype=torch.int64, device=group.device)
        self._user: weakref.ref[RowSearch] | None = None

    @property
    def is_free(self) -> bool:
        """Whether no lookup needs the memory any more."""
        user = None if self._user is None else self._user()
        return user is None or user.used

    def write_fields(self, values: list[int]) -> torch.Tensor:
        """Copy descriptors to the same memory at each call."""
        # returns: int64 [n] on the device.
        if len(values) != len(self._values):
            retire(self._fields)
            self._fields = self._group.upload(values)
            self._group.generation += 1
        elif values != self._values:
            self._group.write(self._fields, values)
        self._values = values
        return self._fields

    def retire(self) -> None:
        """Note that the memory is about to be freed; replayed launches of any stream may use it."""
        retire(self.ids, *self.memory, self._fields)

    def take(self) -> RowSearch:
        """Give the memory to a lookup."""
        rows, missing, absent = self.memory
        search = RowSearch(rows, missing, absent, self)
        self._user = weakref.ref(search)
        return search


class SearchSlots:
    """The slots of a launch group."""

    def __init__(self, group: LaunchGroup) -> None:
        self._group = group
        self._slots: dict[tuple[int, ...], list[SearchSlot]] = {}
        self._recent: deque[tuple[int, ...]] = deque(maxlen=RECENT)

    def find(self, sizes: Sequence[int]) -> SearchSlot | None:
        """Return a free slot for lookups of these sizes."""
        key = tuple(sizes)
        slots = self._slots.get(key)
        if slots is None:
            self._recent.append(key)
            if self._recent.count(key) < CALLS_BEFORE:
                return None
            if len(self._slots) >= MAX_SLOTS:
                for slot in self._slots.pop(next(iter(self._slots))):
                    slot.retire()
                self._group.generation += 1
            slots = self._slots[key] = []
        for slot in slots:
            if slot.is_free:
                return slot
        if len(slots) < MAX_SLOTS:
            slots.append(SearchSlot(self._group, sizes))
            return slots[-1]
        return None
