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
call whose message does not arrive in time is cancelled (read_deadlines.py). The access log has all of these.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megalith.serving.client.credentials import grpc_module
from megalith.serving.server.access_log import AccessLog
from megalith.serving.server.handler_threads import HandlerThreads
from megalith.serving.server.health import HEALTH
from megalith.serving.server.read_deadlines import ReadDeadlines
from megalith.serving.server.request_errors import Code
from megalith.serving.server.security import Permission, Security, authorization_of

MAX_STREAMS = MAX_CHECKS = MAX_CONTROLS = 16
MAX_REFLECTIONS = 4
REQUESTS = ("/tensorflow.serving.PredictionService/Predict", "/inference.GRPCInferenceService/ModelInfer")
"""Methods of the group `requests`."""
Refusal = tuple[Any, str]
"""Status and reason."""
Refuse = Callable[[Any, Refusal], None]
"""Ends the call of a context."""
_NO_TOKEN: Refusal = (Code.UNAUTHENTICATED, "this server requires a token: authorization: Bearer ...")
_FULL: Refusal = (Code.RESOURCE_EXHAUSTED, "too many calls of this kind are in progress; try again later")
_NO_METHOD: Refusal = (Code.UNIMPLEMENTED, "Method not found!")  # the words of gRPC
_NO_MESSAGE: Refusal = (Code.INVALID_ARGUMENT, "the call has no message")
_GONE: Refusal = (Code.CANCELLED, "the client no longer waits")
_PASSED_ON: Refusal = (
    Code.CANCELLED,
    "another call needed the place of this one, which sent no message",
)


class PlacePassedOnError(Exception):
    """A call was ended, and its place was given to another one."""


class _CallGroup:
    """Methods that share places and threads."""

    def __init__(self, name: str, places: int) -> None:
        self.places = threading.BoundedSemaphore(places)
        self.pool = HandlerThreads(places, f"megalith-{name}")


