"""Methods: what the gRPC services share to read requests, write responses and return a status.

Methods take and return bytes. Parsing is the first step that can fail, so it happens here: gRPC would report
such a failure without a reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalith.serving.client.credentials import grpc_module
from megalith.serving.proto import Message
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
