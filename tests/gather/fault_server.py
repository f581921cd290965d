"""An object server for tests: the part of S3 that gather needs, on loopback, with faults on order.

Objects live in memory. Latency, bandwidth and faults are given per object, or drawn from a seed alone, so a
run can be repeated. Every request is logged: who asked for what, what was answered, whether all of it was
sent.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from megalith.storage.object_store import ObjectStore, open_object_store

FaultKind = Literal["status", "reset", "truncate", "stall", "replace", "corrupt"]
_PIECE = 16384


@dataclass(frozen=True)
class ServerFault:
    """Something that goes wrong with an object, for its next `times` requests of this method.

    status: the answer is `code`. reset: the connection ends before an answer. truncate: it ends amid the
    body. stall: no answer until the client gives up. replace: the object is written anew first. corrupt: a
    byte of the body is wrong.
    """

    kind: FaultKind
    method: str = "GET"
    times: int = 1
    code: int = 503


@dataclass(frozen=True)
class Request:
    """A line of the log. complete: the answer went out whole."""

    method: str
    key: str
    status: int
    bytes: int
    complete: bool


@dataclass(frozen=True)
class StoredObject:
    """An object of the server."""

    data: bytes
    etag: str
    last_modified: datetime


@dataclass
class _State:
    objects: dict[str, StoredObject] = field(default_factory=dict)
    faults: dict[str, list[ServerFault]] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    log: list[Request] = field(default_factory=list)
    writes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)


class FaultServer:
    """Serves one bucket on a free port of loopback, from `with` to its end.

    latency: seconds before each answer. bytes_per_second: of each connection; None is as fast as it goes.
    """

    bucket = "gather"

    def __init__(self, *, latency: float = 0.0, bytes_per_second: float | None = None) -> None:
        self.latency = latency
        self.bytes_per_second = bytes_per_second
        self.state = _State()
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> FaultServer:
        outer = self

        class Handler(_Handler):
            owner = outer

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.state.closing.set()
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(10)

    @property
    def endpoint(self) -> str:
        """Its address: http://127.0.0.1:PORT."""
        if self._server is None:
            raise RuntimeError("the server is not running: use it in a `with`")
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def open(self, prefix: str = "") -> ObjectStore:
        """A store of the bucket."""
        return open_object_store(f"s3://{self.bucket}/{prefix}", endpoint=self.endpoint)

    @property
    def log(self) -> list[Request]:
        """All requests so far."""
        with self.state.lock:
            return list(self.state.log)

    def downloads(self) -> dict[str, int]:
        """How often each object went out whole."""
        counts: dict[str, int] = {}
        for request in self.log:
            if request.method == "GET" and request.status == 200 and request.complete:
                counts[request.key] = counts.get(request.key, 0) + 1
        return counts

    def put(self, key: str, data: bytes, last_modified: datetime | None = None) -> None:
        """Stores an object without a request."""
        with self.state.lock:
            _store(self.state, key, data, last_modified)

    def fail(self, key: str, *faults: ServerFault) -> None:
        """Orders faults for an object, in this sequence per method."""
        with self.state.lock:
            self.state.faults.setdefault(key, []).extend(faults)


