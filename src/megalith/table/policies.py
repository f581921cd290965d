"""Policies: which new ids get a row (`Admission`), and which rows are removed (`Eviction`).

A policy holds settings only. The rows, counts and logs belong to the engine, so one policy object may serve
several tables. A new eviction policy is a class and an entry of `EVICTIONS`.

`MinCount` admits an id by its number of occurrences, `Probability` at random. The engines decide, for speed:
native/table_admit.hpp and engines/reference_policies.py.

`TTL` removes rows by age, `MinNorm` by their norm, and `Capacity` limits the size of a table. `Table.evict`
asks `TTL` and `MinNorm` in passes over the table (eviction_pass.py). A `Capacity` holds at every moment: the
write that needs a place removes rows (engines/shard_capacity.py, native/table_evict.hpp).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.ids import NUM_SLOTS, slot_of
from megalith.table.schedules import FLOAT32_MAX
from megalith.table.table_data import MAX_TIME, Chunk

MAX_COUNT = 2**32 - 1


class Admission:
    """Decides which new ids of an update get a row.

    `Table.assign`, `assign_add`, `reinitialize` and `restore` create rows without asking the policy.
    """

    name: ClassVar[str]
    """The name of the policy in configs of runs and in errors."""


class Eviction(ABC):
    """Decides which rows `Table.evict` removes."""

    name: ClassVar[str]
    """The name of the policy in configs of runs and in errors."""

    needs_rows: ClassVar[bool] = False
    """Whether `expired` reads weights and optimizer state. Without them a pass over a table is cheaper."""

    @abstractmethod
    def expired(self, chunk: Chunk, now: int) -> Tensor:
        """Return which rows are to be removed.

        Args:
            chunk: Rows of the table, on its device. Without `needs_rows` it holds ids, times, counts and
                steps only.
            now: The time of the call in seconds.

        Returns:
            bool [n].
        """


def check_integer(where: str, value: Any, low: int) -> int:
    """Check an integer setting of a policy."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(f"{where} must be an integer >= {low}, got {value!r}")
    return value


def check_real(where: str, value: Any, *, above: float, most: float) -> float:
    """Check a real setting of a policy."""
    if isinstance(value, bool) or not isinstance(value, Real) or not above < float(value) <= most:
        raise InputError(f"{where} must be a number above {above:g} and at most {most:g}, got {value!r}")
    return float(value)


@dataclass(frozen=True)
class MinCount(Admission):
    """Creates the row of an id in the call in which the total of its occurrences reaches `n`.

    That call applies the whole summed gradient of the id; the gradients of earlier calls are dropped. Counts
    are exact for up to `max_ids` ids without a row. Beyond that the ids that were counted first are dropped;
    `Table.stats` reports how many.

    Args:
        n: Number of occurrences that creates a row. 1 admits every id.
        max_ids: Largest number of ids that are counted, for each shard. A counted id takes about 45 bytes. A
            `Capacity` with `max_bytes` may lower it.

    Raises:
        InputError: An argument is not an integer, or it is out of range.
    """

    n: int
    max_ids: int = 1 << 24
    name: ClassVar[str] = "min_count"

    def __post_init__(self) -> None:
        if check_integer("MinCount: n", self.n, 1) > MAX_COUNT:
            raise InputError(f"MinCount: n must be at most {MAX_COUNT}, got {self.n}")
        check_integer("MinCount: max_ids", self.max_ids, 1)


@dataclass(frozen=True)
class Probability(Admission):
    """Creates a row with probability `p` for each occurrence of the id; needs no memory for counts.

    The draw is a function of the seed, the table, the id, the step and the number of the occurrence, so a run
    can be repeated. An id occurs 1 / p times on average before it has a row.

    Args:
        p: Probability, above 0 and at most 1.

    Raises:
        InputError: `p` is not a number, or it is out of range.
    """

    p: float
    name: ClassVar[str] = "probability"

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", check_real("Probability: p", self.p, above=0, most=1))

    @property
    def limit(self) -> int:
        """The limit below which 24 random bits admit an id, 1 to 2^24."""
        return max(1, round(self.p * 2**24))


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
        return age >= ages.to(age.device)[slot_of(chunk.ids)]


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
        return torch.zeros_like(chunk.ids, dtype=torch.bool)


ADMISSIONS: dict[str, type[Admission]] = {kind.name: kind for kind in (MinCount, Probability)}
EVICTIONS: dict[str, type[Eviction]] = {kind.name: kind for kind in (TTL, MinNorm, Capacity)}


def describe_policy(policy: Admission | Eviction) -> dict[str, Any]:
    """Describe a policy as JSON data, for manifests and messages."""
    names: list[str] = [field.name for field in fields(policy)] if is_dataclass(policy) else []
    return {"name": policy.name, "settings": {name: _plain(getattr(policy, name)) for name in names}}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return getattr(value, "__qualname__", None) or repr(value)
