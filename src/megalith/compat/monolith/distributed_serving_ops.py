"""Monolith's serving ops: remote_predict, the clients of parameter sync and the dummy server.

Monolith's remote_predict has no argument for where the servers are. Here a call gets a `ClientCache`, which
has a discovery, or uses the one cache of the process, whose discovery `set_default_discovery` sets. That
cache exists only for code that calls as Monolith's does; it is made by the first call and closed when the
process exits. New code uses `megalith.serving.PredictClient` and `megalith.serving.Publisher`.
"""

from __future__ import annotations

import atexit
import functools
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, tensor

from megalith.compat.monolith.sync_clients import (
    TIMEOUT_MS,
    DummySyncHandle,
    SyncHandle,
    TrackedChanges,
)
from megalith.errors import DiscoveryError, InputError, RemoteError, UsageError
from megalith.ops import checks
from megalith.ps import ServerShards
from megalith.serving.client.channels import FINAL, MAX_MESSAGE_BYTES
from megalith.serving.client.credentials import Credentials, grpc_module
from megalith.serving.client.predict_client import ClientCache, Input, check_timeout
from megalith.serving.discovery import SyncBackend
from megalith.serving.discovery.contract import Discovery, check_address, is_loopback
from megalith.serving.proto.message_types import (
    ClientConfig,
    Message,
    PredictRequest,
    PredictResponse,
    protobuf,
)
from megalith.serving.proto.tf_tensors import Strings, from_tensor_protos, to_tensor_proto
from megalith.serving.wire_names import CONTROLS, HASHTABLE_ASSIGN, PREDICT
from megalith.shards import Shards
from megalith.table import Table

# ---- remote_predict

DEADLINE_MILLIS = 30
_MIN_TIMEOUT = 1e-06


@functools.cache
def _process_clients() -> ClientCache:
    clients = ClientCache()
    atexit.register(clients.close)
    return clients


def set_default_discovery(discovery: Discovery | str | None) -> None:
    """Set the discovery of calls that pass none, and close what earlier such calls opened.

    Args:
        discovery: A started discovery, or a URL, which is opened at once; None removes the default.

    Raises:
        InputError: The URL is of an unknown kind.
        DiscoveryError: The discovery cannot be opened.
    """
    clients = _process_clients()
    clients.reset(discovery)
    if isinstance(discovery, str):
        try:
            clients.open(discovery)
        except BaseException:
            clients.reset()
            raise


