"""What a publisher and its senders share: the state of the publisher, the options, and the reports.

The publisher owns the state and changes it with `lock` held; each sender (`sender.py`) reads it, and fills in
the report of its own target.
"""

from __future__ import annotations

import threading
import time as clock
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megalith.serving.client.credentials import Credentials
from megalith.serving.sync.changed_ids import Interval, Journal
from megalith.serving.sync.message_header import ModelLayout
from megalith.serving.sync.parameter_source import ParameterSource


@dataclass
class TargetReport:
    """The progress of a target. Times are in seconds since 1970; None: not yet known."""

    address: str
    model: str
    """The name of the model there."""
    part: str | None = None
    backlog: int = 0
    """Rows to be sent."""
    sequence: int = 0
    rows: int = 0
    """Rows sent and acknowledged."""
    error: str | None = None
    """The last error; None after a success."""
    acknowledged_at: float | None = None
    """The time of the last answer."""
    complete: float | None = None
    """Everything trained until this time has arrived."""
    listed: bool = True
    """Whether discovery still lists the target."""

    @property
    def staleness(self) -> float | None:
        """Seconds of training that have not arrived; None before the first interval is complete."""
        return None if self.complete is None else max(0.0, clock.time() - self.complete)


class PublisherState(Protocol):
    """The state of a publisher that its senders share; guarded by `lock`."""

    lock: threading.Condition
    source: ParameterSource
    journal: Journal
    interval: Interval
    """The last interval that has ended."""
    dense: Mapping[str, Tensor]
    dense_number: int
    """The number of the interval in which the dense weights changed last."""

    def compact_journal(self) -> None:
        """Compact the journal if it is due; called when an interval is complete at a target."""


@dataclass(frozen=True)
class SenderOptions:
    """The options that all senders of a publisher share."""

    session: str
    number: int
    """The number of the session."""
    index: int
    count: int
    signature: str
    monolith: bool
    """Use Monolith's protocol: rows only, without positions."""
    timeout: float
    max_backlog: int
    credentials: Credentials | None
    on_layout: Callable[[ModelLayout], None]
    """Called with the layout of each target at its handshake."""
