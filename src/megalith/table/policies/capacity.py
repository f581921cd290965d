"""Capacity: a limit of the size of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.table.policies.policy import Eviction, check_integer
from megalith.table.table_data import Chunk

SCORES = ("lru", "lfu", "step")

Score = Callable[[Chunk], Tensor]


@dataclass(frozen=True)
class Capacity(Eviction):
    """Limits the number of rows. When a write needs room, the rows with the lowest score are removed.

    The limit applies to the whole table: with W shards each shard holds at most ceil(rows / W). It holds at
    every moment. An id of the current call is never removed; a call with more distinct ids than the limit
    raises `TableFullError` before anything is written.

    A write never waits for a pass over the table. The lowest named scores are found by sampling: a removed
    row is among the lowest eighth, not always the lowest. With "lfu", a row has count 1 after its first
    update or assignment; an assigned row has the latest step of an update.

    With a limit, results depend on the number of shards, because each shard chooses among its own rows.

    Args:
        rows: Largest number of rows.
        max_bytes: Largest number of bytes that `Table.memory` reports, logs and counts of ids without a row
            included (see `megalith.table.engines.shard_limits`). With both limits the lower one applies. A
            table whose limit has no room for a row raises InputError.
        score: "lru": time of the last update in seconds. "lfu": number of updates, the older row first among
            equals. "step": step of the last update. Or a function that takes a `Chunk`, on the device of the
            table, and returns a float tensor [n]; a write that needs room calls it for a part of the table
            (`megalith.table.engines.score_search`). None: nothing is removed, and a write beyond the limit
            raises `TableFullError`.

    Raises:
        InputError: No limit is given, or an argument has the wrong type or value.
    """

    rows: int | None = None
    max_bytes: int | None = None
    score: str | Score | None = "lru"
    name: ClassVar[str] = "capacity"

    def __post_init__(self) -> None:
        if self.rows is None and self.max_bytes is None:
            raise InputError("Capacity: pass rows or max_bytes")
        if self.rows is not None:
            check_integer("Capacity: rows", self.rows, 1)
        if self.max_bytes is not None:
            check_integer("Capacity: max_bytes", self.max_bytes, 1)
        named = isinstance(self.score, str) and self.score in SCORES
        good = self.score is None or callable(self.score) or named
        if not good or isinstance(self.score, type):
            raise InputError(
                f"Capacity: score must be one of {', '.join(SCORES)}, a function of a Chunk, or None, "
                f"got {self.score!r}"
            )

    def expired(self, chunk: Chunk, now: int) -> Tensor:
        # Nothing, since a table never exceeds its capacity.
        return torch.zeros(chunk.ids.shape[0], dtype=torch.bool, device="cpu")
