"""The records that ZooKeeper discovery stores in nodes: the serving process and its addresses.

The JSON keys and their order are Monolith's, so both systems can read each other's nodes. The content of a
node is untrusted until `from_json` has validated it: the size is bounded, types and addresses are checked,
unknown keys are ignored. The records that only Monolith's own components use are in
`megalith.compat.monolith.znode_records`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, get_type_hints

from megalith.errors import InputError
from megalith.serving.discovery.addresses import check_address
from megalith.serving.discovery.contract import check_name
from megalith.storage.strict_json import parse_json

MAX_RECORD_BYTES = 65536
"""The maximum size of a record."""


class ZnodeRecord:
    """Base of data classes that are stored as a JSON object in a node."""

    def to_json(self) -> bytes:
        """Return the content of the node."""
        return json.dumps(asdict(self)).encode()  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, data: bytes, *, where: str = "record") -> Self:
        """Read a record from the content of a node.

        Args:
            data: The content.
            where: The path of the node, for the error message.

        Returns:
            The record.

        Raises:
            InputError: The content is too long, not a JSON object, or a field has the wrong type or value.
        """
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
