"""ZooKeeperDiscovery: servers found in ZooKeeper, with the nodes and the JSON of Monolith's agents.

| node | value | lifetime |
| /{root}/container_service/{cluster}:{id} | ContainerServiceInfo | of the session |
| /{root}/binding/{model}/{sub_graph}:{cluster}:{id} | empty | of the session |
| /{root}/saved_models/{model}/{sub_graph} | SavedModelDeployConfig | lasting |
| /{root}/layouts/{layout}/{model}:{sub_graph} | empty | lasting |
| /{root}/service/{model}[/{idc}:{cluster}]/{server_type}:{task}/{replica} | ReplicaMeta | of the session |

The root is what Monolith calls bzid. Replicas of a service are the bindings of its sub graph whose container
says where it listens; the `service` nodes are read by a `ReplicaWatcher`.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Set
from typing import Any

from megalith.errors import InputError
from megalith.serving.discovery.addresses import is_wildcard
from megalith.serving.discovery.contract import Discovery, Replica, Replicas, Watch, log
from megalith.serving.discovery.replica_watcher import ReplicaWatcher
from megalith.serving.discovery.zk_session import NodeReader, Task, View, ZooKeeperSession
from megalith.serving.discovery.znode_records import (
    AddressFamily,
    Container,
    ContainerServiceInfo,
    ReplicaMeta,
    SavedModel,
    SavedModelDeployConfig,
    check_name,
)

Layout = list[tuple[SavedModel, SavedModelDeployConfig]]
Bindings = dict[str, list[tuple[Container, ContainerServiceInfo]]]
"""Of one model: the containers of each sub graph."""


class ZooKeeperDiscovery(Discovery):
    """Servers found in ZooKeeper.

    hosts: "host:port,host:port". root: the name everything is below (Monolith's bzid), perhaps with slashes.
    container_id: what this process is called there; made up if not given. options: ZooKeeperSession's.
    What was found last stays known while ZooKeeper is away; what was registered is registered again when it
    is back, in a new session too. Raises InputError for bad arguments.
    """

    def __init__(
        self, hosts: str, root: str = "megalith", *, container_id: str | None = None, **options: Any
    ) -> None:
        super().__init__()
        for part in root.split("/"):
            check_name(part, "root")
        self.root = root
        self._name = check_name(container_id or uuid.uuid4().hex[:12], "container_id")
        self._session = ZooKeeperSession(hosts, **options)
        self._lock = threading.RLock()
        self._containers: dict[str, Container] = {}
        self._available: dict[Container, set[SavedModel]] = {}
        self._bindings: dict[str, View[Bindings]] = {}
        self._parts: dict[str, set[str]] = {}

    def start(self, timeout: float = 15.0) -> None:
        """See `SyncBackend.start`; with a timeout of 0 connects in the background."""
        self._session.start(timeout)

    def stop(self) -> None:
        """See `SyncBackend.stop`; what was registered is gone at once if ZooKeeper can be reached."""
        self._session.stop()

    @property
    def is_connected(self) -> bool:
        """Whether ZooKeeper answers now."""
        return self._session.is_connected

    # ---- Discovery

    def register(self, service: str, replica: Replica) -> None:
        """See `Discovery.register`; while ZooKeeper is away it is kept, and said when it is back."""
        saved_model = SavedModel.parse(service)
        info = ContainerServiceInfo(grpc=replica.address, idc=replica.idc)
        with self._lock:
            container = self._container_of(replica)
            said = self._session.hold(self._container_path(container), info.to_json())
            bound = self._bind(container, self._available.get(container, set()) | {saved_model})
        self._session.wait(said, *bound)

    def unregister(self, service: str, address: str) -> None:
        """See `Discovery.unregister`."""
        saved_model = SavedModel.parse(service)
        with self._lock:
            container = self._containers.get(address)
            if container is None:
                return
            left = self._available.get(container, set()) - {saved_model}
            tasks = self._bind(container, left)
            if not left:
                del self._containers[address]
                tasks.append(self._session.release(self._container_path(container)))
        self._session.wait(*tasks)

    def replicas(self, service: str) -> Replicas:
        """See `Discovery.replicas`."""
        saved_model = SavedModel.parse(service)
        self._watch_bindings(saved_model.model_name)
        return self._board.get(service)

    def subscribe_model(self, model_name: str) -> None:
        """See `SyncBackend.subscribe_model`."""
        super().subscribe_model(model_name)
        self._watch_bindings(model_name)

    # ---- what an agent beside a server says and asks

    def report_service_info(self, container: Container, service_info: ContainerServiceInfo) -> None:
        """Says where a container listens, for as long as this session lasts."""
        self._session.wait(self._session.hold(self._container_path(container), service_info.to_json()))

    def sync_available_saved_models(self, container: Container, saved_models: Set[SavedModel]) -> None:
        """Says what a container serves now: bindings of these, and no others of its."""
        with self._lock:
            tasks = self._bind(container, saved_models)
        self._session.wait(*tasks)

    def get_service_info(self, container: Container) -> ContainerServiceInfo | None:
        """Where a container listens; None if it is not there or what it says cannot be read."""
        path = self._container_path(container)
        data = self._session.get(path)
        return None if data is None else _read_info(data, path)

    def get_service_map(self) -> dict[str, dict[str, list[ContainerServiceInfo]]]:
        """Of every model that was subscribed to, asked for or in a watched layout: who serves each part."""
        with self._lock:
            models = {model: view.value or {} for model, view in self._bindings.items()}
        return {
            model: {part: [info for _, info in found] for part, found in bindings.items()}
            for model, bindings in models.items()
        }

    def register_layout_callback(self, layout: str, callback: Callable[[Layout], object]) -> Watch:
        """Calls back with a layout's saved models and their configs, in order, at once and at every change.

        layout: a name below /{root}/layouts, or a whole path. A model without a config is left out.
        """
        path = self._layout_path(layout)

        def changed(found: Layout) -> None:
            for model in sorted({saved_model.model_name for saved_model, _ in found}):
                self._watch_bindings(model)
            callback(found)

        view = self._session.view(path, lambda reader: self._read_layout(reader, path), changed)
        self._session.wait(view)
        return Watch(lambda: self._session.drop(view))

    # ---- what a controller says and asks

    def decl_saved_model(self, saved_model: SavedModel, deploy_config: SavedModelDeployConfig) -> None:
        """Says where a saved model lies; lasts. Raises DiscoveryError."""
        self._session.put(self._saved_model_path(saved_model), deploy_config.to_json())

    def list_saved_models(self, model_name: str) -> list[SavedModel]:
        """The parts of a model that were declared. Raises DiscoveryError."""
        path = f"/{self.root}/saved_models/{check_name(model_name, 'model name')}"
        return [SavedModel(model_name, sub_graph) for sub_graph in self._session.children(path)]

    def add_to_layout(self, layout: str, saved_model: SavedModel) -> None:
        """Adds to what the servers of a layout should load; lasts. Raises DiscoveryError."""
        self._session.put(f"{self._layout_path(layout)}/{saved_model}", b"")

    def remove_from_layout(self, layout: str, saved_model: SavedModel) -> None:
        """Takes out of a layout; harmless if it was not in it. Raises DiscoveryError."""
        self._session.remove(f"{self._layout_path(layout)}/{saved_model}")

    # ---- replicas by task

    def register_replica(
        self, meta: ReplicaMeta, *, idc: str | None = None, cluster: str | None = None
    ) -> None:
        """Says that a replica of a task is there and in which state; again replaces what was said."""
        path = meta.get_path(self.root, idc=idc, cluster=cluster)
        self._session.wait(self._session.hold(path, meta.to_json()))

    def unregister_replica(
        self, meta: ReplicaMeta, *, idc: str | None = None, cluster: str | None = None
    ) -> None:
        """Takes back what `register_replica` said."""
        self._session.wait(self._session.release(meta.get_path(self.root, idc=idc, cluster=cluster)))

    def watch_replicas(
        self,
        base_name: str,
        *,
        dc_aware: bool = False,
        use_archon: bool = False,
        address_family: AddressFamily = "ipv4",
    ) -> ReplicaWatcher:
        """The replicas below /{root}/service/{base_name}, kept up to date; see `ReplicaWatcher`."""
        prefix = f"/{self.root}/service/{check_name(base_name, 'base name')}"
        return ReplicaWatcher(
            self._session, prefix, dc_aware=dc_aware, use_archon=use_archon, address_family=address_family
        )

    # ---- inside

    def _bind(self, container: Container, saved_models: Set[SavedModel]) -> list[Task]:
        """Begins to write the bindings of a container, and to delete those it had before; under the lock."""
        before = self._available.get(container, set())
        self._available[container] = set(saved_models)
        tasks = [
            self._session.hold(self._binding_path(container, saved_model), b"")
            for saved_model in sorted(saved_models)
        ]
        for saved_model in sorted(before - saved_models):
            tasks.append(self._session.release(self._binding_path(container, saved_model)))
        return tasks

    def _watch_bindings(self, model: str) -> None:
        path = f"/{self.root}/binding/{model}"
        with self._lock:
            view = self._bindings.get(model)
            if view is None:
                view = self._bindings[model] = self._session.view(
                    path,
                    lambda reader: self._read_bindings(reader, path),
                    lambda found: self._bound(model, found),
                )
        self._session.wait(view)

    def _bound(self, model: str, found: Bindings) -> None:
        parts = self._parts.setdefault(model, set())
        parts.update(found)
        for part in sorted(parts):
            replicas = [
                Replica(info.grpc, idc=_name_or_none(info.idc), cluster=container.ctx_cluster)
                for container, info in found.get(part, [])
                if info.grpc and not is_wildcard(info.grpc)
            ]
            self._board.set(f"{model}:{part}", replicas)

    def _read_bindings(self, reader: NodeReader, path: str) -> Bindings:
        bound: list[tuple[str, Container]] = []
        for name in reader.children(path):
            try:
                sub_graph, cluster, id = name.split(":")
                bound.append((check_name(sub_graph, "sub graph"), Container(cluster, id)))
            except ValueError:  # InputError is one
                log.warning("%s/%s is no binding: sub_graph:cluster:id is", path, name)
        paths = {self._container_path(container) for _, container in bound}
        infos = {place: _read_info(data, place) for place, data in reader.data(sorted(paths)).items()}
        found: Bindings = {}
        for sub_graph, container in bound:
            info = infos.get(self._container_path(container))
            if info is not None:
                found.setdefault(sub_graph, []).append((container, info))
        return found

    def _read_layout(self, reader: NodeReader, path: str) -> Layout:
        wanted: list[SavedModel] = []
        for name in reader.children(path):
            try:
                wanted.append(SavedModel.parse(name))
            except InputError as error:
                log.warning("%s: %s", path, error)
        configs = reader.data([self._saved_model_path(saved_model) for saved_model in wanted])
        found: Layout = []
        for saved_model in wanted:
            place = self._saved_model_path(saved_model)
            try:
                found.append((saved_model, SavedModelDeployConfig.from_json(configs[place], where=place)))
            except KeyError:
                log.warning("%s: %s has no config at %s", path, saved_model, place)
            except InputError as error:
                log.warning("%s", error)
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

    def _binding_path(self, container: Container, saved_model: SavedModel) -> str:
        return f"/{self.root}/binding/{saved_model.model_name}/{saved_model.sub_graph}:{container}"

    def _saved_model_path(self, saved_model: SavedModel) -> str:
        return f"/{self.root}/saved_models/{saved_model.model_name}/{saved_model.sub_graph}"

    def _layout_path(self, layout: str) -> str:
        path = layout if layout.startswith("/") else f"/{self.root}/layouts/{layout}"
        for part in path[1:].split("/"):
            check_name(part, "layout")
        return path


def _read_info(data: bytes, path: str) -> ContainerServiceInfo | None:
    try:
        return ContainerServiceInfo.from_json(data, where=path)
    except InputError as error:
        log.warning("%s", error)
        return None


def _name_or_none(idc: str | None) -> str | None:
    """A data centre that may be part of a path; None for another, so that the server is not lost for it."""
    try:
        return None if idc is None else check_name(idc, "idc")
    except InputError:
        return None


def open_zookeeper(rest: str, **options: Any) -> ZooKeeperDiscovery:
    """From what follows "zk:" in an address: //host:port,host:port/root. Raises InputError."""
    hosts, _, root = rest.removeprefix("//").partition("/")
    if not rest.startswith("//") or not hosts:
        raise InputError(f"zk:{rest} must be zk://host:port,host:port/root")
    return ZooKeeperDiscovery(hosts, root.rstrip("/") or "megalith", **options)
