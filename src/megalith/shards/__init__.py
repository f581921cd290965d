"""Shards: all tables of a model by name, one call for all of them. On parameter servers: `megalith.ps`."""

from megalith.shards.comm_metrics import CommMetrics, CommReport
from megalith.shards.contract import Shards, ShardsPart
from megalith.shards.local import LocalLookup, LocalShards
from megalith.shards.lookup import Lookup, PreparedIds
from megalith.shards.sync import SyncLookup, SyncShards

__all__ = [
    "CommMetrics",
    "CommReport",
    "LocalLookup",
    "LocalShards",
    "Lookup",
    "PreparedIds",
    "Shards",
    "ShardsPart",
    "SyncLookup",
    "SyncShards",
]
