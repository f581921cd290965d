"""What runs on servers for touched ids. Ids that a consumer has taken are kept until that is confirmed.

call       effect on a server
drain      takes the touched ids and those of a drain that was not confirmed, keeps and returns them
confirm    forgets what is kept; sent when all servers have answered
abandon    the worker has left or was replaced: what is kept becomes touched again
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.errors import UnknownNameError
from megalith.ps.messages import Array, array_of
from megalith.shards.local import LocalShards
from megalith.shards.part import ShardsPart


class DrainedIds:
    """The ids of a drain that is not confirmed; a `Kept`."""

    def __init__(self, shards: LocalShards, consumer: str, found: dict[str, tuple[Tensor, Tensor]]) -> None:
        self._shards = shards
        self._consumer = consumer
        self.found = found

    def abandon(self) -> None:
        """Mark the ids again, unless the consumer was removed."""
        ids = {name: torch.cat(pair) for name, pair in self.found.items()}
        try:
            self._shards.mark_touched(self._consumer, ids)
        except UnknownNameError:
            return


def drain(part: ShardsPart, consumer: str) -> dict[str, tuple[Array, Array]]:
    kept = part.kept.pop(_key(consumer), None)
    if kept is not None:
        kept.abandon()
    found = part.shards.drain_touched(consumer)
    part.kept[_key(consumer)] = DrainedIds(part.shards, consumer, found)
    return {name: (array_of(updated), array_of(removed)) for name, (updated, removed) in found.items()}


def confirm(part: ShardsPart, consumer: str) -> None:
    part.kept.pop(_key(consumer), None)


def pending_ids(part: ShardsPart, consumer: str) -> dict[str, Tensor]:
    """Return the touched ids of a consumer without taking them."""
    # returns: int64 [n] per table, updated and removed ids.
    drain(part, consumer)
    kept = part.kept.pop(_key(consumer))
    assert isinstance(kept, DrainedIds)
    kept.abandon()
    return {name: torch.cat(pair) for name, pair in kept.found.items()}


def check_consumer(part: ShardsPart, consumer: str) -> None:
    part.shards.consumer_numbers(consumer)


def _key(consumer: str) -> str:
    return f"drained/{consumer}"
