"""gRPC services: what the services share to read requests and write responses, and gRPC's own services.

Methods take and return bytes. Parsing is the first step that can fail, so it happens here: gRPC would report
such a failure without a reason. A RequestError becomes the status of the call, and the access log gets a line
for each call.

gRPC's own services are health and reflection. concurrency_limits.py limits their calls.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalith.errors import MissingDependencyError
from megalith.serving.client.credentials import grpc_module
from megalith.serving.proto import Message
from megalith.serving.proto.message_types import POOL
from megalith.serving.server.access_log import AccessLog, traceparent_of
from megalith.serving.server.batching import Alive
from megalith.serving.server.dispatcher import Dispatcher
from megalith.serving.server.inputs import InputReader, Rows
from megalith.serving.server.request_errors import RequestError

MISSING_IDS = "megalith-missing-ids"
"""Metadata, or HTTP header, by which a request asks for the number of its ids without a row."""
REQUEST_KEY = "megalith-request-key"
"""Metadata, or HTTP header, by which requests get the same version of a model whose traffic is split."""
Method = Callable[[bytes, Any], bytes]
NO_DEADLINE = 1e9
"""Seconds above which a deadline is ignored: gRPC reports centuries for a call without a deadline."""


@dataclass(slots=True)
class GrpcScoreRequest:
    """A request for scores over gRPC; see ScoreRequest."""

    model: str
    version: int | str | None
    outputs: Sequence[str]
    timeout: float | None
    alive: Alive | None
    read: Callable[[InputReader], Rows]
    key: str | None = None
    reports_missing: bool = False


def grpc_handler(service: str, methods: Mapping[str, Method], log: AccessLog | None = None) -> Any:
    """Make a gRPC handler of a service."""
    grpc = grpc_module()
    return grpc.method_handlers_generic_handler(
        service,
        {
            name: grpc.unary_unary_rpc_method_handler(
                _abort_on_error(method if log is None else _logged(method, f"/{service}/{name}", log))
            )
            for name, method in methods.items()
        },
    )


def _abort_on_error(method: Method) -> Method:
    def call(data: bytes, context: Any) -> bytes:
        try:
            return method(data, context)
        except RequestError as error:
            context.abort(error.code, str(error))
            raise  # not reached: abort raises

    return call


def _logged(method: Method, name: str, log: AccessLog) -> Method:
    def call(data: bytes, context: Any) -> bytes:
        traceparent = traceparent_of(context.invocation_metadata())
        with log.call("grpc", name, context.peer(), traceparent) as fields:
            fields["request_bytes"], fields["code"] = len(data), "UNKNOWN"
            try:
                response = method(data, context)
            except RequestError as error:
                fields["code"] = error.code.name
                raise
            fields["code"], fields["response_bytes"] = "OK", len(response)
            return response

    return call


def parse(dispatcher: Dispatcher, kind: Any, data: bytes) -> Message:
    try:
        return kind.FromString(data)
    except Exception as error:
        raise dispatcher.reject(error) from None


def serialize(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def request_options(context: Any) -> tuple[str | None, bool]:
    """Return the options of a request for scores, which are in its metadata."""
    request_key, missing = None, False
    for key, value in context.invocation_metadata():
        if key == MISSING_IDS:
            missing = True
        elif key == REQUEST_KEY and isinstance(value, str):
            request_key = value
    return request_key, missing


def report_missing(context: Any, missing_ids: Mapping[str, int] | None) -> None:
    """Send the number of ids without a row, as JSON in the trailing metadata MISSING_IDS."""
    if missing_ids is not None:
        context.set_trailing_metadata(((MISSING_IDS, json.dumps(missing_ids)),))


def remaining(context: Any) -> float | None:
    """Return the time until a call's deadline."""
    seconds: float | None = context.time_remaining()
    return None if seconds is None or seconds > NO_DEADLINE else seconds


HEALTH = "grpc.health.v1.Health"


def _module(package: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError.of_extra(f"serving needs {package}", "serve") from error


class Health:
    """Health of the services and models, for gRPC's health checks; "" is the server itself."""

    def __init__(self) -> None:
        health = _module("grpcio-health-checking", "grpc_health.v1.health")
        self._messages = _module("grpcio-health-checking", "grpc_health.v1.health_pb2")
        self._servicer = health.HealthServicer()
        self._known: dict[str, Any] = {}
        self.set(())

    def add_to(self, server: Any) -> None:
        """Add the service to a gRPC server."""
        stubs = _module("grpcio-health-checking", "grpc_health.v1.health_pb2_grpc")
        stubs.add_HealthServicer_to_server(self._servicer, server)

    def set(self, serving: Iterable[str]) -> None:
        """Set which services and models are SERVING; the server itself is, if there are any."""
        now = set(serving)
        states = self._messages.HealthCheckResponse
        for name in {*self._known, *now, ""}:
            state = states.SERVING if name in now or (now and not name) else states.NOT_SERVING
            if self._known.get(name) != state:  # watchers are notified of changes only
                self._known[name] = state
                self._servicer.set(name, state)

    def shut_down(self) -> None:
        """Set everything to NOT_SERVING permanently."""
        self._servicer.enter_graceful_shutdown()


def add_reflection(server: Any, services: Sequence[str]) -> None:
    """Add reflection, by which clients such as grpcurl list services, methods and messages."""
    reflection = _module("grpcio-reflection", "grpc_reflection.v1alpha.reflection")
    for name in ("grpc_health.v1.health_pb2", "grpc_reflection.v1alpha.reflection_pb2"):
        POOL.AddSerializedFile(importlib.import_module(name).DESCRIPTOR.serialized_pb)
    names = [*services, HEALTH, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server, pool=POOL)
