"""DummySyncServer: a server that records pushed requests, for users' tests of parameter sync.

It is a real gRPC PredictionService on loopback that stores every request and applies none. It can fail or
answer late on request, so that a test can check how its client reacts. No request stops it. Like a Monolith
server it does not have Megalith's control signatures, such as sync_position: it refuses them, unrecorded.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, tensor

from megalith.errors import InputError, RemoteError, UsageError
from megalith.ops import checks
from megalith.serving.client.channels import MAX_MESSAGE_BYTES
from megalith.serving.client.credentials import grpc_module
from megalith.serving.discovery.contract import is_loopback
from megalith.serving.proto.message_types import Message, PredictRequest, PredictResponse, protobuf
from megalith.serving.proto.tf_tensors import Strings, from_tensor_protos, to_tensor_proto
from megalith.serving.wire_names import CONTROLS

logger = logging.getLogger(__name__)

THREADS = 8
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
        """Wait for requests.

        Args:
            n: The number of requests to wait for.
            timeout: Seconds to wait.

        Returns:
            All requests so far.

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
        """Fail the next requests.

        Args:
            n: The number of requests.
            code: The name of a gRPC status.
        """
        checks.integer(n, "fail_next: n", least=0)
        status = grpc_module().StatusCode.__members__.get(checks.text(code, "fail_next: code"))
        if status is None or code == "OK":
            raise InputError(f"fail_next: {code!r} is not the status of a failure, such as 'UNAVAILABLE'")
        with self._changed:
            self._failures.extend([status] * n)

    def delay(self, seconds: float) -> None:
        """Delay each answer from now on; requests are still recorded when they arrive.

        Args:
            seconds: The delay.
        """
        if not checks.number(seconds, "delay: seconds") >= 0:
            raise InputError(f"delay: seconds must be 0 or more, got {seconds}")
        with self._changed:
            self._delay = float(seconds)

    def shutdown(self) -> None:
        """Stop the server without waiting for delayed answers; a second call does nothing."""
        self._server.stop(None).wait()
        self._threads.shutdown()

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
    """Start a `DummySyncServer`.

    Args:
        address: A `host:port` on loopback; port 0 picks a free port.

    Returns:
        The server. Monolith returns a handle, and its class DummySyncServer wraps it.
    """
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
