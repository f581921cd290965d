"""Monolith's parameter sync clients: each call pushes the changed rows and returns a result per target.

They are for code written for Monolith and for servers with its protocol; new code should use
`megalith.serving.Publisher`, which also pushes dense weights and applies each message once, in order.

    target             | how it is recognised        | ids                        | removed ids
    -------------------+-----------------------------+----------------------------+------------------------
    a Megalith server  | it answers `sync_position`  | those routed to its part   | removed there
    a Monolith server  | it lacks that signature, or | all of the attached tables | rows of zeros, which is
                       | answers without outputs     |                            | how an absent id reads

Each target has a backlog: ids are added to it when they change, and leave it when the target acknowledges
them. It is kept while a target fails or is missing from the config. A new target is sent every id that
changed since `attach`; so is a Megalith server that has lost the pushed rows, because it restarted or serves
another version.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

import torch

from megalith.compat.monolith.sync_config import SyncConfig, read_sync_config
from megalith.compat.monolith.tracked_changes import TrackedChanges
from megalith.errors import InputError, RemoteError, UsageError
from megalith.ops import checks
from megalith.serving.client.channels import Channels
from megalith.serving.client.credentials import Credentials, grpc_module
from megalith.serving.proto.message_types import Message, PushResult, protobuf
from megalith.serving.sync.changed_ids import IdSets
from megalith.serving.sync.parameter_source import describe_not_finite, read_rows
from megalith.serving.sync.protocol import ModelLayout, ask_position
from megalith.serving.sync.push_messages import (
    MAX_CONTENT_BYTES,
    encode_request,
    inputs_of,
    is_assign,
    row_bytes,
)
from megalith.serving.wire_names import HASHTABLE_ASSIGN, SYNC_POSITION
from megalith.shards import Shards
from megalith.table import Table

logger = logging.getLogger(__name__)

MAX_THREADS = 16
MAX_ABSENT_IDS = 20_000_000
"""The number of ids kept for targets that the config no longer lists; beyond it the oldest are dropped."""
MAX_NAMED_PARTS = 20
"""The number of parts that a message names."""
NOT_PUSHED = "FAILED_PRECONDITION"
"""The status of a target that answered, but was not sent all rows; the message names them."""
_MONOLITH = "monolith"
_NO_SIGNATURE = ("FAILED_PRECONDITION", "INVALID_ARGUMENT", "UNIMPLEMENTED")


@dataclass(eq=False)
class _Target:
    """A model on a server, and the ids that it has not acknowledged.

    rows_id: Identifies the rows it was sent; "" before its first answer, _MONOLITH for a Monolith server.
    """

    address: str
    model: str
    backlog: IdSets = field(default_factory=IdSets)
    rows_id: str = ""


class SyncHandle:
    """Tables, their changes and the targets: what Monolith's handles of clients refer to."""

    def __init__(
        self,
        name: str,
        config: bytes | str | Message | None = None,
        *,
        credentials: Credentials | None = None,
        changes: TrackedChanges | None = None,
    ) -> None:
        if credentials is not None and not isinstance(credentials, Credentials):
            raise InputError(f"credentials must be Credentials, got {type(credentials).__name__}")
        self.name = name
        self._config = _read(config)
        self._channels = Channels(credentials)
        self._changes = changes or TrackedChanges()
        self._closed = False
        self._tables: dict[str, Table] = {}
        self._targets: dict[tuple[str, str], _Target] = {}
        """By address and model; those that have been missing from the config for longest come first."""

    def attach(self, tables: Mapping[str, Table]) -> None:
        """Add tables; their changes are tracked from now on."""
        self._check_open()
        for name, table in tables.items():
            if self._tables.get(name, table) is not table:
                raise InputError(f"another table named {name!r} is already attached to {self.name!r}")
            self._changes.attach(self, name, table)
            self._tables[name] = table

    def push(self, config_str: bytes | str | None = None) -> Message:
        """Push the changed rows to every target; see `ParameterSyncClient.create_sync_op`."""
        self._check_open()
        if _is_given(config_str):
            self._config = _read(config_str)
        chosen = self._config
        if not is_assign(chosen.signature_name or HASHTABLE_ASSIGN):
            raise InputError(
                f"sync config: signature_name must be hashtable_assign or raw_assign, "
                f"got {chosen.signature_name[:100]!r}"
            )
        result = PushResult()
        if not chosen.targets:
            problem = self._describe_waiting(chosen.model_name)
            if problem:
                logger.warning("%s", problem)
                status = grpc_module().StatusCode[NOT_PUSHED].value[0]
                result.responses.add(target="", status_code=status, update_num=0, error_message=problem)
            return result
        listed = {address: self._list(address, chosen.model_name) for address in chosen.targets}
        changed = self._changes.take(self)
        for target in self._targets.values():
            target.backlog.add(changed)
        self._drop_absent(len(listed))
        with ThreadPoolExecutor(min(MAX_THREADS, len(listed))) as threads:
            outcomes = threads.map(lambda target: self._push(target, chosen), listed.values())
            pushed = dict(zip(listed, outcomes, strict=True))
        for address in chosen.targets:
            count, error = pushed[address]
            response = result.responses.add(target=address, status_code=0, update_num=count)
            if error is not None:
                response.status_code = grpc_module().StatusCode[error.code].value[0]
                response.error_message = str(error)
        return result

    def _describe_waiting(self, model: str) -> str:
        """Name the ids that wait for a model without targets; "" if there are none."""
        waiting = IdSets()
        waiting.add(self._changes.waiting(self))
        for target in self._targets.values():
            if target.model == model:
                waiting.add(target.backlog.tensors())
        counts = [f"{ids.numel()} of table {table!r}" for table, ids in waiting.tensors().items()]
        if not counts:
            return ""
        return (
            f"the config has no targets for {model!r}, and changed ids wait: {', '.join(counts)}. "
            "If the model has no such part, push to those it has, with create_parameter_sync_clients"
        )

    def _list(self, address: str, model: str) -> _Target:
        """Return the target, and move it after those that were listed earlier."""
        target = self._targets.pop((address, model), None) or _Target(address, model)
        self._targets[address, model] = target
        return target

    def _drop_absent(self, listed: int) -> None:
        """Forget targets that the config has not listed for longest, once they hold too many ids."""
        # listed: The number of targets that it lists, which are the last ones.
        absent = list(self._targets)[: len(self._targets) - listed]
        total = sum(len(self._targets[key].backlog) for key in absent)
        for key in absent:
            if total <= MAX_ABSENT_IDS:
                return
            gone = self._targets.pop(key)
            total -= len(gone.backlog)
            logger.warning(
                "%s: %s has been missing from the config for long: the %d ids it was not sent are dropped; "
                "if it returns, it is sent all ids that changed",
                gone.model,
                gone.address,
                len(gone.backlog),
            )

    def _push(self, target: _Target, config: SyncConfig) -> tuple[int, RemoteError | None]:
        """Push to one target; returns the number of ids pushed and the error, if any."""
        if not self._changes.has_changed(self):
            return 0, None
        count, problems = 0, list[str]()
        try:
            layout = self._ask_layout(target, config, problems)
            while len(target.backlog):
                count += self._send(target, layout, config, problems)
        except RemoteError as error:
            return count, error
        if not problems:
            return count, None
        for problem in problems:
            logger.warning("%s at %s: %s", target.model, target.address, problem)
        return count, RemoteError("; ".join(problems), code=NOT_PUSHED)

    def _ask_layout(self, target: _Target, config: SyncConfig, problems: list[str]) -> ModelLayout | None:
        """Ask what the target serves, and reduce its backlog to that; None for a Monolith server."""
        connection, timeout = self._channels.get(target.address), config.timeout_ms / 1000
        rows_id, layout = _MONOLITH, None
        try:
            position = ask_position(connection, target.model, SYNC_POSITION, timeout=timeout)
            rows_id, layout = position.rows_id, position.layout
        except InputError as error:
            problem = f"{target.address}: malformed answer to {SYNC_POSITION}: {error}; nothing is pushed"
            raise RemoteError(problem, code="INTERNAL") from None
        except RemoteError as error:
            if error.code not in _NO_SIGNATURE or target.rows_id not in ("", _MONOLITH):
                raise
        if layout is not None and not layout.takes_rows:
            raise RemoteError(
                f"{target.address}: {target.model!r} is an entry, which has no rows: push to its parts, "
                "'model:ps_0' and so on",
                code=NOT_PUSHED,
            )
        if rows_id != target.rows_id:
            # It is new, or has lost what was pushed to it.
            target.backlog.add(self._changes.all_ids(self))
            target.rows_id = rows_id
            if not self._changes.knows_removals:
                problems.append(
                    "too many rows were removed since attach to remember all of them, and this target, which "
                    "is new or was restarted, may serve some of them: export the model again and load that"
                )
        if layout is None:
            return None
        problems += self._ids_of_nobody(target, layout)
        target.backlog.compact(layout.keep)
        return layout

    def _ids_of_nobody(self, target: _Target, layout: ModelLayout) -> list[str]:
        """Describe the ids of a backlog that neither this target nor that of another client receives."""
        found, model = list[str](), target.model.removesuffix(layout.part)
        if layout.part.startswith("ps_"):
            self._changes.reach(self, model, int(layout.part.removeprefix("ps_")))
        for table, ids in target.backlog.tensors().items():
            if table not in layout.tables:
                found.append(f"table {table!r} is not served there: its {ids.numel()} ids are not pushed")
                continue
            parts = self._changes.unreached(self, table, model, layout.sub_graph_num)
            if not parts:
                continue
            owners = layout.tables[table].router.owner(ids)
            owners = owners[torch.isin(owners, torch.tensor(sorted(parts), dtype=owners.dtype, device="cpu"))]
            if owners.numel():
                named = ", ".join(f"ps_{part}" for part in owners.unique().tolist()[:MAX_NAMED_PARTS])
                found.append(
                    f"{owners.numel()} ids of table {table!r} belong to parts that no client has pushed to "
                    f"({named}): attach it to one client for each part, which "
                    f"create_parameter_sync_clients({layout.sub_graph_num}) makes"
                )
        return found

    def _send(
        self, target: _Target, layout: ModelLayout | None, config: SyncConfig, problems: list[str]
    ) -> int:
        """Send one message; returns the number of its ids. If it fails, they return to the backlog."""
        dims = {name: table.dim for name, table in self._tables.items()}
        served = dims if layout is None else layout.tables
        signature = config.signature_name or HASHTABLE_ASSIGN
        ids = target.backlog.take(MAX_CONTENT_BYTES, row_bytes(dims))
        try:
            push, not_finite = read_rows(self._tables, ids)
            if layout is None:
                push = push.with_zero_rows(dims)
            if push.num_ids:
                request = encode_request(target.model, signature, inputs_of(push, signature, served))
                self._channels.get(target.address).predict(request, timeout=config.timeout_ms / 1000)
        except BaseException:
            target.backlog.add(ids)
            raise
        if not_finite:
            problems.append(describe_not_finite(not_finite))
        return push.num_ids

    def close(self) -> None:
        """Close the connections; the tables stop tracking changes for this client."""
        self._closed = True
        self._channels.close()
        self._changes.detach(self)
        self._tables = {}

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"the sync client {self.name!r} is closed: make a new one and attach its tables")


