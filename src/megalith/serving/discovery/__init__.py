"""Discovery: who serves what.

`StaticDiscovery` is told, `FileDiscovery` watches a file, `ZooKeeperDiscovery` shares Monolith's nodes;
`open_discovery` makes one from an address. ZooKeeper needs kazoo: `pip install megalith[discovery]`.
"""

from megalith.serving.discovery.contract import Discovery, Replica, SyncBackend, Watch
from megalith.serving.discovery.file import FileDiscovery
from megalith.serving.discovery.replica_watcher import ReplicaWatcher
from megalith.serving.discovery.static import StaticDiscovery
from megalith.serving.discovery.urls import open_discovery
from megalith.serving.discovery.znode_records import (
    Container,
    ContainerServiceInfo,
    ReplicaMeta,
    SavedModel,
    SavedModelDeployConfig,
    TargetExtraInfo,
)
from megalith.serving.discovery.zookeeper import ZooKeeperDiscovery

__all__ = [
    "Container",
    "ContainerServiceInfo",
    "Discovery",
    "FileDiscovery",
    "Replica",
    "ReplicaMeta",
    "ReplicaWatcher",
    "SavedModel",
    "SavedModelDeployConfig",
    "StaticDiscovery",
    "SyncBackend",
    "TargetExtraInfo",
    "Watch",
    "ZooKeeperDiscovery",
    "open_discovery",
]
