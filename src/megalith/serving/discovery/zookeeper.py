"""ZooKeeperDiscovery: servers found in ZooKeeper, with the nodes and the JSON of Monolith's agents.

    node                                                | value                | lifetime
    ----------------------------------------------------+----------------------+---------
    /{root}/container_service/{cluster}:{id}            | ContainerServiceInfo | session
    /{root}/binding/{model}/{part}:{cluster}:{id}       | empty                | session

Monolith calls the root bzid, and a part a sub graph. The replicas of a service are the containers bound to
its part that have announced a gRPC address.

The JSON keys of a record and their order are Monolith's, so both systems can read each other's nodes. The
content of a node is untrusted until `from_json` has validated it: the size is bounded, types and addresses
are checked, unknown keys are ignored. Nodes and records that only Monolith's own components use are in
`megalith.compat.monolith`.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Set
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Self, get_type_hints

from megalith.errors import InputError
from megalith.ops import checks
from megalith.serving.discovery.contract import (
    Discovery,
    Replica,
    Replicas,
    ServiceName,
    check_address,
    check_name,
    is_wildcard,
)
from megalith.serving.discovery.zk_session import NodeReader, NodeView, SessionTask, ZooKeeperSession
from megalith.storage.json_codec import parse_json

MAX_RECORD_BYTES = 65536
"""The maximum size of a record."""


class ZnodeRecord:
    """Base of data classes that are stored as a JSON object in a node."""

    def to_json(self) -> bytes:
        """Return the content of the node."""
        return json.dumps(asdict(self)).encode()  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, data: bytes, *, where: str = "record") -> Self:
        """Read a record from the content of the node `where`; raise InputError if it is malformed."""
        found = parse_json(
            data, lambda problem: InputError(f"{where}: {problem}"), max_bytes=MAX_RECORD_BYTES
        )
        if not isinstance(found, dict):
            raise InputError(f"{where}: a {cls.__name__} must be a JSON object")
        kinds = get_type_hints(cls)
        known: dict[str, Any] = {}
        for field in fields(cls):  # type: ignore[arg-type]
            if field.name not in found:
                continue
            value = found[field.name]
            if isinstance(value, bool) or not isinstance(value, kinds[field.name]):
                raise InputError(f"{where}: {field.name} is {repr(value)[:100]}")
            known[field.name] = value
        try:
            return cls(**known)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None


@dataclass(frozen=True, order=True)
class Container:
    """A serving process.

    Args:
        ctx_cluster: The cluster it runs in.
        ctx_id: Its id within the cluster.
    """

    ctx_cluster: str
    ctx_id: str

    def __post_init__(self) -> None:
        check_name(self.ctx_cluster, "container cluster")
        check_name(self.ctx_id, "container id")

    def __str__(self) -> str:
        return f"{self.ctx_cluster}:{self.ctx_id}"


@dataclass(frozen=True)
class ContainerServiceInfo(ZnodeRecord):
    """The addresses of a serving process; a field is None if there is no such address.

    Args:
        grpc: The address for gRPC.
        http: The address for HTTP.
        archon: The archon address.
        agent: The address of the agent.
        idc: The data centre.
        debug_info: Free text.
    """

    grpc: str | None = None
    http: str | None = None
    archon: str | None = None
    agent: str | None = None
    idc: str | None = None
    debug_info: str | None = None

    def __post_init__(self) -> None:
        if self.grpc is not None:
            check_address(self.grpc, "grpc")


logger = logging.getLogger(__name__)

Bindings = dict[str, list[tuple[Container, ContainerServiceInfo]]]
"""The containers of each part of one model."""


class ZooKeeperDiscovery(Discovery):
    """Servers found in ZooKeeper.

    The replicas found last stay known while ZooKeeper is unavailable. Registered replicas are registered
    again when it returns, also in a new session.

    Args:
        hosts: The servers of ZooKeeper, "host:port,host:port".
        root: The path that all nodes are below (Monolith's bzid); it may contain slashes.
        container_id: The name of this process in ZooKeeper; random if not given.
        options: Further arguments of `ZooKeeperSession`.

    Raises:
        InputError: An argument is malformed.
    """

    def __init__(
        self, hosts: str, root: str = "megalith", *, container_id: str | None = None, **options: Any
    ) -> None:
        super().__init__()
        checks.text(hosts, "ZooKeeper: hosts")
        for part in checks.text(root, "root").split("/"):
            check_name(part, "root")
        self.root = root
        self._name = check_name(
            uuid.uuid4().hex[:12] if container_id is None else container_id, "container_id"
        )
        self.session = ZooKeeperSession(hosts, **options)
        """The connection, which further readers of nodes may share."""
        self._lock = threading.RLock()
        self._containers: dict[str, Container] = {}
        self._bound_services: dict[Container, set[ServiceName]] = {}
        self._bindings: dict[str, NodeView[Bindings]] = {}
        self._parts: dict[str, set[str]] = {}

    def start(self, timeout: float = 15.0) -> None:
        # A timeout of 0 connects in the background.
        self.session.start(timeout)

    def stop(self) -> None:
        # Registered replicas disappear immediately if ZooKeeper can be reached.
        self.session.stop()

    @property
    def is_connected(self) -> bool:
        return self.session.is_connected

    def register(self, service: str, replica: Replica) -> None:
        # While ZooKeeper is unavailable the replica is kept and written later.
        name = ServiceName.parse(service)
        checks.instance(replica, Replica, "register: replica")
        info = ContainerServiceInfo(grpc=replica.address, idc=replica.idc)
        with self._lock:
            container = self._container_of(replica)
            announced = self.session.hold(self._container_path(container), info.to_json())
            bound = self._bind(container, self._bound_services.get(container, set()) | {name})
        self.session.wait(announced, *bound)

    def unregister(self, service: str, address: str) -> None:
        name = ServiceName.parse(service)
        checks.text(address, "unregister: address")
        with self._lock:
            container = self._containers.get(address)
            if container is None:
                return
            remaining = self._bound_services.get(container, set()) - {name}
            tasks = self._bind(container, remaining)
            if not remaining:
                del self._containers[address]
                tasks.append(self.session.release(self._container_path(container)))
        self.session.wait(*tasks)

    def replicas(self, service: str) -> Replicas:
        self._watch_bindings(ServiceName.parse(service).model)
        return self._registry.get(service)

    def subscribe_model(self, model_name: str) -> None:
        super().subscribe_model(model_name)
        self._watch_bindings(model_name)

    def _bind(self, container: Container, services: Set[ServiceName]) -> list[SessionTask]:
        """Replace the bindings of a container; the caller holds the lock and waits for the tasks."""
        before = self._bound_services.get(container, set())
        self._bound_services[container] = set(services)
        held = [self.session.hold(self._binding_path(container, name), b"") for name in sorted(services)]
        gone = sorted(before - services)
        return held + [self.session.release(self._binding_path(container, name)) for name in gone]

    def _watch_bindings(self, model: str) -> None:
        with self._lock:
            view = self._bindings.get(model)
            if view is None:
                path = f"/{self.root}/binding/{model}"
                view = self._bindings[model] = self.session.view(
                    path, partial(self._read_bindings, path), partial(self._set_bindings, model)
                )
        self.session.wait(view)

    def _set_bindings(self, model: str, found: Bindings) -> None:
        parts = self._parts.setdefault(model, set())
        parts.update(found)
        for part in sorted(parts):
            replicas = [
                Replica(info.grpc, idc=_name_or_none(info.idc), cluster=container.ctx_cluster)
                for container, info in found.get(part, [])
                if info.grpc and not is_wildcard(info.grpc)
            ]
            self._registry.set(f"{model}:{part}", replicas)

    def _read_bindings(self, path: str, reader: NodeReader) -> Bindings:
        bound: list[tuple[str, Container]] = []
        for name in reader.children(path):
            try:
                part, cluster, id = name.split(":")
                bound.append((check_name(part, "part of a model"), Container(cluster, id)))
            except ValueError:  # InputError is one
                logger.warning("%s/%s is not a binding, which is named part:cluster:id", path, name)
        paths = {self._container_path(container) for _, container in bound}
        infos = {path: read_service_info(data, path) for path, data in reader.data(sorted(paths)).items()}
        found: Bindings = {}
        for part, container in bound:
            info = infos.get(self._container_path(container))
            if info is not None:
                found.setdefault(part, []).append((container, info))
        return found

    def _container_of(self, replica: Replica) -> Container:
        if replica.address not in self._containers:
            taken = {container.ctx_id for container in self._containers.values()}
            names = (self._name if k == 0 else f"{self._name}-{k}" for k in range(len(taken) + 1))
            id = next(name for name in names if name not in taken)
            self._containers[replica.address] = Container(replica.cluster or "default", id)
        return self._containers[replica.address]

    def _container_path(self, container: Container) -> str:
        return f"/{self.root}/container_service/{container}"

    def _binding_path(self, container: Container, service: ServiceName) -> str:
        return f"/{self.root}/binding/{service.model}/{service.part}:{container}"


def read_service_info(data: bytes, path: str) -> ContainerServiceInfo | None:
    """Read the addresses of a container; a malformed record is logged."""
    try:
        return ContainerServiceInfo.from_json(data, where=path)
    except InputError as error:
        logger.warning("%s", error)
        return None


def _name_or_none(idc: str | None) -> str | None:
    """Return a valid name of a data centre, or None, so that an invalid name does not hide the server."""
    try:
        return None if idc is None else check_name(idc, "idc")
    except InputError:
        return None


def open_zookeeper(rest: str, **options: Any) -> ZooKeeperDiscovery:
    hosts, _, root = rest.removeprefix("//").partition("/")
    if not rest.startswith("//") or not hosts:
        raise InputError(f"zk:{rest} must be zk://host:port,host:port/root")
    return ZooKeeperDiscovery(hosts, root.rstrip("/") or "megalith", **options)
