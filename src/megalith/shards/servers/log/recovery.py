"""Recovery: how a server that ended gets its rows back. PartRecovery: what a save reports to its log.

A server that Ray starts again opens its tables with `TableSpace.recover`: it loads its rows from the newest
checkpoint that the log knows, then applies the records of the log after it. Only this server does so; the
others continue, and workers wait for it and send again what was not answered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megalith.errors import InputError
from megalith.ops import checks

LOGS = ("none", "async", "sync")
RestoreRows = Callable[..., str | None]
"""restore(part, place, only=id): loads the rows of a part from the checkpoint at a place, which is JSON data,
if that is the save with this id. Returns the id of the save there; None: there is no checkpoint."""


@dataclass(frozen=True)
class Recovery:
    """Where servers keep what they need to start again. `checkpoint.recovery` makes one."""

    directory: str  # A directory that all servers reach; each has a folder in it. Use a new one for each run.
    # "sync": nothing that was answered is lost. "async": at most the updates of the last 0.2 seconds (after a
    # power failure, of the last flush). "none": all updates since the last checkpoint.
    log: str
    restore: RestoreRows  # Loads rows from a checkpoint
    # The id of the move of tables to new servers that these are started for; None: no move
    move: str | None = None

    def __post_init__(self) -> None:
        checks.one_of(self.log, LOGS, "Recovery: log")
        if not isinstance(self.directory, str) or not self.directory:
            raise InputError(f"Recovery: directory must be a path, got {self.directory!r}")
        checks.callback(self.restore, "Recovery: restore", required=True)

    def folder(self, name: str, index: int, count: int) -> Path:
        """Return the folder of a server."""
        return Path(self.directory) / name / f"server-{index}-of-{count}"


class PartRecovery(Protocol):
    """What a save or load reports to the server of a part."""

    def frozen(self, id: str, place: Any) -> None:
        """Report that a save has frozen the rows."""

    def ended(self, id: str, *, complete: bool) -> None:
        """Report the end of a save."""
