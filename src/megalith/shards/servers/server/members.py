"""Member: a worker of a `TableSpace`. Round: the pushes of one synchronous step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megalith.errors import UsageError
from megalith.shards.servers.server_messages import ServerWrite

_KEPT_ERRORS = 1000


@dataclass
class Member:
    """A worker."""

    session: str = ""  # Identifies the process that is this worker
    accepted: int = 0  # The number of the last accepted write
    done: int = 0  # The number of the last write that has been applied or has failed
    pushes: int = 0  # The number of its pushes, counted from the highest number of a member when it joined
    result: Any = None  # The result of the last write
    # Errors of the last failed writes by their number, for writes that are sent again
    errors: dict[int, Exception] = field(default_factory=dict)
    # The number of the last write whose error is no longer in `errors`. A repetition of this write or an
    # earlier one raises, so no error is lost.
    forgotten: int = 0
    present: bool = True  # Whether it is a member now
    observer: bool = False  # Whether nobody waits for its gradients: it reads, saves, loads and evicts

    @property
    def trains(self) -> bool:
        """Whether others wait for its gradients."""
        return self.present and not self.observer

    @property
    def progress(self) -> tuple[int, int, str, bool]:
        """What changes when a write is accepted or done, or when the worker leaves or is replaced."""
        return self.accepted, self.done, self.session, self.present

    def keep(self, number: int, error: Exception) -> None:
        """Keep the error of a write, for the case that the write is sent again."""
        self.errors[number] = error.with_traceback(None)
        while len(self.errors) > _KEPT_ERRORS:
            self.forgotten = max(self.forgotten, next(iter(self.errors)))
            del self.errors[next(iter(self.errors))]

    def raise_error(self, number: int) -> None:
        """Raise the error of a write that is done."""
        if number in self.errors:
            raise self.errors[number]
        if number <= self.forgotten:
            raise UsageError(
                f"write {number} was sent again, but its result is no longer known: more than {_KEPT_ERRORS} "
                "writes after it have failed"
            )

    def skip(self, number: int, error: Exception) -> None:
        """Give up a write and those before it that have not arrived; they raise if they arrive later."""
        if number - _KEPT_ERRORS > self.accepted:
            self.forgotten = number - _KEPT_ERRORS
        for skipped in range(max(self.accepted, number - _KEPT_ERRORS) + 1, number + 1):
            self.keep(skipped, error)
        self.accepted = self.done = number


class Round:
    """The pushes of one synchronous step."""

    def __init__(self) -> None:
        self.pushes: dict[int, ServerWrite] = {}
        self.ended = False
        self.error: Exception | None = None
