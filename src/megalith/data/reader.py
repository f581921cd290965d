"""Reader: the contract of everything that yields batches.

A subclass says where its rows come from (`_parts`); this file cuts them into batches, keeps the
position, and counts what was skipped. `MemoryReader` reads Samples that are in memory already.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from megalith.data.batch import Batch, Position, Samples
from megalith.errors import InputError, UsageError

OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class RowBlock:
    """Rows a reader has at hand, and `after(k)`: the position behind the first k of them."""

    samples: Samples
    after: Callable[[int], Position]


class Reader(IterableDataset[Batch], ABC):
    """Yields batches; goes on exactly where it was stopped; can be divided among ranks.

    Each `for` loop starts at `position` and ends with the data; then the position is the start again, so the
    next loop is the next epoch. A reader given to a DataLoader takes batch_size=None and at most one worker;
    there, `batch.position` is right and `reader.position` is not.
    skipped: with on_error="skip", the bad rows met so far by reason, those read ahead included.
    Raises InputError, naming file, row and column, at a bad row if on_error="raise".
    """

    skipped: Counter[str]

    def __init__(self, *, batch_size: int, drop_last: bool = False, on_error: OnError = "raise") -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise InputError(f"reader: batch_size must be at least 1, got {batch_size!r}")
        if on_error not in ("raise", "skip"):
            raise InputError(f'reader: on_error must be "raise" or "skip", got {on_error!r}')
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.on_error = on_error
        self.rank, self.world_size = 0, 1
        self.skipped = Counter()
        self._at: Position | None = None

    # ---- what a subclass says

    @abstractmethod
    def _start(self) -> Position:
        """The position before the first row."""

    @abstractmethod
    def _check(self, position: Position) -> None:
        """Raise InputError if this cannot be a position of this reader."""

    def _parts(self, position: Position) -> Iterator[RowBlock]:
        """The rows of this shard from `position` on; or else __iter__ is overridden."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int | None:
        """How many rows this shard has, bad ones included; None if only reading them would tell."""
        return None

    # ---- what a user calls

    @property
    def position(self) -> Position:
        """Where the next batch starts; JSON can hold it."""
        return self._stamped(self._start() if self._at is None else self._at)

    def seek(self, position: Position) -> None:
        """Go to a position of this reader or of a batch it gave.

        Raises InputError if it is none, or of another shard.
        """
        if not isinstance(position, dict):
            raise InputError(f"reader: a position is a dict, got {type(position).__name__}")
        own = [self.rank, self.world_size]
        if position.get("shard") != own:
            raise InputError(
                f"reader: this position is of shard {position.get('shard')} ([rank, world size]), "
                f"the reader is shard {own}; go on with the same number of ranks, or start anew"
            )
        self._check(position)
        self._at = dict(position)

    def shard(self, rank: int, world_size: int) -> Self:
        """A reader of this rank's rows: those of all ranks are disjoint and together everything."""
        if not 0 <= rank < world_size:
            raise InputError(f"reader: rank must be within 0 .. {world_size - 1}, got {rank}")
        other = copy.copy(self)
        other.rank, other.world_size = rank, world_size
        other.skipped = Counter()
        other._at = None
        return other

    def __iter__(self) -> Iterator[Batch]:
        self._check_workers()
        waiting: list[Samples] = []
        missing = self.batch_size
        position = self.position
        for part in self._parts(position):
            done = 0
            while done < len(part.samples):
                taken = part.samples[done : done + missing]
                waiting.append(taken)
                done += len(taken)
                missing -= len(taken)
                position = part.after(done)
                if missing == 0:
                    yield self._emit(waiting, position)
                    waiting, missing = [], self.batch_size
        if waiting and not self.drop_last:
            yield self._emit(waiting, position)
        self._at = None

    def _check_workers(self) -> None:
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            raise UsageError("reader: more than one DataLoader worker would repeat rows; use num_workers=1")

    def _emit(self, parts: list[Samples], position: Position) -> Batch:
        self._at = self._stamped(position)
        return Samples.concat(parts).to_batch(dict(self._at))

    def _stamped(self, position: Position) -> Position:
        return {**position, "shard": [self.rank, self.world_size]}

    def _bad(self, reason: str, message: str, count: int = 1) -> None:
        """Bad rows: an error, or a count."""
        if self.on_error == "raise":
            raise InputError(f'{message}; mend it, or pass on_error="skip" to leave such rows out')
        self.skipped[reason] += count


class MemoryReader(Reader):
    """Reads Samples; with `shuffle`, in an order drawn from (shuffle, epoch).

    shuffle: a seed, or None to keep the order. A shard is every world_size-th row of that order.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        batch_size: int,
        shuffle: int | None = None,
        drop_last: bool = False,
    ) -> None:
        super().__init__(batch_size=batch_size, drop_last=drop_last)
        self.samples = samples
        self.shuffle = shuffle
        self._epoch = 0

    @property
    def num_rows(self) -> int:
        """How many rows this shard has."""
        return len(range(self.rank, len(self.samples), self.world_size))

    def _start(self) -> Position:
        return {"epoch": self._epoch, "row": 0}

    def _check(self, position: Position) -> None:
        whole(position, "epoch")
        whole(position, "row", self.num_rows)

    def _parts(self, position: Position) -> Iterator[RowBlock]:
        epoch = position["epoch"]
        order = self._order(epoch)
        for start in range(position["row"], self.num_rows, self.batch_size):
            end = min(start + self.batch_size, self.num_rows)
            rows = self.samples[start:end] if order is None else self.samples.select(order[start:end])
            yield RowBlock(rows, partial(self._behind, epoch, start))
        self._epoch = epoch + 1

    def _behind(self, epoch: int, start: int, k: int) -> Position:
        return {"epoch": epoch, "row": start + k}

    def _order(self, epoch: int) -> Tensor | None:
        n = len(self.samples)
        if self.shuffle is None:
            return None if self.world_size == 1 else torch.arange(n)[self.rank :: self.world_size]
        generator = torch.Generator().manual_seed((self.shuffle * 1_000_003 + epoch) % 2**63)
        return torch.randperm(n, generator=generator)[self.rank :: self.world_size]


def whole(position: Position, key: str, most: int | None = None) -> int:
    """The whole number under `key` of a position, from 0 to `most`; InputError if it is not one."""
    value = position.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError(f"reader: {key!r} of a position must be a whole number, got {value!r}")
    if most is not None and value > most:
        raise InputError(f"reader: {key!r} of the position is {value}, beyond {most}; the data has changed")
    return value


def check_file(position: Position, key: str, files: list[Path]) -> None:
    """Raise InputError unless the file that `key` of a position counts to is the one named there."""
    index = whole(position, key, max(len(files) - 1, 0))
    name = files[index].name if files else ""
    if position.get("name") != name:
        raise InputError(
            f"reader: the position is in file {position.get('name')!r}, where now is {name!r}; "
            "read the same files in the same order, or start anew"
        )
