"""Discovery: which servers serve which part of which model.

`StaticDiscovery` has a fixed list, `FileDiscovery` watches a file, `DNSDiscovery` resolves a name,
`ZooKeeperDiscovery` shares its nodes with Monolith; `open_discovery` makes one from a URL. ZooKeeper needs
kazoo, the extra `discovery`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megalith.errors import InputError
from megalith.ops import checks
from megalith.serving.discovery.contract import Discovery, Replica, ServiceName, SyncBackend, Watch
from megalith.serving.discovery.dns import DNSDiscovery, open_dns
from megalith.serving.discovery.server_list import FileDiscovery, StaticDiscovery
from megalith.serving.discovery.zookeeper import ZooKeeperDiscovery, open_zookeeper

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


def _open_static(rest: str, **options: Any) -> StaticDiscovery:
    addresses = [address.strip() for address in rest.split(",") if address.strip()]
    if not addresses:
        raise InputError("static: must be static:host:port,host:port")
    return StaticDiscovery(addresses, **options)


def _open_file(rest: str, **options: Any) -> FileDiscovery:
    path = rest.removeprefix("//")
    if not path:
        raise InputError("file: must be file:path")
    return FileDiscovery(path, **options)


_SCHEMES: dict[str, Callable[..., Discovery]] = {
    "static": _open_static,
    "file": _open_file,
    "dns": open_dns,
    "zk": open_zookeeper,
}


def open_discovery(url: str, **options: Any) -> Discovery:
    """Make a discovery, which is not started yet.

    Args:
        url: One of "static:host:port,...", "file:path", "dns:name:port" or "zk://host:port,host:port/root".
        options: Further arguments of the discovery's class.

    Returns:
        The discovery.

    Raises:
        InputError: The URL is malformed.
    """
    scheme, colon, rest = checks.text(url, "discovery").partition(":")
    if not colon or scheme not in _SCHEMES:
        raise InputError(f"discovery {url!r} must start with one of {', '.join(f'{s}:' for s in _SCHEMES)}")
    return _SCHEMES[scheme](rest, **options)
