"""RankGroup: which of how many this process is, and small facts agreed on between all of them."""

from __future__ import annotations

from typing import Any


class RankGroup:
    """One process by itself. Placements over processes bring their own."""

    rank: int = 0
    size: int = 1

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        return [value]
