"""Policies: which ids get a row, which rows are removed, and how large a table may become."""

from __future__ import annotations

from megalith.table.policies.capacity import Capacity
from megalith.table.policies.min_count import MinCount
from megalith.table.policies.min_norm import MinNorm
from megalith.table.policies.policy import Admission, Eviction, describe_policy
from megalith.table.policies.probability import Probability
from megalith.table.policies.ttl import TTL

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
