"""The Open Inference Protocol, version 2, over REST.

Paths:

    GET   /v2                                          name and version of the server
    GET   /v2/health/live, /v2/health/ready            health; needs no token
    GET   /v2/models/NAME[/versions/VERSION]           inputs and outputs of a model
    GET   /v2/models/NAME[/versions/VERSION]/ready     whether it is available
    POST  /v2/models/NAME[/versions/VERSION]/infer     scores
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from megalith import __version__
from megalith.errors import InputError
from megalith.serving.server.dispatcher import Dispatcher
from megalith.serving.server.http import Handler, HttpServer
from megalith.serving.server.infer_json import HEADER_LENGTH, InferRequest
from megalith.serving.server.methods import MISSING_IDS
from megalith.serving.server.oip_service import EXTENSIONS, SERVER, describe, model_ready, parse_version
from megalith.serving.server.request_errors import HTTP_STATUS, Code, RequestError
from megalith.serving.server.security import Permission, Security

Reply = tuple[int, dict[str, Any], bytes]
"""Status, JSON, and the bytes of the tensors that follow it."""


class RestServer(HttpServer):
    """The HTTP server of the protocol.

    Args:
        dispatcher: Answers the requests.
        security: Token and TLS.
        host: Address to listen on.
        port: Port; 0 picks a free one.
    """

    def __init__(self, dispatcher: Dispatcher, security: Security, host: str, port: int) -> None:
        self.dispatcher = dispatcher
        self.security = security
        super().__init__(_RestHandler, security, host, port)


class _RestHandler(Handler):
    server: RestServer

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, method: Callable[[list[str], bytes], Reply]) -> None:
        try:
            parts, body = self._admitted(), self._body()
        except RequestError as error:
            with self.server.answering():
                self._send(*_error_reply(error))
            return
        with self.server.answering():
            try:
                reply = method(parts, body)
            except RequestError as error:
                reply = _error_reply(error)
            self._send(*reply)

    def _send(self, status: int, reply: dict[str, Any], tensors: bytes) -> None:
        if self.server.dispatcher.closing:
            self.close_connection = True
        text = json.dumps(reply, allow_nan=False).encode()
        if tensors:
            length = {HEADER_LENGTH: str(len(text))}
            self.reply(status, "application/octet-stream", text + tensors, **length)
        else:
            self.reply(status, "application/json", text)

    def _admitted(self) -> list[str]:
        """Return the parts of the path; otherwise raise RequestError and end the connection unread."""
        close, self.close_connection = self.close_connection, True
        try:
            parts = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
        except ValueError:
            raise RequestError(Code.INVALID_ARGUMENT, "the path is malformed") from None
        open_to_all = parts[:2] == ["v2", "health"] and self.command == "GET"
        sent, security = self.headers.get("authorization"), self.server.security
        is_read = parts[-1] == "infer" and security.permits(sent, Permission.READ)
        if not open_to_all and not is_read and not security.admits(sent):
            raise RequestError(Code.UNAUTHENTICATED, "this server requires a token")
        if not open_to_all and self.server.connection.is_spare:
            raise RequestError(Code.UNAVAILABLE, "the server has too many connections; try again later")
        self.close_connection = close
        return parts

    def _body(self) -> bytes:
        """Read the body; raise RequestError, and end the connection, if it must not be read."""
        close, self.close_connection = self.close_connection, True
        if (
            self.headers.get("transfer-encoding")
            or self.headers.get("content-encoding", "identity") != "identity"
        ):
            raise RequestError(Code.INVALID_ARGUMENT, "send the body unencoded, with a Content-Length")
        lengths = self.headers.get_all("content-length", ["0"])
        given = lengths[0]
        if len(lengths) > 1 or not given.isascii() or not given.isdecimal() or len(given) > 18:
            raise RequestError(Code.INVALID_ARGUMENT, "Content-Length must be one decimal number")
        limit = min(self.server.dispatcher.max_bytes, self.server.dispatcher.max_predict_bytes)
        if self.command == "GET":
            limit = 0
        if int(given) > limit:
            raise RequestError(Code.OUT_OF_RANGE, f"the body has more than {limit} bytes")
        body = self.rfile.read(int(given))
        if len(body) != int(given):
            raise RequestError(Code.INVALID_ARGUMENT, "the body is shorter than its Content-Length")
        self.close_connection = close
        return body

    def _get(self, parts: list[str], body: bytes) -> Reply:
        dispatcher = self.server.dispatcher
        match parts:
            case ["v2"]:
                return 200, {"name": SERVER, "version": __version__, "extensions": list(EXTENSIONS)}, b""
            case ["v2", "health", "live"]:
                return 200, {"live": True}, b""
            case ["v2", "health", "ready"]:
                return _ready(dispatcher.ready)
            case ["v2", "models", name]:
                return 200, describe(dispatcher, name, ""), b""
            case ["v2", "models", name, "versions", version]:
                return 200, describe(dispatcher, name, version), b""
            case ["v2", "models", name, "ready"]:
                return _ready(model_ready(dispatcher, name, ""))
            case ["v2", "models", name, "versions", version, "ready"]:
                return _ready(model_ready(dispatcher, name, version))
        raise _no_such_path()

    def _post(self, parts: list[str], body: bytes) -> Reply:
        match parts:
            case ["v2", "models", name, "infer"]:
                return self._infer(name, "", body)
            case ["v2", "models", name, "versions", version, "infer"]:
                return self._infer(name, version, body)
        raise _no_such_path()

    def _infer(self, name: str, version: str, body: bytes) -> Reply:
        dispatcher = self.server.dispatcher
        dispatcher.permit(self.headers.get("authorization"), Permission.READ)
        dispatcher.memory.received(len(body))
        try:
            number = parse_version(version)
        except InputError as error:
            raise dispatcher.reject(error) from None
        reports = MISSING_IDS in self.headers
        request = InferRequest(name, number, body, self.headers.get(HEADER_LENGTH), reports)
        return 200, *request.response(dispatcher.predict(request))


def _error_reply(error: RequestError) -> Reply:
    return HTTP_STATUS.get(error.code, 500), {"error": str(error)}, b""


def _ready(ready: bool) -> Reply:
    return 200 if ready else 503, {"ready": ready}, b""


def _no_such_path() -> RequestError:
    return RequestError(Code.NOT_FOUND, "unknown path; see the Open Inference Protocol, version 2")