class DummySyncHandle(SyncHandle):
    """Reports success for every push without sending anything; its tables track no changes."""

    def attach(self, tables: Mapping[str, Table]) -> None: ...

    def push(self, config_str: bytes | str | None = None) -> Message:
        if _is_given(config_str):
            self._config = _read(config_str)
        result = PushResult()
        for target in self._config.targets:
            result.responses.add(target=target, status_code=0, update_num=0)
        return result


class ParameterSyncClient:
    """Pushes the changed rows of its tables at each `create_sync_op`. Not safe to share between threads.

    Make one with `create_parameter_sync_clients` or `parameter_sync_client_from_config`.

    Args:
        client: A client or its handle; both clients then have the same tables and targets.
    """

    def __init__(self, client: ParameterSyncClient | SyncHandle) -> None:
        if not isinstance(client, ParameterSyncClient | SyncHandle):
            raise InputError(
                f"client must be a ParameterSyncClient or its handle, got {type(client).__name__}; "
                "parameter_sync_client_from_config makes a client from a config"
            )
        self._handle = client.handle if isinstance(client, ParameterSyncClient) else client

    @property
    def handle(self) -> SyncHandle:
        """What the client shares with those made from it."""
        return self._handle

    @property
    def name(self) -> str:
        """Monolith's name of the client; several clients may have the same one."""
        return self._handle.name

    def attach(self, tables: Shards | Table) -> None:
        """Add tables; their changes are tracked from now on.

        Args:
            tables: A table, or the shards that hold tables.

        Raises:
            InputError: Another table with the same name is attached.
            UsageError: The shards hold no table in this process, a table has too many consumers, or the
                client is closed.
        """
        self._handle.attach(_by_name(tables))

    def create_sync_op(self, config_str: bytes | str | None = None) -> str:
        """Push the changed rows to every target. Nothing is sent if nothing changed.

        Args:
            config_str: A serialised ClientConfig (a str holds its bytes as Latin-1); empty: the last one.

        Returns:
            A PushResult as JSON with one response per target, in the order of the targets: status_code is 0
            or gRPC's code, update_num is the number of ids pushed, removed ones included. Ids that could not
            be pushed are kept and pushed by a later call, also if a config in between does not list the
            target. Rows with NaN or Inf, of tables that the target does not serve, or of parts that no client
            has pushed to are not pushed: the status is then FAILED_PRECONDITION and error_message names them.
            Without targets, there is one response if changed ids wait, with that status and the target "".

        Raises:
            InputError: The config is malformed.
            UsageError: The client is closed.
        """
        text: str = protobuf("json_format").MessageToJson(
            self._handle.push(config_str), preserving_proto_field_name=True
        )
        return text

    def close(self) -> None:
        """Close the connections; the tables stop tracking changes for this client."""
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parameter_sync_client_from_config(
    config: bytes | str | Message | None = None,
    name_suffix: str = "",
    *,
    credentials: Credentials | None = None,
) -> ParameterSyncClient:
    """Make a client.

    Args:
        config: A ClientConfig with the targets, or its bytes; empty: none yet.
        name_suffix: The end of the client's name.
        credentials: What the client presents to the targets, such as a token.

    Returns:
        The client.
    """
    handle = SyncHandle(f"MonolithSyncClient_{name_suffix}", config, credentials=credentials)
    return ParameterSyncClient(handle)


