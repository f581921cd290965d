"""Shards: all tables of a model by name, one call for all of them.

`servers/` needs the extra `servers`, which is imported when servers are started.
"""

from megalith.shards.comm_metrics import CommMetrics, CommReport
from megalith.shards.contract import Shards
from megalith.shards.local import LocalLookup, LocalShards
from megalith.shards.lookup import Lookup, PreparedIds
from megalith.shards.part import ShardsPart
from megalith.shards.servers.ray.ray_servers import Servers
from megalith.shards.servers.worker.server_lookup import ServerLookup
from megalith.shards.servers.worker.server_shards import ServerShards
from megalith.shards.sync import SyncShards
from megalith.shards.sync_lookup import SyncLookup

__all__ = [
    "CommMetrics",
    "CommReport",
    "LocalLookup",
    "LocalShards",
    "Lookup",
    "PreparedIds",
    "ServerLookup",
    "ServerShards",
    "Servers",
    "Shards",
    "ShardsPart",
    "SyncLookup",
    "SyncShards",
]
