"""Sync config: whom a trainer pushes a table's changes to, in the bytes Monolith's clients pass around."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megalith.errors import InputError
from megalith.serving.discovery.addresses import check_address
from megalith.serving.discovery.contract import SyncBackend
from megalith.serving.discovery.znode_records import TargetExtraInfo
from megalith.serving.proto.parameter_sync import ClientConfig
from megalith.serving.proto.schema import Message, protobuf
from megalith.serving.wire_names import HASHTABLE_ASSIGN

TIMEOUT_MS = 3000
MAX_TARGETS = 10_000


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """A ClientConfig as a data class."""

    model_name: str = ""
    signature_name: str = ""
    targets: tuple[str, ...] = ()
    """Addresses of the replicas to push to."""
    timeout_ms: int = 1000
    """How long one push may take."""
    extra_info: tuple[TargetExtraInfo, ...] = ()
    """Where each target runs, in the order of the targets; none if that is not known of all."""

    def to_bytes(self) -> bytes:
        """The serialised ClientConfig; a replica id of -1 is written out."""
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
    """From a ClientConfig or its bytes; extra info of another number than the targets is left out.

    Raises InputError if it is not a ClientConfig, or a target is no address.
    """
    if isinstance(config, bytes):
        try:
            config = ClientConfig.FromString(config)
        except protobuf("message").DecodeError:
            raise InputError(f"sync config: {len(config)} bytes that are no ClientConfig") from None
    if len(config.targets) > MAX_TARGETS:
        raise InputError(f"sync config: {len(config.targets)} targets, but {MAX_TARGETS} is the most")
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


def refresh_sync_config(backend: SyncBackend, ps_index: int) -> bytes:
    """The serialised ClientConfig of part `ps_{ps_index}`: its replicas now, perhaps none.

    Raises InputError if the backend names a target that is no address.
    """
    name, targets = backend.get_sync_targets(f"ps_{ps_index}")
    return SyncConfig(
        model_name=name,
        signature_name=HASHTABLE_ASSIGN,
        targets=tuple(check_address(target, f"{name}: target") for target in targets),
        timeout_ms=TIMEOUT_MS,
        extra_info=tuple(targets.values()) if isinstance(targets, Mapping) else (),
    ).to_bytes()
