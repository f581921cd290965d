"""What a sender and its publisher share: reports, options, and the numbers of messages."""

from __future__ import annotations

import threading
import time as clock
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megalith.serving.client.credentials import Credentials
from megalith.serving.sync.backlog import Interval
from megalith.serving.sync.journal import Journal
from megalith.serving.sync.message_header import ModelLayout
from megalith.serving.sync.parameter_source import ParameterSource


@dataclass
class TargetReport:
    """How a target is getting on. Times are in seconds; None where there is nothing to tell yet."""

    address: str
    model: str
    """What it is called there."""
    part: str | None = None
    backlog: int = 0
    """Rows yet to be sent."""
    sequence: int = 0
    rows: int = 0
    """Sent and acknowledged."""
    error: str | None = None
    """What went wrong last, until something goes well."""
    acknowledged_at: float | None = None
    """When it last answered, since 1970."""
    complete: float | None = None
    """Everything trained up to then has arrived."""
    named: bool = True
    """Whether discovery still names it."""

    @property
    def staleness(self) -> float | None:
        """Seconds of training that it does not know of."""
        return None if self.complete is None else max(0.0, clock.time() - self.complete)


class PublisherState(Protocol):
    """What a sender needs of its publisher."""

    lock: threading.Condition
    source: ParameterSource
    journal: Journal
    interval: Interval
    """The last that has ended."""
    dense: Mapping[str, Tensor]
    dense_number: int
    """In which interval they changed last."""

    def tidy(self) -> None:
        """Told when an interval is complete somewhere: there may be time to tidy up."""


@dataclass(frozen=True)
class SenderOptions:
    """What all senders of a publisher share."""

    session: str
    index: int
    count: int
    signature: str
    plain: bool
    """Monolith's protocol: rows alone, without positions."""
    timeout: float
    max_backlog: int
    credentials: Credentials | None
    on_layout: Callable[[ModelLayout], None]


class Sequence:
    """Numbers the messages to a target: no number twice in a session, whoever sends. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.last = 0

    def next(self) -> int:
        """The number of the next message."""
        with self._lock:
            self.last += 1
            return self.last

    def skip(self, used: int) -> None:
        """Goes on behind a number that is known to be used."""
        with self._lock:
            self.last = max(self.last, used)
