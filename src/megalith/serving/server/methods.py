"""Methods: what the gRPC services share, to take bytes, give bytes, and end with a status.

Reading a request into a message is the first thing that may go wrong with it, so it happens here and not in
gRPC, which would tell the client nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megalith.serving.client.credentials import grpc_module
from megalith.serving.proto import Message
from megalith.serving.server.dispatcher import Dispatcher
from megalith.serving.server.request_errors import RequestError

Method = Callable[[bytes, Any], bytes]
NO_DEADLINE = 1e9
"""Seconds from which a deadline is none: gRPC gives a request without one some centuries."""


def handler_of(service: str, methods: Mapping[str, Method]) -> Any:
    """A gRPC handler of methods that take bytes and raise RequestErrors."""
    grpc = grpc_module()
    return grpc.method_handlers_generic_handler(
        service,
        {name: grpc.unary_unary_rpc_method_handler(_ended(method)) for name, method in methods.items()},
    )


def _ended(method: Method) -> Method:
    def call(data: bytes, context: Any) -> bytes:
        try:
            return method(data, context)
        except RequestError as error:
            context.abort(error.code, str(error))
            raise  # not reached: abort raises

    return call


def parsed(dispatcher: Dispatcher, kind: Any, data: bytes) -> Message:
    """A message of a kind. Raises RequestError, and has it counted, if the bytes are none."""
    try:
        return kind.FromString(data)
    except Exception as error:
        raise dispatcher.refused(error) from None


def serialised(message: Message) -> bytes:
    """A message as it travels."""
    data: bytes = message.SerializeToString()
    return data


def remaining(context: Any) -> float | None:
    """Seconds until a call's deadline; None if it has none."""
    seconds: float | None = context.time_remaining()
    return None if seconds is None or seconds > NO_DEADLINE else seconds
