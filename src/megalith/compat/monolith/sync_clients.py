"""What Monolith's parameter sync clients refer to: tables, their changed rows and the targets to push to.

    target             | how it is recognised        | ids                        | removed ids
    -------------------+-----------------------------+----------------------------+------------------------
    a Megalith server  | it answers `sync_position`  | those routed to its part   | removed there
    a Monolith server  | it lacks that signature, or | all of the attached tables | rows of zeros, which is
                       | answers without outputs     |                            | how an absent id reads

Each target has a backlog: ids are added to it when they change, and leave it when the target acknowledges
them. It is kept while a target fails or is missing from the config. A new target is sent every id that
changed since `attach`; so is a Megalith server that has lost the pushed rows, because it restarted or serves
another version.

A table records changes for 8 consumers at most, and there is one client for each part of a served model. So
the clients of one model share one consumer: whenever one of them takes its ids, those of the others are kept
for them. All ids since the first attach are remembered too, for a server that has lost what was pushed to it:

    more than max_ids | what such a server is sent                      | removed rows
    ------------------+-------------------------------------------------+-------------------------
    neither           | the ids that changed                            | removed
    changed ids       | all rows, and the ids that were removed         | removed
    removed ids too   | all rows                                        | served again: reported
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError, MegalithError, RemoteError, ServerLostError, UsageError
from megalith.ps import ServerShards
from megalith.serving.client.channels import Channels
from megalith.serving.client.credentials import Credentials, grpc_module
from megalith.serving.discovery.contract import check_address
from megalith.serving.proto.message_types import ClientConfig, Message, PushResult, protobuf
from megalith.serving.sync.changed_ids import IdSets, Journal
from megalith.serving.sync.parameter_source import describe_not_finite, join_changes, read_rows, scan_ids
from megalith.serving.sync.protocol import ModelLayout, ask_position
from megalith.serving.sync.push_messages import (
    MAX_CONTENT_BYTES,
    encode_request,
    inputs_of,
    is_assign,
    row_bytes,
)
from megalith.serving.wire_names import HASHTABLE_ASSIGN, SYNC_POSITION
from megalith.shards import ShardsPart
from megalith.table import Table

# ---- the config

TIMEOUT_MS = 3000
MAX_TARGETS = 10_000


def read_sync_config(config: bytes | Message) -> Message:
    """Check a ClientConfig, which may be a message of Monolith's generated code, or its bytes."""
    found: Any = config
    if getattr(getattr(config, "DESCRIPTOR", None), "full_name", None) == ClientConfig.DESCRIPTOR.full_name:
        found = found.SerializeToString()
    if not isinstance(found, bytes):
        raise InputError(f"sync config: expected a ClientConfig or its bytes, got {type(config).__name__}")
    try:
        found = ClientConfig.FromString(found)
    except protobuf("message").DecodeError:
        raise InputError(f"sync config: these {len(found)} bytes are not a ClientConfig") from None
    if len(found.targets) > MAX_TARGETS:
        raise InputError(f"sync config: {len(found.targets)} targets, but at most {MAX_TARGETS} are allowed")
    if found.timeout_in_ms <= 0:
        raise InputError(f"sync config: timeout_in_ms must be above 0, got {found.timeout_in_ms}")
    for target in found.targets:
        check_address(target, "sync config: target")
    return found


# ---- changes

MAX_IDS = 20_000_000
"""The number of changed ids to remember, and of removed ids."""


