"""Reader: the base class of everything that yields batches.

A subclass produces blocks of rows (`_row_blocks`). This file cuts them into batches, keeps the position and
counts the skipped rows. `MemoryReader` reads Samples that are already in memory.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from megalith.data.batch import Batch, Position, Samples
from megalith.errors import InputError, UsageError
from megalith.ops import checks

OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class RowBlock:
    samples: Samples
    after: Callable[[int], Position]
    """`after(k)` is the position after the first k rows of the block."""
    numbers: NDArray[np.int64] | None = None
    """Increasing numbers of the rows, int64 [n], comparable with those of bad rows of the block (`_bad`)."""

    def between(self, start: int | None, end: int | None) -> RowBlock:
        """Return the rows with start <= time < end."""
        times = self.samples.times
        if times is None:
            raise InputError("reader: the rows have no times; name the time column in the schema")
        taken = torch.ones_like(times, dtype=torch.bool)
        if start is not None:
            taken &= times >= start
        if end is not None:
            taken &= times < end
        rows = taken.nonzero().view(-1)
        if len(rows) == len(times):
            return self
        numbers = None if self.numbers is None else self.numbers[rows.numpy()]
        return RowBlock(self.samples.select(rows), lambda k: self.after(int(rows[k - 1]) + 1), numbers)


class Reader(IterableDataset[Batch], ABC):
    """Yields batches, continues exactly where it stopped, and can be sharded over ranks.

    Each `for` loop starts at `position` and ends with the data. The position then returns to the start, so
    that the next loop is the next epoch. With a DataLoader, use batch_size=None and at most one worker; then
    `batch.position` is correct and `reader.position` is not.

    Args:
        batch_size: Rows per batch.
        drop_last: Whether to drop the last batch if it is not full.
        on_error: "raise" raises InputError at a bad row, naming file, row and column. "skip" skips the row
            and counts it in `skipped`.
        binary_labels: Whether a label other than 0 and 1 makes a row of a file bad. False: any number is a
            label.

    Raises:
        InputError: An argument is out of range.
    """

    skipped: Counter[str]
    """Number of bad rows skipped so far by reason, including rows read ahead."""
    skipped_before: Counter[str]
    """Those of `skipped` before `position`: a reader that continues there does not count them again."""
    first_skipped: dict[str, str]
    """Reason -> file, row, column and value of the first such row. Shards of a reader share it."""

    def __init__(
        self,
        *,
        batch_size: int,
        drop_last: bool = False,
        on_error: OnError = "raise",
        binary_labels: bool = False,
    ) -> None:
        self.batch_size = checks.integer(batch_size, "reader: batch_size")
        if not isinstance(on_error, str) or on_error not in ("raise", "skip"):
            raise InputError(f'reader: on_error must be "raise" or "skip", got {on_error!r}')
        self.drop_last = checks.flag(drop_last, "reader: drop_last")
        self.on_error = on_error
        self.binary_labels = checks.flag(binary_labels, "reader: binary_labels")
        self.rank, self.world_size = 0, 1
        self.skipped, self.skipped_before = Counter(), Counter()
        self._unpassed: list[_BadRows] = []
        self.first_skipped = {}
        self._times: tuple[int | None, int | None] = None, None
        self._at: Position | None = None

    # ---- implemented by subclasses

    @abstractmethod
    def _start(self) -> Position:
        """The position before the first row."""

    @abstractmethod
    def _check(self, position: Position) -> None:
        """Raise InputError if `position` is not a valid position of this reader."""

    def _row_blocks(self, position: Position) -> Iterator[RowBlock]:
        """The rows of this shard from `position`. A subclass implements this or overrides __iter__."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int | None:
        """Number of rows of this shard, bad rows included. None if it is unknown before reading."""
        return None

    @property
    @abstractmethod
    def feature_names(self) -> list[str]:
        """Names of the features of a batch."""

    @property
    @abstractmethod
    def num_dense(self) -> int:
        """Number of dense values per row."""

    @classmethod
    def from_config(
        cls, path: str | list[str], schema: Mapping[str, Any], *, labelled: bool = True, **options: Any
    ) -> Self:
        """Open files as a config describes them.

        Args:
            path: File, directory or pattern, or several in their order.
            schema: The columns, for readers that take a schema: the JSON form of a `Schema`.
            labelled: Whether to read labels. Readers of formats that always have labels ignore it.
            **options: Further arguments of the reader.

        Returns:
            The reader.

        Raises:
            InputError: The schema does not name the columns, or a file cannot be read.
        """
        return cls(path, **options)  # type: ignore[call-arg, arg-type]

    # ---- called by users

    @property
    def position(self) -> Position:
        """Where the next batch starts, as a JSON-compatible dict."""
        return self._with_shard(self._start() if self._at is None else self._at)

    def seek(self, position: Position) -> None:
        """Move to a position.

        Args:
            position: A `position` of this reader or of one of its batches.

        Raises:
            InputError: The position is invalid or belongs to another shard.
        """
        if not isinstance(position, dict):
            raise InputError(f"reader: position must be a dict, got {type(position).__name__}")
        own = [self.rank, self.world_size]
        if position.get("shard") != own:
            raise InputError(
                f"reader: the position belongs to shard {position.get('shard')} ([rank, world size]), but "
                f"the reader is shard {own}; continue with the same number of ranks, or start over"
            )
        self._check(position)
        self._at = dict(position)

    def shard(self, rank: int, world_size: int) -> Self:
        """Return a reader of one rank's rows.

        The shards of all ranks are disjoint and together hold all rows.

        Args:
            rank: The rank, 0 to world_size - 1.
            world_size: Number of ranks.

        Returns:
            A new reader at the start of its shard.
        """
        for name, value in (("rank", rank), ("world_size", world_size)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputError(f"reader: {name} must be an integer, got {value!r}")
        if not 0 <= rank < world_size:
            raise InputError(f"reader: rank must be 0 to {world_size - 1}, got {rank}")
        other = self._copy()
        other.rank, other.world_size = rank, world_size
        return other

    def between(self, start: int | None = None, end: int | None = None) -> Self:
        """Return a reader of the rows of a time span, of the same shard at its start.

        It reads all rows and leaves out the others, so `num_rows` counts both.

        Args:
            start: Time of the first rows, in seconds. None: no limit.
            end: Time of the first rows that are left out, in seconds. None: no limit.

        Returns:
            A new reader. Reading rows without times raises InputError.
        """
        for name, value in (("start", start), ("end", end)):
            if value is not None:
                checks.integer(value, f"reader: {name}", least=0)
        if (start, end) != (None, None) and type(self).__iter__ is not Reader.__iter__:
            raise InputError(f"{type(self).__name__}: its rows have no times of their own")
        other = self._copy()
        other._times = start, end
        return other

    def _copy(self) -> Self:
        """A reader of the same shard at its start."""
        other = copy.copy(self)
        other.skipped, other.skipped_before, other._unpassed = Counter(), Counter(), []
        other._at = None
        return other

    def __iter__(self) -> Iterator[Batch]:
        self._check_workers()
        waiting: list[Samples] = []
        missing = self.batch_size
        position = self.position
        number, earlier = None, 0  # the last row, and how many entries are of earlier blocks
        self._unpassed = []
        for part in self._row_blocks(position):
            self._end_block(earlier)
            if self._times != (None, None):
                part = part.between(*self._times)
            done = 0
            while done < len(part.samples):
                whole = done == 0 and len(part.samples) <= missing
                taken = part.samples if whole else part.samples[done : done + missing]
                waiting.append(taken)
                done += len(taken)
                missing -= len(taken)
                position = part.after(done)
                number = None if part.numbers is None else int(part.numbers[done - 1])
                if missing == 0:
                    self._pass(number, len(self._unpassed))
                    yield self._emit(waiting, position)
                    waiting, missing = [], self.batch_size
            earlier = len(self._unpassed)
        if waiting and not self.drop_last:
            self._pass(number, earlier)
            yield self._emit(waiting, position)
        self._at, self._unpassed, self.skipped_before = None, [], Counter(self.skipped)

    def _check_workers(self) -> None:
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            raise UsageError("reader: more than one DataLoader worker would repeat rows; use num_workers=1")

    def _emit(self, parts: list[Samples], position: Position) -> Batch:
        self._at = self._with_shard(position)
        return Samples.concat(parts).to_batch(dict(self._at))

    def _with_shard(self, position: Position) -> Position:
        return {**position, "shard": [self.rank, self.world_size]}

    def _bad(self, reason: str, message: str, count: int = 1, rows: NDArray[np.int64] | None = None) -> None:
        """Raise InputError about bad rows, or count them if they are skipped."""
        # rows: their numbers in the next block, int64 [count]; None: they are before that block.
        if self.on_error == "raise":
            remedy = 'fix it, or pass on_error="skip" (command line: --on-error skip) to skip such rows'
            raise InputError(f"{message}; {remedy}")
        self.skipped[reason] += count
        self.first_skipped.setdefault(reason, message)
        self._unpassed.append(_BadRows(reason, count, rows))

    def _end_block(self, entries: int | None = None) -> None:
        """Note that bad rows counted so far, or the first entries of them, are before the next block."""
        self._unpassed[:entries] = [each._replace(rows=None) for each in self._unpassed[:entries]]

    def _pass(self, number: int | None, entries: int) -> None:
        """Count bad rows before a row of the block in `skipped_before`; they are among the first entries."""
        left = []
        for each in self._unpassed[:entries]:
            after = each.rows
            if after is not None and number is not None:
                after = after[after > number]
                if len(after):
                    left.append(_BadRows(each.reason, len(after), after))
                self.skipped_before[each.reason] += each.number - len(after)
            else:
                self.skipped_before[each.reason] += each.number
        self._unpassed[:entries] = left


class _BadRows(NamedTuple):
    """Bad rows that `skipped` counts and `skipped_before` does not; see `Reader._bad`."""

    reason: str
    number: int
    rows: NDArray[np.int64] | None


class MemoryReader(Reader):
    """Reads Samples that are in memory. A shard is every world_size-th row.

    Args:
        samples: The rows.
        batch_size: Rows per batch.
        shuffle: Seed of a random order that differs per epoch. None keeps the order of the samples.
        drop_last: Whether to drop the last batch if it is not full.

    Raises:
        InputError: An argument has the wrong type or is out of range.
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
        self.samples = checks.instance(samples, Samples, "reader: samples")
        if shuffle is not None and (isinstance(shuffle, bool) or not isinstance(shuffle, int)):
            raise InputError(f"reader: shuffle must be an integer, the seed, or None, got {shuffle!r}")
        self.shuffle = shuffle
        self._epoch = 0

    @property
    def num_rows(self) -> int:
        """Number of rows of this shard."""
        return len(range(self.rank, len(self.samples), self.world_size))

    @property
    def feature_names(self) -> list[str]:
        return list(self.samples.features)

    @property
    def num_dense(self) -> int:
        return 0 if self.samples.dense is None else self.samples.dense.shape[1]

    def _start(self) -> Position:
        return {"epoch": self._epoch, "row": 0}

    def _check(self, position: Position) -> None:
        position_integer(position, "epoch")
        position_integer(position, "row", self.num_rows)

    def _row_blocks(self, position: Position) -> Iterator[RowBlock]:
        epoch = position["epoch"]
        order = self._order(epoch)
        for start in range(position["row"], self.num_rows, self.batch_size):
            end = min(start + self.batch_size, self.num_rows)
            rows = self.samples[start:end] if order is None else self.samples.select(order[start:end])
            yield RowBlock(rows, partial(self._position_after, epoch, start))
        self._epoch = epoch + 1

    def _position_after(self, epoch: int, start: int, k: int) -> Position:
        return {"epoch": epoch, "row": start + k}

    def _order(self, epoch: int) -> Tensor | None:
        n = len(self.samples)
        if self.shuffle is None:
            return (
                None if self.world_size == 1 else torch.arange(n, device="cpu")[self.rank :: self.world_size]
            )
        generator = torch.Generator().manual_seed((self.shuffle * 1_000_003 + epoch) % 2**63)
        return torch.randperm(n, generator=generator, device="cpu")[self.rank :: self.world_size]


def position_integer(position: Position, key: str, most: int | None = None) -> int:
    value = position.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError(f"reader: {key!r} of a position must be an integer of 0 or more, got {value!r}")
    if most is not None and value > most:
        raise InputError(f"reader: {key!r} of the position is {value}, above {most}; the data has changed")
    return value
