"""gRPC calls: limits, deadlines and tokens; parsing and errors; health checks and reflection.

`ConcurrencyLimits` is an interceptor in front of every method. Each group of methods has its own threads and
slots, so that one group cannot starve another:

    group       methods                                              slots
    requests    Predict, ModelInfer                                  max_concurrent and some more
    control     status, metadata, live, ready                        MAX_CONTROLS
    reflection  ServerReflectionInfo, a stream                       MAX_REFLECTIONS
    health      Check and Watch of grpc.health.v1.Health             MAX_CHECKS, MAX_STREAMS

    event                                                  effect
    the token is missing or wrong (health needs none)      refused before the message is read
    no slot is free, and a call of the group with one      that call is cancelled, and its slot is reassigned
    response has waited PATIENCE_SECONDS for its message
    no slot is free otherwise                              refused with RESOURCE_EXHAUSTED
    the message does not arrive in time                    cancelled (`ReadDeadlines`)
    the method returns, also after a cancelled call        the slot is free, and so is its thread

Methods take and return bytes and parse them in the handler: gRPC reports a failure of its own parser without
a reason. A RequestError becomes the status of the call. The access log gets a line for each call, also for
those that are refused.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from megalith.library import import_extra
from megalith.serving.client.credentials import grpc_module
from megalith.serving.proto.message_types import POOL, Message
from megalith.serving.server.access_log import AccessLog, traceparent_of
from megalith.serving.server.batching import Alive
from megalith.serving.server.dispatcher import Dispatcher
from megalith.serving.server.inputs import InputReader, Rows
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.security import Permission, Security, authorization_of

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 30.0
"""Seconds in which the threads of calls must end once they are shut down."""
MISSING_IDS = "megalith-missing-ids"
"""Metadata, or HTTP header, by which a request asks for the number of its ids without a row."""
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
    reports_missing: bool = False


def grpc_handler(service: str, methods: Mapping[str, Method], log: AccessLog | None = None) -> Any:
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


def wants_missing(context: Any) -> bool:
    """Return whether the metadata of a request for scores asks for the number of ids without a row."""
    return any(key == MISSING_IDS for key, _ in context.invocation_metadata())


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
    return import_extra(name, f"serving needs {package}", "serve")


class Health:
    """Health of the services and models, for gRPC's health checks; "" is the server itself."""

    def __init__(self) -> None:
        health = _module("grpcio-health-checking", "grpc_health.v1.health")
        self._messages = _module("grpcio-health-checking", "grpc_health.v1.health_pb2")
        self._servicer = health.HealthServicer()
        self._known: dict[str, Any] = {}
        self.set(())

    def add_to(self, server: Any) -> None:
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
    # Clients look up the messages of these services too, and ours are in a pool of their own.
    for name in ("grpc_health.v1.health_pb2", "grpc_reflection.v1alpha.reflection_pb2"):
        POOL.AddSerializedFile(importlib.import_module(name).DESCRIPTOR.serialized_pb)
    names = [*services, HEALTH, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server, pool=POOL)


P = ParamSpec("P")
T = TypeVar("T")
_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class _HandlerThread:
    """A thread and its next call; `wake` is held while it is idle."""

    __slots__ = ("call", "wake")

    def __init__(self, call: _Call) -> None:
        self.call: _Call | None = call
        self.wake = threading.Lock()
        self.wake.acquire()  # no limit: it is free


