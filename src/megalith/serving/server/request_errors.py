"""Status: how a request ends when it does not end well, in gRPC's codes and in HTTP's."""

from __future__ import annotations

import logging
from typing import Any

from megalith.errors import (
    DiscoveryError,
    InputError,
    MegalithError,
    RemoteError,
    SequenceError,
    UnknownNameError,
    UsageError,
)
from megalith.serving.client.credentials import grpc_module
from megalith.serving.proto.message_types import protobuf

log = logging.getLogger("megalith.serving")

Code: Any = grpc_module().StatusCode
DecodeError: type[Exception] = protobuf("message").DecodeError
MAX_MESSAGE = 1000
"""Characters of an error that a client is told; some errors quote what the client sent."""
HTTP_STATUS: dict[Any, int] = {
    Code.OK: 200,
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.OUT_OF_RANGE: 413,
    Code.FAILED_PRECONDITION: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.INTERNAL: 500,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
    Code.CANCELLED: 499,
}


class RequestError(MegalithError):
    """A request that is refused. code: gRPC's status."""

    def __init__(self, code: Any, message: str) -> None:
        super().__init__(message)
        self.code = code


def as_request_error(error: Exception, where: str) -> tuple[Any, str]:
    """The code and the text a client gets for an error; one that nobody expected is logged and not shown."""
    if isinstance(error, RequestError):
        return error.code, str(error)[:MAX_MESSAGE]
    if isinstance(error, DecodeError):
        return Code.INVALID_ARGUMENT, "the request is no message of the type that this method takes"
    if isinstance(error, SequenceError):
        return Code.FAILED_PRECONDITION, str(error)[:MAX_MESSAGE]
    if isinstance(error, RemoteError | DiscoveryError):
        # The rows of a part could not be fetched: the client did nothing wrong and may try again.
        return Code.UNAVAILABLE, str(error)[:MAX_MESSAGE]
    if isinstance(error, InputError | UnknownNameError | UsageError):
        return Code.INVALID_ARGUMENT, str(error)[:MAX_MESSAGE]
    log.error("%s failed", where, exc_info=error)
    return Code.INTERNAL, "the server failed; its log says why"