class Guard:
    """The places of a server's calls, and who may make them; `close` it."""

    def __init__(
        self, security: Security, max_requests: int, read_seconds: float, log: AccessLog | None = None
    ) -> None:
        grpc = grpc_module()
        self._security = security
        self._log = log
        self._requests = _CallGroup("rpc", max_requests)
        self._control = _CallGroup("control", MAX_CONTROLS)
        self._checks = _CallGroup("health", MAX_CHECKS)
        self._streams = _CallGroup("streams", MAX_STREAMS)
        self._reflection = _CallGroup("reflection", MAX_REFLECTIONS)
        self._refusals = ThreadPoolExecutor(1, thread_name_prefix="megalith-refusal")
        self._deadlines = ReadDeadlines(read_seconds)
        self._handlers: dict[Any, Any] = {}
        """The guarded form of each handler; two ports may have different handlers of one method."""
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
                return self._refusing(method, _NO_TOKEN)
        handler = continuation(details)
        if handler is None:  # gRPC refuses the call
            return None if self._log is None else self._refusing(method, _NO_METHOD)
        if method in REQUESTS:
            group = self._requests
        elif handler.response_streaming:
            group = self._streams if is_health else self._reflection
        else:
            group = self._checks if is_health else self._control
        if not group.places.acquire(blocking=False) and not self._deadlines.give_way(group):
            return self._refusing(method, _FULL)
        guarded = self._handlers.get(handler)
        if guarded is None:
            guarded = self._handlers[handler] = self._guarded(handler, group, method)
        return guarded

    def _guarded(self, handler: Any, group: _CallGroup, method: str) -> Any:
        """Return a handler that runs in the threads of its group and gives its place back."""
        grpc = grpc_module()
        if handler.request_streaming:
            behavior = self._every_message(handler.stream_stream or handler.stream_unary, method)
        else:
            behavior = self._first_message(
                handler.unary_stream or handler.unary_unary,
                method,
                None if handler.response_streaming else group,
            )
        # A handler of a stream starts before a message arrives, so that it can be cancelled without one.
        make, placed = grpc.stream_unary_rpc_method_handler, _placed_call
        if handler.response_streaming:
            make, placed = grpc.stream_stream_rpc_method_handler, _placed_stream
        refuse = functools.partial(self._refuse, method)
        return make(
            placed(behavior, group, refuse), handler.request_deserializer, handler.response_serializer
        )

    def _first_message(
        self, behavior: Callable[..., Any], method: str, group: _CallGroup | None
    ) -> Callable[..., Any]:
        """Wrap a unary method as a streaming method whose first message must arrive in time."""

        @functools.wraps(behavior)
        def call(requests: Iterator[Any], context: Any, *more: Any) -> Any:
            request = self._next_message(requests, context, method, is_first=True, group=group)
            if request is None:
                self._refuse(method, context, _NO_MESSAGE)
            return behavior(request, context, *more)

        return call

    def _every_message(self, behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
        """Wrap a streaming method, each of whose messages must arrive in time."""

        def timed(requests: Iterator[Any], context: Any) -> Iterator[Any]:
            is_first = True
            while (request := self._next_message(requests, context, method, is_first=is_first)) is not None:
                yield request
                is_first = False

        @functools.wraps(behavior)
        def call(requests: Iterator[Any], context: Any, *more: Any) -> Any:
            return behavior(timed(requests, context), context, *more)

        return call

    def _next_message(
        self,
        requests: Iterator[Any],
        context: Any,
        method: str,
        *,
        is_first: bool,
        group: _CallGroup | None = None,
    ) -> Any:
        """Wait for the next message of a call; None: there is none. Raises if the call ends."""
        started = time.perf_counter()
        peer = "" if self._log is None else context.peer()  # a cancelled call has none
        wait = self._deadlines.begin(context, group)
        try:
            request = next(requests, None)
            if self._deadlines.end(wait):
                raise PlacePassedOnError
            if request is None and wait.expired:  # gRPC may report the end of the messages first
                context.abort(Code.CANCELLED, "")
            return request
        except Exception:  # the call was cancelled
            gave_way = self._deadlines.end(wait)
            if self._log is not None and (is_first or wait.expired):
                late = f"no message arrived in {self._deadlines.seconds:g} s"
                reason = _PASSED_ON[1] if gave_way else late if wait.expired else _GONE[1]
                metadata, code = context.invocation_metadata(), Code.CANCELLED.name
                self._log.refused(method, peer, metadata, code=code, reason=reason, started=started)
            if gave_way:
                raise PlacePassedOnError from None
            raise

    def _refusing(self, method: str, refusal: Refusal) -> Any:
        """Return a handler that refuses a call."""

        def refuse(_: Any, context: Any) -> None:
            self._refuse(method, context, refusal)

        refuse.experimental_thread_pool = self._refusals  # type: ignore[attr-defined]
        return grpc_module().stream_unary_rpc_method_handler(refuse)

    def _refuse(self, method: str, context: Any, refusal: Refusal) -> None:
        """Log a call and end it; raises what ends its thread."""
        code, reason = refusal
        if self._log is not None:
            peer, metadata, now = context.peer(), context.invocation_metadata(), time.perf_counter()
            self._log.refused(method, peer, metadata, code=code.name, reason=reason, started=now)
        context.abort(code, reason)


def _placed_call(behavior: Callable[..., Any], group: _CallGroup, refuse: Refuse) -> Callable[..., Any]:
    """Give the place of a call back when its method returns, which is after a client cancelled the call."""

    @functools.wraps(behavior)
    def call(request: Any, context: Any) -> Any:
        has_place = True
        try:
            if not context.is_active():
                refuse(context, _GONE)
            return behavior(request, context)
        except PlacePassedOnError:
            has_place = False
            context.abort(*_PASSED_ON)
        finally:
            if has_place:
                group.places.release()

    call.experimental_thread_pool = group.pool  # type: ignore[attr-defined]
    return call


def _placed_stream(behavior: Callable[..., Any], group: _CallGroup, refuse: Refuse) -> Callable[..., Any]:
    """Give the place of a call with many responses back when it ends; its method returns before that."""

    @functools.wraps(behavior)
    def call(request: Any, context: Any, *more: Any) -> Any:
        if not context.add_callback(group.places.release):
            group.places.release()
            refuse(context, _GONE)
        return behavior(request, context, *more)

    call.experimental_thread_pool = group.pool  # type: ignore[attr-defined]
    return call
