"""RunBatches: the batches of a run, read once in total by all ranks together or once by every rank.

    reading    each rank reads                    its rows of a step           order of the samples
    stream     all rows                           its part of the batch        that of one process
    shards     its shard of the data              batch_size / ranks rows      depends on the number of ranks

Data in memory or generated, one rank, and a fixed number of micro-batches (whose result must not depend on
the number of ranks) are read as a stream. Files on several ranks are read as shards: decoding them on every
rank would cost each rank as much as one process. A rank whose shard ends first continues with empty batches.

A position in the middle of an epoch of shards is the list of the positions of all shards. It can be continued
on any number of ranks: the shards are assigned to the ranks, and a rank reads its shards one after the other.
A shard that was read to its end keeps its position there: files that are appended later are read as well.
A position in a stream is continued as a stream. In both cases the next epoch is read as configured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.data import Batch, Reader
from megalith.data.batch import Position
from megalith.data.equal_batches import EqualBatchLoader
from megalith.data.reader import read_ahead
from megalith.distributed.ranks import Ranks
from megalith.errors import InputError
from megalith.ragged import Ragged

_ALIGNMENT = 64
WATCHED_BATCHES = 100
"""Number of batches in which features with several ids per row are noticed."""


def bounds(rows: int, number: int, parts: int) -> tuple[int, int]:
    """Return start and end of part `number` if `rows` are split into nearly equal `parts`."""
    return rows * number // parts, rows * (number + 1) // parts


def part_of(batch: Batch, number: int, parts: int) -> Batch:
    return batch if parts == 1 else batch.part(*bounds(len(batch), number, parts))


class Copied(NamedTuple):
    """A batch that a side stream copies to a GPU, all tensors in one copy of one block of memory."""

    memory: Tensor
    batch: Batch
    ready: torch.cuda.Event

    @classmethod
    def start(cls, batch: Batch, stream: torch.cuda.Stream) -> Copied:
        places: dict[int, tuple[Tensor, int]] = {}  # columns with one id per row share their row_splits
        size = 0

        def add(tensor: Tensor | None) -> None:
            nonlocal size
            if tensor is not None and id(tensor) not in places:
                places[id(tensor)] = tensor, size
                size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT

        others: dict[str, Any] = {
            f.name: x for f in fields(batch) if isinstance(x := getattr(batch, f.name), Tensor)
        }
        for column in batch.features.values():
            for tensor in (column.values, column.row_splits, column.weights):
                add(tensor)
        for tensor in others.values():
            add(tensor)
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")
        for tensor, start in places.values():
            _view(pinned, tensor, start).copy_(tensor)
        with torch.cuda.stream(stream):
            memory, ready = pinned.to(stream.device, non_blocking=True), stream.record_event()
        moved = {key: _view(memory, *place) for key, place in places.items()}
        columns = {
            name: Ragged.trusted(
                moved[id(x.values)],
                moved[id(x.row_splits)],
                None if x.weights is None else moved[id(x.weights)],
                single=x.single,
            )
            for name, x in batch.features.items()
        }
        others = {name: moved[id(tensor)] for name, tensor in others.items()}
        return cls(memory, replace(batch, features=columns, **others), ready)

    def use(self) -> Batch:
        """Let the current stream wait for the copy, and keep its memory until that stream is done."""
        current = torch.cuda.current_stream()
        current.wait_event(self.ready)
        self.memory.record_stream(current)
        return self.batch


def _view(memory: Tensor, like: Tensor, start: int) -> Tensor:
    """Return the part of a block that holds a tensor."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


class StepBatch(NamedTuple):
    batch: Batch
    """The rows that this rank has read."""
    sizes: list[int] | None
    """Number of rows of each rank, if each has read its own. None: all ranks have read the same batch."""
    copied: Copied | None = None
    """The batch on a GPU, if it was copied ahead of the step."""

    def on_device(self, device: torch.device) -> Batch:
        """Return the whole batch on a device."""
        if self.copied is not None:
            return self.copied.use()
        return self.batch if self.batch.labels.device == device else self.batch.to(device, non_blocking=True)

    @property
    def rows(self) -> int:
        """Number of rows on all ranks together."""
        return len(self.batch) if self.sizes is None else sum(self.sizes)

    def sizes_of(self, ranks: int) -> list[int]:
        """Return the number of rows that each rank computes if each has one part."""
        if self.sizes is not None:
            return self.sizes
        return [end - start for start, end in (bounds(self.rows, rank, ranks) for rank in range(ranks))]

    def part(self, number: int, parts: int, own: range) -> Batch:
        if self.sizes is None:
            return part_of(self.batch, number, parts)
        return part_of(self.batch, number - own.start, len(own))