def _store(state: _State, key: str, data: bytes, last_modified: datetime | None = None) -> StoredObject:
    state.writes += 1
    etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}-{state.writes}"'
    made = StoredObject(data, etag, last_modified or datetime.now(UTC))
    state.objects[key] = made
    return made


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no error of the server."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: FaultServer

    def log_message(self, format: str, *args: Any) -> None:
        """The log is kept as data."""

    def do_GET(self) -> None:
        """An object, a range of it, or a listing."""
        key, query = self._target()
        if "list-type" in query:
            self._answer_xml(_listing(self.owner.state, query.get("prefix", [""])[0]))
        else:
            self._object(key, body=True)

    def do_HEAD(self) -> None:
        """An object's size, tag and time."""
        self._object(self._target()[0], body=False)

    def do_PUT(self) -> None:
        """A new object, or a part of one."""
        key, query = self._target()
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._faulty(key, "PUT") is None:
            return
        state = self.owner.state
        if "uploadId" in query:
            with state.lock:
                parts = state.uploads.get(query["uploadId"][0])
                if parts is not None:
                    parts[int(query["partNumber"][0])] = data
            self._answer(200 if parts is not None else 404, {"ETag": f'"{len(data)}"'})
            return
        with state.lock:
            taken = self.headers.get("If-None-Match") == "*" and key in state.objects
            made = None if taken else _store(state, key, data)
        self._answer(412 if made is None else 200, {} if made is None else {"ETag": made.etag})

    def do_POST(self) -> None:
        """Start and end of an upload in parts."""
        key, query = self._target()
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        state = self.owner.state
        if "uploads" in query:
            with state.lock:
                state.writes += 1
                upload = f"upload-{state.writes}"
                state.uploads[upload] = {}
            tags = f"<Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
            self._answer_xml(f"<InitiateMultipartUploadResult>{tags}</InitiateMultipartUploadResult>")
            return
        with state.lock:
            parts = state.uploads.pop(query.get("uploadId", [""])[0], None)
            whole = None if parts is None else b"".join(parts[number] for number in sorted(parts))
            made = None if whole is None else _store(state, key, whole)
        if made is None:
            self._answer(404, {})
        else:
            tags = f"<Key>{escape(key)}</Key><ETag>{escape(made.etag)}</ETag>"
            self._answer_xml(f"<CompleteMultipartUploadResult>{tags}</CompleteMultipartUploadResult>")

    def do_DELETE(self) -> None:
        """Removes an object, or gives up an upload."""
        key, query = self._target()
        with self.owner.state.lock:
            if "uploadId" in query:
                self.owner.state.uploads.pop(query["uploadId"][0], None)
            else:
                self.owner.state.objects.pop(key, None)
        self._answer(204, {})

    # ---- answers

    def _target(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        _, _, key = unquote(parts.path).lstrip("/").partition("/")
        return key, parse_qs(parts.query, keep_blank_values=True)

    def _faulty(self, key: str, method: str) -> ServerFault | Literal["none"] | None:
        """The fault of this request: "none", one that changes the answer, or None if it is over already."""
        state = self.owner.state
        if self.owner.latency:
            state.closing.wait(self.owner.latency)
        fault = self._next_fault(key, method)
        if fault is None:
            return "none"
        if fault.kind == "status":
            self._answer(fault.code, {})
            return None
        if fault.kind in ("reset", "stall"):
            if fault.kind == "stall":
                state.closing.wait()
            self._log(Request(method, key, 0, 0, complete=False))
            self._hang_up()
            return None
        if fault.kind == "replace":
            with state.lock:
                old = state.objects.get(key)
                if old is not None:
                    _store(state, key, old.data, old.last_modified)
            return "none"
        return fault

    def _next_fault(self, key: str, method: str) -> ServerFault | None:
        with self.owner.state.lock:
            faults = self.owner.state.faults.get(key, [])
            for number, fault in enumerate(faults):
                if fault.method in (method, "*"):
                    if fault.times > 1:
                        faults[number] = replace(fault, times=fault.times - 1)
                    else:
                        del faults[number]
                    return fault
        return None

    def _object(self, key: str, *, body: bool) -> None:
        fault = self._faulty(key, self.command)
        if fault is None:
            return
        with self.owner.state.lock:
            found = self.owner.state.objects.get(key)
        if found is None:
            self._answer(404, {})
            return
        if self.headers.get("If-Match", found.etag) not in (found.etag, "*"):
            self._answer(412, {})
            return
        start, stop = _range(self.headers.get("Range"), len(found.data))
        if start >= stop and self.headers.get("Range"):
            self._answer(416, {})
            return
        data = found.data[start:stop]
        headers = {
            "ETag": found.etag,
            "Last-Modified": format_datetime(found.last_modified, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        status = 200
        if self.headers.get("Range"):
            status = 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(found.data)}"
        truncated = isinstance(fault, ServerFault) and fault.kind == "truncate"
        if isinstance(fault, ServerFault) and fault.kind == "corrupt" and data:
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
        self._answer(status, headers, data, body=body, truncated=truncated)

    def _answer_xml(self, text: str) -> None:
        self._answer(200, {"Content-Type": "application/xml"}, text.encode())

    def _answer(
        self,
        status: int,
        headers: Mapping[str, str],
        data: bytes = b"",
        *,
        body: bool = True,
        truncated: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        going = data[: len(data) // 2] if truncated else data if body else b""
        request = Request(self.command, self._target()[0], status, len(going), complete=not truncated)
        # Logged before the last byte goes out: who has an answer finds it in the log.
        if not going:
            self._log(request)
        self.end_headers()
        self._send(going, request)
        if truncated:
            self._hang_up()

    def _send(self, data: bytes, request: Request) -> None:
        """Sends at the server's speed, as far as the client listens."""
        rate, sent = self.owner.bytes_per_second, 0
        while sent < len(data):
            piece = data[sent : sent + _PIECE]
            if rate is not None and self.owner.state.closing.wait(len(piece) / rate):
                self._hang_up()
                return
            if sent + len(piece) == len(data):
                self._log(request)
            try:
                self.wfile.write(piece)
            except OSError:
                if sent + len(piece) < len(data):
                    self._log(replace(request, bytes=sent, complete=False))
                self.close_connection = True
                return
            sent += len(piece)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    def _log(self, request: Request) -> None:
        with self.owner.state.lock:
            self.owner.state.log.append(request)


def _range(header: str | None, size: int) -> tuple[int, int]:
    if header is None:
        return 0, size
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, size - int(last)), size
    return min(int(first), size), min(int(last) + 1 if last else size, size)


def _listing(state: _State, prefix: str) -> str:
    with state.lock:
        found = sorted((key, made) for key, made in state.objects.items() if key.startswith(prefix))
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{len(made.data)}</Size><ETag>{escape(made.etag)}</ETag>"
        f"<LastModified>{made.last_modified.strftime('%Y-%m-%dT%H:%M:%S.000Z')}</LastModified></Contents>"
        for key, made in found
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
