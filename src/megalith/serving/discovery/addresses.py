"""Addresses of servers: what one looks like, and which of them can be called.

An address from a file or from ZooKeeper becomes a gRPC target, and gRPC takes `unix:...` or `dns:...` for
something else than a host; only `host:port` passes here.
"""

from __future__ import annotations

import ipaddress
import re

from megalith.errors import InputError

_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})"
_ADDRESS = re.compile(rf"(?P<host>{_HOST}|\[[0-9A-Fa-f:.]{{2,45}}\]):(?P<port>[0-9]{{1,5}})", re.ASCII)
_GRPC_SCHEMES = frozenset({"unix", "unix-abstract", "vsock", "dns", "ipv4", "ipv6", "xds", "passthrough"})


def check_address(address: object, what: str = "address") -> str:
    """The address if it is `host:port` or `[ipv6]:port`; raises InputError, naming `what`, if not."""
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or not 1 <= int(found["port"]) <= 65535 or found["host"].lower() in _GRPC_SCHEMES:
        shown = repr(address)[:100]
        raise InputError(f"{what}: {shown} is not an address; write host:port or [ipv6]:port")
    return found[0]


def is_wildcard(address: str) -> bool:
    """Whether it says "all interfaces", which a server binds to and nobody can call."""
    return address.startswith(("0.0.0.0", "[::]"))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host, which is written without a port."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
