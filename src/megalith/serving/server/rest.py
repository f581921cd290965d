"""The Open Inference Protocol, version 2, and TF Serving's interface over REST.

Paths of the Open Inference Protocol; tf_serving.py and open_inference.py have those of TF Serving and Triton:

    GET   /v2                                          name and version of the server
    GET   /v2/health/live, /v2/health/ready            health; needs no token
    GET   /v2/models/NAME[/versions/VERSION]           inputs and outputs of a model
    GET   /v2/models/NAME[/versions/VERSION]/ready     whether it is available
    POST  /v2/models/NAME[/versions/VERSION]/infer     scores

HEAD is answered as GET, without the body.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megalith import __version__
from megalith.errors import InputError
from megalith.library import import_extra
from megalith.serving.server.access_log import TRACEPARENT
from megalith.serving.server.dispatcher import Dispatcher, ScoreRequest, ScoreResult
from megalith.serving.server.grpc_calls import MISSING_IDS
from megalith.serving.server.http import (
    GZIP,
    HttpConnection,
    HttpServer,
    body_encoding,
    compress_body,
    decompress_body,
)
from megalith.serving.server.open_inference import (
    EXTENSIONS,
    HEADER_LENGTH,
    SERVER,
    InferBody,
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
from megalith.serving.server.tf_serving import TFBody, TFPath
from megalith.storage.json_codec import parse_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

MODEL_VERSION = "Megalith-Model-Version"
"""Header of a response with scores: the version that computed them."""
_MAX_INDEX_BYTES = 1000
_ROUTING: Any = import_extra("starlette.routing", "REST needs starlette", "serve")
_REQUESTS: Any = import_extra("starlette.requests", "REST needs starlette", "serve")
_RESPONSES: Any = import_extra("starlette.responses", "REST needs starlette", "serve")


@dataclass(frozen=True)
class HttpReply:
    """A response: JSON, the bytes of tensors that follow it, the status and further headers."""

    data: dict[str, Any] | list[Any]
    tensors: bytes = b""
    status: int = 200
    code: str = "OK"
    headers: dict[str, str] = field(default_factory=dict)
    size: int = 0
    """About how many bytes the response has, if that may be many."""


Endpoint = Callable[["Request", bytes], Awaitable[HttpReply]]


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
        self._dispatcher = dispatcher
        self._accept_compressed = accept_compressed
        self._other = _ROUTING.request_response(self._endpoint(_no_such_path))
        super().__init__(
            _ROUTING.Router(self._routes(), redirect_slashes=False, default=self._other),
            security,
            host,
            port,
            reuse_port=reuse_port,
            on_malformed=self._log_malformed,
        )

    def _routes(self) -> list[Any]:
        def route(method: str, path: str, endpoint: Endpoint, **options: bool) -> Any:
            return _ROUTING.Route(path, self._endpoint(endpoint, **options), methods=[method])

        model, version = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
        get = [
            ("/v2", _server_metadata),
            ("/v2/models/stats", self._statistics),
            *((path, self._describe) for path in (model, version)),
            *((f"{path}/ready", self._model_ready) for path in (model, version)),
            *((f"{path}/config", self._config) for path in (model, version)),
            *((f"{path}/stats", self._statistics) for path in (model, version)),
            ("/v1/models/{selected:path}", self._describe_selected),
        ]
        return [
            *(route("POST", f"{path}/infer", self._infer, scores=True) for path in (model, version)),
            route("POST", "/v1/models/{selected:path}", self._predict, scores=True),
            route("GET", "/v2/health/live", _live, public=True),
            route("GET", "/v2/health/ready", self._ready, public=True),
            *(route("GET", path, endpoint) for path, endpoint in get),
            route("POST", "/v2/repository/index", self._index),
            _ROUTING.Mount("", self._other),  # otherwise another method on a path would be a 405
        ]

    # ---- every request

    def _endpoint(
        self, endpoint: Endpoint, *, scores: bool = False, public: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a route: limits, tokens, the body, errors and the access log."""

        async def answer(request: Request) -> Response:
            connection: HttpConnection = request.scope["state"]["connection"]
            close = True  # the body is not read
            try:
                self._admit(request, connection, scores, public)
                body = await self._body(request)
                close = self._dispatcher.closing
                reply = None
            except RequestError as error:
                reply, body = _error_reply(error), b""
            except _REQUESTS.ClientDisconnect:
                return _nothing()
            if not connection.begin_answer():
                return _nothing()
            try:
                with self._log_line(request) as fields:
                    if reply is None:
                        try:
                            reply = await endpoint(request, body)
                        except RequestError as error:
                            reply = _error_reply(error)
                            fields["reason"] = str(error) if error.code is Code.UNIMPLEMENTED else None
                    response = await self._response(request, reply, close)
                    fields |= {"status": reply.status, "code": reply.code}
                    fields |= {"request_bytes": len(body), "response_bytes": len(response.body)}
            finally:
                connection.end_answer()
            return response

        return answer

    def _admit(self, request: Request, connection: HttpConnection, scores: bool, public: bool) -> None:
        if public:
            return
        sent = request.headers.get("authorization")
        if not (scores and self._security.permits(sent, Permission.READ)) and not self._security.admits(sent):
            raise RequestError(Code.UNAUTHENTICATED, "this server requires a token")
        if connection.is_spare:
            raise RequestError(Code.UNAVAILABLE, "the server has too many connections; try again later")

    async def _body(self, request: Request) -> bytes:
        """Read the body; raise RequestError if it must not be read."""
        dispatcher = self._dispatcher
        limit = min(dispatcher.max_bytes, dispatcher.max_predict_bytes) if request.method == "POST" else 0
        encoding = body_encoding(request.headers, limit, accept_compressed=self._accept_compressed)
        body = await request.body()
        if encoding == GZIP and body:
            return await dispatcher.in_thread(lambda: decompress_body(body, limit), limit)
        return body

    async def _response(self, request: Request, reply: HttpReply, close: bool) -> Response:
        def encode() -> tuple[bytes, dict[str, str]]:
            text = json.dumps(reply.data, allow_nan=False).encode()
            headers = {"content-type": "application/json", **reply.headers}
            if reply.tensors:
                headers |= {HEADER_LENGTH: str(len(text)), "content-type": "application/octet-stream"}
            body, encoding = compress_body(request.headers, text + reply.tensors)
            return body, headers | encoding

        body, headers = await self._dispatcher.in_thread(encode, reply.size)
        if close:
            headers["connection"] = "close"
        response: Response = _RESPONSES.Response(body, reply.status, headers)
        return response

    def _log_line(self, request: Request) -> contextlib.AbstractContextManager[dict[str, Any]]:
        log = self._dispatcher.access_log
        if log is None:
            return contextlib.nullcontext({})
        path = request.scope["raw_path"].decode("ascii", "replace")
        trace = request.headers.get(TRACEPARENT)
        return log.call("http", f"{request.method} {path}", _peer(request.scope["client"]), trace)

    def _log_malformed(self, peer: Any, message: str) -> None:
        log = self._dispatcher.access_log
        if log is not None:
            with log.call("http", "", _peer(peer), None) as fields:
                fields |= {"status": 400, "code": Code.INVALID_ARGUMENT.name, "reason": message}

    # ---- endpoints

    async def _ready(self, request: Request, body: bytes) -> HttpReply:
        return _readiness(self._dispatcher.ready)

    async def _model_ready(self, request: Request, body: bytes) -> HttpReply:
        return _readiness(model_ready(self._dispatcher, *_selected(request)))

    async def _describe(self, request: Request, body: bytes) -> HttpReply:
        return HttpReply(describe(self._dispatcher, *_selected(request)))

    async def _config(self, request: Request, body: bytes) -> HttpReply:
        return HttpReply(message_to_json(model_config(self._dispatcher, *_selected(request)).config))

    async def _statistics(self, request: Request, body: bytes) -> HttpReply:
        return HttpReply(message_to_json(model_statistics(self._dispatcher, *_selected(request))))

    async def _describe_selected(self, request: Request, body: bytes) -> HttpReply:
        path = TFPath.parse(request.path_params["selected"].split("/"))
        return HttpReply(path.describe(self._dispatcher))

    async def _index(self, request: Request, body: bytes) -> HttpReply:
        def error(problem: str) -> RequestError:
            return self._dispatcher.reject(InputError(f"the body {problem[:200]}"))

        given = parse_json(body or b"{}", error, max_bytes=_MAX_INDEX_BYTES)
        ready = isinstance(given, dict) and given.get("ready") is True
        return HttpReply(message_to_json(repository_index(self._dispatcher, ready_only=ready))["models"])

    async def _infer(self, request: Request, body: bytes) -> HttpReply:
        self._dispatcher.permit(request.headers.get("authorization"), Permission.READ)
        name, version = _selected(request)
        try:
            number = parse_version(version)
        except InputError as error:
            raise self._dispatcher.reject(error) from None
        asked = InferBody(body, request.headers.get(HEADER_LENGTH))
        asked.request = _score_request(request, name, number, body, asked.read)
        scored = await self._dispatcher.predict(asked.request)
        size = max(len(body), _size(scored))
        data, tensors = await self._dispatcher.in_thread(lambda: asked.response(scored), size)
        return HttpReply(data, tensors, size=size)

    async def _predict(self, request: Request, body: bytes) -> HttpReply:
        path = TFPath.parse(request.path_params["selected"].split("/"))
        if path.action != "predict":
            return await _no_such_path(request, body)
        self._dispatcher.permit(request.headers.get("authorization"), Permission.READ)
        asked = TFBody(body)
        scored = await self._dispatcher.predict(
            _score_request(request, path.model, path.version, body, asked.read)
        )
        headers = {MODEL_VERSION: str(scored.version)}
        size = max(len(body), _size(scored))
        data = await self._dispatcher.in_thread(lambda: asked.response(scored), size)
        return HttpReply(data, headers=headers, size=size)


