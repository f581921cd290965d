"""Statuses: what happened to a peer, one per attempted uid, and whose fault it was.

Faults of peers and faults of this side are disjoint, so that penalties can depend on the first alone. `Fault`
carries a status from where a check fails to the record of that peer, and no further.
"""

from __future__ import annotations

from enum import StrEnum

from megalith.errors import MegalithError


class Status(StrEnum):
    """The outcome of one peer in one attempt."""

    OK = "OK"
    NOT_FOUND = "NOT_FOUND"
    """No object at its location by the deadline."""
    TOO_EARLY = "TOO_EARLY"
    """Written before the window opened."""
    TOO_LATE = "TOO_LATE"
    """Written after the window closed."""
    TOO_LARGE = "TOO_LARGE"
    """More bytes than the plan allows."""
    CHANGED = "CHANGED"
    """Replaced while it was read, twice."""
    CORRUPT = "CORRUPT"
    """Not a payload, or a digest that does not match its bytes."""
    INVALID_SCHEMA = "INVALID_SCHEMA"
    """A payload of another model, window or peer."""
    INVALID_INDEX = "INVALID_INDEX"
    """An index out of range, repeated or out of order."""
    INVALID_VALUE = "INVALID_VALUE"
    """A value that is not finite or too large, or a code without a value."""
    TIMEOUT = "TIMEOUT"
    """Not read before the deadline; the peer or the network was slow."""
    STORE_ERROR = "STORE_ERROR"
    """The store refused or failed: 5xx, 429, credentials, connection."""
    LOCAL_ERROR = "LOCAL_ERROR"
    """This machine failed: the spool is full, or Megalith has an error."""
    RANK_LOST = "RANK_LOST"
    """The rank that had to fetch it is lost."""
    DIGEST_CONFLICT = "DIGEST_CONFLICT"
    """Two ranks read different payloads of one peer."""


OUR_FAULTS = frozenset(
    {
        Status.TIMEOUT,
        Status.STORE_ERROR,
        Status.LOCAL_ERROR,
        Status.RANK_LOST,
        Status.DIGEST_CONFLICT,
    }
)
"""Statuses for which no peer may be penalised."""

PEER_FAULTS = frozenset(Status) - OUR_FAULTS - {Status.OK}
"""Statuses that the peer caused."""

RETRIED = frozenset({Status.NOT_FOUND, Status.TIMEOUT, Status.STORE_ERROR, Status.CHANGED})
"""Statuses after which another try may succeed."""


class Fault(MegalithError, ValueError):
    """Why the object of one peer was not accepted.

    Args:
        status: The status that the peer gets.
        detail: A sentence for the log.
    """

    def __init__(self, status: Status, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail
