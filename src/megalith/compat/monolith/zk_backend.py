"""ZKBackend: ZooKeeper discovery with the calls of Monolith's agents and controllers.

In addition to the nodes of `ZooKeeperDiscovery`:

    node below /{bzid}                    | value                  | lifetime
    --------------------------------------+------------------------+-----------
    saved_models/{model}/{sub_graph}      | SavedModelDeployConfig | persistent
    layouts/{layout}/{model}:{sub_graph}  | empty                  | persistent

Megalith's own servers use none of these calls: they register through `Discovery.register`. The nodes of
replicas by task are read by `ReplicaWatcher`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from functools import partial
from typing import Any

from megalith.compat.monolith.znode_records import SavedModel, SavedModelDeployConfig
from megalith.errors import InputError
from megalith.ops import checks
from megalith.serving.discovery.contract import ServiceName, Watch, check_name
from megalith.serving.discovery.zk_session import NodeReader
from megalith.serving.discovery.zookeeper import (
    Container,
    ContainerServiceInfo,
    ZooKeeperDiscovery,
    read_service_info,
)

logger = logging.getLogger(__name__)

DeployedModels = list[tuple[SavedModel, SavedModelDeployConfig]]
"""The saved models of a layout, each with its config."""


class ZKBackend(ZooKeeperDiscovery):
    """Monolith's backend in ZooKeeper. Its calls raise DiscoveryError if ZooKeeper is unavailable or refuses.

    Args:
        bzid: The path that all nodes are below.
        zk_servers: The servers of ZooKeeper, "host:port,host:port".
        options: Further arguments of `ZooKeeperDiscovery`.
    """

    def __init__(self, bzid: str, zk_servers: str, **options: Any) -> None:
        super().__init__(zk_servers, bzid, **options)

    # ---- the calls of an agent

    def report_service_info(self, container: Container, service_info: ContainerServiceInfo) -> None:
        """Announce the addresses of a container for the lifetime of this session.

        Args:
            container: The serving process.
            service_info: Its addresses.
        """
        checks.instance(container, Container, "ZKBackend: container")
        checks.instance(service_info, ContainerServiceInfo, "ZKBackend: service_info")
        self.session.wait(self.session.hold(self._container_path(container), service_info.to_json()))

    def get_service_info(self, container: Container) -> ContainerServiceInfo | None:
        """Return the addresses of a container.

        Args:
            container: The serving process.

        Returns:
            The addresses; None if the node is absent or malformed.
        """
        checks.instance(container, Container, "ZKBackend: container")
        data = self.session.get(path := self._container_path(container))
        return None if data is None else read_service_info(data, path)

    def sync_available_saved_models(self, container: Container, saved_models: Set[SavedModel]) -> None:
        """Replace the bindings of a container.

        Args:
            container: The serving process.
            saved_models: The parts of models that it serves now.
        """
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
        """Store the config of a saved model.

        Args:
            saved_model: The part of a model.
            deploy_config: Its config.
        """
        checks.instance(saved_model, SavedModel, "ZKBackend: saved_model")
        checks.instance(deploy_config, SavedModelDeployConfig, "ZKBackend: deploy_config")
        self.session.put(self._saved_model_path(saved_model), deploy_config.to_json())

    def add_to_layout(self, layout: str, saved_model: SavedModel) -> None:
        """Add a saved model to a layout.

        Args:
            layout: A name below /{bzid}/layouts, or a full path.
            saved_model: The part of a model.
        """
        checks.instance(saved_model, SavedModel, "ZKBackend: saved_model")
        self.session.put(f"{self._layout_path(layout)}/{saved_model}", b"")

    def remove_from_layout(self, layout: str, saved_model: SavedModel) -> None:
        """Remove a saved model from a layout, if it is there.

        Args:
            layout: A name below /{bzid}/layouts, or a full path.
            saved_model: The part of a model.
        """
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