def remote_predict(
    input_tensor_alias: Sequence[str],
    input_tensors: Sequence[Input],
    output_tensor_alias: Sequence[str],
    model_name: str | None,
    task: str | int,
    old_model_name: str | None = None,
    model_version: int = -1,
    fail_op_on_rpc_error: bool = True,
    max_rpc_deadline_millis: float = DEADLINE_MILLIS,
    output_types: Sequence[torch.dtype] | None = None,
    name: str | None = None,
    signature_name: str = PREDICT,
    *,
    discovery: Discovery | str | None = None,
    credentials: Credentials | None = None,
    clients: ClientCache | None = None,
) -> list[Tensor]:
    """Request predictions or rows from the servers of a model.

    Args:
        input_tensors: Tensors, Ragged columns or strings, one for each alias.
        model_name: The model and its part, such as "movies:ps_0"; or the model alone, with the part in
            `task`.
        task: The number i of part "ps_i", or the name of a part, such as "entry". It must agree with the
            part of `model_name`.
        old_model_name: Requested if no server knows `model_name`. The part alone, such as "ps_0", is
            Monolith's old name of it on the same servers. If both fail, the error names both.
        model_version: -1 is the newest.
        fail_op_on_rpc_error: False returns empty outputs [0] if no server or discovery answers in time, no
            server has the model or version (one may still be loading it), or the response is malformed. A
            request that servers refuse as wrong raises all the same: an unknown input, output or signature,
            a wrong dtype or shape, a missing permission.
        max_rpc_deadline_millis: For opening the discovery and all attempts.
        output_types: The dtype of each output, also of empty ones; None: as the servers send them, and
            float32 for empty outputs.
        name: Name of the call in error messages.
        discovery: Used instead of that of `clients`; a URL is opened by the first call that names it, and
            kept.
        credentials: What the client presents to servers.
        clients: Holds connections and a discovery; None: those of the process.

    Returns:
        The outputs, in the order of `output_tensor_alias`.

    Raises:
        InputError: An argument is invalid, or an output has another dtype than `output_types`.
        UsageError: There is no discovery.
        RemoteError: No server answered in time, or the servers refuse the request.
        DiscoveryError: The discovery did not answer in time.
    """
    where = "remote_predict" if name is None else f"remote_predict {checks.text(name, 'name')!r}"
    inputs = _aliases(input_tensor_alias, "input_tensor_alias", where)
    outputs = _aliases(output_tensor_alias, "output_tensor_alias", where)
    if len(inputs) != len(checks.as_list(input_tensors, f"{where}: input_tensors")):
        raise InputError(f"{where}: {len(inputs)} input aliases for {len(input_tensors)} tensors")
    if not outputs:
        raise InputError(f"{where}: output_tensor_alias must name an output")
    dtypes = _dtypes(output_types, outputs, where)
    model, part = _model_and_part(model_name, task, where)
    old = _old_model(old_model_name, part, where)
    checks.flag(fail_op_on_rpc_error, f"{where}: fail_op_on_rpc_error")
    seconds = check_timeout(
        float(checks.number(max_rpc_deadline_millis, f"{where}: max_rpc_deadline_millis")) / 1000
    )
    end = time.monotonic() + seconds
    try:
        client = _clients(clients, discovery, where).client(
            model,
            part,
            discovery=discovery,
            credentials=credentials,
            timeout=seconds,
            old_model_name=old,
            model_version=model_version,
            signature_name=signature_name,
        )
        given = dict(zip(inputs, input_tensors, strict=True))
        left = max(end - time.monotonic(), _MIN_TIMEOUT)
        answer = client.predict(given, outputs=outputs, timeout=left)
    except (RemoteError, DiscoveryError) as error:
        wrong = isinstance(error, RemoteError) and error.code in FINAL
        if fail_op_on_rpc_error or wrong:
            raise
        return [torch.empty(0, dtype=dtype or torch.float32, device="cpu") for dtype in dtypes]
    for alias, dtype in zip(outputs, dtypes, strict=True):
        if dtype is not None and answer[alias].dtype != dtype:
            raise InputError(
                f"{where}: output {alias!r} is {answer[alias].dtype}, but output_types has {dtype}"
            )
    return [answer[alias] for alias in outputs]


def _clients(given: ClientCache | None, discovery: Discovery | str | None, where: str) -> ClientCache:
    if given is not None:
        if not isinstance(given, ClientCache):
            raise InputError(f"{where}: clients must be a ClientCache, got {checks.kind(given)}")
        return given
    clients = _process_clients()
    if discovery is None and clients.discovery is None:
        raise UsageError(
            f"{where}: no discovery: call set_default_discovery('static:host:port') first, or pass one"
        )
    return clients


def _aliases(given: Sequence[str], what: str, where: str) -> list[str]:
    if not isinstance(given, list | tuple) or not all(isinstance(alias, str) for alias in given):
        raise InputError(f"{where}: {what} must be a list of names, got {repr(given)[:100]}")
    if len(set(given)) != len(given):
        raise InputError(f"{where}: {what} contains a name twice")
    return list(given)


def _dtypes(
    given: Sequence[torch.dtype] | None, outputs: Sequence[str], where: str
) -> list[torch.dtype | None]:
    if given is None:
        return [None] * len(outputs)
    known = checks.as_list(given, f"{where}: output_types")
    if len(known) != len(outputs) or not all(isinstance(dtype, torch.dtype) for dtype in known):
        raise InputError(
            f"{where}: output_types must be {len(outputs)} torch dtypes, one for each output, "
            f"got {repr(given)[:100]}"
        )
    return known


