"""TTL: rows that were not updated for a while are removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.ids import NUM_SLOTS, slot_of
from megalith.table.policies.policy import Eviction, check_real
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