def create_parameter_sync_clients(
    ps_num: int, *, credentials: Credentials | None = None
) -> list[ParameterSyncClient]:
    """Make one client per part of a served model; one client for 0 parts.

    Client i pushes to the targets of `ps_i`: `create_sync_op(refresh_sync_config(backend, i))`. All clients
    may attach the same tables: each part receives the ids that serving routes to it.

    Args:
        ps_num: The number of parameter servers, which is the number of parts.
        credentials: What the clients present to the targets, such as a token.

    Returns:
        The clients.
    """
    checks.integer(ps_num, "ps_num", least=0)
    changes = TrackedChanges()
    return [
        ParameterSyncClient(
            SyncHandle(f"MonolithSyncClient_{suffix}", credentials=credentials, changes=changes)
        )
        for suffix in (range(ps_num) if ps_num else [""])
    ]


def create_dummy_sync_client() -> ParameterSyncClient:
    """Make a client that pushes nothing."""
    return ParameterSyncClient(DummySyncHandle("MonolithDummySyncClient"))


def _by_name(tables: Shards | Table) -> Mapping[str, Table]:
    if isinstance(tables, Table):
        return {tables.name: tables}
    if not isinstance(tables, Shards):
        raise InputError(f"attach: expected Shards or a Table, got {type(tables).__name__}")
    if not tables.local:
        raise UsageError("attach: these shards hold no table in this process")
    return tables.local


def _read(config: bytes | str | Message | None) -> SyncConfig:
    if isinstance(config, str):
        config = config.encode("latin-1", "replace")
    if config is None or not _is_given(config):
        return SyncConfig(signature_name=HASHTABLE_ASSIGN)
    return read_sync_config(config)


def _is_given(config: object) -> bool:
    return config is not None and not (isinstance(config, str | bytes) and not config)
