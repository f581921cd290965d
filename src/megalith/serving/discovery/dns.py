"""DNSDiscovery: the servers are the addresses of a DNS name, such as a headless service of Kubernetes.

The records are managed by whoever starts the servers, so registering changes nothing. A name that cannot be
resolved is logged, and the addresses that were found before stay in use.
"""

from __future__ import annotations

import logging
import socket
import threading

from megalith.errors import InputError
from megalith.ops import checks
from megalith.serving.discovery.contract import PolledDiscovery, Replica, Replicas, ServiceName, check_address

logger = logging.getLogger(__name__)

MODEL, PART = "{model}", "{part}"
"""Placeholders in a name."""


class DNSDiscovery(PolledDiscovery):
    """The servers that a DNS name leads to, all on one port.

    `replicas` resolves the name when it is first asked for a service. `start` starts a thread that resolves
    it again every `interval` seconds and calls the watches.

    Args:
        name: The name. `{model}` and `{part}` in it are replaced by those of the service, with "-" for "_",
            as in "{part}.movies.default.svc.cluster.local"; without them, all addresses serve every service.
        port: The port of every server.
        interval: Seconds between two resolutions, 0.01 to 3600.

    Raises:
        InputError: The name, the port or the interval is invalid.
    """

    def __init__(self, name: str, port: int, *, interval: float = 10.0) -> None:
        self._name = checks.text(name, "dns: name")
        self._port = checks.integer(port, "dns: port")
        if not 0.01 <= checks.number(interval, "dns: interval") <= 3600:
            raise InputError(f"dns: interval must be 0.01 to 3600 seconds, got {interval}")
        check_address(f"{self._host(ServiceName('model', 'part'))}:{port}", "dns")
        super().__init__(f"dns:{name}", interval)
        self._lock = threading.Lock()
        self._services: set[str] = set()
        self._problems: dict[str, str] = {}

    def register(self, service: str, replica: Replica) -> None:
        # Changes nothing, as `unregister`: the records of the name say who serves.
        ServiceName.parse(service)
        checks.instance(replica, Replica, "register: replica")

    def unregister(self, service: str, address: str) -> None:
        ServiceName.parse(service)
        checks.text(address, "unregister: address")

    def replicas(self, service: str) -> Replicas:
        ServiceName.parse(service)
        with self._lock:
            is_new = service not in self._services
            self._services.add(service)
        if is_new or self._thread is None:
            self._resolve(service)
        return self._registry.get(service)

    def _host(self, service: ServiceName) -> str:
        parts = {MODEL: service.model, PART: service.part}
        host = self._name
        for placeholder, value in parts.items():
            host = host.replace(placeholder, value.replace("_", "-"))
        return host

    def _resolve(self, service: str) -> None:
        host = self._host(ServiceName.parse(service))
        try:
            found = lookup_addresses(host, self._port)
        except OSError as error:
            if self._problems.get(service) != str(error):
                self._problems[service] = str(error)
                logger.warning("dns:%s: %s; keeping the addresses found before", host, error)
            return
        self._problems.pop(service, None)
        self._registry.set(service, [Replica(address) for address in found])

    def _poll(self) -> None:
        with self._lock:
            services = sorted(self._services)
        for service in services:
            self._resolve(service)


def lookup_addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ips = dict.fromkeys(str(address[0]) for *_, address in found)
    return [f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in ips]


def open_dns(rest: str, **options: float) -> DNSDiscovery:
    name, colon, port = rest.removeprefix("//").rpartition(":")
    if not colon or not name or not port.isascii() or not port.isdecimal():
        raise InputError("dns: must be dns:name:port")
    return DNSDiscovery(name, int(port), **options)