def _selected(request: Request) -> tuple[str, str]:
    """Return the model and the version of a path; "": none."""
    return request.path_params.get("name", ""), request.path_params.get("version", "")


def _score_request(
    request: Request, model: str, version: int | str | None, body: bytes, read: Any
) -> ScoreRequest:
    return ScoreRequest(model, version, len(body), read, reports_missing=MISSING_IDS in request.headers)


def _size(scored: ScoreResult) -> int:
    return sum(array.nbytes for array in scored.outputs.values())


async def _live(request: Request, body: bytes) -> HttpReply:
    return HttpReply({"live": True})


async def _server_metadata(request: Request, body: bytes) -> HttpReply:
    return HttpReply({"name": SERVER, "version": __version__, "extensions": list(EXTENSIONS)})


async def _no_such_path(request: Request, body: bytes) -> HttpReply:
    if request.method not in ("GET", "HEAD", "POST"):
        raise RequestError(Code.UNIMPLEMENTED, f"{request.method[:30]} is not supported; use GET or POST")
    raise RequestError(
        Code.NOT_FOUND,
        "unknown path; see the Open Inference Protocol, version 2, or TF Serving's REST interface",
    )


def _readiness(ready: bool) -> HttpReply:
    return HttpReply({"ready": ready}, status=200 if ready else 503)


def _error_reply(error: RequestError) -> HttpReply:
    status = HTTP_STATUS.get(error.code, 500)
    return HttpReply({"error": str(error)}, status=status, code=error.code.name)


def _nothing() -> Response:
    """Return the response of a connection that was closed."""
    response: Response = _RESPONSES.Response()
    return response


def _peer(address: Any) -> str:
    return f"{address[0]}:{address[1]}" if address else ""
