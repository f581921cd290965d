"""Policies: which ids get a row, which rows are removed, and how large a table may become."""

from __future__ import annotations

from megalith.table.policies.admission import MinCount, Probability
from megalith.table.policies.eviction import TTL, Capacity, MinNorm
from megalith.table.policies.policy import Admission, Eviction, describe_policy

ADMISSIONS: dict[str, type[Admission]] = {kind.name: kind for kind in (MinCount, Probability)}
EVICTIONS: dict[str, type[Eviction]] = {kind.name: kind for kind in (TTL, MinNorm, Capacity)}

__all__ = [
    "ADMISSIONS",
    "EVICTIONS",
    "TTL",
    "Admission",
    "Capacity",
    "Eviction",
    "MinCount",
    "MinNorm",
    "Probability",
    "describe_policy",
]
