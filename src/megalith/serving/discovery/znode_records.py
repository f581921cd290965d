"""Records: what Monolith's services write into ZooKeeper, as data classes and as the same JSON.

Keys and their order are Monolith's, so both systems can read each other's nodes. What comes from a node is
hostile until read: JSON of bounded size, known types, addresses that are addresses; unknown keys are ignored.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar, get_type_hints

from megalith.errors import InputError
from megalith.serving.discovery.addresses import check_address, is_wildcard
from megalith.serving.model_state import ModelState

AddressFamily = Literal["ipv4", "ipv6"]
ServerType = Literal["ps", "entry", "dense"]
MAX_BYTES = 65536
"""The longest record that is read."""

_T = TypeVar("_T", bound="_Record")


def check_name(name: object, what: str) -> str:
    """A name that may be part of a path and of `a:b:c`; raises InputError, naming `what`, if not."""
    if not isinstance(name, str) or not 1 <= len(name) <= 255:
        raise InputError(f"{what} must be a string of 1 to 255 characters, got {repr(name)[:100]}")
    if name in (".", "..") or any(char in "/:" or not char.isprintable() for char in name):
        raise InputError(f"{what} {name!r} must not hold '/', ':' or unprintable characters")
    return name


@dataclass(frozen=True, order=True)
class SavedModel:
    """A part of a model that is served on its own: "entry", "ps_0" and so on."""

    model_name: str
    sub_graph: str

    def __post_init__(self) -> None:
        check_name(self.model_name, "model name")
        check_name(self.sub_graph, "sub graph")

    def __str__(self) -> str:
        return f"{self.model_name}:{self.sub_graph}"

    @classmethod
    def parse(cls, name: str) -> SavedModel:
        """From "model:sub_graph"; raises InputError."""
        model_name, colon, sub_graph = name.partition(":")
        if not colon:
            raise InputError(f"service {name!r} must be model:part, for example 'movies:entry'")
        return cls(model_name, sub_graph)


@dataclass(frozen=True, order=True)
class Container:
    """A serving process: the cluster it is in, and its id there."""

    ctx_cluster: str
    ctx_id: str

    def __post_init__(self) -> None:
        check_name(self.ctx_cluster, "container cluster")
        check_name(self.ctx_id, "container id")

    def __str__(self) -> str:
        return f"{self.ctx_cluster}:{self.ctx_id}"


@dataclass(frozen=True)
class TargetExtraInfo:
    """Where a replica runs; None where it is not known."""

    idc: str | None = None
    cluster: str | None = None
    replica_id: int = -1


class _Record:
    """A data class that is a JSON object in a node."""

    def to_json(self) -> bytes:
        """As it stands in the node."""
        return json.dumps(asdict(self)).encode()  # type: ignore[call-overload]

    @classmethod
    def from_json(cls: type[_T], data: bytes, *, where: str = "record") -> _T:
        """From a node's bytes; raises InputError, naming `where`."""
        if len(data) > MAX_BYTES:
            raise InputError(f"{where}: {len(data)} bytes, but a {cls.__name__} has at most {MAX_BYTES}")
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            raise InputError(f"{where}: not JSON") from None
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


@dataclass(frozen=True)
class SavedModelDeployConfig(_Record):
    """Where a saved model lies, and which versions of it are served."""

    model_base_path: str | None = None
    version_policy: str | None = None


@dataclass(frozen=True)
class ContainerServiceInfo(_Record):
    """The addresses of a serving process."""

    grpc: str | None = None
    http: str | None = None
    archon: str | None = None
    agent: str | None = None
    idc: str | None = None
    """The data centre."""
    debug_info: str | None = None

    def __post_init__(self) -> None:
        if self.grpc is not None:
            check_address(self.grpc, "grpc")


@dataclass(frozen=True)
class ReplicaMeta(_Record):
    """One replica of a task of a service."""

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
            if getattr(self, name):
                check_address(getattr(self, name), name)

    @property
    def is_available(self) -> bool:
        """Whether it answers requests."""
        return self.stat == ModelState.AVAILABLE

    def get_address(self, use_archon: bool = False, address_family: AddressFamily = "ipv4") -> str | None:
        """The address to call: of this family, else of the other, else None. Wildcards are no addresses."""
        if address_family not in ("ipv4", "ipv6"):
            raise InputError(f"address_family must be 'ipv4' or 'ipv6', got {address_family!r}")
        ipv4 = self.archon_address if use_archon else self.address
        ipv6 = self.archon_address_ipv6 if use_archon else self.address_ipv6
        for address in (ipv4, ipv6) if address_family == "ipv4" else (ipv6, ipv4):
            if address and not is_wildcard(address):
                return address
        return None

    def get_path(self, root: str, *, idc: str | None = None, cluster: str | None = None) -> str:
        """Its node below a root; idc and cluster add the level of services that know data centres.

        Raises InputError unless model name and server type are set, and idc and cluster both or neither.
        """
        if (idc is None) != (cluster is None):
            raise InputError(f"idc and cluster go together, got idc {idc!r} and cluster {cluster!r}")
        place = "" if idc is None else f"/{check_name(idc, 'idc')}:{check_name(cluster, 'cluster')}"
        model = check_name(self.model_name, "model name")
        server_type = check_name(self.server_type, "server type")
        return f"/{root}/service/{model}{place}/{server_type}:{self.task}/{self.replica}"
