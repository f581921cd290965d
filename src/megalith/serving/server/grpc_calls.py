"""gRPC on the event loop: limits, deadlines and tokens of calls; parsing and errors; health and reflection.

Every method is in `Calls`, which gives each group of methods its own slots, so that one group cannot starve
another. A call holds its slot until its method returns, also after the client cancelled it:

    group       methods                                              slots
    requests    Predict, ModelInfer                                  max_concurrent and some more
    control     status, metadata, live, ready                        MAX_CONTROLS
    health      Check of grpc.health.v1.Health                       MAX_CHECKS
    streams     Watch of grpc.health.v1.Health                       MAX_STREAMS
    reflection  ServerReflectionInfo, a stream                       MAX_REFLECTIONS

    event                                                  effect
    the token is missing or wrong (health needs none)      refused before the message is read
    no slot is free, and a call of the group has waited    that call is cancelled, and its slot is reassigned
    PATIENCE_SECONDS for its message
    no slot is free otherwise                              refused with RESOURCE_EXHAUSTED
    the message does not arrive in time                    cancelled

A call that waits for its message is a task of the event loop, so half-open calls cost no threads. Methods
take and return bytes and parse them in the handler: gRPC reports a failure of its own parser without a
reason. A RequestError becomes the status of the call. The access log gets a line for each call, also for
those that are refused."""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from megalith.library import import_extra
from megalith.serving.client.credentials import grpc_module
from megalith.serving.proto.message_types import POOL, Message
from megalith.serving.server.access_log import AccessLog, traceparent_of
from megalith.serving.server.dispatcher import Dispatcher, ScoreRequest, ScoreResult
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.security import Permission, Security, authorization_of

MISSING_IDS = "megalith-missing-ids"
"""Metadata, or HTTP header, by which a request asks for the number of its ids without a row."""
Method = Callable[[bytes, Any], Awaitable[bytes]]
NO_DEADLINE = 1e9
"""Seconds above which a deadline is ignored: gRPC reports centuries for a call without a deadline."""
HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
MAX_STREAMS = MAX_CHECKS = MAX_CONTROLS = 16
MAX_REFLECTIONS = 4
REQUESTS = ("/tensorflow.serving.PredictionService/Predict", "/inference.GRPCInferenceService/ModelInfer")
"""Methods of the group `requests`."""
PATIENCE_SECONDS = 0.1
"""Seconds for which a call without its message keeps its slot from others; messages follow the headers."""
_SLOT_REASSIGNED = "another call needed the place of this one, which sent no message"
_NO_TOKEN = "this server requires a token: authorization: Bearer ..."
_FULL = "too many calls of this kind are in progress; try again later"
_NO_METHOD = "Method not found!"  # the words of gRPC


def parse(dispatcher: Dispatcher, kind: Any, data: bytes) -> Message:
    try:
        return kind.FromString(data)
    except Exception as error:
        raise dispatcher.reject(error) from None


