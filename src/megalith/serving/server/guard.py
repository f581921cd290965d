"""Guard: the interceptor in front of every gRPC method, which checks the token and limits calls.

Each group of methods has threads and places of its own, so that one cannot starve another:

    group       methods                                              places
    requests    Predict, ModelInfer                                  max_concurrent and some more
    control     status, metadata, live, ready                        MAX_CONTROLS
    reflection  ServerReflectionInfo, a stream                       MAX_REFLECTIONS
    health      Check and Watch of grpc.health.v1.Health             MAX_CHECKS, MAX_STREAMS

A call without a place is refused at once with RESOURCE_EXHAUSTED, unless a call with one response waits for
its message, which then gives way: calls that send nothing keep nobody out. The place of a call with one
response is that of its thread: if the client cancels the call, both are free when the method returns. A call
without the token is refused before its message is read; health needs no token, because probes send none. A
call whose message does not arrive in time is cancelled (read_deadlines.py).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megalith.serving.client.credentials import grpc_module
from megalith.serving.server.handler_threads import HandlerThreads
from megalith.serving.server.health import HEALTH
from megalith.serving.server.read_deadlines import ReadDeadlines
from megalith.serving.server.request_errors import Code
from megalith.serving.server.security import Permission, Security, authorization_of

MAX_STREAMS = MAX_CHECKS = MAX_CONTROLS = 16
MAX_REFLECTIONS = 4
REQUESTS = ("/tensorflow.serving.PredictionService/Predict", "/inference.GRPCInferenceService/ModelInfer")
"""Methods of the group `requests`."""


class PlacePassedOnError(Exception):
    """A call was ended, and its place was given to another one."""


class _CallGroup:
    """Methods that share places and threads."""

    def __init__(self, name: str, places: int) -> None:
        self.places = threading.BoundedSemaphore(places)
        self.pool = HandlerThreads(places, f"megalith-{name}")


class Guard:
    """The places of a server's calls, and who may make them; `close` it.

    Args:
        security: Has the token; without one, nothing is required.
        max_requests: Number of places for requests.
        read_seconds: Seconds in which the message of a call must arrive.
    """

    def __init__(self, security: Security, max_requests: int, read_seconds: float) -> None:
        grpc = grpc_module()
        self._security = security
        self._requests = _CallGroup("rpc", max_requests)
        self._control = _CallGroup("control", MAX_CONTROLS)
        self._checks = _CallGroup("health", MAX_CHECKS)
        self._streams = _CallGroup("streams", MAX_STREAMS)
        self._reflection = _CallGroup("reflection", MAX_REFLECTIONS)
        self._refusals = ThreadPoolExecutor(1, thread_name_prefix="megalith-refusal")
        self._deadlines = ReadDeadlines(read_seconds)
        self._handlers: dict[Any, Any] = {}
        """The guarded form of each handler; two ports may have different handlers of one method."""
        self._no_token = self._refusal(
            Code.UNAUTHENTICATED, "this server requires a token: authorization: Bearer ..."
        )
        self._full = self._refusal(
            Code.RESOURCE_EXHAUSTED, "too many calls of this kind are in progress; try again later"
        )
        guard = self

        class Interceptor(grpc.ServerInterceptor):  # type: ignore[misc, name-defined]
            def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
                return guard._intercept(continuation, details)

        self.interceptor: Any = Interceptor()
        """The `grpc.ServerInterceptor`."""

    @property
    def pool(self) -> ThreadPoolExecutor:
        """The threads of requests."""
        return self._requests.pool

    def close(self) -> None:
        """End the threads; calls in progress continue."""
        self._deadlines.close()
        groups = (self._requests, self._control, self._checks, self._streams, self._reflection)
        for group in groups:
            group.pool.shutdown(wait=False)
        self._refusals.shutdown(wait=False)

    def _intercept(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        method = details.method
        is_health = method.startswith(f"/{HEALTH}/")
        if self._security.requires_token and not is_health:
            # Without a read token, scores are for everyone; what else a request wants is in its message.
            sent = authorization_of(details.invocation_metadata)
            is_open = method in REQUESTS and self._security.permits(sent, Permission.READ)
            if not is_open and not self._security.admits(sent):
                return self._no_token
        handler = continuation(details)
        if handler is None:
            return None
        if method in REQUESTS:
            group = self._requests
        elif handler.response_streaming:
            group = self._streams if is_health else self._reflection
        else:
            group = self._checks if is_health else self._control
        if not group.places.acquire(blocking=False) and not self._deadlines.give_way(group):
            return self._full
        guarded = self._handlers.get(handler)
        if guarded is None:
            guarded = self._handlers[handler] = self._guarded(handler, group)
        return guarded

    def _guarded(self, handler: Any, group: _CallGroup) -> Any:
        """Return a handler that runs in the threads of its group and gives its place back."""
        grpc = grpc_module()
        if handler.request_streaming:
            behavior = self._every_message(handler.stream_stream or handler.stream_unary)
        else:
            behavior = self._first_message(
                handler.unary_stream or handler.unary_unary, None if handler.response_streaming else group
            )
        # A handler of a stream starts before a message arrives, so that it can be cancelled without one.
        make, placed = grpc.stream_unary_rpc_method_handler, _placed_call
        if handler.response_streaming:
            make, placed = grpc.stream_stream_rpc_method_handler, _placed_stream
        return make(placed(behavior, group), handler.request_deserializer, handler.response_serializer)

    def _first_message(self, behavior: Callable[..., Any], group: _CallGroup | None) -> Callable[..., Any]:
        """Wrap a unary method as a streaming method whose first message must arrive in time."""
        deadlines = self._deadlines

        @functools.wraps(behavior)
        def call(requests: Iterator[Any], context: Any, *more: Any) -> Any:
            wait = deadlines.begin(context, group)
            try:
                request = next(requests, None)
            except Exception:
                if deadlines.end(wait):
                    raise PlacePassedOnError from None
                raise
            if deadlines.end(wait):
                raise PlacePassedOnError
            if request is None:
                context.abort(Code.INVALID_ARGUMENT, "the call has no message")
            return behavior(request, context, *more)

        return call

    def _every_message(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a streaming method, each of whose messages must arrive in time."""
        deadlines = self._deadlines

        def timed(requests: Iterator[Any], context: Any) -> Iterator[Any]:
            while True:
                wait = deadlines.begin(context)
                try:
                    request = next(requests, None)
                finally:
                    deadlines.end(wait)
                if request is None:
                    return
                yield request

        @functools.wraps(behavior)
        def call(requests: Iterator[Any], context: Any, *more: Any) -> Any:
            return behavior(timed(requests, context), context, *more)

        return call

    def _refusal(self, code: Any, message: str) -> Any:
        def refuse(_: Any, context: Any) -> None:
            context.abort(code, message)

        refuse.experimental_thread_pool = self._refusals  # type: ignore[attr-defined]
        return grpc_module().stream_unary_rpc_method_handler(refuse)


def _placed_call(behavior: Callable[..., Any], group: _CallGroup) -> Callable[..., Any]:
    """Give the place of a call back when its method returns, which is after a client cancelled the call."""

    @functools.wraps(behavior)
    def call(request: Any, context: Any) -> Any:
        has_place = True
        try:
            if not context.is_active():
                context.abort(Code.CANCELLED, "the client no longer waits")
            return behavior(request, context)
        except PlacePassedOnError:
            has_place = False
            context.abort(Code.CANCELLED, "another call needed the place of this one, which sent no message")
        finally:
            if has_place:
                group.places.release()

    call.experimental_thread_pool = group.pool  # type: ignore[attr-defined]
    return call


def _placed_stream(behavior: Callable[..., Any], group: _CallGroup) -> Callable[..., Any]:
    """Give the place of a call with many responses back when it ends; its method returns before that."""

    @functools.wraps(behavior)
    def call(request: Any, context: Any, *more: Any) -> Any:
        if not context.add_callback(group.places.release):
            group.places.release()
            context.abort(Code.CANCELLED, "the client no longer waits")
        return behavior(request, context, *more)

    call.experimental_thread_pool = group.pool  # type: ignore[attr-defined]
    return call