class TrackedChanges:
    """The changed ids of tables, for each client. Safe to share between threads.

    Ids are returned for each table, int64 [n], without duplicates.
    """

    def __init__(self, max_ids: int = MAX_IDS) -> None:
        self._consumer = f"sync clients {uuid.uuid4().hex}"
        self._lock = threading.Lock()
        # Two tables may have one name, if each client has the tables of its own parameter server.
        self._tables: dict[str, Table] = {}
        self._attached: dict[object, dict[str, str]] = {}
        """The keys of each client's tables, by the name of the table."""
        self._pending: dict[object, IdSets] = {}
        self._reached: dict[object, set[tuple[str, int]]] = {}
        """The models and parts that have answered each client."""
        self._changed: set[str] = set()
        """The keys of the tables that have changed since they were attached."""
        self._journal, self._removals = Journal(max_ids), Journal(max_ids)
        for journal in (self._journal, self._removals):
            journal.begin_epoch("")

    def attach(self, client: object, name: str, table: Table) -> None:
        """Record the changes of a table for a client from now on; a second call has no effect."""
        key = str(id(table))
        with self._lock:
            self._drain()  # earlier changes are not for this client
            if key not in self._tables:
                try:
                    table.track(self._consumer)
                except UsageError as error:
                    raise UsageError(
                        f"{error}; the clients that one call of create_parameter_sync_clients makes share one"
                    ) from None
                self._tables[key] = table
            self._attached.setdefault(client, {})[name] = key
            self._pending.setdefault(client, IdSets())

    def detach(self, client: object) -> None:
        """Forget a client; tables that no other client has attached stop recording."""
        with self._lock:
            keys = set(self._attached.pop(client, {}).values())
            self._pending.pop(client, None)
            self._reached.pop(client, None)
            for key in keys.difference(*(others.values() for others in self._attached.values())):
                self._tables.pop(key).untrack(self._consumer)

    def reach(self, client: object, model: str, part: int) -> None:
        """Record that a part of a model has answered a client, which then pushes the part's ids to it."""
        with self._lock:
            self._reached.setdefault(client, set()).add((model, part))

    def unreached(self, client: object, name: str, model: str, num_parts: int) -> set[int]:
        """Return the parts of a model that no client pushes a table to."""
        # Clients that have not pushed yet are expected to push to a part each: nothing is returned as long as
        # there are enough of them for the parts that are left.
        with self._lock:
            key = self._attached[client][name]
            clients = [each for each, keys in self._attached.items() if key in keys.values()]
            reached = [self._reached.get(each, set()) for each in clients]
            left = set(range(num_parts)) - {part for each in reached for at, part in each if at == model}
            return left if len(left) > sum(not each for each in reached) else set()

    def waiting(self, client: object) -> dict[str, Tensor]:
        """Return what `take` would return, and leave it there."""
        with self._lock:
            self._drain()
            return self._by_name(client, self._pending.get(client, IdSets()).tensors())

    def take(self, client: object) -> dict[str, Tensor]:
        """Return the ids that changed or were removed since the client's last call."""
        with self._lock:
            self._drain()
            pending = self._pending.get(client, IdSets()).tensors()
            self._pending[client] = IdSets()
            return self._by_name(client, pending)

    def has_changed(self, client: object) -> bool:
        """Return whether anything has changed since the tables were attached, as far as `take` knows."""
        with self._lock:
            return not self._changed.isdisjoint(self._attached.get(client, {}).values())

    @property
    def knows_removals(self) -> bool:
        """Whether `all_ids` has the ids of all removed rows."""
        with self._lock:
            return bool(self._journal.labels or self._removals.labels)

    def all_ids(self, client: object) -> dict[str, Tensor]:
        """Return all ids that changed since the tables were attached; if too many, those of all rows
        instead."""
        with self._lock:
            self._drain()
            known = self._journal.since("")
            if known is not None:
                return self._by_name(client, known)
            removed = self._by_name(client, self._removals.since("") or {})
            tables = {name: self._tables[key] for name, key in self._attached.get(client, {}).items()}
        found = IdSets()
        found.add(removed)
        found.add(scan_ids(tables))
        return found.tensors()

    def _by_name(self, client: object, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        keys = self._attached.get(client, {})
        return {name: ids[key] for name, key in keys.items() if key in ids}

    def _drain(self) -> None:
        """Distribute the changed ids to the clients that have attached their table."""
        for key, table in self._tables.items():
            updated, removed = table.drain_touched(self._consumer)
            ids = join_changes(updated, removed)
            if not ids.numel():
                continue
            self._changed.add(key)
            self._journal.add({key: ids})
            self._removals.add({key: removed})
            for client, keys in self._attached.items():
                if key in keys.values():
                    self._pending[client].add({key: ids})


# ---- clients

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
        index: int = 0,
        count: int = 1,
    ) -> None:
        if credentials is not None and not isinstance(credentials, Credentials):
            raise InputError(f"credentials must be Credentials, got {type(credentials).__name__}")
        self.name = name
        self._config = _read(config)
        self._credentials, self._channels = credentials, Channels(credentials)
        self._changes = changes or TrackedChanges()
        self._index, self._count = index, count  # the number of this client among those of one call
        self._servers: ServerShards | None = None
        self._key = f"{name} {uuid.uuid4().hex}"
        self._closed = False
        self._tables: dict[str, Table] = {}
        self._targets: dict[tuple[str, str], _Target] = {}
        """By address and model; those that have been missing from the config for longest come first."""

    def attach(self, tables: Mapping[str, Table]) -> None:
        """Add tables; their changes are tracked from now on."""
        self._check_open()
        if self._servers is not None:
            raise UsageError(
                f"{self.name!r} has the tables of a parameter server: attach others to another client"
            )
        for name, table in tables.items():
            if self._tables.get(name, table) is not table:
                raise InputError(f"another table named {name!r} is already attached to {self.name!r}")
            self._changes.attach(self, name, table)
            self._tables[name] = table

    def attach_server(self, shards: ServerShards) -> None:
        """Take the tables of one parameter server; the handle that pushes them runs there."""
        self._check_open()
        if self._servers is shards:
            return
        if self._tables or self._servers is not None:
            raise UsageError(
                f"{self.name!r} has tables already: attach a ServerShards to a client of its own"
            )
        if len(shards.links) != self._count:
            raise UsageError(
                f"attach: these tables are on {len(shards.links)} parameter servers: attach them to one "
                f"client for each, which create_parameter_sync_clients({len(shards.links)}) makes"
            )
        shards.flush()  # earlier changes are not for this client
        self._servers = shards
        try:
            self._on_server(_attach_part, self.name, self._config.SerializeToString(), self._credentials)
        except BaseException:
            self._servers = None
            raise

    def _on_server(self, function: Callable[..., Any], *args: Any, background: bool = False) -> Any:
        assert self._servers is not None
        if len(self._servers.links) != self._count:
            raise UsageError(f"{self.name!r}: the tables have moved: make new clients and attach the tables")
        link = self._servers.links[self._index]
        return link.result(link.run(function, self._key, *args, background=background))

    def push(self, config_str: bytes | str | None = None) -> Message:
        """Push the changed rows to every target; see `ParameterSyncClient.create_sync_op`."""
        self._check_open()
        if self._servers is not None:
            return PushResult.FromString(self._on_server(_push_part, config_str, background=True))
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

    def _push(self, target: _Target, config: Message) -> tuple[int, RemoteError | None]:
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

    def _ask_layout(self, target: _Target, config: Message, problems: list[str]) -> ModelLayout | None:
        """Ask what the target serves, and reduce its backlog to that; None for a Monolith server."""
        connection, timeout = self._channels.get(target.address), config.timeout_in_ms / 1000
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

    def _send(self, target: _Target, layout: ModelLayout | None, config: Message, problems: list[str]) -> int:
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
                self._channels.get(target.address).predict(request, timeout=config.timeout_in_ms / 1000)
        except BaseException:
            target.backlog.add(ids)
            raise
        if not_finite:
            problems.append(describe_not_finite(not_finite))
        return push.num_ids

    def close(self) -> None:
        """Close the connections; the tables stop tracking changes for this client."""
        if self._servers is not None and not self._closed:
            with suppress(MegalithError):  # the server ended, or the shards are closed
                self._on_server(_close_part)
        self._closed = True
        self._channels.close()
        self._changes.detach(self)
        self._tables = {}

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"the sync client {self.name!r} is closed: make a new one and attach its tables")

    def abandon(self) -> None:
        """On a server: the worker that attached the tables has left."""
        self.close()


# ---- what runs on parameter servers


def _attach_part(
    part: ShardsPart, key: str, name: str, config: bytes, credentials: Credentials | None
) -> None:
    handle = SyncHandle(name, config, credentials=credentials)
    handle.attach(part.shards.local)
    part.kept[key] = handle


def _push_part(part: ShardsPart, key: str, config_str: bytes | str | None) -> bytes:
    handle = part.kept.get(key)
    if not isinstance(handle, SyncHandle):
        raise ServerLostError(
            f"server {part.index} has no sync client: it was started again, or the worker has left; make new "
            "clients and attach the tables to them"
        )
    data: bytes = handle.push(config_str).SerializeToString()
    return data


def _close_part(part: ShardsPart, key: str) -> None:
    handle = part.kept.pop(key, None)
    if handle is not None:
        handle.abandon()


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


def _read(config: bytes | str | Message | None) -> Message:
    if isinstance(config, str):
        config = config.encode("latin-1", "replace")
    if config is None or not _is_given(config):
        return ClientConfig()
    return read_sync_config(config)


def _is_given(config: object) -> bool:
    return config is not None and not (isinstance(config, str | bytes) and not config)
