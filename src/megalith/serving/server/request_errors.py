"""Request errors: the gRPC status and the HTTP status of a request that fails."""

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

logger = logging.getLogger(__name__)

Code: Any = grpc_module().StatusCode
DecodeError: type[Exception] = protobuf("message").DecodeError
MAX_MESSAGE = 1000
"""Maximum length of an error message for a client; some messages quote what the client sent."""
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
    def __init__(self, code: Any, message: str) -> None:
        super().__init__(message)
        self.code = code


def as_request_error(error: Exception, where: str) -> tuple[Any, str]:
    """Return the status code and the message that a client gets for an error."""
    if isinstance(error, RequestError):
        return error.code, str(error)[:MAX_MESSAGE]
    if isinstance(error, DecodeError):
        return Code.INVALID_ARGUMENT, "the request is not a message of the type that this method takes"
    if isinstance(error, SequenceError):
        return Code.FAILED_PRECONDITION, str(error)[:MAX_MESSAGE]
    if isinstance(error, RemoteError | DiscoveryError):
        # The rows of a part could not be fetched: the client may retry.
        return Code.UNAVAILABLE, str(error)[:MAX_MESSAGE]
    if isinstance(error, InputError | UnknownNameError | UsageError):
        return Code.INVALID_ARGUMENT, str(error)[:MAX_MESSAGE]
    logger.error("%s failed", where, exc_info=error)
    return Code.INTERNAL, "internal error; see the log of the server"