def _model_and_part(model_name: str | None, task: str | int, where: str) -> tuple[str, str | int]:
    model, colon, part = model_name.rpartition(":") if isinstance(model_name, str) else ("", "", "")
    if not (model if colon else part):
        raise InputError(
            f"{where}: model_name must name a model, as in 'movies:ps_0' or 'movies', got {model_name!r}"
        )
    if not colon:
        return part, task
    number = re.search(r"_(\d+)$", part)
    is_number = isinstance(task, int) and not isinstance(task, bool)
    same_number = is_number and (number is None or int(number[1]) == task)
    if not (task == part if isinstance(task, str) else same_number):
        raise InputError(f"{where}: model_name {model_name!r} names another part than task {task!r}")
    return model, part


def _old_model(old_model_name: str | None, part: str | int, where: str) -> str | None:
    """Return an old name without its part; None if there is no old name."""
    if old_model_name is None or not checks.text(old_model_name, f"{where}: old_model_name"):
        return None
    model, colon, own = old_model_name.rpartition(":")
    expected = f"ps_{part}" if isinstance(part, int) else part
    if colon and own != expected:
        raise InputError(f"{where}: old_model_name {old_model_name!r} names another part than {expected!r}")
    return model if colon else own


# ---- the dummy server

logger = logging.getLogger(__name__)

THREADS = 8
STOP_SECONDS = 10.0
_HOST_AND_PORT = re.compile(r"(?P<host>[^:]+|\[[^\]]+\]):(?P<port>[0-9]{1,5})", re.ASCII)


