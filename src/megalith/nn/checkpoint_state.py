"""CheckpointState: what a collection remembers about its checkpoints; the package checkpoint maintains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class CheckpointState:
    """Where the rows of a collection come from, and whether a save of them is in progress.

    A copy of a collection starts with an empty state: the saves of the original are not its own.

    Attributes:
        last_save: The address of the checkpoint and the id of the save that the rows were saved to or loaded
            from; None if there is none. A delta can only be added there.
        save_in_progress: The save that is in progress, or None.
    """

    last_save: tuple[str, str] | None = None
    save_in_progress: object | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy as an empty state."""
        return CheckpointState, ()
