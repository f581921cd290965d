"""Discovery: which servers serve which part of which model.

`StaticDiscovery` has a fixed list, `FileDiscovery` watches a file, `DNSDiscovery` resolves a name,
`ZooKeeperDiscovery` shares its nodes with Monolith; `open_discovery` makes one from a URL. ZooKeeper needs
kazoo, the extra `discovery`.
"""

from megalith.serving.discovery.contract import Discovery, Replica, ServiceName, SyncBackend, Watch
from megalith.serving.discovery.dns import DNSDiscovery
from megalith.serving.discovery.server_list import FileDiscovery, StaticDiscovery
from megalith.serving.discovery.urls import open_discovery
from megalith.serving.discovery.zookeeper import ZooKeeperDiscovery

__all__ = [
    "DNSDiscovery",
    "Discovery",
    "FileDiscovery",
    "Replica",
    "ServiceName",
    "StaticDiscovery",
    "SyncBackend",
    "Watch",
    "ZooKeeperDiscovery",
    "open_discovery",
]
