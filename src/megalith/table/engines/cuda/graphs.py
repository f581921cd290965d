"""The memory of lookups, and CUDA graphs of the launches that repeat on it.

A training loop makes the same launches in every step, and on the host they take longer than on the device.
So a lookup of a size that repeats gets memory that stays (`SearchSlot`), up to the update that uses it:

    ids        of all tables of a kind, one table after another; padded, so that ragged batches of about the
               same size share a slot
    rows       what was found for them
    fields     descriptors, copied before each call: of the parts of the pooling, and the spans of the tables

All arguments of the launches are then in memory that stays, apart from numbers that are read from it. So the
launches on a slot are recorded in its second call and replayed from then on, in one call of the driver each
for lookup and update. Memory of a launch group that is replaced advances its `generation`, and they are
recorded again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megalith.table.engines.cuda.launch_group import JoinedRows, LaunchGroup, Spans
from megalith.table.engines.cuda.pooling_plans import PlannedPooling, PoolingPlan, Room
from megalith.table.engines.cuda.streams import retire

SEEN_BEFORE = 2
"""Lookups of a size before it gets memory of its own; they also compile the kernels."""
RECENT = 16
"""Lookups among which a size must repeat."""
MAX_SIZES = 6
MAX_SLOTS = 4
"""Slots of a size: lookups that are in progress at the same time."""


class FoundTogether:
    """What one search found, for all its tables together."""

    def __init__(
        self,
        writes: int,
        groups: Sequence[LaunchGroup],
        rows: Sequence[JoinedRows],
        planned: PlannedPooling | None = None,
        slot: SearchSlot | None = None,
    ) -> None:
        self.writes = writes  # Number of writes at that time; while it stays, absent ids stay absent
        self.by_group = dict(zip(groups, rows, strict=True))
        self.planned = planned  # The pooling that it was made for
        self.slot = slot  # The memory of its rows, if they are of a pooling
        self.used = False  # Whether an update has used it; its memory may then be used again

    def rows(self, group: LaunchGroup, sizes: list[int]) -> JoinedRows | None:
        """Return the rows of the tables of a group, if they are those of ids of these numbers."""
        rows = self.by_group.get(group)
        return rows if rows is not None and rows.sizes == sizes else None

    def all_rows(self, planned: PlannedPooling) -> list[JoinedRows] | None:
        """Return the rows of all kinds of tables that a pooling reads, if it has them."""
        found = [self.rows(*own) for own in zip(planned.plan.groups, planned.kind_sizes, strict=True)]
        rows = [own for own in found if own is not None]
        return rows if found and len(rows) == len(found) else None

    def is_planned(self, planned: PlannedPooling | None) -> bool:
        """Whether its memory has launches for the gradients of a pooling; None: for gradients of ids."""
        return planned is None or (self.planned is not None and self.planned.plan is planned.plan)


class Graph(Protocol):
    """Launches that were recorded."""

    def replay(self) -> None:
        """Make the launches."""


def can_record(device: torch.device) -> bool:
    """Return whether launches can be recorded: not within a graph of the user."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def record(launch: Callable[[], None]) -> Graph:
    """Record launches without making them."""
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
    """Memory for one lookup of a plan at a time, and the launches that were recorded on it."""

    def __init__(self, plan: PoolingPlan, rooms: Sequence[Room]) -> None:
        self._groups = plan.groups
        self._device = plan.groups[0].device
        self._filled: tuple[PlannedPooling, list[int]] | None = None  # what `fields` describes
        self._generation = -1
        self._graphs: dict[Hashable, Graph | None] = {}  # None: launched once
        self._user: weakref.ref[FoundTogether] | None = None
        self.fields = torch.empty(plan.num_fields, dtype=torch.int64, device=self._device)
        self._memory = []
        first = plan.num_part_fields
        for group, room, size in zip(plan.groups, rooms, plan.num_span_fields, strict=True):
            spans = Spans(self.fields[first : first + size], len(group.tables), room.n, room.most)
            ids = torch.empty(room.n, dtype=torch.int64, device=self._device)
            self._memory.append((ids, spans, group.new_search(room.n)))
            first += size

    @property
    def is_free(self) -> bool:
        """Whether no lookup needs the memory any more."""
        user = None if self._user is None else self._user()
        return user is None or user.used

    def fill(
        self, planned: PlannedPooling, columns: Sequence[Tensor], addresses: list[int]
    ) -> list[JoinedRows]:
        """Copy the ids and the descriptors of a lookup; return the rows of each kind, not yet found."""
        # addresses: those of the outputs.
        if self._filled is None or self._filled[0] is not planned or self._filled[1] != addresses:
            self._groups[0].write(self.fields, planned.fields(addresses))
            self._filled = planned, addresses
        rows = []
        for own, sizes, memory in zip(planned.plan.members, planned.kind_sizes, self._memory, strict=True):
            joined = JoinedRows(*memory, sizes)
            if len(own.names) == 1:
                joined.ids[: sum(sizes)].copy_(columns[own.names[0]])
            else:
                torch.cat([columns[name] for name in own.names], out=joined.ids[: sum(sizes)])
            rows.append(joined)
        return rows

    def give(self, found: FoundTogether) -> None:
        """Keep the memory for a lookup, as long as it needs it."""
        self._user = weakref.ref(found)

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Launch, or replay the launches of an earlier call on this slot."""
        if not can_record(self._device):
            return launch()
        for group in self._groups:
            group.descriptors()  # a table may have grown
        generation = sum(group.generation for group in self._groups)
        if generation != self._generation:  # memory was replaced
            self._generation = generation
            self._graphs.clear()
        if key not in self._graphs:
            self._graphs[key] = None
            return launch()
        graph = self._graphs[key]
        if graph is None:
            graph = record(launch)
            if generation == sum(group.generation for group in self._groups):
                self._graphs[key] = graph
        return graph.replay()

    def retire(self) -> None:
        """Note that the memory is about to be freed; replayed launches of any stream may use it."""
        retire(self.fields, *(tensor for ids, _, search in self._memory for tensor in (ids, *search)))


class SearchSlots:
    """The slots of poolings of sizes that repeat."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, list[SearchSlot]] = {}
        self._recent: deque[Hashable] = deque(maxlen=RECENT)

    def find(self, planned: PlannedPooling) -> SearchSlot | None:
        """Return a free slot for lookups of a pooling."""
        key, rooms = planned.slot_key, planned.rooms
        slots = self._slots.pop(key, None)
        if slots is None:
            self._recent.append(key)
            if self._recent.count(key) <= SEEN_BEFORE:
                return None
            slots = []
            if len(self._slots) >= MAX_SIZES:  # the least recently used
                for slot in self._slots.pop(next(iter(self._slots))):
                    slot.retire()
        self._slots[key] = slots
        for slot in slots:
            if slot.is_free:
                return slot
        if len(slots) < MAX_SLOTS:
            slots.append(SearchSlot(planned.plan, rooms))
            return slots[-1]
        return None
