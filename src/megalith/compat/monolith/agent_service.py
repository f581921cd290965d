"""Monolith's agent service in ZooKeeper: its records, ZKBackend and ReplicaWatcher.

In addition to the nodes of `ZooKeeperDiscovery`:

    node below /{bzid}                                              | value                  | lifetime
    ----------------------------------------------------------------+------------------------+-----------
    saved_models/{model}/{sub_graph}                                | SavedModelDeployConfig | persistent
    layouts/{layout}/{model}:{sub_graph}                            | empty                  | persistent
    service/{model}[/{idc}:{cluster}]/{server_type}:{task}/{replica} | ReplicaMeta            | ephemeral

The JSON keys and their order are Monolith's. The content of a node is untrusted until `from_json` has
validated it; malformed nodes are skipped and logged. Megalith's own servers use none of these nodes: they
register through `Discovery.register`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from functools import partial
from hashlib import md5
from typing import Any, Literal

from megalith.errors import InputError
from megalith.ops import checks
from megalith.serving.discovery.contract import (
    ServiceName,
    SyncBackend,
    SyncTargets,
    Watch,
    check_address,
    check_name,
    is_wildcard,
)
from megalith.serving.discovery.zk_session import NodeReader
from megalith.serving.discovery.zookeeper import (
    Container,
    ContainerServiceInfo,
    ZnodeRecord,
    ZooKeeperDiscovery,
    read_service_info,
)
from megalith.serving.wire_names import ModelState

# ---- records

AddressFamily = Literal["ipv4", "ipv6"]
ServerType = Literal["ps", "entry", "dense"]


@dataclass(frozen=True, order=True)
class SavedModel:
    """A part of a model that is served on its own; Monolith's form of `ServiceName`.

    Args:
        model_name: The name of the model.
        sub_graph: The part: "entry", "ps_0" and so on.
    """

    model_name: str
    sub_graph: str

    def __post_init__(self) -> None:
        ServiceName(self.model_name, self.sub_graph)

    def __str__(self) -> str:
        return str(self.service)

    @property
    def service(self) -> ServiceName:
        """The name of the service in a `Discovery`."""
        return ServiceName(self.model_name, self.sub_graph)


@dataclass(frozen=True)
class TargetExtraInfo:
    """Where a replica runs.

    Args:
        idc: The data centre; None if it is unknown.
        cluster: The cluster; None if it is unknown.
        replica_id: The number of the replica; -1 if it has none.
    """

    idc: str | None = None
    cluster: str | None = None
    replica_id: int = -1


@dataclass(frozen=True)
class SavedModelDeployConfig(ZnodeRecord):
    """The config of a saved model.

    Args:
        model_base_path: Its directory.
        version_policy: Which of its versions are served.
    """

    model_base_path: str | None = None
    version_policy: str | None = None


@dataclass(frozen=True)
class ReplicaMeta(ZnodeRecord):
    """A replica of a task of a service.

    Args:
        address: Its address.
        address_ipv6: Its IPv6 address.
        stat: Its state, a number of `ModelState`.
        model_name: The name of the model.
        server_type: One of "ps", "entry" and "dense".
        replica: The number of the replica.
        archon_address: Its archon address.
        archon_address_ipv6: Its archon IPv6 address.

    Raises:
        InputError: An address is malformed.
    """

    address: str | None = None
    address_ipv6: str | None = None
    stat: int = ModelState.UNKNOWN
    model_name: str | None = None
    server_type: str | None = None
    task: int = -1
    replica: int = -1
    archon_address: str | None = None
    archon_address_ipv6: str | None = None

    def __post_init__(self) -> None:
        for name in ("address", "address_ipv6", "archon_address", "archon_address_ipv6"):
            address = getattr(self, name)
            if address is not None and not (isinstance(address, str) and not address):
                check_address(address, name)

    @property
    def is_available(self) -> bool:
        """Whether it answers requests."""
        return self.stat == ModelState.AVAILABLE

    def get_address(self, use_archon: bool = False, address_family: AddressFamily = "ipv4") -> str | None:
        """Return the address to call.

        Args:
            use_archon: Return an archon address.
            address_family: The preferred family, "ipv4" or "ipv6".

        Returns:
            The address of the preferred family, otherwise that of the other family, otherwise None. Wildcards
            such as 0.0.0.0 do not count as addresses.
        """
        checks.flag(use_archon, "use_archon")
        if not isinstance(address_family, str) or address_family not in ("ipv4", "ipv6"):
            raise InputError(f"address_family must be 'ipv4' or 'ipv6', got {address_family!r}")
        ipv4 = self.archon_address if use_archon else self.address
        ipv6 = self.archon_address_ipv6 if use_archon else self.address_ipv6
        for address in (ipv4, ipv6) if address_family == "ipv4" else (ipv6, ipv4):
            if address and not is_wildcard(address):
                return address
        return None

    def get_path(self, root: str, *, idc: str | None = None, cluster: str | None = None) -> str:
        """Return the path of its node.

        Args:
            root: The path that all nodes are below (Monolith's bzid).
            idc: The data centre; together with `cluster` it adds a level to the path.
            cluster: The cluster.

        Returns:
            The path.
        """
        if (idc is None) != (cluster is None):
            raise InputError(f"idc and cluster must be given together, got {idc!r} and {cluster!r}")
        place = "" if idc is None else f"/{check_name(idc, 'idc')}:{check_name(cluster, 'cluster')}"
        model = check_name(self.model_name, "model name")
        server_type = check_name(self.server_type, "server type")
        return f"/{root}/service/{model}{place}/{server_type}:{self.task}/{self.replica}"


# ---- ZKBackend

logger = logging.getLogger(__name__)

DeployedModels = list[tuple[SavedModel, SavedModelDeployConfig]]
"""The saved models of a layout, each with its config."""


class ZKBackend(ZooKeeperDiscovery):
    """Monolith's backend in ZooKeeper. Its calls raise DiscoveryError if ZooKeeper is unavailable or refuses.

    Args:
        bzid: The path that all nodes are below.
        zk_servers: The servers of ZooKeeper, "host:port,host:port".
        zk_client: A client with kazoo's calls, used in place of a connection to zk_servers.
        options: Further arguments of `ZooKeeperDiscovery`.
    """

    def __init__(
        self, bzid: str, zk_servers: str | None = None, *, zk_client: Any = None, **options: Any
    ) -> None:
        super().__init__("localhost" if zk_servers is None and zk_client else zk_servers, bzid, **options)  # type: ignore[arg-type]
        if zk_client is not None:
            self.session: Any = ClientSession(zk_client)

    # ---- the calls of an agent

    def report_service_info(self, container: Container, service_info: ContainerServiceInfo) -> None:
        """Announce the addresses of a container for the lifetime of this session."""
        checks.instance(container, Container, "ZKBackend: container")
        checks.instance(service_info, ContainerServiceInfo, "ZKBackend: service_info")
        self.session.wait(self.session.hold(self._container_path(container), service_info.to_json()))

    def get_service_info(self, container: Container) -> ContainerServiceInfo | None:
        """Return the addresses of a container.

        Returns:
            The addresses; None if the node is absent or malformed.
        """
        checks.instance(container, Container, "ZKBackend: container")
        data = self.session.get(path := self._container_path(container))
        return None if data is None else read_service_info(data, path)

    def sync_available_saved_models(self, container: Container, saved_models: Set[SavedModel]) -> None:
        """Replace the bindings of a container."""
        checks.instance(container, Container, "ZKBackend: container")
        if not isinstance(saved_models, Set | list | tuple):
            raise InputError(f"ZKBackend: saved_models must be a set, got {type(saved_models).__name__}")
        for saved_model in saved_models:
            checks.instance(saved_model, SavedModel, "ZKBackend: saved_model")
        with self._lock:
            tasks = self._bind(container, {saved_model.service for saved_model in saved_models})
        self.session.wait(*tasks)

    def register_layout_callback(self, layout: str, callback: Callable[[DeployedModels], object]) -> Watch:
        """Call back with the saved models of a layout, immediately and after every change.

        Args:
            layout: A name below /{bzid}/layouts, or a full path.
            callback: Called with the saved models and their configs, sorted by name. A saved model without a
                config is left out.

        Returns:
            The watch, to be cancelled.
        """
        checks.callback(callback, "ZKBackend: callback", required=True)
        path = self._layout_path(layout)
        view = self.session.view(path, partial(self._read_layout, path), callback)
        self.session.wait(view)
        return Watch(partial(self.session.drop, view))

    # ---- the calls of a controller

    def decl_saved_model(self, saved_model: SavedModel, deploy_config: SavedModelDeployConfig) -> None:
        """Store the config of a saved model."""
        checks.instance(saved_model, SavedModel, "ZKBackend: saved_model")
        checks.instance(deploy_config, SavedModelDeployConfig, "ZKBackend: deploy_config")
        self.session.put(self._saved_model_path(saved_model), deploy_config.to_json())

    def add_to_layout(self, layout: str, saved_model: SavedModel) -> None:
        """Add a saved model to a layout."""
        checks.instance(saved_model, SavedModel, "ZKBackend: saved_model")
        self.session.put(f"{self._layout_path(layout)}/{saved_model}", b"")

    def remove_from_layout(self, layout: str, saved_model: SavedModel) -> None:
        """Remove a saved model from a layout, if it is there."""
        checks.instance(saved_model, SavedModel, "ZKBackend: saved_model")
        self.session.remove(f"{self._layout_path(layout)}/{saved_model}")

    # ---- nodes

    def _read_layout(self, path: str, reader: NodeReader) -> DeployedModels:
        names: list[ServiceName] = []
        for name in reader.children(path):
            try:
                names.append(ServiceName.parse(name))
            except InputError as error:
                logger.warning("%s: %s", path, error)
        saved_models = [SavedModel(name.model, name.part) for name in names]
        configs = reader.data([self._saved_model_path(saved_model) for saved_model in saved_models])
        found: DeployedModels = []
        for saved_model in saved_models:
            place = self._saved_model_path(saved_model)
            try:
                found.append((saved_model, SavedModelDeployConfig.from_json(configs[place], where=place)))
            except KeyError:
                logger.warning("%s: %s has no config at %s", path, saved_model, place)
            except InputError as error:
                logger.warning("%s", error)
        return found

    def _saved_model_path(self, saved_model: SavedModel) -> str:
        return f"/{self.root}/saved_models/{saved_model.model_name}/{saved_model.sub_graph}"

    def _layout_path(self, layout: str) -> str:
        is_full = checks.text(layout, "ZKBackend: layout").startswith("/")
        path = layout if is_full else f"/{self.root}/layouts/{layout}"
        for part in path[1:].split("/"):
            check_name(part, "layout")
        return path


# ---- clients of users


class ClientSession:
    """The calls of a `ZooKeeperSession` on a client with kazoo's calls, such as a test's fake."""

    is_connected = True

    def __init__(self, client: Any) -> None:
        calls = ("create", "delete", "set", "get", "exists", "get_children", "DataWatch", "ChildrenWatch")
        if missing := [name for name in calls if not callable(getattr(client, name, None))]:
            raise InputError(
                f"a ZooKeeper client must have kazoo's calls; {type(client).__name__} lacks "
                f"{', '.join(missing)}"
            )
        self.client = client

    def start(self, timeout: float = 15.0) -> None:
        self.client.start()

    def stop(self) -> None:
        self.client.stop()

    def wait(self, *tasks: object) -> None: ...

    def put(self, path: str, value: bytes, *, ephemeral: bool = False) -> None:
        if self.client.exists(path):
            self.client.set(path, value)
        else:
            self.client.create(path, value, ephemeral=ephemeral, makepath=True)

    def hold(self, path: str, value: bytes) -> None:
        self.put(path, value, ephemeral=True)

    def remove(self, path: str) -> None:
        if self.client.exists(path):
            self.client.delete(path)

    release = remove

    def get(self, path: str) -> bytes | None:
        return bytes(self.client.get(path)[0]) if self.client.exists(path) else None

    def view(self, name: str, read: Callable[[Any], Any], on_change: Callable[[Any], object]) -> object:
        view = _ClientView(self, read, on_change)
        view.compute()
        return view

    def drop(self, view: _ClientView) -> None:
        view.on_change = None


class _ClientView:
    """A value computed from nodes, and again when the client reports a change of one of them."""

    def __init__(
        self, session: ClientSession, read: Callable[[Any], Any], on_change: Callable[[Any], object]
    ) -> None:
        self._session, self._read = session, read
        self.on_change: Callable[[Any], object] | None = on_change
        self._watched: set[tuple[str, str]] = set()

    def compute(self) -> None:
        if self.on_change is not None:
            self.on_change(self._read(self))

    def children(self, path: str) -> list[str]:
        client = self._session.client
        if not client.exists(path):
            client.create(path, b"", makepath=True)  # a watch needs the node
        self._watch("ChildrenWatch", path)
        return sorted(client.get_children(path))

    def data(self, paths: Iterable[str]) -> dict[str, bytes]:
        found = {path: value for path in paths if (value := self._session.get(path)) is not None}
        for path in found:
            self._watch("DataWatch", path)
        return found

    def _watch(self, kind: str, path: str) -> None:
        if (kind, path) in self._watched:
            return
        self._watched.add((kind, path))
        is_known = False  # a client calls back at once

        def changed(*_: object) -> None:
            if is_known:
                self.compute()

        getattr(self._session.client, kind)(path, changed)
        is_known = True


# ---- ReplicaWatcher

_TASK = re.compile(r"(?P<server_type>[a-z]+):(?P<task>[0-9]{1,9})")
_REPLICA = re.compile(r"-?[0-9]{1,18}")
_PLACE = re.compile(r"(?P<idc>[^:]+):(?P<cluster>[^:]+)")
_SUB_GRAPH = re.compile(r"ps_(?P<task>[0-9]{1,9})")


_Found = tuple[str, int, str, "TargetExtraInfo"]
"""An AVAILABLE replica of a task such as ps:1: "ps", 1, its address, and where it runs."""


@dataclass
class AgentConfig:
    """What Monolith's agents are configured with, as far as replicas are found by it.

    Args:
        bzid: The path that all nodes are below.
        base_name: The name of the service.
        num_ps: The number of parameter servers.
        num_shard: The number of serving processes that share them.
        shard_id: The number of this serving process.
        replica_id: Replaced by a number that follows from the variable MY_POD_NAME, or -1 without it.
        idc: The data centre; None if it is unknown.
        cluster: The cluster; None if it is unknown.
        dc_aware: Whether there is a level idc:cluster between the service and its tasks.
        deploy_type: Ignored; in Monolith the parts that this process serves.
    """

    bzid: str
    base_name: str
    num_ps: int = 1
    num_shard: int = 1
    shard_id: int = 0
    replica_id: int = -1
    idc: str | None = None
    cluster: str | None = None
    dc_aware: bool = False
    deploy_type: str | None = None

    def __post_init__(self) -> None:
        for part in (*checks.text(self.bzid, "AgentConfig: bzid").split("/"), self.base_name):
            check_name(part, "AgentConfig: bzid and base_name")
        pod = os.environ.get("MY_POD_NAME")
        digest = md5(pod.encode(), usedforsecurity=False).hexdigest() if pod else ""
        self.replica_id = int(digest[10:20], 16) if pod else -1

    @property
    def path_prefix(self) -> str:
        """The node of the service."""
        return f"/{self.bzid}/service/{self.base_name}"


class ReplicaWatcher:
    """The replicas of a service, kept up to date from `watch_data` until `stop`.

    The getters need no connection: while ZooKeeper is unavailable they return the replicas found last.

    Args:
        zk_client: A started ZKBackend, whose connection is used, or a client with kazoo's calls.
        config: Which service.
        use_archon: Return archon addresses.
        zk_watch_address_family: The preferred family of addresses.
    """

    def __init__(
        self,
        zk_client: Any,
        config: AgentConfig,
        use_archon: bool = False,
        zk_watch_address_family: AddressFamily = "ipv4",
    ) -> None:
        self._config = checks.instance(config, AgentConfig, "ReplicaWatcher: config")
        self._use_archon = checks.flag(use_archon, "ReplicaWatcher: use_archon")
        self._family: AddressFamily = zk_watch_address_family
        if zk_watch_address_family not in ("ipv4", "ipv6"):
            raise InputError(f"zk_watch_address_family must be ipv4 or ipv6, got {zk_watch_address_family!r}")
        self._dc_aware, self._prefix = config.dc_aware, config.path_prefix
        self._found: list[_Found] = []
        self._is_stopped = False
        ours = isinstance(zk_client, ZooKeeperDiscovery)
        self._session: Any = zk_client.session if ours else ClientSession(zk_client)
        self._view: Any = None

    def watch_data(self) -> None:
        """Find the replicas, and follow their changes; a second call does nothing."""
        if self._view is None:
            self._view = self._session.view(self._prefix, self._read, self._changed)
            self._session.wait(self._view)

    def stop(self) -> None:
        """Stop watching without delay; afterwards there are no replicas."""
        self._is_stopped = True
        if self._view is not None:
            self._session.drop(self._view)
        self._found = []

    def get_replicas(
        self, server_type: ServerType, task: int, idc: str | None = None, cluster: str | None = None
    ) -> list[str]:
        """Return the addresses of the replicas of a task, sorted by replica id."""
        return list(self.get_replicas_with_extra_info(server_type, task, idc, cluster))

    def get_replica(
        self,
        server_type: ServerType,
        task: int,
        replica: int,
        idc: str | None = None,
        cluster: str | None = None,
    ) -> list[str]:
        """Return the addresses of one replica.

        Returns:
            The addresses, at most one for each data centre and cluster.
        """
        found = self.get_replicas_with_extra_info(server_type, task, idc, cluster)
        return [address for address, info in found.items() if info.replica_id == replica]

    def get_all_replicas(
        self, server_type: ServerType, idc: str | None = None, cluster: str | None = None
    ) -> dict[str, list[str]]:
        """Return the addresses of all tasks of a type.

        Returns:
            The addresses by "ps:1", or by "idc:cluster/ps:1" if dc_aware.
        """
        result: dict[str, list[str]] = {}
        for kind, task, address, info in self._matching(server_type, None, idc, cluster):
            place = f"{info.idc}:{info.cluster}/" if self._dc_aware else ""
            result.setdefault(f"{place}{kind}:{task}", []).append(address)
        return result

    def get_replicas_with_extra_info(
        self, server_type: ServerType, task: int, idc: str | None = None, cluster: str | None = None
    ) -> dict[str, TargetExtraInfo]:
        """Return the addresses of the replicas of a task, and where each of them runs.

        Returns:
            The places by address, sorted by replica id.
        """
        found = self._matching(server_type, task, idc, cluster)
        return {address: info for _, _, address, info in found}

    def to_sync_wrapper(self) -> SyncBackend:
        """Return the backend for parameter sync: the sub graph "ps_1" is task 1 of type ps."""
        return _SyncWrapper(self)

    def _matching(
        self, server_type: str, task: int | None, idc: str | None, cluster: str | None
    ) -> list[_Found]:
        return [
            (kind, number, address, info)
            for kind, number, address, info in self._found
            if kind == server_type
            and task in (None, number)
            and idc in (None, info.idc)
            and cluster in (None, info.cluster)
        ]

    def _changed(self, found: list[_Found]) -> None:
        if not self._is_stopped:
            self._found = found

    def _read(self, reader: NodeReader) -> list[_Found]:
        places: dict[str, tuple[str | None, str | None]] = {self._prefix: (None, None)}
        if self._dc_aware:
            matches = map(_PLACE.fullmatch, reader.children(self._prefix))
            places = {
                f"{self._prefix}/{match[0]}": (match["idc"], match["cluster"]) for match in matches if match
            }
        found: list[_Found] = []
        for path, place in places.items():
            for name in reader.children(path):
                task = _TASK.fullmatch(name)
                if task is None:
                    logger.warning("%s/%s is not a task, which is named type:number", path, name)
                    continue
                kind, number = task["server_type"], int(task["task"])
                for replica, address in self._read_task(reader, f"{path}/{name}"):
                    found.append((kind, number, address, TargetExtraInfo(*place, replica)))
        found.sort(key=lambda each: (each[0], each[1], each[3].replica_id, each[2]))
        return found

    def _read_task(self, reader: NodeReader, path: str) -> list[tuple[int, str]]:
        names = [name for name in reader.children(path) if _REPLICA.fullmatch(name)]
        usable: list[tuple[int, str]] = []
        for place, data in reader.data([f"{path}/{name}" for name in names]).items():
            try:
                meta = ReplicaMeta.from_json(data, where=place)
            except InputError as error:
                logger.warning("%s", error)
                continue
            address = meta.get_address(self._use_archon, self._family)
            if meta.is_available and address is not None:
                usable.append((int(place.rpartition("/")[2]), address))
        return usable


class _SyncWrapper(SyncBackend):
    """A ReplicaWatcher as the backend of parameter sync."""

    def __init__(self, watcher: ReplicaWatcher) -> None:
        self._watcher = watcher

    def start(self, timeout: float = 15.0) -> None:
        self._watcher.watch_data()

    def subscribe_model(self, model_name: str) -> None: ...

    def get_sync_targets(self, sub_graph: str) -> SyncTargets:
        part = _SUB_GRAPH.fullmatch(sub_graph)
        if part is None:
            raise InputError(f"sub graph {sub_graph!r} must be ps_0, ps_1 and so on")
        return sub_graph, self._watcher.get_replicas_with_extra_info("ps", int(part["task"]))

    def stop(self) -> None:
        self._watcher.stop()