def serialize(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def remaining(context: Any) -> float | None:
    """Return the time until a call's deadline."""
    seconds: float | None = context.time_remaining()
    return None if seconds is None or seconds > NO_DEADLINE else seconds


async def score(dispatcher: Dispatcher, request: ScoreRequest, context: Any) -> ScoreResult:
    """Compute the scores of a call; its deadline and its metadata complete the request."""
    metadata = context.invocation_metadata()
    if dispatcher.requires_token:
        dispatcher.permit(authorization_of(metadata), Permission.READ)
    request.timeout = remaining(context)
    request.reports_missing = any(key == MISSING_IDS for key, _ in metadata)
    scored = await dispatcher.predict(request)
    if scored.missing_ids is not None:
        context.set_trailing_metadata(((MISSING_IDS, json.dumps(scored.missing_ids)),))
    return scored


class GrpcCall:
    """A call that has a slot, and `read_seconds` for its message."""

    __slots__ = ("began", "reason", "task", "timer")

    def __init__(self, read_seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.began = time.perf_counter()
        self.timer: asyncio.TimerHandle | None = None
        """Ends the call unless its message arrives; None once it has."""
        self.reason = ""
        """Why the server ended the call before its message arrived; "": it did not."""
        self.wait_for_message(read_seconds)

    def wait_for_message(self, seconds: float) -> None:
        self.timer = self.task.get_loop().call_later(seconds, self._expire, seconds)

    def _expire(self, seconds: float) -> None:
        self.end(f"no message arrived in {seconds:g} s")

    def end(self, reason: str) -> None:
        if not self.reason:  # a second cancellation would count as the client's
            self.reason = reason
            self.task.cancel()

    def end_wait(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class CallGroup:
    """Methods that share slots."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.calls: dict[GrpcCall, None] = {}
        """Calls that have a slot, in the order in which they began."""

    def is_full(self) -> bool:
        """Of a full group: end a call that has no message yet; return whether there is none."""
        latest = time.perf_counter() - PATIENCE_SECONDS
        for call in self.calls:
            if call.began > latest:
                return True
            if call.timer is not None:
                call.end(_SLOT_REASSIGNED)
                del self.calls[call]
                return False
        return True


class CallLimits:
    """The slots of a server's calls, which its ports share."""

    def __init__(self, max_requests: int, read_seconds: float) -> None:
        self.read_seconds = read_seconds
        """Seconds in which the message of a call must arrive."""
        self.requests = CallGroup(max_requests)
        self.control = CallGroup(MAX_CONTROLS)
        self.checks = CallGroup(MAX_CHECKS)
        self.streams = CallGroup(MAX_STREAMS)
        self.reflection = CallGroup(MAX_REFLECTIONS)


class Calls(grpc_module().GenericRpcHandler):  # type: ignore[misc]
    """The methods of a port, and who may call them."""

    def __init__(self, limits: CallLimits, security: Security, log: AccessLog | None) -> None:
        self._limits, self._security, self._log = limits, security, log
        self._requires_token = security.requires_token
        self._methods: dict[str, Any] = {}

    def add(self, service: str, methods: Mapping[str, Method]) -> None:
        """Add methods with one request and one response, as bytes."""
        for name, method in methods.items():
            path = f"/{service}/{name}"
            group = self._limits.requests if path in REQUESTS else self._limits.control
            self._add_unary(path, method, group, self._log)

    def add_health(self, health: Health) -> None:
        self._add_unary(f"/{HEALTH}/Check", health.check, self._limits.checks, None)
        path = f"/{HEALTH}/Watch"

        async def watch(data: bytes, context: Any) -> None:
            async for state in health.watch(data):
                await context.write(state)

        handler = self._limited(path, self._limits.streams, watch)
        self._methods[path] = grpc_module().stream_stream_rpc_method_handler(handler)

    def add_reflection(self, services: Sequence[str]) -> None:
        """Add reflection, by which clients such as grpcurl list services, methods and messages."""
        reflection = _module("grpcio-reflection", "grpc_reflection.v1alpha.reflection")
        messages = _module("grpcio-reflection", "grpc_reflection.v1alpha.reflection_pb2")
        # Clients look up the messages of these services too, and ours are in a pool of their own.
        for name in ("grpc_health.v1.health_pb2", "grpc_reflection.v1alpha.reflection_pb2"):
            POOL.AddSerializedFile(importlib.import_module(name).DESCRIPTOR.serialized_pb)
        servicer = reflection.aio.ReflectionServicer([*services, HEALTH, REFLECTION], pool=POOL)
        path = f"/{REFLECTION}/ServerReflectionInfo"

        async def info(requests: AsyncIterator[Any], context: Any) -> None:
            async for response in servicer.ServerReflectionInfo(requests, context):
                await context.write(response)

        self._methods[path] = grpc_module().stream_stream_rpc_method_handler(
            self._limited(path, self._limits.reflection, info, reads_stream=True),
            request_deserializer=messages.ServerReflectionRequest.FromString,
            response_serializer=messages.ServerReflectionResponse.SerializeToString,
        )

    def service(self, details: Any) -> Any:
        """Return the handler of a call."""
        return self._methods.get(details.method) or self._unknown(details.method)

    def _add_unary(self, path: str, method: Method, group: CallGroup, log: AccessLog | None) -> None:
        async def logged(data: bytes, context: Any) -> bytes:
            assert log is not None
            traceparent = traceparent_of(context.invocation_metadata())
            with log.call("grpc", path, context.peer(), traceparent) as fields:
                fields["request_bytes"], fields["code"] = len(data), Code.CANCELLED.name
                try:
                    response = await method(data, context)
                except Exception as error:
                    fields["code"] = (error.code if isinstance(error, RequestError) else Code.UNKNOWN).name
                    raise
                fields["code"], fields["response_bytes"] = Code.OK.name, len(response)
                return response

        # gRPC would wait for the message of a unary method without a limit before it calls the method.
        self._methods[path] = grpc_module().stream_unary_rpc_method_handler(
            self._limited(path, group, method if log is None else logged)
        )

    def _limited(
        self,
        method: str,
        group: CallGroup,
        work: Callable[[Any, Any], Awaitable[Any]],
        *,
        reads_stream: bool = False,
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        """Return a handler that gives each call its slot until its work ends; an error becomes its status."""

        async def answer(requests: AsyncIterator[Any], context: Any) -> Any:
            if self._requires_token and not method.startswith(f"/{HEALTH}/"):
                # Without a read token, scores are for everyone; what else a request wants is in its message.
                sent = authorization_of(context.invocation_metadata())
                is_open = method in REQUESTS and self._security.permits(sent, Permission.READ)
                if not is_open and not self._security.admits(sent):
                    await self._refuse(method, context, Code.UNAUTHENTICATED, _NO_TOKEN)
            if len(group.calls) >= group.slots and group.is_full():
                await self._refuse(method, context, Code.RESOURCE_EXHAUSTED, _FULL)
            call = GrpcCall(self._limits.read_seconds)
            group.calls[call] = None
            try:
                if reads_stream:
                    return await work(self._timed(call, requests), context)
                data = await context.read()
                call.end_wait()
                if not isinstance(data, bytes):  # the end of the stream
                    raise _NoMessageError(Code.INVALID_ARGUMENT, "the call has no message")
                return await work(data, context)
            except RequestError as error:
                refusal = error
            except asyncio.CancelledError:
                if call.timer is not None:
                    reason = call.reason or "the client no longer waits"
                    self._log_refused(method, context, Code.CANCELLED, reason, call.began)
                if not call.reason or call.task.uncancel():  # the client cancelled it
                    raise
                refusal = RequestError(Code.CANCELLED, call.reason)
            finally:
                if call.timer is not None:
                    call.end_wait()
                group.calls.pop(call, None)
            if isinstance(refusal, _NoMessageError):
                await self._refuse(method, context, refusal.code, str(refusal))
            await context.abort(refusal.code, str(refusal))

        return answer

    async def _timed(self, call: GrpcCall, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            call.end_wait()
            yield request
            call.wait_for_message(self._limits.read_seconds)
        call.end_wait()

    def _unknown(self, method: str) -> Any:
        async def refuse(_: object, context: Any) -> None:
            if self._requires_token:
                sent = authorization_of(context.invocation_metadata())
                if not self._security.admits(sent):
                    await self._refuse(method, context, Code.UNAUTHENTICATED, _NO_TOKEN)
            await self._refuse(method, context, Code.UNIMPLEMENTED, _NO_METHOD)

        return grpc_module().stream_unary_rpc_method_handler(refuse)

    async def _refuse(self, method: str, context: Any, code: Any, reason: str) -> None:
        """Log a call and end it; raises what ends its task."""
        self._log_refused(method, context, code, reason, time.perf_counter())
        await context.abort(code, reason)

    def _log_refused(self, method: str, context: Any, code: Any, reason: str, started: float) -> None:
        if self._log is not None:
            peer, metadata = context.peer(), context.invocation_metadata()
            self._log.refused(method, peer, metadata, code=code.name, reason=reason, started=started)


class _NoMessageError(RequestError):
    """The client ended a call without a message."""


def _module(package: str, name: str) -> Any:
    return import_extra(name, f"serving needs {package}", "serve")


class Health:
    """Health of the services and models, for gRPC's health checks; "" is the server itself."""

    # grpcio-health-checking's servicer for event loops forgets the other watchers of a service when one ends.

    def __init__(self) -> None:
        self._messages = _module("grpcio-health-checking", "grpc_health.v1.health_pb2")
        self._states: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._is_shut_down = False
        self.set(())

    def set(self, serving: Iterable[str]) -> None:
        """Set which services and models are SERVING; the server itself is, if there are any."""
        now = set() if self._is_shut_down else set(serving)
        states = self._messages.HealthCheckResponse
        self._states = {
            name: states.SERVING if name in now or (now and not name) else states.NOT_SERVING
            for name in {*self._states, *now, ""}
        }
        self._changed.set()  # watchers look for changes, and wait for the next event
        self._changed = asyncio.Event()

    def shut_down(self) -> None:
        """Set everything to NOT_SERVING permanently."""
        self._is_shut_down = True
        self.set(())

    def _service(self, data: bytes) -> str:
        try:
            name: str = self._messages.HealthCheckRequest.FromString(data).service
        except Exception:
            raise RequestError(Code.INVALID_ARGUMENT, "the message is not a HealthCheckRequest") from None
        return name

    async def check(self, data: bytes, context: Any) -> bytes:
        state = self._states.get(self._service(data))
        if state is None:
            raise RequestError(Code.NOT_FOUND, "the service is unknown")
        return serialize(self._messages.HealthCheckResponse(status=state))

    async def watch(self, data: bytes) -> AsyncIterator[bytes]:
        """Yield the state of a service, and the new one whenever it changes."""
        name, sent = self._service(data), None
        while True:
            changed = self._changed
            state = self._states.get(name, self._messages.HealthCheckResponse.SERVICE_UNKNOWN)
            if state != sent:
                yield serialize(self._messages.HealthCheckResponse(status=state))
                sent = state
            await changed.wait()  # no limit: it ends with its client
