"""The Open Inference Protocol, version 2, as REST: JSON, and tensors as bytes behind it where asked.

An HTTP server of threads, one for each connection. Connections, bodies and waits are bounded; a request
that breaks a bound gets a status and the connection is closed.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import unquote, urlsplit

from torch import Tensor

from megalith import __version__
from megalith.errors import InputError
from megalith.serving.proto.infer_tensors import BYTES, from_raw, from_values
from megalith.serving.proto.limits import MAX_RANK, POINTER_BYTES
from megalith.serving.proto.tensors import Strings
from megalith.serving.server.dispatch import Dispatcher
from megalith.serving.server.oip_service import EXTENSIONS, SERVER, describe, model_ready, parse_version
from megalith.serving.server.security import Security
from megalith.serving.server.served import Array
from megalith.serving.server.status import HTTP_STATUS, Code, RequestError

log = logging.getLogger("megalith.serving")

HEADER_LENGTH = "Inference-Header-Content-Length"
"""How many bytes of a body are JSON; tensors follow."""
MAX_CONNECTIONS = 128
IDLE_SECONDS = 30.0
"""How long a connection may say nothing, in the middle of a request too."""
Reply = tuple[int, dict[str, Any], bytes]
"""Status, JSON, and the bytes of tensors behind it."""


class RestServer(ThreadingMixIn, HTTPServer):
    """The server; `start` and `stop` it."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, dispatcher: Dispatcher, security: Security, host: str, port: int) -> None:
        self.dispatcher = dispatcher
        self.security = security
        self._context = security.ssl_context()
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._changed = threading.Condition()
        self._busy = 0
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host.strip("[]"), port), _Handler)
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, name="megalith-rest", daemon=True)

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Takes no more connections, and waits `timeout` seconds for answers that are being written."""
        self.shutdown()
        self.server_close()
        self._thread.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, timeout)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While a request is read and answered."""
        with self._changed:
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Gives a connection a thread, or closes it if there are too many."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a connection; shakes hands here, so that a slow client holds up no other."""
        try:
            request.settimeout(IDLE_SECONDS)
            if self._context is not None:
                try:
                    request = self._context.wrap_socket(request, server_side=True)
                except (OSError, ssl.SSLError):
                    self.shutdown_request(request)
                    return
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is its client's business."""
        log.debug("a connection ended", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = f"megalith/{__version__}"
    sys_version = ""
    # Status line, headers and body would be packets of their own, each waiting for the one before.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: RestServer

    def do_GET(self) -> None:
        with self.server.answering():
            self._answer(self._get)

    def do_POST(self) -> None:
        with self.server.answering():
            self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def _answer(self, method: Callable[[list[str], bytes], Reply]) -> None:
        status: int
        try:
            body = self._body()
            parts = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
            open_to_all = parts[:2] == ["v2", "health"]
            if not open_to_all and not self.server.security.admits(self.headers.get("authorization")):
                raise RequestError(Code.UNAUTHENTICATED, "this server asks for a token")
            status, reply, tensors = method(parts, body)
        except RequestError as error:
            status, reply, tensors = HTTP_STATUS.get(error.code, 500), {"error": str(error)}, b""
        if self.server.dispatcher.closing:
            self.close_connection = True
        text = json.dumps(reply, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if tensors else "application/json")
        if tensors:
            self.send_header(HEADER_LENGTH, str(len(text)))
        self.send_header("Content-Length", str(len(text) + len(tensors)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(text + tensors)
        self.wfile.flush()

    def _body(self) -> bytes:
        """The request's body; raises RequestError, and ends the connection, if it is not to be read."""
        close, self.close_connection = self.close_connection, True
        if (
            self.headers.get("transfer-encoding")
            or self.headers.get("content-encoding", "identity") != "identity"
        ):
            raise RequestError(Code.INVALID_ARGUMENT, "send the body as it is, with a Content-Length")
        lengths = self.headers.get_all("content-length", ["0"])
        given = lengths[0]
        if len(lengths) > 1 or not given.isascii() or not given.isdecimal() or len(given) > 18:
            raise RequestError(Code.INVALID_ARGUMENT, "Content-Length is no whole number")
        if int(given) > self.server.dispatcher.max_bytes:
            limit = self.server.dispatcher.max_bytes
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
        try:
            number = parse_version(version)
            request, tensors = _split(body, self.headers.get(HEADER_LENGTH))
            wanted = _outputs(request)
        except InputError as error:
            raise dispatcher.refused(error) from None
        scored = dispatcher.predict(
            name,
            number,
            lambda reader: reader.read(_inputs(request, tensors, reader.max_bytes)),
            outputs=list(wanted),
        )
        given = _parameters(request).get("binary_data_output") is True
        reply: dict[str, Any] = {"model_name": name, "model_version": str(scored.version)}
        if isinstance(request.get("id"), str):
            reply["id"] = request["id"]
        outputs, binary = [], []
        for output, array in scored.outputs.items():
            described: dict[str, Any] = {"name": output, "datatype": "FP32", "shape": list(array.shape)}
            if wanted.get(output, given):
                described["parameters"] = {"binary_data_size": array.nbytes}
                binary.append(array.tobytes())
            else:
                described["data"] = _numbers(array)
            outputs.append(described)
        return 200, {**reply, "outputs": outputs}, b"".join(binary)


def _ready(ready: bool) -> Reply:
    return 200 if ready else 503, {"ready": ready}, b""


def _no_such_path() -> RequestError:
    return RequestError(Code.NOT_FOUND, "there is no such path; see the Open Inference Protocol, version 2")


def _split(body: bytes, header: str | None) -> tuple[dict[str, Any], bytes]:
    """The JSON of a body, and the bytes of tensors behind it."""
    length = len(body)
    if header is not None:
        if not header.isascii() or not header.isdecimal() or len(header) > 18 or int(header) > length:
            raise InputError(f"{HEADER_LENGTH} must be at most the body's {length} bytes")
        length = int(header)
    try:
        request = json.loads(body[:length], parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise InputError('the body must be a JSON object with "inputs", a list')
    return request, body[length:]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = given.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InputError("parameters must be a JSON object")
    return parameters


def _outputs(request: Mapping[str, Any]) -> dict[str, bool]:
    """The outputs wanted, and whether as bytes."""
    default = _parameters(request).get("binary_data_output") is True
    outputs = request.get("outputs", [])
    if not isinstance(outputs, list):
        raise InputError("outputs must be a list")
    wanted = {}
    for output in outputs:
        if not isinstance(output, dict) or not isinstance(output.get("name"), str):
            raise InputError("an output must be a JSON object with a name")
        wanted[output["name"]] = _parameters(output).get("binary_data", default) is True
    return wanted


def _inputs(request: Mapping[str, Any], tensors: bytes, max_bytes: int) -> dict[str, Tensor | Strings]:
    read: dict[str, Tensor | Strings] = {}
    at, left = 0, max_bytes
    for given in request["inputs"]:
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            raise InputError("an input must be a JSON object with a name")
        name = f"input {given['name'][:100]!r}"
        datatype, shape = given.get("datatype"), given.get("shape")
        if not isinstance(datatype, str) or not isinstance(shape, list) or not _whole(shape):
            raise InputError(f"{name} needs a datatype and a shape, a list of whole numbers")
        if given["name"] in read:
            raise InputError(f"{name} is there twice")
        size = _parameters(given).get("binary_data_size")
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(tensors) - at or "data" in given:
                raise InputError(f"{name}: binary_data_size {str(size)[:30]} does not fit the body")
            value = from_raw(datatype, shape, tensors[at : at + size], name=name, max_bytes=left)
            at += size
        else:
            values = _flat(given.get("data"), name)
            if datatype == BYTES:
                values = [value.encode() if isinstance(value, str) else value for value in values]
            value = from_values(datatype, shape, values, name=name, max_bytes=left)
        read[given["name"]] = value
        left -= value.nbytes if isinstance(value, Tensor) else value.size * POINTER_BYTES
    if at != len(tensors):
        raise InputError(f"{len(tensors) - at} bytes behind the last tensor")
    return read


def _whole(sizes: list[Any]) -> bool:
    return all(type(size) is int for size in sizes)


def _flat(data: Any, name: str) -> list[Any]:
    """Values in row-major order, from a flat list or lists in lists."""
    if not isinstance(data, list):
        raise InputError(f"{name} needs data, a list")
    values: list[Any] = data
    for _ in range(MAX_RANK):
        if not any(isinstance(item, list) for item in values):
            return values
        if not all(isinstance(item, list) for item in values):
            raise InputError(f"{name}: data mixes lists and values")
        values = [value for item in values for value in item]
    raise InputError(f"{name}: data is nested too deeply")


def _numbers(array: Array) -> list[float | None]:
    """Values as JSON has them; it has no name for what is not finite."""
    return [value if math.isfinite(value) else None for value in array.tolist()]
