"""Reader: the base class of everything that yields batches.

A subclass produces blocks of rows (`_row_blocks`). This file shuffles them, cuts them into batches, keeps the
position, counts the skipped rows, reads ahead, and divides the data among the workers of a DataLoader.
`MemoryReader` reads Samples that are already in memory.

    rows of all ranks -> shard(rank, ranks) -> shard of a worker: rank + ranks * worker of ranks * workers
      -> blocks in the order of the files, or of shuffled row groups and files
      -> windows of `shuffle_rows` rows, each in a random order, if the reader shuffles
      -> batches, with the position after each
"""

from __future__ import annotations

import copy
import json
import logging
import queue
import threading
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from megalith.data.batch import Batch, Position, Samples
from megalith.data.files import position_integer
from megalith.errors import InputError
from megalith.ops import checks

T = TypeVar("T")
logger = logging.getLogger(__name__)

OnError = Literal["raise", "skip"]
REMEDY = 'fix it, or pass on_error="skip" (command line: --on-error skip) to skip such rows'


@dataclass(frozen=True)
class RowBlock:
    samples: Samples
    after: Callable[[int], Position]
    """`after(k)` is the position after the first k rows of the block."""
    numbers: NDArray[np.int64] | None = None
    """Increasing numbers of the rows, int64 [n], comparable with those of bad rows of the block (`_bad`)."""
    passed: Counter[str] | None = None
    """Of a shuffled block: `Reader.skipped_before` after all its rows."""

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


SHUFFLE_ROWS = 65_536