@dataclass(frozen=True)
class RecordedRequest:
    """A received Predict request. version: None if the request has none."""

    model: str
    signature: str
    version: int | None
    inputs: dict[str, Tensor | Strings]
    metadata: dict[str, str]

    @property
    def tables(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The ids, int64 [n], and rows, float32 [n, dim], of a `hashtable_assign`, by table."""
        found = {}
        for name, ids in self.inputs.items():
            rows = self.inputs.get(f"{name.removesuffix('_id')}_value")
            if name.endswith("_id") and isinstance(ids, Tensor) and isinstance(rows, Tensor):
                found[name.removesuffix("_id")] = (ids, rows)
        return found


class DummySyncServer:
    """A recording PredictionService that runs until `shutdown`. Safe to share between threads.

    An answer has the model_spec of the request and, for each `{table}_id`, a `{table}_result` int64 [1] with
    the number of ids; for `raw_assign` it has `result` = [0].

    Args:
        address: A `host:port` on loopback; port 0 picks a free port.

    Raises:
        InputError: The address is not on loopback.
        UsageError: The port is in use.
    """

    def __init__(self, address: str = "localhost:0") -> None:
        found = _HOST_AND_PORT.fullmatch(address) if isinstance(address, str) else None
        if found is None or not is_loopback(found["host"]) or int(found["port"]) > 65535:
            raise InputError(f"DummySyncServer: {str(address)[:100]!r} is not on loopback; use localhost:0")
        self._changed = threading.Condition()
        self._requests: list[RecordedRequest] = []
        self._failed: list[RecordedRequest] = []
        self._refused = 0
        self._failures: deque[Any] = deque()
        self._delay = 0.0
        grpc = grpc_module()
        # Without so_reuseport=0 two servers could share a port, and each would receive some of the requests.
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        self._threads = ThreadPoolExecutor(THREADS, "dummy-sync-server")
        self._server = grpc.server(self._threads, options=options)
        handler = grpc.unary_unary_rpc_method_handler(self._answer)
        service = grpc.method_handlers_generic_handler(
            "tensorflow.serving.PredictionService", {"Predict": handler}
        )
        self._server.add_generic_rpc_handlers((service,))
        try:
            self._port = int(self._server.add_insecure_port(address))
        except RuntimeError:
            raise UsageError(
                f"DummySyncServer: cannot listen on {address}; use port 0 for a free one"
            ) from None
        self.address = f"{address.rpartition(':')[0]}:{self._port}"
        self._server.start()

    def as_op(self) -> Self:
        """Return this object: the server runs already."""
        return self

    @property
    def handle(self) -> DummySyncServer:
        """The server itself; Monolith's class wraps a handle."""
        return self

    def get_port(self) -> int:
        """Return the port it listens on."""
        return self._port

    @property
    def requests(self) -> list[RecordedRequest]:
        """The requests with a successful answer, also those not answered yet, in the order of arrival."""
        with self._changed:
            return list(self._requests)

    @property
    def failed(self) -> list[RecordedRequest]:
        """The requests that failed because of `fail_next`."""
        with self._changed:
            return list(self._failed)

    @property
    def refused(self) -> int:
        """The number of requests that could not be decoded and were answered with INVALID_ARGUMENT."""
        with self._changed:
            return self._refused

    def wait(self, n: int = 1, timeout: float = 10.0) -> list[RecordedRequest]:
        """Return all requests, once there are `n`.

        Raises:
            RemoteError: There are fewer requests after `timeout` seconds.
        """
        checks.integer(n, "wait: n", least=0)
        checks.seconds(timeout, "wait: timeout", zero=True)
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._requests) >= n, timeout):
                raise RemoteError(
                    f"{self.address}: {len(self._requests)} of {n} requests after {timeout:g} seconds",
                    code="DEADLINE_EXCEEDED",
                )
            return list(self._requests)

    def fail_next(self, n: int = 1, code: str = "UNAVAILABLE") -> None:
        """Fail the next `n` requests with a gRPC status."""
        checks.integer(n, "fail_next: n", least=0)
        status = grpc_module().StatusCode.__members__.get(checks.text(code, "fail_next: code"))
        if status is None or code == "OK":
            raise InputError(f"fail_next: {code!r} is not the status of a failure, such as 'UNAVAILABLE'")
        with self._changed:
            self._failures.extend([status] * n)

    def delay(self, seconds: float) -> None:
        """Delay each answer from now on; requests are still recorded when they arrive."""
        if not checks.number(seconds, "delay: seconds") >= 0:
            raise InputError(f"delay: seconds must be 0 or more, got {seconds}")
        with self._changed:
            self._delay = float(seconds)

    def shutdown(self) -> None:
        """Stop the server without waiting for delayed answers; a second call does nothing.

        Raises:
            RemoteError: It has not stopped after 10 seconds.
        """
        ended = self._server.stop(None).wait(STOP_SECONDS)
        self._threads.shutdown(wait=ended)
        if not ended:
            raise RemoteError(
                f"{self.address}: the server has not stopped after {STOP_SECONDS:g} seconds",
                code="DEADLINE_EXCEEDED",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _answer(self, data: bytes, context: Any) -> bytes:
        grpc = grpc_module()
        try:
            request = PredictRequest.FromString(data)
            recorded = _recorded(request, context)
        except (protobuf("message").DecodeError, InputError) as error:
            with self._changed:
                self._refused += 1
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if recorded.signature in CONTROLS:  # TF Serving's answer to an unknown signature
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"Serving signature key {recorded.signature!r} not found.",
            )
        with self._changed:
            status = self._failures.popleft() if self._failures else None
            (self._requests if status is None else self._failed).append(recorded)
            delay = self._delay
            self._changed.notify_all()
        logger.debug("%s: %s %s", self.address, recorded.model, sorted(recorded.inputs))
        if delay > 0:
            # Ends early if the call ends, so that a client that gave up does not occupy a thread.
            ended = threading.Event()
            if context.add_callback(ended.set):
                ended.wait(delay)
        if status is not None:
            context.abort(status, "requested by fail_next")
        response = PredictResponse(model_spec=request.model_spec)
        for name, value in _outputs(recorded.inputs).items():
            response.outputs[name].CopyFrom(to_tensor_proto(value))
        answer: bytes = response.SerializeToString()
        return answer


