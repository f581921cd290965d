"""Ranks: which process this is, and how many there are.

The functions describe torch.distributed's process groups, and for a single process where there is none.
`RankGroup` is the same for the ranks that share the tables of a model; it also exchanges small values.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def has_process_group() -> bool:
    """Return whether the default process group exists."""
    return dist.is_available() and dist.is_initialized()


def current_rank(group: Any = None) -> int:
    """Return the rank of this process."""
    return dist.get_rank(group) if has_process_group() else 0


def world_size(group: Any = None) -> int:
    """Return the number of ranks."""
    return dist.get_world_size(group) if has_process_group() else 1


class RankGroup:
    """A single process. Placements over several processes bring their own subclass."""

    rank: int = 0  # The rank of this process in the group
    size: int = 1  # The number of ranks in the group

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank. A collective call."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on every rank. A collective call."""
        return [value]
