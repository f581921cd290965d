"""The records that Monolith's agents, controllers and watchers store in ZooKeeper.

The JSON keys and their order are Monolith's. The content of a node is untrusted until `from_json` has
validated it; see `megalith.serving.discovery.zookeeper`, which has the records that Megalith's own discovery
shares with Monolith.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalith.errors import InputError
from megalith.ops import checks
from megalith.serving.discovery.contract import ServiceName, check_address, check_name, is_wildcard
from megalith.serving.discovery.zookeeper import ZnodeRecord
from megalith.serving.wire_names import ModelState

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
        task: The number of the task.
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
