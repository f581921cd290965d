"""The Open Inference Protocol, version 2, and TF Serving's interface over REST.

Paths of the Open Inference Protocol; tf_rest.py and triton_extensions.py have those of TF Serving and Triton:

    GET   /v2                                          name and version of the server
    GET   /v2/health/live, /v2/health/ready            health; needs no token
    GET   /v2/models/NAME[/versions/VERSION]           inputs and outputs of a model
    GET   /v2/models/NAME[/versions/VERSION]/ready     whether it is available
    POST  /v2/models/NAME[/versions/VERSION]/infer     scores

HEAD is answered as GET, without the body.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from megalith import __version__
from megalith.errors import InputError
from megalith.serving.server.access_log import TRACEPARENT
from megalith.serving.server.dispatcher import Dispatcher
from megalith.serving.server.grpc_calls import MISSING_IDS
from megalith.serving.server.http import Handler, HttpServer, compress_body, read_body
from megalith.serving.server.infer_json import HEADER_LENGTH, InferRequest
from megalith.serving.server.open_inference import (
    EXTENSIONS,
    SERVER,
    describe,
    message_to_json,
    model_config,
    model_ready,
    model_statistics,
    parse_version,
    repository_index,
)
from megalith.serving.server.request_errors import HTTP_STATUS, Code, RequestError
from megalith.serving.server.security import Permission, Security
from megalith.serving.server.tf_rest import TFPath, TFRequest
from megalith.storage.json_codec import parse_json

MODEL_VERSION = "Megalith-Model-Version"
"""Header of a response with scores: the version that computed them."""
_MAX_INDEX_BYTES = 1000


@dataclass(frozen=True)
class HttpReply:
    """A response: JSON, the bytes of tensors that follow it, the status and further headers."""

    data: dict[str, Any] | list[Any]
    tensors: bytes = b""
    status: int = 200
    code: str = "OK"
    headers: dict[str, str] = field(default_factory=dict)


class RestServer(HttpServer):
    """The HTTP server of the protocols."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        security: Security,
        host: str,
        port: int,
        *,
        accept_compressed: bool = False,
        reuse_port: bool = False,
    ) -> None:
        self.dispatcher = dispatcher
        self.security = security
        self.accept_compressed = accept_compressed
        super().__init__(_RestHandler, security, host, port, reuse_port=reuse_port)


