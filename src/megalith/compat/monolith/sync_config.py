"""Sync config: the targets of parameter sync, as the ClientConfig bytes that Monolith's clients take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megalith.compat.monolith.znode_records import TargetExtraInfo
from megalith.errors import InputError
from megalith.ops import checks
from megalith.serving.discovery.contract import SyncBackend, check_address
from megalith.serving.proto.message_types import ClientConfig, Message, protobuf
from megalith.serving.wire_names import HASHTABLE_ASSIGN

TIMEOUT_MS = 3000
MAX_TARGETS = 10_000


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """A ClientConfig message as a data class."""

    model_name: str = ""
    signature_name: str = ""
    targets: tuple[str, ...] = ()
    """The addresses of the replicas to push to."""
    timeout_ms: int = 1000
    """The time limit of one push."""
    extra_info: tuple[TargetExtraInfo, ...] = ()
    """Where each target runs, in the order of the targets; empty unless it is known for all of them."""

    def to_bytes(self) -> bytes:
        """Return the serialised ClientConfig; a replica id of -1 is written explicitly."""
        config = ClientConfig(
            model_name=self.model_name,
            signature_name=self.signature_name,
            targets=self.targets,
            timeout_in_ms=self.timeout_ms,
        )
        for info in self.extra_info:
            # None leaves a field unset.
            config.targets_extra_info.add(idc=info.idc, cluster=info.cluster, replica_id=info.replica_id)
        data: bytes = config.SerializeToString()
        return data


def read_sync_config(config: bytes | Message) -> SyncConfig:
    """Read a ClientConfig."""
    if isinstance(config, bytes):
        try:
            config = ClientConfig.FromString(config)
        except protobuf("message").DecodeError:
            raise InputError(f"sync config: these {len(config)} bytes are not a ClientConfig") from None
    if not isinstance(config, ClientConfig):
        raise InputError(f"sync config: expected a ClientConfig or its bytes, got {type(config).__name__}")
    if len(config.targets) > MAX_TARGETS:
        raise InputError(f"sync config: {len(config.targets)} targets, but at most {MAX_TARGETS} are allowed")
    if config.timeout_in_ms <= 0:
        raise InputError(f"sync config: timeout_in_ms must be above 0, got {config.timeout_in_ms}")
    infos = config.targets_extra_info if len(config.targets_extra_info) == len(config.targets) else ()
    return SyncConfig(
        model_name=config.model_name,
        signature_name=config.signature_name,
        targets=tuple(check_address(target, "sync config: target") for target in config.targets),
        timeout_ms=config.timeout_in_ms,
        extra_info=tuple(
            TargetExtraInfo(
                info.idc if info.HasField("idc") else None,
                info.cluster if info.HasField("cluster") else None,
                info.replica_id,
            )
            for info in infos
        ),
    )


def refresh_sync_config(sync_backend: SyncBackend, ps_index: int) -> bytes:
    """Make the serialised ClientConfig of one parameter server.

    Args:
        sync_backend: Finds the replicas, for example a `Discovery`.
        ps_index: The number of the parameter server; its part is `ps_{ps_index}`.

    Returns:
        The serialised ClientConfig with the current replicas, possibly none.

    Raises:
        InputError: The backend returns a target that is not an address.
    """
    if not isinstance(sync_backend, SyncBackend):
        raise InputError(f"sync_backend must be a SyncBackend, got {type(sync_backend).__name__}")
    checks.integer(ps_index, "refresh_sync_config: ps_index", least=0)
    name, targets = sync_backend.get_sync_targets(f"ps_{ps_index}")
    return SyncConfig(
        model_name=name,
        signature_name=HASHTABLE_ASSIGN,
        targets=tuple(check_address(target, f"{name}: target") for target in targets),
        timeout_ms=TIMEOUT_MS,
        extra_info=tuple(targets.values()) if isinstance(targets, Mapping) else (),
    ).to_bytes()
