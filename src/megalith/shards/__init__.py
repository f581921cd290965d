"""Shards: all tables of a model by name, one call for all."""

from megalith.shards.contract import Lookup, Prepared, Shards
from megalith.shards.fused import FusedLookup
from megalith.shards.local import LocalLookup, LocalShards
from megalith.shards.metrics import CommMetrics, CommReport
from megalith.shards.sync import SyncLookup, SyncShards

__all__ = [
    "CommMetrics",
    "CommReport",
    "FusedLookup",
    "LocalLookup",
    "LocalShards",
    "Lookup",
    "Prepared",
    "Shards",
    "SyncLookup",
    "SyncShards",
]
