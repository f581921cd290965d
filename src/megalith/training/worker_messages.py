"""What a run and its workers on Ray send each other.

    call                                   the worker
    prepare(number)                        opens the data; takes its time while the others train
    connect(written)                       builds the model and joins the workers of the servers
    read(share, rows)                      opens a share at its position and reads its first batch ahead
    step(order)                            trains on the batch read ahead, then reads the next one
    rest()                                 leaves the workers of the servers until the next step
    leave()                                ends its work

An error of a worker is returned as a Failure, so that the run raises it as it is. One that is not an error of
Megalith becomes a WorkerFailedError, with its type, message and traceback.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megalith.data import Batch
from megalith.data.batch import Position
from megalith.shards import Servers
from megalith.training.run_config import RunConfig


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker needs to build the model and to find the servers.

    Attributes:
        config: The config of the run, with the fitted schema.
        servers: The servers.
        log: The directory of their logs.
    """

    config: RunConfig
    servers: Servers
    log: str


@dataclass(frozen=True)
class Written:
    """The numbers of a worker's writes that were answered, by server.

    Attributes:
        tables: Those to the tables.
        dense: Those to the dense weights.
    """

    tables: list[int]
    dense: list[int]


@dataclass(frozen=True)
class DataShare:
    """A part of the training data, read by one worker at a time.

    Attributes:
        index: Its number.
        count: The number of shares.
        position: Where to begin.
    """

    index: int
    count: int
    position: Position


@dataclass(frozen=True)
class Ahead:
    """The batch that a worker has read ahead.

    Attributes:
        rows: Its number of rows; 0: the share has ended.
        columns: Its columns, for workers without a batch; see `megalith.data.empty_batch.describe`.
        last_skipped: If the share has ended, the bad rows at its end, by reason.
        first_skipped: See `Reader.first_skipped`.
    """

    rows: int
    columns: bytes | None = None
    last_skipped: Counter[str] | None = None
    first_skipped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepOrder:
    """A step of one worker.

    Attributes:
        step: The global step.
        part: The number of this worker in the step, and the number of workers.
        sizes: The rows of all workers, if each has read its own. None: all have read the same batch.
        columns: The columns of a batch, for a worker that has none.
        sample: Whether to return the batch.
    """

    step: int
    part: tuple[int, int] = (0, 1)
    sizes: list[int] | None = None
    columns: bytes | None = None
    sample: bool = False


@dataclass(frozen=True)
class StepResult:
    """What a worker did in a step.

    Attributes:
        rows: The number of rows that it computed; 0 in mode "async": the share has ended.
        loss: Its share of the mean loss of the step.
        scores: Labels, weights and logits of its rows.
        position: The position of its share after the step.
        ahead: The rows of its next batch; 0: the share has ended.
        written: Its answered writes.
        lost: Number of answered writes that were lost with a server.
        time: The time of the newest row.
        batch: The batch, if it was asked for.
        skipped: Bad rows between the positions before and after the step, by reason.
        last_skipped: If the share has ended, the bad rows after that position.
        first_skipped: See `Reader.first_skipped`.
        list_features: Features of which a row with several ids was seen.
    """

    rows: int
    loss: float
    scores: list[tuple[Tensor, Tensor | None, Tensor]]
    position: Position
    ahead: int
    written: Written
    lost: int = 0
    time: int | None = None
    batch: Batch | None = None
    skipped: Counter[str] = field(default_factory=Counter)
    last_skipped: Counter[str] | None = None
    first_skipped: dict[str, str] = field(default_factory=dict)
    list_features: frozenset[str] = frozenset()


Call = tuple[str, tuple[Any, ...]]
"""The name of a method of a worker, and its arguments."""
