"""Addresses of servers: their syntax, and which of them can be called.

An address that comes from a file or from ZooKeeper becomes a gRPC target. gRPC gives targets such as
`unix:...` or `dns:...` a special meaning, so only `host:port` is accepted.
"""

from __future__ import annotations

import ipaddress
import re

from megalith.errors import InputError

_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})"
_ADDRESS = re.compile(rf"(?P<host>{_HOST}|\[[0-9A-Fa-f:.]{{2,45}}\]):(?P<port>[0-9]{{1,5}})", re.ASCII)
_GRPC_SCHEMES = frozenset({"unix", "unix-abstract", "vsock", "dns", "ipv4", "ipv6", "xds", "passthrough"})


def check_address(address: object, what: str = "address") -> str:
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or not 1 <= int(found["port"]) <= 65535 or found["host"].lower() in _GRPC_SCHEMES:
        shown = repr(address)[:100]
        raise InputError(f"{what}: {shown} is not an address; write host:port or [ipv6]:port")
    return found[0]


def is_wildcard(address: str) -> bool:
    """Return whether an address means "all interfaces": a server can bind to it, a client cannot call it."""
    return address.startswith(("0.0.0.0", "[::]"))


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
