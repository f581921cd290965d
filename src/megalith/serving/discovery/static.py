"""StaticDiscovery: servers whose addresses are known in advance."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from megalith.errors import InputError
from megalith.ops import checks
from megalith.serving.discovery.contract import Discovery, Replica, Replicas, ServiceName, parse_replica

Servers = Sequence[str | Replica]


class StaticDiscovery(Discovery):
    """A fixed list of servers.

    A replica registered later is visible through this object only, which is enough for one process and for
    tests.

    Args:
        servers: A list of addresses or replicas that serve every service, or one list per service.

    Raises:
        InputError: A server is not an address or a Replica, or the name of a service is malformed.
    """

    def __init__(self, servers: Servers | Mapping[str, Servers]) -> None:
        super().__init__()
        if not isinstance(servers, list | tuple | Mapping):
            raise InputError(f"servers must be a list of addresses, not {servers!r}")
        by_service = servers if isinstance(servers, Mapping) else {}
        everywhere = () if isinstance(servers, Mapping) else servers
        self._everywhere = tuple(parse_replica(server, "servers") for server in everywhere)
        self._lock = threading.RLock()
        self._registered: dict[str, dict[str, Replica]] = {}
        for service, given in by_service.items():
            checks.as_list(given, f"servers of {service!r}")
            for server in given:
                self.register(service, parse_replica(server, service))

    def register(self, service: str, replica: Replica) -> None:
        ServiceName.parse(service)
        checks.instance(replica, Replica, "register: replica")
        with self._lock:
            self._registered.setdefault(service, {})[replica.address] = replica
            self._update(service)

    def unregister(self, service: str, address: str) -> None:
        # Servers that serve every service stay.
        ServiceName.parse(service)
        checks.text(address, "unregister: address")
        with self._lock:
            self._registered.get(service, {}).pop(address, None)
            self._update(service)

    def replicas(self, service: str) -> Replicas:
        ServiceName.parse(service)
        with self._lock:
            self._update(service)
            return self._registry.get(service)

    def _update(self, service: str) -> None:
        self._registry.set(service, (*self._registered.get(service, {}).values(), *self._everywhere))
