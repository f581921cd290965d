"""gRPC's own services beside the models': health and reflection; and the guard before all of them.

Health is open to all who can connect, since probes carry no token; everything else asks for the token, if
there is one. Who shows none is refused unread, and health reads only so many at once and not for long: a
call that never sends its message would hold a thread for ever. Streams are few for the same reason.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megalith.errors import MissingDependencyError
from megalith.serving.client.credentials import grpc_module
from megalith.serving.proto.message_types import POOL
from megalith.serving.server.request_errors import Code
from megalith.serving.server.security import Security

HEALTH = "grpc.health.v1.Health"
MAX_STREAMS = MAX_CHECKS = 16
READ_SECONDS = 5.0
"""For the message of a health check to arrive."""


def _module(package: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(f"serving needs {package}: pip install megalith[serve]") from error


class Health:
    """Which services and models answer, for gRPC's health checks; "" is the server itself."""

    def __init__(self) -> None:
        health = _module("grpcio-health-checking", "grpc_health.v1.health")
        self._messages = _module("grpcio-health-checking", "grpc_health.v1.health_pb2")
        self._servicer = health.HealthServicer()
        self._known: dict[str, Any] = {}
        self.set(())

    def add_to(self, server: Any) -> None:
        """Adds the service to a gRPC server."""
        stubs = _module("grpcio-health-checking", "grpc_health.v1.health_pb2_grpc")
        stubs.add_HealthServicer_to_server(self._servicer, server)

    def set(self, serving: Iterable[str]) -> None:
        """These answer, and so does the server if there are any; those known from before do not."""
        now = set(serving)
        states = self._messages.HealthCheckResponse
        for name in {*self._known, *now, ""}:
            state = states.SERVING if name in now or (now and not name) else states.NOT_SERVING
            if self._known.get(name) != state:  # who watches wants to hear of changes only
                self._known[name] = state
                self._servicer.set(name, state)

    def shut_down(self) -> None:
        """Nothing answers any more, for good."""
        self._servicer.enter_graceful_shutdown()


def add_reflection(server: Any, services: Sequence[str]) -> None:
    """Lets clients such as grpcurl ask which services, methods and messages there are."""
    reflection = _module("grpcio-reflection", "grpc_reflection.v1alpha.reflection")
    for name in ("grpc_health.v1.health_pb2", "grpc_reflection.v1alpha.reflection_pb2"):
        POOL.AddSerializedFile(importlib.import_module(name).DESCRIPTOR.serialized_pb)
    names = [*services, HEALTH, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server, pool=POOL)


def guard(security: Security) -> Any:
    """A gRPC interceptor that asks for the token and counts streams."""
    grpc = grpc_module()
    streams, checks = (threading.BoundedSemaphore(number) for number in (MAX_STREAMS, MAX_CHECKS))

    def refuse(_: Any, context: Any) -> None:
        context.abort(Code.UNAUTHENTICATED, "this server asks for a token: authorization: Bearer ...")

    # One that takes a stream begins before anything has arrived; one that takes a message waits for it.
    refused = grpc.stream_unary_rpc_method_handler(refuse)

    class Guard(grpc.ServerInterceptor):  # type: ignore[misc, name-defined]
        def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
            is_health = details.method.startswith(f"/{HEALTH}/")
            if security.token is not None and not is_health:
                shown = [value for key, value in details.invocation_metadata if key == "authorization"]
                if len(shown) != 1 or not security.admits(shown[0]):
                    return refused
            handler = continuation(details)
            if handler is None:
                return None
            if is_health and not handler.response_streaming:
                return grpc.stream_unary_rpc_method_handler(
                    _placed(_first(handler.unary_unary), checks),
                    handler.request_deserializer,
                    handler.response_serializer,
                )
            if is_health:
                return grpc.stream_stream_rpc_method_handler(
                    _placed(_first(handler.unary_stream), streams),
                    handler.request_deserializer,
                    handler.response_serializer,
                )
            if handler.response_streaming:
                return handler._replace(stream_stream=_placed(handler.stream_stream, streams))
            return handler

    return Guard()


def _first(behavior: Callable[..., Any]) -> Callable[..., Any]:
    """A method of one message as one of a stream, whose first must come soon."""

    @functools.wraps(behavior)
    def call(requests: Iterator[Any], context: Any, *more: Any) -> Any:
        late = threading.Timer(READ_SECONDS, context.cancel)
        late.daemon = True
        late.start()
        try:
            request = next(requests, None)
        finally:
            late.cancel()
        if request is None:
            context.abort(Code.INVALID_ARGUMENT, "the call has no message")
        return behavior(request, context, *more)

    return call


def _placed(behavior: Callable[..., Any], places: threading.BoundedSemaphore) -> Callable[..., Any]:
    """A method that takes one of the places while it lasts."""

    @functools.wraps(behavior)
    def call(request: Any, context: Any, *more: Any) -> Any:
        if not places.acquire(blocking=False):
            context.abort(Code.RESOURCE_EXHAUSTED, "too many such calls are open already")
        if not context.add_callback(places.release):
            places.release()
            context.abort(Code.CANCELLED, "the client does not wait any more")
        return behavior(request, context, *more)

    return call
