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
    """What a worker needs to build the model and to find the servers."""

    config: RunConfig  # The config of the run, with the fitted schema
    servers: Servers
    log: str  # The directory of their logs


@dataclass(frozen=True)
class Written:
    """The numbers of a worker's writes that were answered, by server."""

    tables: list[int]  # Those to the tables
    dense: list[int]  # Those to the dense weights


@dataclass(frozen=True)
class DataShare:
    """A part of the training data, read by one worker at a time."""

    index: int  # Its number
    count: int  # The number of shares
    position: Position  # Where to begin


@dataclass(frozen=True)
class Ahead:
    """The batch that a worker has read ahead."""

    rows: int  # Its number of rows; 0: the share has ended
    # Its columns, for workers without a batch; see `megalith.data.empty_batch.describe`.
    columns: bytes | None = None
    last_skipped: Counter[str] | None = None  # If the share has ended, the bad rows at its end, by reason
    first_skipped: dict[str, str] = field(default_factory=dict)  # See `Reader.first_skipped`.


@dataclass(frozen=True)
class StepOrder:
    """A step of one worker."""

    step: int  # The global step
    part: tuple[int, int] = (0, 1)  # The number of this worker in the step, and the number of workers
    # The rows of all workers, if each has read its own. None: all have read the same batch.
    sizes: list[int] | None = None
    columns: bytes | None = None  # The columns of a batch, for a worker that has none
    sample: bool = False  # Whether to return the batch


@dataclass(frozen=True)
class StepResult:
    """What a worker did in a step."""

    rows: int  # The number of rows that it computed; 0 in mode "async": the share has ended
    loss: float  # Its share of the mean loss of the step
    scores: list[tuple[Tensor, Tensor | None, Tensor]]  # Labels, weights and logits of its rows
    position: Position  # The position of its share after the step
    ahead: int  # The rows of its next batch; 0: the share has ended
    written: Written  # Its answered writes
    lost: int = 0  # Number of answered writes that were lost with a server
    time: int | None = None  # The time of the newest row
    batch: Batch | None = None  # The batch, if it was asked for
    # Bad rows between the positions before and after the step, by reason
    skipped: Counter[str] = field(default_factory=Counter)
    last_skipped: Counter[str] | None = None  # If the share has ended, the bad rows after that position
    first_skipped: dict[str, str] = field(default_factory=dict)  # See `Reader.first_skipped`.
    list_features: frozenset[str] = frozenset()  # Features of which a row with several ids was seen


Call = tuple[str, tuple[Any, ...]]
"""The name of a method of a worker, and its arguments."""
