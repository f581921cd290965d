"""Monolith's parameter sync clients: each call pushes the changed rows and returns a result per target.

They are for code written for Monolith and for servers with its protocol. They send rows only, without
positions, deletions or dense weights; new code should use `megalith.serving.Publisher`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Self

from torch import Tensor, cat

from megalith.compat.monolith.sync_config import SyncConfig, read_sync_config
from megalith.errors import InputError, RemoteError, UsageError
from megalith.serving.client.channels import Channels
from megalith.serving.client.credentials import Credentials, grpc_module
from megalith.serving.proto.message_types import PushResult, protobuf
from megalith.serving.sync.changed_ids import IdSets
from megalith.serving.sync.parameter_source import read_rows
from megalith.serving.sync.push_messages import (
    MAX_CONTENT_BYTES,
    PushMessage,
    encode_request,
    inputs_of,
    is_assign,
    row_bytes,
)
from megalith.serving.wire_names import HASHTABLE_ASSIGN
from megalith.shards import Shards
from megalith.table import Table

MAX_THREADS = 16


class ParameterSyncClient:
    """Pushes the changed rows of its tables at each `create_sync_op`. Not safe to share between threads.

    Args:
        config: A serialised ClientConfig with the targets, used until a call passes another one.
        name: The name of the consumer that tracks changes in the tables.
        credentials: The credentials for the targets.
    """

    def __init__(
        self,
        config: bytes | str | None = None,
        *,
        name: str = "MonolithSyncClient_",
        credentials: Credentials | None = None,
    ) -> None:
        self.name = name
        self._config = _read(config)
        self._channels = Channels(credentials)
        self._tables: dict[str, Table] = {}
        self._waiting: dict[str, IdSets] = {}

    def attach(self, tables: Shards | Table) -> None:
        """Adds tables; their changes are tracked from now on.

        Args:
            tables: A table, or the shards that hold tables.

        Raises:
            InputError: Another table with the same name is attached.
            UsageError: The shards hold no table in this process.
        """
        for name, table in _by_name(tables).items():
            if self._tables.get(name, table) is not table:
                raise InputError(f"another table named {name!r} is already attached to {self.name!r}")
            self._tables[name] = table
            table.track(self.name)

    def create_sync_op(self, config: bytes | str | None = None) -> str:
        """Pushes the changed rows to every target. Nothing is sent if nothing changed.

        Args:
            config: A serialised ClientConfig (a str holds its bytes as Latin-1); empty: the last one.

        Returns:
            A PushResult as JSON with one response per target, in the order of the targets: status_code is 0
            or gRPC's code, update_num is the number of ids pushed. Ids that could not be pushed are kept and
            pushed by the next call.

        Raises:
            InputError: The config is malformed.
        """
        if config:
            self._config = _read(config)
        chosen = self._config
        if not is_assign(chosen.signature_name or HASHTABLE_ASSIGN):
            raise InputError(
                f"sync config: signature_name must be hashtable_assign or raw_assign, "
                f"got {chosen.signature_name[:100]!r}"
            )
        self._waiting = {target: self._waiting.get(target, IdSets()) for target in chosen.targets}
        result = PushResult()
        if not chosen.targets:
            return _json(result)
        changed = self._drain()
        for waiting in self._waiting.values():
            waiting.add(changed)
        with ThreadPoolExecutor(min(MAX_THREADS, len(chosen.targets))) as threads:
            pushed = list(threads.map(lambda target: self._push(target, chosen), chosen.targets))
        for target, (count, error) in zip(chosen.targets, pushed, strict=True):
            response = result.responses.add(target=target, status_code=0, update_num=count)
            if error is not None:
                response.status_code = grpc_module().StatusCode[error.code].value[0]
                response.error_message = str(error)
        return _json(result)

    def _drain(self) -> dict[str, Tensor]:
        return {name: cat(table.drain_touched(self.name)) for name, table in self._tables.items()}

    def _push(self, target: str, config: SyncConfig) -> tuple[int, RemoteError | None]:
        """Pushes to one target; returns the number of ids pushed and the error, if any."""
        waiting, count = self._waiting[target], 0
        costs = row_bytes({name: table.dim for name, table in self._tables.items()})
        signature = config.signature_name or HASHTABLE_ASSIGN
        while len(waiting):
            ids = waiting.take(MAX_CONTENT_BYTES, costs)
            push = PushMessage(read_rows(self._tables, ids)[0].rows)
            if not push.num_ids:
                continue
            request = encode_request(config.model_name, signature, inputs_of(push, signature, self._tables))
            try:
                self._channels.get(target).predict(request, timeout=config.timeout_ms / 1000)
            except RemoteError as error:
                waiting.add(ids)
                return count, error
            count += push.num_ids
        return count, None

    def close(self) -> None:
        """Closes the connections; the tables stop tracking changes for this client."""
        self._channels.close()
        for table in self._tables.values():
            with suppress(KeyError):  # another client with the same name may have stopped it already
                table.untrack(self.name)
        self._tables = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DummySyncClient(ParameterSyncClient):
    """Reports success for every push without sending anything; its tables track no changes."""

    def attach(self, tables: Shards | Table) -> None:
        """Checks the argument and does nothing else."""
        _by_name(tables)

    def create_sync_op(self, config: bytes | str | None = None) -> str:
        """Returns a PushResult as JSON with success for every target."""
        result = PushResult()
        for target in _read(config).targets:
            result.responses.add(target=target, status_code=0, update_num=0)
        return _json(result)


def parameter_sync_client_from_config(
    config: bytes | str | None = None, name_suffix: str = ""
) -> ParameterSyncClient:
    """Makes a client.

    Args:
        config: A serialised ClientConfig with the targets; empty: none yet.
        name_suffix: The end of the client's name.

    Returns:
        The client.
    """
    return ParameterSyncClient(config, name=f"MonolithSyncClient_{name_suffix}")


def create_parameter_sync_clients(ps_num: int) -> list[ParameterSyncClient]:
    """Makes one client per parameter server; one client for 0 servers.

    Args:
        ps_num: The number of parameter servers.

    Returns:
        The clients.

    Raises:
        InputError: The number is negative.
    """
    if ps_num < 0:
        raise InputError(f"ps_num must be 0 or more, got {ps_num}")
    suffixes = [str(number) for number in range(ps_num)] or [""]
    return [parameter_sync_client_from_config(name_suffix=suffix) for suffix in suffixes]


def create_dummy_sync_client() -> DummySyncClient:
    """Makes a client that pushes nothing."""
    return DummySyncClient(name="MonolithDummySyncClient")


def _by_name(tables: Shards | Table) -> Mapping[str, Table]:
    if isinstance(tables, Table):
        return {tables.name: tables}
    if not isinstance(tables, Shards):
        raise InputError(f"attach: expected Shards or a Table, got {type(tables).__name__}")
    if not tables.local:
        raise UsageError("attach: these shards hold no table in this process")
    return tables.local


def _read(config: bytes | str | None) -> SyncConfig:
    if isinstance(config, str):
        config = config.encode("latin-1", "replace")
    return read_sync_config(config) if config else SyncConfig(signature_name=HASHTABLE_ASSIGN)


def _json(result: object) -> str:
    text: str = protobuf("json_format").MessageToJson(result, preserving_proto_field_name=True)
    return text