class HandlerThreads(ThreadPoolExecutor):
    """A pool of daemon threads that are started when they are needed.

    It is a ThreadPoolExecutor because grpcio accepts nothing else; only `submit` and `shutdown` are used.
    """

    # A call runs in the idle thread that became idle last. The standard pool passes calls to its threads in
    # turn, so each thread runs on a stack, and with thread-local memory, that the others have displaced from
    # the cache. With 32 clients and one core, a request took 330 us of CPU time with the standard pool, 262
    # with this.

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, thread_name_prefix=name)
        self._count, self._name = count, name
        self._mutex = threading.Lock()
        self._idle: list[_HandlerThread] = []
        self._waiting: deque[_Call] = deque()
        self._all: list[threading.Thread] = []
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        call: _Call = (future, fn, args, kwargs)
        with self._mutex:
            if self._ended:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._idle:
                thread = self._idle.pop()
                thread.call = call
                thread.wake.release()
            elif len(self._all) < self._count:
                name = f"{self._name}_{len(self._all)}"
                made = threading.Thread(
                    target=self._run, args=(_HandlerThread(call),), name=name, daemon=True
                )
                self._all.append(made)
                made.start()
            else:
                self._waiting.append(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once the submitted calls have ended."""
        with self._mutex:
            self._ended = True
            cancelled = list(self._waiting) if cancel_futures else []
            if cancel_futures:
                self._waiting.clear()
            for thread in self._idle:
                thread.wake.release()
            self._idle.clear()
            threads = list(self._all)
        for future, *_ in cancelled:
            future.cancel()
        end = time.monotonic() + SHUTDOWN_SECONDS
        for each in threads if wait else ():
            each.join(max(0.0, end - time.monotonic()))
            if each.is_alive():
                logger.error("the call in thread %s has not ended after %g s", each.name, SHUTDOWN_SECONDS)

    def _run(self, own: _HandlerThread) -> None:
        while own.call is not None:
            _answer(*own.call)
            own.call = None
            with self._mutex:
                if self._waiting:
                    own.call = self._waiting.popleft()
                    continue
                if self._ended:
                    return
                self._idle.append(own)
            own.wake.acquire()  # no limit: the next call


def _answer(future: Future[Any], fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = fn(*args, **kwargs)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


PATIENCE_SECONDS = 0.1
"""Seconds for which a call without its message keeps its place from others; messages follow the headers."""


class _Wait:
    """A call that waits for its message; `context` is None once it has arrived."""

    __slots__ = ("began", "context", "expired", "gave_way", "group")

    def __init__(self, context: Any, group: object) -> None:
        self.context: Any = context
        self.group = group
        self.began = time.monotonic()
        self.gave_way = False
        self.expired = False
        """Whether the call was cancelled because its message did not arrive."""


class ReadDeadlines:
    """Cancels calls whose message does not arrive in time; `close` it."""

    # Otherwise a call that sends its headers and then nothing would occupy a thread forever. All calls have
    # the same number of seconds, so they expire in the order in which they began: one thread watches the
    # oldest.

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """Seconds in which the message of a call must arrive."""
        self._waiting: deque[_Wait] = deque()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megalith-read-deadlines", daemon=True)
        self._thread.start()

    def begin(self, context: Any, group: object = None) -> _Wait:
        wait = _Wait(context, group)
        self._waiting.append(wait)
        return wait

    def end(self, wait: _Wait) -> bool:
        """End the deadline of a call whose message has arrived, or which was cancelled."""
        with self._lock:
            wait.context = None
            return wait.gave_way

    def give_way(self, group: object) -> bool:
        """End the call of a group that has waited longest for its message."""
        latest = time.monotonic() - PATIENCE_SECONDS
        with self._lock:
            for wait in list(self._waiting):  # a copy: calls begin meanwhile
                if wait.began > latest:
                    return False
                context = wait.context
                if wait.group is group and context is not None and not wait.gave_way:
                    wait.gave_way = True
                    break
            else:
                return False
        context.cancel()
        return True

    def close(self) -> None:
        self._closed.set()
        self._thread.join(SHUTDOWN_SECONDS)
        if self._thread.is_alive():
            logger.error("%s has not ended after %g s", self._thread.name, SHUTDOWN_SECONDS)

    def _watch(self) -> None:
        while not self._closed.wait(min(0.5, self.seconds / 2)):
            now = time.monotonic()
            oldest = now - self.seconds
            while self._waiting and (self._waiting[0].context is None or self._waiting[0].began <= oldest):
                wait = self._waiting.popleft()
                context = wait.context
                if context is not None:
                    wait.expired = True
                    context.cancel()


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
_SLOT_REASSIGNED: Refusal = (
    Code.CANCELLED,
    "another call needed the place of this one, which sent no message",
)


class SlotReassignedError(Exception):
    """A call was ended, and its place was given to another one."""


class _CallGroup:
    """Methods that share places and threads."""

    def __init__(self, name: str, places: int) -> None:
        self.places = threading.BoundedSemaphore(places)
        self.pool = HandlerThreads(places, f"megalith-{name}")


class ConcurrencyLimits:
    """The places of a server's calls, and who may make them; `close` it."""

    def __init__(
        self, security: Security, max_requests: int, read_seconds: float, log: AccessLog | None = None
    ) -> None:
        grpc = grpc_module()
        self._security = security
        self._log = log
        self._requests = _CallGroup("rpc", max_requests)
        self.pool = self._requests.pool
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

    def close(self) -> None:
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
        make, placed = grpc.stream_unary_rpc_method_handler, _release_after_call
        if handler.response_streaming:
            make, placed = grpc.stream_stream_rpc_method_handler, _release_after_stream
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
                raise SlotReassignedError
            if request is None and wait.expired:  # gRPC may report the end of the messages first
                context.abort(Code.CANCELLED, "")
            return request
        except Exception:  # the call was cancelled
            gave_way = self._deadlines.end(wait)
            if self._log is not None and (is_first or wait.expired):
                late = f"no message arrived in {self._deadlines.seconds:g} s"
                reason = _SLOT_REASSIGNED[1] if gave_way else late if wait.expired else _GONE[1]
                metadata, code = context.invocation_metadata(), Code.CANCELLED.name
                self._log.refused(method, peer, metadata, code=code, reason=reason, started=started)
            if gave_way:
                raise SlotReassignedError from None
            raise

    def _refusing(self, method: str, refusal: Refusal) -> Any:
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


def _release_after_call(
    behavior: Callable[..., Any], group: _CallGroup, refuse: Refuse
) -> Callable[..., Any]:
    """Give the place of a call back when its method returns, which is after a client cancelled the call."""

    @functools.wraps(behavior)
    def call(request: Any, context: Any) -> Any:
        has_place = True
        try:
            if not context.is_active():
                refuse(context, _GONE)
            return behavior(request, context)
        except SlotReassignedError:
            has_place = False
            context.abort(*_SLOT_REASSIGNED)
        finally:
            if has_place:
                group.places.release()

    call.experimental_thread_pool = group.pool  # type: ignore[attr-defined]
    return call


def _release_after_stream(
    behavior: Callable[..., Any], group: _CallGroup, refuse: Refuse
) -> Callable[..., Any]:
    """Give the place of a call with many responses back when it ends; its method returns before that."""

    @functools.wraps(behavior)
    def call(request: Any, context: Any, *more: Any) -> Any:
        if not context.add_callback(group.places.release):
            group.places.release()
            refuse(context, _GONE)
        return behavior(request, context, *more)

    call.experimental_thread_pool = group.pool  # type: ignore[attr-defined]
    return call
