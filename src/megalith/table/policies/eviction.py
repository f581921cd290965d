"""Eviction policies: which rows are removed.

`TTL` removes rows by age, `MinNorm` by their norm, and `Capacity` limits the size of a table.
`Table.evict` asks `TTL` and `MinNorm` in passes over the table (eviction_pass.py). A `Capacity` holds at
every moment: the write that needs a place removes rows (engines/shard_capacity.py,
native/table_evict.hpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.ids import NUM_SLOTS, slot_of
from megalith.table.policies.policy import Eviction, check_integer, check_real
from megalith.table.schedules import FLOAT32_MAX
from megalith.table.table_data import MAX_TIME, Chunk


@dataclass(frozen=True)
class TTL(Eviction):
    """Removes rows whose last update is at least `seconds` old.

    Args:
        seconds: Age in seconds at which a row expires.
        per_slot: Other ages by slot, for tables whose ids come from `megalith.fid(slot, id)`. The slot is in
            bits 48 to 62 of an id.

    Raises:
        InputError: An age is not a positive number, or a slot does not exist.
    """

    seconds: float
    per_slot: Mapping[int, float] | None = None
    name: ClassVar[str] = "ttl"

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", check_real("TTL: seconds", self.seconds, above=0, most=MAX_TIME))
        if self.per_slot is None:
            return
        if not isinstance(self.per_slot, Mapping):
            raise InputError(f"TTL: per_slot must map slots to seconds, got {type(self.per_slot).__name__}")
        ages = {}
        for slot, seconds in self.per_slot.items():
            if isinstance(slot, bool) or not isinstance(slot, int) or not 0 <= slot < NUM_SLOTS:
                raise InputError(f"TTL: a slot is an integer from 0 to {NUM_SLOTS - 1}, got {slot!r}")
            ages[slot] = check_real(f"TTL: seconds of slot {slot}", seconds, above=0, most=MAX_TIME)
        object.__setattr__(self, "per_slot", MappingProxyType(ages))

    def expired(self, chunk: Chunk, now: int) -> Tensor:
        age = (now - chunk.time).to(torch.float64)
        if not self.per_slot:
            return age >= self.seconds
        ages = torch.full((NUM_SLOTS,), self.seconds, dtype=torch.float64, device="cpu")
        for slot, seconds in self.per_slot.items():
            ages[slot] = seconds
        return age >= ages[slot_of(chunk.ids)]


@dataclass(frozen=True)
class MinNorm(Eviction):
    """Removes rows whose L2 norm over all weights is below `norm`.

    Optimizers with L1 or group regularisation (`FTRL`, `GroupAdagrad`) set the weights of unimportant ids to
    zero; this policy then frees their memory.

    Args:
        norm: Smallest norm of a row that stays.

    Raises:
        InputError: `norm` is not a positive, finite number.
    """

    norm: float
    name: ClassVar[str] = "min_norm"
    needs_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", check_real("MinNorm: norm", self.norm, above=0, most=FLOAT32_MAX))

    def expired(self, chunk: Chunk, now: int) -> Tensor:
        small: Tensor = torch.linalg.vector_norm(chunk.rows, dim=1, dtype=torch.float64) < self.norm
        return small


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
            included (see `megalith.table.engines.shard_capacity`). With both limits the lower one applies. A
            table whose limit has no room for a row raises InputError.
        score: "lru": time of the last update in seconds. "lfu": number of updates, the older row first among
            equals. "step": step of the last update. Or a function that takes a `Chunk`, on the device of the
            table, and returns a float tensor [n]; a write that needs room calls it for a part of the table
            (`megalith.table.engines.shard_capacity`). None: nothing is removed, and a write beyond the limit
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
