"""Member: a worker of a `TableSpace`. Round: the pushes of one synchronous step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megalith.shards.servers.server_messages import ServerWrite

_KEPT_ERRORS = 1000


@dataclass
class Member:
    """A worker.

    Attributes:
        session: Identifies the process that is this worker.
        accepted: The number of the last accepted write.
        done: The number of the last write that has been applied or has failed.
        pushes: The number of its pushes, counted from the highest number of a member when it joined.
        result: The result of the last write.
        errors: Errors of writes by their number.
        present: Whether it is a member now.
    """

    session: str = ""
    accepted: int = 0
    done: int = 0
    pushes: int = 0
    result: Any = None
    errors: dict[int, Exception] = field(default_factory=dict)
    present: bool = True

    @property
    def progress(self) -> tuple[int, int, str, bool]:
        """What changes when a write is accepted or done, or when the worker leaves or is replaced."""
        return self.accepted, self.done, self.session, self.present

    def keep(self, number: int, error: Exception) -> None:
        """Keep the error of a write, for the case that the write is sent again.

        Args:
            number: The number of the write.
            error: Its error.
        """
        self.errors[number] = error.with_traceback(None)
        while len(self.errors) > _KEPT_ERRORS:
            del self.errors[next(iter(self.errors))]

    def skip(self, number: int, error: Exception) -> None:
        """Give up a write and those before it that have not arrived; they raise if they arrive later.

        Args:
            number: The number of the write.
            error: Its error.
        """
        for skipped in range(max(self.accepted, number - _KEPT_ERRORS) + 1, number + 1):
            self.keep(skipped, error)
        self.accepted = self.done = number


class Round:
    """The pushes of one synchronous step."""

    def __init__(self) -> None:
        self.pushes: dict[int, ServerWrite] = {}
        self.ended = False
        self.error: Exception | None = None