class _RestHandler(Handler):
    server: RestServer

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is not a GET, HEAD or POST of HTTP; called by the base class."""
        log = self.server.dispatcher.access_log
        if log is not None:
            host, port = self.client_address[:2]
            name = f"{self.command or ''} {getattr(self, 'path', '')}".strip()
            trace = self.headers.get(TRACEPARENT) if hasattr(self, "headers") else None
            with log.call("http", name, f"{host}:{port}", trace) as fields:
                grpc_code = Code.UNIMPLEMENTED if code == 501 else Code.INVALID_ARGUMENT
                fields |= {"status": code, "code": grpc_code.name, "reason": message or ""}
        super().send_error(code, message, explain)

    def _answer(self, method: Callable[[list[str], bytes], HttpReply]) -> None:
        refused: RequestError | None = None
        parts, body = [], b""
        try:
            parts, body = self._admitted(), self._body()
        except RequestError as error:
            refused = error
        with self.server.answering():
            reply = self._logged(lambda: _error_reply(refused) if refused else method(parts, body))
            if self.server.dispatcher.closing:
                self.close_connection = True
            self.reply(*reply)

    def _logged(self, call: Callable[[], HttpReply]) -> tuple[int, str, bytes, dict[str, str]]:
        """Return the arguments of `reply` for a call; log the call, before its response is sent."""
        log = self.server.dispatcher.access_log
        if log is None:
            return self._encoded(_result_of(call))
        host, port = self.client_address[:2]
        trace = self.headers.get(TRACEPARENT)
        with log.call("http", f"{self.command} {self.path}", f"{host}:{port}", trace) as fields:
            result = _result_of(call)
            reply = self._encoded(result)
            sent = self.headers.get("content-length", "0")
            size = int(sent) if sent.isascii() and sent.isdecimal() and len(sent) < 19 else 0
            fields |= {"status": result.status, "code": result.code}
            fields |= {"request_bytes": size, "response_bytes": len(reply[2])}
            return reply

    def _encoded(self, reply: HttpReply) -> tuple[int, str, bytes, dict[str, str]]:
        text = json.dumps(reply.data, allow_nan=False).encode()
        headers, kind = dict(reply.headers), "application/json"
        if reply.tensors:
            headers[HEADER_LENGTH] = str(len(text))
            kind = "application/octet-stream"
        body, encoding = compress_body(self.headers, text + reply.tensors)
        return reply.status, kind, body, headers | encoding

    def _admitted(self) -> list[str]:
        """Return the parts of the path; otherwise raise RequestError and end the connection unread."""
        close, self.close_connection = self.close_connection, True
        try:
            parts = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]] or [""]
        except ValueError:
            raise RequestError(Code.INVALID_ARGUMENT, "the path is malformed") from None
        open_to_all = parts[:2] == ["v2", "health"] and self.command in ("GET", "HEAD")
        sent, security = self.headers.get("authorization"), self.server.security
        is_scoring = parts[-1] == "infer" or parts[-1].endswith(":predict")
        is_read = is_scoring and security.permits(sent, Permission.READ)
        if not open_to_all and not is_read and not security.admits(sent):
            raise RequestError(Code.UNAUTHENTICATED, "this server requires a token")
        if not open_to_all and self.server.connection.is_spare:
            raise RequestError(Code.UNAVAILABLE, "the server has too many connections; try again later")
        self.close_connection = close
        return parts

    def _body(self) -> bytes:
        """Read the body; raise RequestError, and end the connection, if it must not be read."""
        close, self.close_connection = self.close_connection, True
        limit = min(self.server.dispatcher.max_bytes, self.server.dispatcher.max_predict_bytes)
        if self.command != "POST":
            limit = 0
        body = read_body(
            self.headers, self.rfile.read, limit, accept_compressed=self.server.accept_compressed
        )
        self.close_connection = close
        return body

    def _get(self, parts: list[str], body: bytes) -> HttpReply:
        dispatcher = self.server.dispatcher
        match parts:
            case ["v2"]:
                return HttpReply({"name": SERVER, "version": __version__, "extensions": list(EXTENSIONS)})
            case ["v2", "health", "live"]:
                return HttpReply({"live": True})
            case ["v2", "health", "ready"]:
                return _ready(dispatcher.ready)
            case ["v2", "models", "stats"]:
                return HttpReply(message_to_json(model_statistics(dispatcher, "", "")))
            case ["v2", "models", name]:
                return HttpReply(describe(dispatcher, name, ""))
            case ["v2", "models", name, "versions", version]:
                return HttpReply(describe(dispatcher, name, version))
            case ["v2", "models", name, "ready"]:
                return _ready(model_ready(dispatcher, name, ""))
            case ["v2", "models", name, "versions", version, "ready"]:
                return _ready(model_ready(dispatcher, name, version))
            case ["v2", "models", name, ("config" | "stats") as what]:
                return _extension(dispatcher, name, "", what)
            case ["v2", "models", name, "versions", version, ("config" | "stats") as what]:
                return _extension(dispatcher, name, version, what)
            case ["v1", "models", *selected]:
                return HttpReply(TFPath.parse(selected).describe(dispatcher))
        raise _no_such_path()

    def _post(self, parts: list[str], body: bytes) -> HttpReply:
        match parts:
            case ["v2", "models", name, "infer"]:
                return self._infer(name, "", body)
            case ["v2", "models", name, "versions", version, "infer"]:
                return self._infer(name, version, body)
            case ["v2", "repository", "index"]:
                return _index(self.server.dispatcher, body)
            case ["v1", "models", *selected]:
                return self._predict(TFPath.parse(selected), body)
        raise _no_such_path()

    def _infer(self, name: str, version: str, body: bytes) -> HttpReply:
        dispatcher = self.server.dispatcher
        dispatcher.permit(self.headers.get("authorization"), Permission.READ)
        dispatcher.memory.received(len(body))
        try:
            number = parse_version(version)
        except InputError as error:
            raise dispatcher.reject(error) from None
        header = self.headers.get(HEADER_LENGTH)
        request = InferRequest(name, number, body, header, MISSING_IDS in self.headers)
        return HttpReply(*request.response(dispatcher.predict(request)))

    def _predict(self, path: TFPath, body: bytes) -> HttpReply:
        dispatcher = self.server.dispatcher
        if path.action != "predict":
            raise _no_such_path()
        dispatcher.permit(self.headers.get("authorization"), Permission.READ)
        dispatcher.memory.received(len(body))
        request = TFRequest(path, body, MISSING_IDS in self.headers)
        scored = dispatcher.predict(request)
        return HttpReply(request.response(scored), headers={MODEL_VERSION: str(scored.version)})


def _result_of(call: Callable[[], HttpReply]) -> HttpReply:
    try:
        return call()
    except RequestError as error:
        return _error_reply(error)


def _error_reply(error: RequestError) -> HttpReply:
    status = HTTP_STATUS.get(error.code, 500)
    return HttpReply({"error": str(error)}, status=status, code=error.code.name)


def _extension(dispatcher: Dispatcher, name: str, version: str, what: str) -> HttpReply:
    if what == "stats":
        return HttpReply(message_to_json(model_statistics(dispatcher, name, version)))
    return HttpReply(message_to_json(model_config(dispatcher, name, version).config))


def _index(dispatcher: Dispatcher, body: bytes) -> HttpReply:
    def error(problem: str) -> RequestError:
        return dispatcher.reject(InputError(f"the body {problem[:200]}"))

    given = parse_json(body or b"{}", error, max_bytes=_MAX_INDEX_BYTES)
    ready = isinstance(given, dict) and given.get("ready") is True
    return HttpReply(message_to_json(repository_index(dispatcher, ready_only=ready))["models"])


def _ready(ready: bool) -> HttpReply:
    return HttpReply({"ready": ready}, status=200 if ready else 503)


def _no_such_path() -> RequestError:
    return RequestError(
        Code.NOT_FOUND,
        "unknown path; see the Open Inference Protocol, version 2, or TF Serving's REST interface",
    )
