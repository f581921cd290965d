"""WorkerBatches: the steps of a run that its workers on parameter servers compute.

To the loop of a run they are batches like any others (`RunBatches`), except that they are done:

    mode     a step is                                    in progress at the same time
    async    a batch of one worker                        two per worker: it begins the next one at once
    sync     a batch, of which each worker has a part     one

Workers join and leave between their steps, in mode "sync" between the steps of all. A run saves and stops
when no step is in progress (`settle`), so its position is that of the tables.

`DataShares` splits the training data into shares that workers take one after the other, and records how far
each was read:

    an epoch is read in       when
    shares                    workers read their own rows; their number does not depend on who takes them
    one share                 all workers read the same rows (a fixed number of micro-batches), or an epoch
                              is continued that one process had begun

Positions have the form of `batches.py`: {"shards": [...]} in the middle of an epoch of shares, otherwise the
position of the reader. So a run continues on workers, ranks or one process, whichever began the epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megalith.data import Batch, Reader
from megalith.data.batch import Position
from megalith.errors import InputError
from megalith.ps.messages import Failure
from megalith.training.batches import bounds
from megalith.training.steps import BatchScores, Steps
from megalith.training.workers import (
    Ahead,
    Call,
    DataShare,
    PoolWorker,
    StepOrder,
    StepResult,
    WorkerPool,
    WorkerSetup,
)

SHARES_PER_WORKER = 4
"""More shares than workers: one that joins finds some to read, and a slow one reads fewer."""


class DataShares:
    def __init__(self, reader: Reader, *, split: bool) -> None:
        self._reader = reader
        self._split = split
        self._at: list[Position] = []
        self._free: deque[int] = deque()
        self._start = reader.shard(0, 1).position
        self._continued: Position | None = None

    def begin(self, epoch: int, workers: int) -> None:
        if self._at:
            return
        if self._continued is not None:
            self._at = [self._continued]
        else:
            count = workers * SHARES_PER_WORKER if self._split else 1
            starts = (self._reader.shard(index, count).position for index in range(count))
            self._at = [{**at, "epoch": epoch} if "epoch" in at else at for at in starts]
        self._continued = None
        self._free = deque(range(len(self._at)))

    def take(self) -> DataShare | None:
        """Return a share that nobody reads, at its position; None: there is none."""
        return self.share(self._free.popleft()) if self._free else None

    def share(self, index: int) -> DataShare:
        return DataShare(index, len(self._at), self._at[index])

    def give_back(self, index: int) -> None:
        """Return a share whose worker has left: another one reads it next."""
        self._free.appendleft(index)

    def record(self, index: int, position: Position) -> None:
        self._at[index] = position

    def end(self, epoch: int) -> None:
        self._at = []
        self._start = {**self._start, "epoch": epoch} if "epoch" in self._start else self._start

    def position(self) -> Position:
        """Return where the run is, as a JSON-compatible dict."""
        if not self._at:
            return self._start if self._continued is None else self._continued
        return self._at[0] if len(self._at) == 1 else {"shards": list(self._at)}

    def seek(self, position: Position) -> None:
        if not isinstance(position, dict) or "shards" not in position:
            self._reader.shard(0, 1).seek(position)
            start = {**self._start, "epoch": position["epoch"]} if "epoch" in self._start else self._start
            self._start = start
            self._continued = None if position == start else position
            return
        found = position["shards"]
        if not isinstance(found, list) or not found:
            raise InputError(f"the position of the shards must be a list, got {found!r}")
        for index, at in enumerate(found):
            self._reader.shard(index, len(found)).seek(at)
        self._at, self._free = list(found), deque(range(len(found)))


_QUEUED = 2
"""Steps that an asynchronous worker has in its queue."""


@dataclass(frozen=True)
class DoneStep:
    results: list[StepResult]  # Their results
    error: Exception | None = None  # The error of a worker instead

    @property
    def rows(self) -> int:
        return sum(result.rows for result in self.results)

    @property
    def batch(self) -> Batch | None:
        """The batch of the first worker, if it took part."""
        return next((result.batch for result in self.results if result.batch is not None), None)

    @property
    def time(self) -> int | None:
        """The time of the newest row."""
        return max((result.time for result in self.results if result.time is not None), default=None)


class DoneSteps(Steps):
    def __init__(self, after: Callable[[DoneStep], None]) -> None:
        self._after = after

    def take(self, step: Any, *, stop: bool = False) -> tuple[float, list[BatchScores]]:
        if step.error is not None:
            raise step.error
        self._after(step)
        scored = [
            BatchScores(Batch({}, labels, weights=weights), logits)
            for result in step.results
            for labels, weights, logits in result.scores
        ]
        return sum(result.loss for result in step.results), scored


class WorkerBatches(ABC):
    def __init__(
        self,
        reader: Reader,
        setup: WorkerSetup,
        *,
        shares: bool,
        step: Callable[[], int],
        limit: Callable[[], int | None],
        epoch: Callable[[], int],
        forget: Callable[[int], None],
    ) -> None:
        self.reader = reader
        self.list_features: set[str] = set()
        self.wanted = setup.config.train.workers
        self._shares = DataShares(reader, split=shares)
        self._split = shares
        self._step, self._limit, self._epoch = step, limit, epoch
        self._micro_batches = setup.config.train.micro_batches
        self._bounded = setup.config.train.staleness is not None
        self._skipped: Counter[str] = Counter()  # before the positions of shares
        self._last_skipped: dict[int, Counter[str]] = {}  # after the last batch of shares that have ended
        self._held = False
        # They start while the run prepares.
        self.pool = WorkerPool(setup, self.wanted, self._calls_again, forget)

    # ---- what a run uses

    def __iter__(self) -> Iterator[DoneStep]:
        """Yield the steps from the position to the end of the epoch."""
        if not self.pool.workers:
            self.pool.connect(wait=True)
        self._shares.begin(self._epoch(), self.wanted)
        for worker in self.pool.workers.values():
            self._give_back(worker)
        yield from self._epoch_steps()
        self._skipped += sum(self._last_skipped.values(), Counter())
        self._last_skipped = {}
        self._shares.end(self._epoch() + 1)

    @abstractmethod
    def _epoch_steps(self) -> Iterator[DoneStep]: ...

    @property
    def in_progress(self) -> bool:
        return any(worker.calls for worker in self.pool.workers.values())

    def settle(self) -> bool:
        """Begin no further step until none is in progress."""
        self._held = self.steps_in_progress
        return not self._held

    @property
    def steps_in_progress(self) -> bool:
        """Whether a worker computes a step, or has computed one that the run has not taken."""
        calls = (call for worker in self.pool.workers.values() for call, _ in worker.calls)
        return any(name == "step" for name, _ in calls)

    def position(self) -> Position:
        # Of a moment: the workers must have settled.
        return self._shares.position()

    def seek(self, position: Position) -> None:
        self._shares.seek(position)

    def skipped(self) -> Counter[str]:
        """Return the number of bad rows skipped by all workers, by reason."""
        return sum(self._last_skipped.values(), self.reader.skipped + self._skipped)

    @property
    def lost_writes(self) -> int:
        """Number of answered updates that were lost with a server; 0 with train.server_log = sync."""
        return self.pool.lost_writes + sum(worker.lost for worker in self.pool.workers.values())

    def set_workers(self, count: int) -> None:
        """Set the number of workers; they join and leave in the course of the next steps."""
        if self._micro_batches is not None and self._micro_batches % count:
            raise InputError(
                f"train.micro_batches is {self._micro_batches}, which is not a multiple of {count} workers"
            )
        self.wanted = count

    # ---- workers

    def _calls_again(self, worker: PoolWorker) -> list[Call]:
        """What the replacement of a worker does: it opens the share at its position and repeats the steps."""
        calls = [call for call, _ in worker.calls]
        if worker.share is None or not calls or calls[0][0] == "read":
            return calls
        return [("read", (self._shares.share(worker.share), self._rows_of(worker))), *calls]

    def _rows_of(self, worker: PoolWorker) -> int:
        return self.reader.batch_size

    def _recorded(self, worker: PoolWorker, result: StepResult, *, own_rows: bool = True) -> None:
        """Take the result of a step; `own_rows`: no other result of the step counts the same bad rows."""
        worker.written, worker.lost = result.written, result.lost
        assert worker.share is not None or not result.rows
        if worker.share is not None:
            self._shares.record(worker.share, result.position)
        if own_rows:
            self._skipped += result.skipped
        self._note_ahead(worker, result.ahead, result)
        self.list_features |= result.list_features

    def _note_ahead(self, worker: PoolWorker, rows: int, found: Ahead | StepResult) -> None:
        """Note the rows of the next batch of a worker, and the bad rows at the end of its share."""
        worker.ahead = rows
        if worker.share is not None and found.last_skipped is not None:
            self._last_skipped[worker.share] = found.last_skipped
        for reason, first in found.first_skipped.items():
            self.reader.first_skipped.setdefault(reason, first)

    def _give_back(self, worker: PoolWorker) -> None:
        if worker.share is not None and worker.ahead:
            self._shares.give_back(worker.share)
        worker.share, worker.ahead = None, 0

    def _grow(self) -> list[PoolWorker]:
        missing = self.wanted - len(self.pool) - self.pool.starting
        if missing > 0:
            self.pool.start(missing)
        before = self.pool.given_up
        joined = self.pool.connect()
        if self.pool.given_up > before:
            self.wanted = min(self.wanted, len(self.pool) + self.pool.starting)
        return joined

    @property
    def _surplus(self) -> list[PoolWorker]:
        return sorted(self.pool.workers.values(), key=lambda worker: worker.number)[self.wanted :]

    def close(self) -> None:
        self.pool.close()


class AsyncBatches(WorkerBatches):
    """Each worker trains on batches of its own."""

    def _epoch_steps(self) -> Iterator[DoneStep]:
        while True:
            if not self._held:
                self._change_workers()
                self._dispatch()
            if self._bounded:
                self._rest_idle()
            if not self.in_progress:
                if not self._held:
                    return
                self._held = False  # the last results had no rows, so the run was not asked
                continue
            worker, _, result = self.pool.wait()  # no limit: the pool has one
            if isinstance(result, Failure):
                yield DoneStep([], result.error)
            elif isinstance(result, Ahead):
                self._note_ahead(worker, result.rows, result)
                worker.share = worker.share if result.rows else None
            elif isinstance(result, StepResult):
                self._recorded(worker, result)
                worker.share = worker.share if result.ahead else None
                if result.rows:
                    yield DoneStep([result])

    def _change_workers(self) -> None:
        self._grow()
        surplus = self._surplus
        for worker in list(self.pool.workers.values()):
            worker.leaving = worker in surplus
            if worker.leaving and not worker.calls:
                self._give_back(worker)
                self.pool.remove(worker)

    def _rest_idle(self) -> None:
        """Let workers without a step leave those of the servers: the others would wait for them."""
        for worker in self.pool.workers.values():
            if not worker.calls and not worker.resting:
                worker.resting = True
                self.pool.call(worker, "rest")

    def _dispatch(self) -> None:
        """Give steps to workers. A worker without a share takes one; if there is none, it rests."""
        limit = self._limit()
        for worker in self.pool.workers.values():
            if worker.leaving:
                continue
            if worker.share is None and not worker.calls:
                share = self._shares.take()
                if share is None:
                    if not worker.resting:
                        worker.resting = True
                        self.pool.call(worker, "rest")
                    continue
                worker.share, worker.resting = share.index, False
                self.pool.call(worker, "read", share, self._rows_of(worker))
            if worker.share is None:
                continue
            while self._steps_of(worker) < _QUEUED:
                pending = sum(map(self._steps_of, self.pool.workers.values()))
                if limit is not None and pending >= limit:
                    return
                worker.resting = False
                sample = worker.number == 1
                self.pool.call(worker, "step", StepOrder(self._step() + pending, sample=sample))

    def _steps_of(self, worker: PoolWorker) -> int:
        return sum(call[0] == "step" for call, _ in worker.calls)


class SyncBatches(WorkerBatches):
    """All workers have a part of each batch."""

    def _epoch_steps(self) -> Iterator[DoneStep]:
        self._columns: bytes | None = None
        while True:
            self._change_workers()
            error = self._open_shares()
            workers = self._in_order()
            if error is None and not any(worker.ahead for worker in workers):
                return
            sizes = [worker.ahead for worker in workers] if self._split else None
            results: list[StepResult] = []
            if error is None:
                for number, worker in enumerate(workers):
                    part = (number, len(workers))
                    order = StepOrder(self._step(), part, sizes, self._columns, sample=number == 0)
                    self.pool.call(worker, "step", order)
                error = self._answers(workers, results)
            yield DoneStep(results, error)

    def _answers(self, workers: list[PoolWorker], results: list[StepResult]) -> Exception | None:
        """Wait for the results of a step; return the error of a worker as soon as there is one."""
        found: dict[int, StepResult] = {}
        while self.in_progress:
            worker, _, result = self.pool.wait()  # no limit: the pool has one
            if isinstance(result, Failure):
                return result.error
            if isinstance(result, StepResult):
                found[worker.number] = result
        for worker in workers:  # only now: one that is replaced reads the same batch as the others
            own_rows = self._split or worker is workers[0]
            self._recorded(worker, found[worker.number], own_rows=own_rows)
        results += [found[worker.number] for worker in workers]
        return None

    def _in_order(self) -> list[PoolWorker]:
        return sorted(self.pool.workers.values(), key=lambda worker: worker.number)

    def _rows_of(self, worker: PoolWorker) -> int:
        if not self._split:
            return self.reader.batch_size
        workers = self._in_order()
        first, last = bounds(self.reader.batch_size, workers.index(worker), len(workers))
        return max(1, last - first)

    def _change_workers(self) -> None:
        """Let workers join and leave. The others then read batches of another size, or other parts."""
        joined, surplus = self._grow(), self._surplus
        if not joined and not surplus:
            return
        for worker in self._in_order():
            if self._split:
                self._give_back(worker)
            worker.share, worker.ahead = None, 0
        for worker in surplus:
            self.pool.remove(worker)

    def _open_shares(self) -> Exception | None:
        """Give shares to workers without a batch, until each has one or no share is left."""
        if not self._split:
            return self._open_stream()
        while waiting := [worker for worker in self._in_order() if not worker.ahead]:
            opened = []
            for worker in waiting:
                share = self._shares.take()
                if share is not None:
                    worker.share = share.index
                    self.pool.call(worker, "read", share, self._rows_of(worker))
                    opened.append(worker)
            if not opened:
                return None
            error = self._aheads(opened)
            if error is not None:
                return error
        return None

    def _open_stream(self) -> Exception | None:
        """Let workers that have not begun read all rows; one of the others has ended only if all have."""
        opened = [worker for worker in self._in_order() if worker.share is None]
        for worker in opened:
            worker.share = 0
            self.pool.call(worker, "read", self._shares.share(0), self._rows_of(worker))
        return self._aheads(opened)

    def _aheads(self, opened: list[PoolWorker]) -> Exception | None:
        for worker in opened:
            while worker.calls:
                _, result = self.pool.answer(worker)
                if isinstance(result, Failure):
                    return result.error
                assert isinstance(result, Ahead)
                self._note_ahead(worker, result.rows, result)
                self._columns = result.columns or self._columns
        return None
