"""CheckpointState: what a collection remembers about its checkpoints; the package checkpoint maintains it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class CheckpointState:
    """Where the rows of a collection come from, and whether a save of them is in progress.

    A copy of a collection starts without saves: those of the original are not its own.
    """

    # The address of the checkpoint and the id of the save that the rows were saved to or loaded from; None if
    # there is none. A delta can only be added there.
    last_save: tuple[str, str] | None = None
    save_in_progress: object | None = None
    # The routing mode and block size that each table was saved with, as the last load found them. With one
    # shard nothing else records them; the next save carries them over.
    routing: dict[str, tuple[str, int | None]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy without saves."""
        return CheckpointState, (None, None, dict(self.routing))