def create_dummy_sync_server(address: str) -> DummySyncServer:
    """Start a `DummySyncServer`. Monolith returns a handle, and its class wraps it."""
    return DummySyncServer(address)


def _recorded(request: Message, context: Any) -> RecordedRequest:
    spec = request.model_spec
    return RecordedRequest(
        model=spec.name,
        signature=spec.signature_name,
        version=spec.version.value if spec.HasField("version") else None,
        inputs=from_tensor_protos(request.inputs),
        metadata={key: value for key, value in context.invocation_metadata() if isinstance(value, str)},
    )


def _outputs(inputs: Mapping[str, Tensor | Strings]) -> dict[str, Tensor]:
    counts = {
        f"{name.removesuffix('_id')}_result": tensor([ids.numel()])
        for name, ids in inputs.items()
        if name.endswith("_id") and isinstance(ids, Tensor)
    }
    return counts | ({"result": tensor([0])} if "id" in inputs else {})


def refresh_sync_config(sync_backend: SyncBackend, ps_index: int) -> bytes:
    """Make the serialised ClientConfig of one parameter server, with its current replicas, possibly none.

    Args:
        sync_backend: Finds the replicas: a `Discovery`, or any object with get_sync_targets.
        ps_index: The number of the parameter server; its part is `ps_{ps_index}`.

    Raises:
        InputError: The backend returns a target that is not an address.
    """
    if not callable(getattr(sync_backend, "get_sync_targets", None)):
        raise InputError(f"sync_backend must have get_sync_targets, got {type(sync_backend).__name__}")
    checks.integer(ps_index, "refresh_sync_config: ps_index", least=0)
    name, targets = sync_backend.get_sync_targets(f"ps_{ps_index}")
    config = ClientConfig(
        model_name=name,
        signature_name=HASHTABLE_ASSIGN,
        targets=[check_address(target, f"{name}: target") for target in targets],
        timeout_in_ms=TIMEOUT_MS,
    )
    for info in targets.values() if isinstance(targets, Mapping) else ():
        # None leaves a field unset; a replica id of -1 is written.
        config.targets_extra_info.add(idc=info.idc, cluster=info.cluster, replica_id=info.replica_id)
    data: bytes = config.SerializeToString()
    return data


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

    def as_op(self) -> Self:
        """Return this object: `create_sync_op` pushes when it is called."""
        return self

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
            tables: A table, or the shards that hold tables. Of a ServerShards, client i takes the tables of
                server i and pushes from there.

        Raises:
            InputError: Another table with the same name is attached.
            UsageError: There is not one client for each server, the shards hold no table in this process, a
                table has too many consumers, or the client is closed.
        """
        if isinstance(tables, ServerShards):
            self._handle.attach_server(tables)
        else:
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
        credentials: What the client presents to the targets, such as a token.
    """
    handle = SyncHandle(f"MonolithSyncClient_{name_suffix}", config, credentials=credentials)
    return ParameterSyncClient(handle)


def create_parameter_sync_clients(
    ps_num: int, *, credentials: Credentials | None = None
) -> list[ParameterSyncClient]:
    """Make one client per part of a served model; one client for 0 parts.

    Client i pushes to the targets of `ps_i`: `create_sync_op(refresh_sync_config(backend, i))`. All clients
    attach the same shards: each part receives the ids that serving routes to it. If the tables are on
    parameter servers, client i takes those of server i.

    Args:
        ps_num: The number of parameter servers, which is the number of parts.
        credentials: What the clients present to the targets, such as a token.
    """
    checks.integer(ps_num, "ps_num", least=0)
    changes = TrackedChanges()
    return [
        ParameterSyncClient(
            SyncHandle(
                f"MonolithSyncClient_{index if ps_num else ''}",
                credentials=credentials,
                changes=changes,
                index=index,
                count=max(1, ps_num),
            )
        )
        for index in range(max(1, ps_num))
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
