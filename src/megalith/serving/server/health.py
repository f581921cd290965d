"""gRPC's own services, health and reflection, and the interceptor that guards all services.

Health needs no token, because probes send none; every other service requires the token, if there is one. A
call without the token is refused before its message is read. A call that never sends its message would occupy
a thread forever, so the number of health checks and of streams is limited, and a health check must send its
message within READ_SECONDS.
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
"""Seconds in which the message of a health check must arrive."""


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
        """Add the service to a gRPC server.

        Args:
            server: A `grpc.Server` that is not started yet.
        """
        stubs = _module("grpcio-health-checking", "grpc_health.v1.health_pb2_grpc")
        stubs.add_HealthServicer_to_server(self._servicer, server)

    def set(self, serving: Iterable[str]) -> None:
        """Set which services and models are SERVING; the server itself is, if there are any.

        Args:
            serving: Their names. Names of earlier calls that are not among them become NOT_SERVING.
        """
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
    """Add reflection, by which clients such as grpcurl list services, methods and messages.

    Args:
        server: A `grpc.Server` that is not started yet.
        services: Full names of our services; health and reflection are added.
    """
    reflection = _module("grpcio-reflection", "grpc_reflection.v1alpha.reflection")
    for name in ("grpc_health.v1.health_pb2", "grpc_reflection.v1alpha.reflection_pb2"):
        POOL.AddSerializedFile(importlib.import_module(name).DESCRIPTOR.serialized_pb)
    names = [*services, HEALTH, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server, pool=POOL)


def guard(security: Security) -> Any:
    """Make a gRPC interceptor that requires the token and limits health checks and streams.

    Args:
        security: Has the token; without one, nothing is required.

    Returns:
        A `grpc.ServerInterceptor`.
    """
    grpc = grpc_module()
    streams, checks = (threading.BoundedSemaphore(number) for number in (MAX_STREAMS, MAX_CHECKS))

    def refuse(_: Any, context: Any) -> None:
        context.abort(Code.UNAUTHENTICATED, "this server requires a token: authorization: Bearer ...")

    # A handler of a stream starts before a message arrives; a handler of one message waits for it.
    refused = grpc.stream_unary_rpc_method_handler(refuse)

    class Guard(grpc.ServerInterceptor):  # type: ignore[misc, name-defined]
        def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
            is_health = details.method.startswith(f"/{HEALTH}/")
            if security.token is not None and not is_health:
                sent = [value for key, value in details.invocation_metadata if key == "authorization"]
                if len(sent) != 1 or not security.admits(sent[0]):
                    return refused
            handler = continuation(details)
            if handler is None:
                return None
            if is_health and not handler.response_streaming:
                return grpc.stream_unary_rpc_method_handler(
                    _limited(_first_message(handler.unary_unary), checks),
                    handler.request_deserializer,
                    handler.response_serializer,
                )
            if is_health:
                return grpc.stream_stream_rpc_method_handler(
                    _limited(_first_message(handler.unary_stream), streams),
                    handler.request_deserializer,
                    handler.response_serializer,
                )
            if handler.response_streaming:
                return handler._replace(stream_stream=_limited(handler.stream_stream, streams))
            return handler

    return Guard()


def _first_message(behavior: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a unary method as a streaming method whose first message must arrive in time."""

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


def _limited(behavior: Callable[..., Any], slots: threading.BoundedSemaphore) -> Callable[..., Any]:
    """Limit the number of concurrent calls of a method to the slots of a semaphore."""

    @functools.wraps(behavior)
    def call(request: Any, context: Any, *more: Any) -> Any:
        if not slots.acquire(blocking=False):
            context.abort(Code.RESOURCE_EXHAUSTED, "too many calls of this kind are in progress")
        if not context.add_callback(slots.release):
            slots.release()
            context.abort(Code.CANCELLED, "the client no longer waits")
        return behavior(request, context, *more)

    return call