class RunBatches:
    def __init__(
        self,
        reader: Reader,
        ranks: Ranks,
        *,
        shards: bool = False,
        ahead: bool = False,
        copy_to: torch.device | None = None,
    ) -> None:
        # ahead: read in a thread. copy_to: a GPU to which that thread copies whole batches.
        self.reader = reader
        self._ahead = ahead
        self._stream = None if copy_to is None else torch.cuda.Stream(copy_to)
        self._at: Position | None = None
        """Where the step after the last one starts, while the reader is ahead of it."""
        self.shards = shards and 1 < ranks.size <= reader.batch_size
        self.ranks = ranks
        self._sharded = _RankShards(reader, ranks, ahead)
        self._equal: EqualBatchLoader | None = None
        self._skipped: Counter[str] = Counter()
        self.list_features: set[str] = set()
        self._watched = 0

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield the steps from the position to the end of the epoch. All ranks yield equally many."""
        for step in self._steps():
            if self._watched < WATCHED_BATCHES:
                self._watched += 1
                self.list_features |= features_with_lists(step.batch)
            yield step

    def _steps(self) -> Iterator[StepBatch]:
        if self._sharded.begun or (self.shards and not self._in_stream):
            yield from self._from_shards()
        else:
            yield from self._from_stream()

    @property
    def _in_stream(self) -> bool:
        """Whether the position is in an epoch that is read as a stream."""
        return self._at is not None or self.reader.position != self.reader.shard(0, 1).position

    def _from_stream(self) -> Iterator[StepBatch]:
        if not self._ahead:
            yield from (StepBatch(batch, None) for batch in self.reader)
            return
        if self._at is not None:  # the last loop was left early
            self.reader.seek(self._at)
        name = type(self.reader).__name__
        for step in read_ahead(self._copied(self.reader), timeout=self.ranks.timeout, name=name):
            self._at = step.batch.position
            yield step
        self._at = None

    def _copied(self, batches: Iterable[Batch]) -> Iterator[StepBatch]:
        for batch in batches:
            yield StepBatch(batch, None, None if self._stream is None else Copied.start(batch, self._stream))

    def _from_shards(self) -> Iterator[StepBatch]:
        if self._equal is None:
            self._equal = EqualBatchLoader(self._sharded, timeout=self.ranks.timeout)
        for batch in self._equal:
            yield StepBatch(batch, self._equal.sizes or [len(batch)])
        self._skipped += self._sharded.end()

    @property
    def lost_writes(self) -> int:
        """Number of updates that were lost with parameter servers: none."""
        return 0

    def settle(self) -> bool:
        """Return whether no step is in progress. A run saves and stops then."""
        return True

    # ---- position

    def position(self) -> Position:
        """Return where the next batch starts, as a JSON-compatible dict. A collective call."""
        if not self._sharded.begun:
            return self.reader.position if self._at is None else self._at
        everywhere = self.ranks.gather(self._sharded.positions())
        merged = {index: position for each in everywhere for index, position in each.items()}
        return {"shards": [merged[index] for index in range(len(merged))]}

    def seek(self, position: Position) -> None:
        if isinstance(position, dict) and "shards" in position:
            self._sharded.resume(position["shards"])
        else:
            self.reader.seek(position)
            self._at = None

    def skipped(self) -> Counter[str]:
        """Return the number of bad rows skipped by all ranks, by reason. A collective call."""
        own = self._skipped + self._sharded.skipped()
        return Counter(self.reader.skipped) + sum(self.ranks.gather(own), Counter())


def features_with_lists(batch: Batch) -> frozenset[str]:
    """Return the features of which a row has several ids."""
    return frozenset(name for name, x in batch.features.items() if bool((x.lengths() > 1).any()))


class _RankShards:
    """The shards of this rank in one epoch, one after the other."""

    def __init__(self, reader: Reader, ranks: Ranks, ahead: bool) -> None:
        self._reader = reader
        self._ahead = ahead
        self._ranks = ranks
        self._readers: dict[int, Reader] = {}
        """Index of a shard -> its reader."""
        self._at: dict[int, Position] = {}
        """Index of a shard -> its position. A reader that has ended is at its start again."""
        self.begun = False
        """Whether the position is in an epoch, the same on all ranks."""

    def _begin(self, shards: int) -> None:
        self.begun = True
        first, last = bounds(self._reader.batch_size, self._ranks.rank, self._ranks.size)
        for index in range(self._ranks.rank, shards, self._ranks.size):
            reader = self._reader.shard(index, shards)
            reader.batch_size = max(1, last - first)
            self._readers[index] = reader
            self._at[index] = reader.position

    def resume(self, positions: list[Position]) -> None:
        if not isinstance(positions, list) or not positions:
            raise InputError(f"the position of the shards must be a list, got {positions!r}")
        self._begin(len(positions))
        self._reader.set_epoch(positions[0].get("epoch", 0))
        for index, reader in self._readers.items():
            reader.seek(positions[index])
            self._at[index] = reader.position

    def __iter__(self) -> Iterator[Batch]:
        if not self.begun:
            self._begin(self._ranks.size)
        for index, reader in self._readers.items():
            reader.seek(self._at[index])
            for batch in read_ahead(reader, timeout=self._ranks.timeout) if self._ahead else reader:
                self._at[index] = batch.position
                yield batch

    def positions(self) -> dict[int, Position]:
        return dict(self._at)

    def skipped(self) -> Counter[str]:
        return sum((Counter(reader.skipped) for reader in self._readers.values()), Counter())

    def end(self) -> Counter[str]:
        """End the epoch, and return the skipped rows of the shards."""
        counted = self.skipped()
        self._reader.set_epoch(self._reader.epoch + 1)  # also without a shard: all ranks have the same order
        self._readers, self._at, self.begun = {}, {}, False
        return counted
