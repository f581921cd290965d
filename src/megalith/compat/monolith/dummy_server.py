"""DummySyncServer: a server that records what is pushed to it, for users' tests of parameter sync.

A real gRPC PredictionService on loopback that keeps every request and applies none. It can be told to fail or
to answer late, so that a test sees what its client makes of that. Whatever arrives, it goes on answering.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from torch import Tensor, tensor

from megalith.errors import InputError, RemoteError, UsageError
from megalith.serving.client.channels import MAX_MESSAGE_BYTES
from megalith.serving.client.credentials import grpc_module
from megalith.serving.discovery.addresses import is_loopback
from megalith.serving.proto.schema import Message, protobuf
from megalith.serving.proto.tf_serving import PredictRequest, PredictResponse
from megalith.serving.proto.tf_tensors import Strings, from_tensor_protos, to_tensor_proto

log = logging.getLogger("megalith.serving")

THREADS = 8
_HOST_AND_PORT = re.compile(r"(?P<host>[^:]+|\[[^\]]+\]):(?P<port>[0-9]{1,5})", re.ASCII)


@dataclass(frozen=True)
class RecordedRequest:
    """A Predict request as it arrived. version: None if it named none."""

    model: str
    signature: str
    version: int | None
    inputs: dict[str, Tensor | Strings]
    metadata: dict[str, str]

    @property
    def tables(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The ids and rows of a `hashtable_assign`, by table."""
        found = {}
        for name, ids in self.inputs.items():
            rows = self.inputs.get(f"{name.removesuffix('_id')}_value")
            if name.endswith("_id") and isinstance(ids, Tensor) and isinstance(rows, Tensor):
                found[name.removesuffix("_id")] = (ids, rows)
        return found


class DummySyncServer:
    """A recording PredictionService, running from the start until `shutdown`. Threads may share one.

    address: host:port on loopback; port 0 picks a free one. Answers echo the model_spec, and hold
    `{table}_result` int64 [1], the number of ids, for each `{table}_id`; for `raw_assign`, `result` = [0].
    Raises InputError for an address elsewhere, UsageError if the port is taken.
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
        # Without so_reuseport=0 two servers could share a port, and each would get some of the requests.
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

    def get_port(self) -> int:
        """The port it listens on."""
        return self._port

    @property
    def requests(self) -> list[RecordedRequest]:
        """Those answered so far, or about to be, in the order of their arrival."""
        with self._changed:
            return list(self._requests)

    @property
    def failed(self) -> list[RecordedRequest]:
        """Those that `fail_next` had fail."""
        with self._changed:
            return list(self._failed)

    @property
    def refused(self) -> int:
        """How many could not be decoded, and were answered with INVALID_ARGUMENT."""
        with self._changed:
            return self._refused

    def wait(self, n: int = 1, timeout: float = 10.0) -> list[RecordedRequest]:
        """The requests as soon as there are `n`; raises RemoteError after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._requests) >= n, timeout):
                raise RemoteError(
                    f"{self.address}: {len(self._requests)} of {n} requests after {timeout:g} seconds",
                    code="DEADLINE_EXCEEDED",
                )
            return list(self._requests)

    def fail_next(self, n: int = 1, code: str = "UNAVAILABLE") -> None:
        """Answers the next `n` requests with a status, by gRPC's name; raises InputError if there is none."""
        status = grpc_module().StatusCode.__members__.get(code)
        if status is None or code == "OK":
            raise InputError(f"fail_next: {code!r} is no status of a failure, such as 'UNAVAILABLE'")
        with self._changed:
            self._failures.extend([status] * n)

    def delay(self, seconds: float) -> None:
        """Lets `seconds` pass before each answer from now on; requests are recorded when they arrive."""
        with self._changed:
            self._delay = seconds

    def shutdown(self) -> None:
        """Ends it at once, late answers included; doing so again is harmless."""
        self._server.stop(None).wait()
        self._threads.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        with self._changed:
            status = self._failures.popleft() if self._failures else None
            (self._requests if status is None else self._failed).append(recorded)
            delay = self._delay
            self._changed.notify_all()
        log.debug("%s: %s %s", self.address, recorded.model, sorted(recorded.inputs))
        if delay > 0:
            # Ends early with the call, so that clients who gave up hold no threads.
            ended = threading.Event()
            if context.add_callback(ended.set):
                ended.wait(delay)
        if status is not None:
            context.abort(status, "fail_next said so")
        response = PredictResponse(model_spec=request.model_spec)
        for name, value in _outputs(recorded.inputs).items():
            response.outputs[name].CopyFrom(to_tensor_proto(value))
        answer: bytes = response.SerializeToString()
        return answer


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
