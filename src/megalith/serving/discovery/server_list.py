"""StaticDiscovery and FileDiscovery: a list of servers, given directly or in a file that is watched.

The file is JSON, or TOML of the same structure: {"services": {"movies:entry": ["host:port", {"address":
"host:port", "replica_id": 0, "idc": "a", "cluster": "b"}]}}. A program that rewrites it should write another
file and rename it. A half-written file is ignored: a file that cannot be read changes nothing.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megalith.errors import DiscoveryError, InputError, UsageError
from megalith.ops import checks
from megalith.serving.discovery.contract import (
    Discovery,
    PolledDiscovery,
    Replica,
    Replicas,
    ServiceName,
    parse_replica,
)
from megalith.storage.json_codec import parse_json
from megalith.storage.local_files import take_lock

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


logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 * 2**20
"""The maximum size of the file."""
LOCK_SECONDS = 5.0
"""How long to wait for another writer, and for a thread of this process that reads the file."""


class FileDiscovery(PolledDiscovery):
    """The servers listed in a file; a missing file lists no servers.

    `replicas` reads the file. `start` starts a thread that reads it every `interval` seconds and calls the
    watches. `register` rewrites a JSON file and holds a lock file next to it. `stop` removes the replicas
    registered through this object; the entries of a killed process stay in the file.

    Args:
        path: The file, *.json or *.toml.
        interval: Seconds between two reads, 0.01 to 60.

    Raises:
        InputError: The interval is out of range.
    """

    def __init__(self, path: str | os.PathLike[str], *, interval: float = 1.0) -> None:
        if not 0.01 <= checks.number(interval, "interval") <= 60:
            raise InputError(f"interval must be 0.01 to 60 seconds, got {interval}")
        self.path = checks.path(path, "discovery: path")
        super().__init__(str(self.path), interval)
        self._lock = threading.RLock()
        self._last: bytes | None = None
        self._problem: str | None = None
        self._listed: dict[str, list[Replica]] = {}
        self._own: set[tuple[str, str]] = set()

    def _begin(self) -> None:
        # A file that is malformed from the start is an error; later it only keeps the previous list.
        data = self._read()
        if data is not None:
            parse_services(data, self.path)
        self.refresh()

    def stop(self) -> None:
        super().stop()
        for service, address in sorted(self._own):
            try:
                self.unregister(service, address)
            except (DiscoveryError, InputError) as error:
                logger.warning("%s is still listed: %s", address, error)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LOCK_SECONDS)
            if self._thread.is_alive():
                logger.error("%s: a read has not ended %g s after the stop", self.path, LOCK_SECONDS)

    def register(self, service: str, replica: Replica) -> None:
        # Raises UsageError for a TOML file, which is read-only.
        name = str(ServiceName.parse(service))
        checks.instance(replica, Replica, "register: replica")
        entry = {key: value for key, value in vars(replica).items() if value not in (None, -1)}
        with self._rewriting() as services:
            others = [server for server in services.get(name, []) if _address_of(server) != replica.address]
            services[name] = [*others, entry]
        self._own.add((name, replica.address))
        self.refresh()

    def unregister(self, service: str, address: str) -> None:
        ServiceName.parse(service)
        checks.text(address, "unregister: address")
        with self._rewriting() as services:
            others = [server for server in services.get(service, []) if _address_of(server) != address]
            if service in services:
                services[service] = others
        self._own.discard((service, address))
        self.refresh()

    def replicas(self, service: str) -> Replicas:
        ServiceName.parse(service)
        self.refresh()
        return self._registry.get(service)

    def refresh(self) -> None:
        """Read the file now. A file that cannot be read is logged once and changes nothing."""
        with self._reading():
            try:
                data = self._read()
                if data is None or data == self._last:
                    return
                self._last = data
                listed = parse_services(data, self.path)
            except (InputError, DiscoveryError) as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    logger.warning("%s; keeping the previous list of servers", error)
                return
            self._problem = None
            for service in {*self._listed, *listed}:
                self._registry.set(service, listed.get(service, ()))
            self._listed = listed

    def _poll(self) -> None:
        try:
            self.refresh()
        except DiscoveryError as error:
            logger.warning("%s", error)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Hold the lock, for which another thread waits only so long: a read of a network mount may hang."""
        if not self._lock.acquire(timeout=LOCK_SECONDS):
            raise DiscoveryError(f"{self.path}: another thread has read it for {LOCK_SECONDS:g} s")
        try:
            yield
        finally:
            self._lock.release()

    def _read(self) -> bytes | None:
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DiscoveryError(f"{self.path}: cannot be read: {error.strerror}") from None
        if len(data) > MAX_FILE_BYTES:
            raise InputError(f"{self.path}: more than {MAX_FILE_BYTES} bytes")
        return data

    @contextmanager
    def _rewriting(self) -> Iterator[dict[str, list[Any]]]:
        """Yield the services of the file to be changed, and write them back if they were."""
        if self.path.suffix == ".toml":
            raise UsageError(f"{self.path}: TOML files are read-only; let servers register in a .json file")
        with self._reading(), self._locked():
            data = self._read()
            if data is not None:
                parse_services(data, self.path)
            document = {"services": {}} if data is None else json.loads(data)
            before = json.dumps(document)
            yield document["services"]
            if json.dumps(document) == before:
                return
            part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
            try:
                part.write_text(json.dumps(document, indent=2) + "\n")
                part.replace(self.path)
            except OSError as error:
                raise DiscoveryError(f"{self.path}: cannot be written: {error.strerror}") from None
            finally:
                part.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock file, which all processes that rewrite the file use."""
        path = self.path.with_name(f".{self.path.name}.lock")
        try:
            file = path.open("a")
        except OSError as error:
            raise DiscoveryError(f"{path}: cannot be written: {error.strerror}") from None
        with file:
            if not take_lock(file.fileno(), LOCK_SECONDS):
                raise DiscoveryError(f"{path}: another process has held the lock for {LOCK_SECONDS:g} s")
            yield


def parse_services(data: bytes, path: Path) -> dict[str, list[Replica]]:
    """Parse the content of a file."""
    try:
        found = tomllib.loads(data.decode()) if path.suffix == ".toml" else parse_json(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {str(error)[:200]}") from None
    services = found.get("services") if isinstance(found, dict) else None
    if not isinstance(services, dict):
        raise InputError(f'{path}: must be a table with the key "services", a table of lists')
    listed: dict[str, list[Replica]] = {}
    for service, servers in services.items():
        where = f"{path}: {service[:100]!r}"
        try:
            ServiceName.parse(service)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        if not isinstance(servers, list):
            raise InputError(f"{where} must be a list of servers")
        listed[service] = [parse_replica(server, where) for server in servers]
    return listed


def _address_of(server: Any) -> object:
    return server.get("address") if isinstance(server, dict) else server