class Reader(IterableDataset[Batch], ABC):
    """Yields batches, continues exactly where it stopped, and can be sharded over ranks.

    Each `for` loop starts at `position` and ends with the data. The position then returns to the start, so
    that the next loop is the next epoch.

    With a DataLoader, use batch_size=None. Each of its workers reads its own shard of the rows of the reader;
    `batch.position` is correct there and `reader.position` is not. `state_dict` and `load_state_dict` are for
    torchdata's StatefulDataLoader.

    Args:
        batch_size: Rows per batch.
        drop_last: Whether to drop the last batch if it is not full.
        on_error: "raise" raises InputError at a bad row, naming file, row and column. "skip" skips the row
            and counts it in `skipped`.
        binary_labels: Whether a label other than 0 and 1 makes a row of a file bad. False: any number is a
            label.
        shuffle: Seed of a random order that differs per epoch (`set_epoch`). None keeps the order.
        shuffle_rows: Rows that are shuffled at a time, in memory. Row groups and files are shuffled too.
        prefetch: Batches that a thread reads ahead. 0: none.

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
        shuffle: int | None = None,
        shuffle_rows: int = SHUFFLE_ROWS,
        prefetch: int = 0,
    ) -> None:
        self.batch_size = checks.integer(batch_size, "reader: batch_size")
        if not isinstance(on_error, str) or on_error not in ("raise", "skip"):
            raise InputError(f'reader: on_error must be "raise" or "skip", got {on_error!r}')
        self.drop_last = checks.flag(drop_last, "reader: drop_last")
        self.on_error = on_error
        self.binary_labels = checks.flag(binary_labels, "reader: binary_labels")
        self.shuffle = optional_seed(shuffle)
        self.shuffle_rows = checks.integer(shuffle_rows, "reader: shuffle_rows")
        self.prefetch = checks.integer(prefetch, "reader: prefetch", least=0)
        self._epoch = 0
        self._times: tuple[int | None, int | None] = None, None
        self.rank, self.world_size = 0, 1
        self._shares: list[Position] | None = None
        self._loaded: dict[str, Any] | None = None
        self.skipped, self.skipped_before = Counter(), Counter()
        self._unpassed: list[_BadRows] = []
        self.first_skipped = {}
        self._at: Position | None = None
        self._epoch_at: int | None = None
        """Epoch of the position to continue at; None: not known."""

    # ---- implemented by subclasses

    @abstractmethod
    def _start(self) -> Position:
        """The position before the first row."""

    @abstractmethod
    def _check(self, position: Position) -> None:
        """Raise InputError if `position` is not a valid position of this reader."""

    def _row_blocks(self, position: Position) -> Iterator[RowBlock]:
        """The rows of this shard from `position`. A subclass implements this or overrides `_read`."""
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
        return self._with_shard(self._begin() if self._at is None else self._at)

    def _begin(self) -> Position:
        start = self._start()
        return start if self.shuffle is None else {**start, "epoch": self._epoch}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the order of a shuffled reader depends.

        If the reader is at a position of another epoch, it returns to the start. A loop over a DataLoader
        with workers needs this call before each epoch: workers read copies, and the reader stays where it is.

        Args:
            epoch: Number of the epoch, from 0.

        Raises:
            InputError: It is not an integer of 0 or more.
        """
        self._epoch = checks.integer(epoch, "reader: epoch", least=0)
        if self._epoch_at not in (None, epoch):
            self._at = self._loaded = None
        self._epoch_at = epoch

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
        if self.shuffle is not None:
            position_integer(position, "epoch")
            position_integer({"shuffled": 0, **position}, "shuffled", self.shuffle_rows)
        elif "shuffled" in position:
            raise InputError("reader: the position is of a shuffled reader; pass shuffle=, or start over")
        self._check(position)
        self._at, self._epoch_at = dict(position), position.get("epoch")

    def state_dict(self) -> dict[str, Any]:
        """Return where to continue, as a JSON-compatible dict.

        Torchdata's StatefulDataLoader calls it in each worker, where it is the state of that worker.
        """
        if self._loaded is not None:
            return self._loaded
        at = [self.position] if self._at is not None else None
        shares = at if self._shares is None else [dict(share) for share in self._shares]
        return {"positions": shares, "epoch": self._epoch, "worker": _worker()}

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Continue at a state in the next `for` loop.

        Args:
            state: What `state_dict` returned; or the states of all workers, which may be continued by any
                number of workers.

        Raises:
            InputError: It is not such a state.
        """
        states = [state] if isinstance(state, Mapping) else state
        fits = isinstance(states, list | tuple) and len(states) > 0
        if not fits or not all(isinstance(each, Mapping) and _is_state(each) for each in states):
            raise InputError(f"reader: state must be what state_dict returned, got {state!r}")
        self._epoch = checks.integer(states[0]["epoch"], "reader: epoch", least=0)
        self._at = self._shares = None
        begun = [each for each in states if each["positions"] is not None]
        if begun and len(begun) < len(states):
            raise InputError(
                "reader: state has workers that have not begun the epoch; pass states of one moment"
            )
        if len(begun) > 1:
            positions = [position for each in states for position in each["positions"]]
            states = [{"positions": positions, "epoch": self._epoch, "worker": None}]
        self._loaded = None if states[0]["positions"] is None else dict(states[0])
        self._epoch_at = states[0]["positions"][0].get("epoch") if states[0]["positions"] else None

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
        if (start, end) != (None, None) and type(self)._read is not Reader._read:
            raise InputError(f"{type(self).__name__}: its rows have no times of their own")
        other = self._copy()
        other._times = start, end
        return other

    def in_order(self) -> Self:
        """Return a reader of the same shard at its start that does not shuffle."""
        other = self._copy()
        other.shuffle = None
        return other

    @property
    def epoch(self) -> int:
        """Number of the next epoch, on which the order of a shuffled reader depends."""
        return self._epoch

    def _copy(self) -> Self:
        """A reader of the same shard at its start."""
        other = copy.copy(self)
        other.skipped, other.skipped_before, other._unpassed = Counter(), Counter(), []
        other._at = other._shares = other._loaded = None
        return other

    def __iter__(self) -> Iterator[Batch]:
        self._shares = self._take_shares()
        return self._ahead() if self._shares is None else self._read_shares(self._shares)

    def _take_shares(self) -> list[Position] | None:
        """Positions of the shards that this process reads, one after the other. None: its own shard."""
        worker, loaded = _worker(), self._loaded
        self._loaded = None
        number, count = worker or (0, 1)
        if loaded is None and worker is None:
            return None
        if loaded is None and self._at is None:  # a new epoch
            return [self.shard(self.rank + self.world_size * number, self.world_size * count).position]
        shares = [self.position] if loaded is None else loaded["positions"]
        if loaded is not None and loaded["worker"] == worker:
            return list(shares)
        return list(shares[number::count])

    def _read_shares(self, shares: list[Position]) -> Iterator[Batch]:
        while shares:
            shard = shares[0].get("shard")
            if not isinstance(shard, list) or len(shard) != 2:
                raise InputError(f"reader: a position must name its shard, got {shares[0]!r}")
            reader = self.shard(*shard)
            reader.seek(shares[0])
            for batch in reader._ahead():
                shares[0] = batch.position
                yield batch
            self.skipped += reader.skipped
            self._epoch = max(self._epoch, reader._epoch)
            shares.pop(0)
        if _worker() is None:  # the state of a worker stays the end of its share until the next epoch
            self._shares = None

    def _ahead(self) -> Iterator[Batch]:
        """The batches of this shard from the position, read by a thread if `prefetch` is set."""
        if not self.prefetch:
            yield from self._read()
            return
        other = copy.copy(self)
        other.skipped, other.skipped_before = Counter(self.skipped), Counter(self.skipped_before)
        counted = ((batch, Counter(other.skipped), Counter(other.skipped_before)) for batch in other._read())
        for batch, skipped, before in read_ahead(counted, batches=self.prefetch, name=type(self).__name__):
            self._at, self.skipped, self.skipped_before = dict(batch.position), skipped, before
            yield batch
        self._at, self._epoch, self._epoch_at = None, other._epoch, None
        self.skipped, self.skipped_before = other.skipped, other.skipped_before

    def _read(self) -> Iterator[Batch]:
        position = self.position
        self.skipped, self._unpassed = Counter(self.skipped_before), []
        if self.shuffle is None:
            parts = self._cut(self._own_blocks(position), self.batch_size, drop_last=self.drop_last)
        else:
            parts = self._cut(self._shuffled(position), self.batch_size, drop_last=self.drop_last)
        for rows, at in parts:
            yield self._emit(rows, at)
        self._at, self._unpassed, self.skipped_before = None, [], Counter(self.skipped)
        self._epoch_at = None
        if self.shuffle is not None:
            self._epoch = position["epoch"] + 1

    def _cut(
        self, blocks: Iterator[RowBlock], size: int, *, drop_last: bool = False
    ) -> Iterator[tuple[list[Samples], Position]]:
        """Cut blocks into parts of `size` rows, each with the position after it; note passed bad rows."""
        waiting: list[Samples] = []
        missing = size
        position: Position = {}
        number, earlier = None, 0  # the last row, and how many entries are of earlier blocks
        for part in blocks:
            if part.passed is None:
                self._end_block(earlier)
            done = 0
            while done < len(part.samples):
                whole = done == 0 and len(part.samples) <= missing
                taken = part.samples if whole else part.samples[done : done + missing]
                waiting.append(taken)
                done += len(taken)
                missing -= len(taken)
                position = part.after(done)
                number = None if part.numbers is None else int(part.numbers[done - 1])
                if part.passed is not None and done == len(part.samples):
                    self.skipped_before = Counter(part.passed)
                if missing == 0:
                    if part.passed is None:
                        self._pass(number, len(self._unpassed))
                    yield waiting, position
                    waiting, missing = [], size
            if part.passed is None:
                earlier = len(self._unpassed)
        if waiting and not drop_last:
            if part.passed is None:
                self._pass(number, earlier)
            yield waiting, position

    def _own_blocks(self, position: Position) -> Iterator[RowBlock]:
        for block in self._row_blocks(position):
            yield block if self._times == (None, None) else block.between(*self._times)

    def _shuffled(self, position: Position) -> Iterator[RowBlock]:
        """The rows in windows of `shuffle_rows`, each in a random order.

        A position in a window is the position of its first row and the number of rows taken from it, so that
        the order of a window depends on nothing else.
        """
        epoch, done = position["epoch"], position.get("shuffled", 0)
        start = {key: x for key, x in position.items() if key not in ("epoch", "shuffled", "shard")}
        before = Counter(self.skipped_before)
        for parts, end in self._cut(self._own_blocks(position), self.shuffle_rows):
            passed, self.skipped_before = self.skipped_before, before
            rows = Samples.concat(parts)
            if done > len(rows):
                raise InputError("reader: the files of the position have changed; start over")
            key = zlib.crc32(json.dumps([start, self.rank, self.world_size], sort_keys=True).encode())
            draw = np.random.default_rng([self._seed, epoch, key])
            order = torch.from_numpy(draw.permutation(len(rows))[done:])
            after = partial(self._after_shuffled, epoch, start, done, len(rows), end)
            yield RowBlock(rows.select(order), after, passed=passed)
            start, done, before = end, 0, Counter(passed)

    @property
    def _seed(self) -> int:
        return abs(self.shuffle or 0) * 2 + ((self.shuffle or 0) < 0)

    @staticmethod
    def _after_shuffled(epoch: int, start: Position, done: int, rows: int, end: Position, k: int) -> Position:
        if done + k == rows:
            return {**end, "epoch": epoch}
        return {**start, "epoch": epoch, "shuffled": done + k}

    def _emit(self, parts: list[Samples], position: Position) -> Batch:
        self._at = self._with_shard(position)
        return Samples.concat(parts).to_batch(dict(self._at))

    def _with_shard(self, position: Position) -> Position:
        return {**position, "shard": [self.rank, self.world_size]}

    def _bad(self, reason: str, message: str, count: int = 1, rows: NDArray[np.int64] | None = None) -> None:
        """Raise InputError about bad rows, or count them if they are skipped."""
        # rows: their numbers in the next block, int64 [count]; None: they are before that block.
        if self.on_error == "raise":
            raise InputError(f"{message}; {REMEDY}")
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


def optional_seed(shuffle: Any) -> int | None:
    if shuffle is not None and (isinstance(shuffle, bool) or not isinstance(shuffle, int)):
        raise InputError(f"reader: shuffle must be an integer, the seed, or None, got {shuffle!r}")
    return shuffle


class MemoryReader(Reader):
    """Reads Samples that are in memory. A shard is every world_size-th row.

    Args:
        samples: The rows.
        batch_size: Rows per batch.
        shuffle: Seed of a random order that differs per epoch. None keeps the order of the samples.
        drop_last: Whether to drop the last batch if it is not full.
        prefetch: See `Reader`.

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
        prefetch: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, drop_last=drop_last, prefetch=prefetch)
        self.samples = checks.instance(samples, Samples, "reader: samples")
        self._order_seed = optional_seed(shuffle)

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

    def in_order(self) -> Self:
        other = super().in_order()
        other._order_seed = None
        return other

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
        if self._order_seed is None:
            return (
                None if self.world_size == 1 else torch.arange(n, device="cpu")[self.rank :: self.world_size]
            )
        generator = torch.Generator().manual_seed((self._order_seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(n, generator=generator, device="cpu")[self.rank :: self.world_size]


def _worker() -> list[int] | None:
    """Number of this worker of a DataLoader and how many there are; None in any other process."""
    info = get_worker_info()
    return None if info is None else [info.id, info.num_workers]


def _is_state(state: Mapping[str, Any]) -> bool:
    positions = state.get("positions", ())
    listed = isinstance(positions, list) and all(isinstance(x, dict) for x in positions)
    return "epoch" in state and "worker" in state and (positions is None or listed)


# ---- reading ahead: a thread reads the next batches while the caller computes

AHEAD = 2
"""Batches that wait for the caller."""
LEAVE_SECONDS = 10.0
"""How long a loop that is left waits for the read in progress."""
_SECONDS = 0.1
"""How often a thread that waits for room looks whether the caller has left."""


def read_ahead(
    source: Iterable[T], *, batches: int = AHEAD, timeout: float = 600.0, name: str | None = None
) -> Iterator[T]:
    """Yield the same batches, read in a thread; TimeoutError if one takes more than `timeout` seconds."""
    # Reading and computing overlap where the caller waits for a GPU. The reader is ahead of what was yielded:
    # `batch.position` tells where to continue, `reader.position` does not.
    waiting: queue.Queue[T | BaseException | None] = queue.Queue(batches)
    left = threading.Event()
    thread = threading.Thread(target=_read_into, args=(source, waiting, left), name="read-ahead", daemon=True)
    thread.start()
    title = name or type(source).__name__
    try:
        while True:
            try:
                batch = waiting.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(
                    f"{title}: no batch was read within {timeout:g} s: check the storage it reads from, or "
                    "raise the limit, which is train.timeout in a run"
                ) from None
            if batch is None:
                return
            if isinstance(batch, BaseException):
                raise batch
            yield batch
    finally:
        left.set()
        thread.join(LEAVE_SECONDS)
        if thread.is_alive():
            logger.warning(
                "%s: its thread still reads a batch %g s after the loop was left; it ends after that read",
                title,
                LEAVE_SECONDS,
            )


def _read_into(
    source: Iterable[T], waiting: queue.Queue[T | BaseException | None], left: threading.Event
) -> None:
    try:
        for batch in source:
            if not _put(waiting, batch, left):
                return
    except BaseException as error:
        _put(waiting, error, left)
    else:
        _put(waiting, None, left)


def _put(
    waiting: queue.Queue[T | BaseException | None],
    item: T | BaseException | None,
    left: threading.Event,
) -> bool:
    """Pass an item on; return False if the caller has left."""
    while not left.is_set():
        try:
            waiting.put(item, timeout=_SECONDS)
            return True
        except queue.Full:
            continue
    return False
