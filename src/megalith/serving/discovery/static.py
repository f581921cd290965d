"""StaticDiscovery: servers whose addresses are known beforehand."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from megalith.errors import InputError
from megalith.serving.discovery.contract import Discovery, Replica, Replicas, replica_of
from megalith.serving.discovery.znode_records import SavedModel

Servers = Sequence[str | Replica]


class StaticDiscovery(Discovery):
    """The servers given: a list, which answers for every service, or lists by service.

    What is registered later is added for this object alone, which is enough for one process and for tests.
    Raises InputError for what is no address.
    """

    def __init__(self, servers: Servers | Mapping[str, Servers]) -> None:
        super().__init__()
        if isinstance(servers, str):
            raise InputError(f"servers must be a list of addresses, not {servers!r}")
        by_service = servers if isinstance(servers, Mapping) else {}
        everywhere = () if isinstance(servers, Mapping) else servers
        self._everywhere = tuple(replica_of(server, "servers") for server in everywhere)
        self._lock = threading.RLock()
        self._registered: dict[str, dict[str, Replica]] = {}
        for service, given in by_service.items():
            for server in given:
                self.register(service, replica_of(server, service))

    def register(self, service: str, replica: Replica) -> None:
        """See `Discovery.register`."""
        SavedModel.parse(service)
        with self._lock:
            self._registered.setdefault(service, {})[replica.address] = replica
            self._pin(service)

    def unregister(self, service: str, address: str) -> None:
        """See `Discovery.unregister`; servers that answer for every service stay."""
        with self._lock:
            self._registered.get(service, {}).pop(address, None)
            self._pin(service)

    def replicas(self, service: str) -> Replicas:
        """See `Discovery.replicas`."""
        SavedModel.parse(service)
        with self._lock:
            self._pin(service)
            return self._board.get(service)

    def _pin(self, service: str) -> None:
        self._board.set(service, (*self._registered.get(service, {}).values(), *self._everywhere))
