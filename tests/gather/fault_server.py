"""An object server for tests: GET, HEAD, PUT and listings of S3 on loopback, with faults on order.

Objects live in memory. Faults are given per object, so a run can be repeated. Every request is logged: who
asked for what, what was answered, whether all of it was sent. Deletions and uploads in parts are tested with
moto (`tests/storage/s3_server.py`).
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from megalith.storage.object_store import ObjectStore, open_object_store

FaultKind = Literal["status", "reset", "truncate", "stall", "drip", "replace"]
_PIECE = 16384


@dataclass(frozen=True)
class ServerFault:
    """Something that goes wrong with an object, for its next `times` requests of this method.

    status: the answer is `code`. reset: the connection ends before an answer. truncate: it ends amid the
    body. stall: no answer until the server ends. drip: one byte of the body, and no more. replace: the object
    is written again first.
    """

    kind: FaultKind
    method: str = "GET"
    times: int = 1
    code: int = 503


@dataclass(frozen=True)
class Request:
    """A line of the log. complete: the answer went out whole. authorization: how it was signed."""

    method: str
    key: str
    status: int
    bytes: int
    complete: bool
    authorization: str


@dataclass(frozen=True)
class StoredObject:
    data: bytes
    etag: str
    last_modified: datetime


class FaultServer:
    """Serves one bucket on a free port of loopback, from `with` to its end.

    bytes_per_second: of each connection; None is as fast as it goes.
    """

    bucket = "gather"

    def __init__(self, *, bytes_per_second: float | None = None) -> None:
        self.bytes_per_second = bytes_per_second
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.objects: dict[str, StoredObject] = {}
        self._faults: dict[str, list[ServerFault]] = {}
        self._log: list[Request] = []
        self._writes = 0
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultServer:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def open(self, prefix: str = "") -> ObjectStore:
        """A store of the bucket."""
        return open_object_store(f"s3://{self.bucket}/{prefix}", endpoint=self.endpoint)

    @property
    def log(self) -> list[Request]:
        """All requests so far."""
        with self.lock:
            return list(self._log)

    def note(self, request: Request) -> None:
        with self.lock:
            self._log.append(request)

    def downloads(self) -> dict[str, int]:
        """How often each object went out whole."""
        counts: dict[str, int] = {}
        for request in self.log:
            if request.method == "GET" and request.status == 200 and request.complete:
                counts[request.key] = counts.get(request.key, 0) + 1
        return counts

    def put(
        self, key: str, data: bytes, last_modified: datetime | None = None, *, create: bool = False
    ) -> StoredObject | None:
        """Stores an object; with `create` not over another one."""
        with self.lock:
            if create and key in self.objects:
                return None
            self._writes += 1
            etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}-{self._writes}"'
            made = self.objects[key] = StoredObject(data, etag, last_modified or datetime.now(UTC))
            return made

    def fail(self, key: str, *faults: ServerFault) -> None:
        """Orders faults for an object, in this sequence per method."""
        with self.lock:
            self._faults.setdefault(key, []).extend(faults)

    def next_fault(self, key: str, method: str) -> ServerFault | None:
        with self.lock:
            faults = self._faults.get(key, [])
            for number, fault in enumerate(faults):
                if fault.method in (method, "*"):
                    left = [replace(fault, times=fault.times - 1)] if fault.times > 1 else []
                    faults[number : number + 1] = left
                    return fault
        return None


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
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            self._answer(200, {}, _listing(self.owner.objects, query.get("prefix", [""])[0]))
        else:
            self._object(body=True)

    def do_HEAD(self) -> None:
        self._object(body=False)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._is_over(self._fault()):
            return
        made = self.owner.put(self._key(), data, create=self.headers.get("If-None-Match") == "*")
        self._answer(412 if made is None else 200, {} if made is None else {"ETag": made.etag})

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    def _request(self, status: int, size: int, *, complete: bool) -> Request:
        return Request(
            self.command, self._key(), status, size, complete, self.headers.get("Authorization", "")
        )

    def _fault(self) -> FaultKind | int | None:
        """What goes wrong with this request: a kind of fault, or the status to answer."""
        fault = self.owner.next_fault(self._key(), self.command)
        if fault is None:
            return None
        return fault.code if fault.kind == "status" else fault.kind

    def _is_over(self, fault: FaultKind | int | None) -> bool:
        """Whether a fault has answered or ended the request."""
        if isinstance(fault, int):
            self._answer(fault, {})
        elif fault in ("reset", "stall"):
            if fault == "stall":
                self.owner.closing.wait()
            self.owner.note(self._request(0, 0, complete=False))
            self._hang_up()
        else:
            return False
        return True

    def _object(self, *, body: bool) -> None:
        key, fault = self._key(), self._fault()
        if self._is_over(fault):
            return
        found = self.owner.objects.get(key)
        if found is not None and fault == "replace":
            found = self.owner.put(key, found.data, found.last_modified)
        if found is None:
            self._answer(404, {})
            return
        if self.headers.get("If-Match", found.etag) not in (found.etag, "*"):
            self._answer(412, {})
            return
        wanted = self.headers.get("Range")
        start, stop = _range(wanted, len(found.data))
        if start >= stop and wanted:
            self._answer(416, {})
            return
        data = found.data[start:stop]
        headers = {
            "ETag": found.etag,
            "Last-Modified": format_datetime(found.last_modified, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(found.data)}"
        self._answer(206 if wanted else 200, headers, data, body=body, fault=fault)

    def _answer(
        self,
        status: int,
        headers: dict[str, str],
        data: bytes = b"",
        *,
        body: bool = True,
        fault: Any = None,
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        part = {"truncate": len(data) // 2, "drip": 1}.get(fault, len(data) if body else 0)
        going = data[:part]
        request = self._request(status, len(going), complete=part == len(data) or not body)
        # Logged before the last byte goes out: who has an answer finds it in the log.
        if not going:
            self.owner.note(request)
        self.end_headers()
        self._send(going, request)
        if fault == "drip":
            self.owner.closing.wait()
        if fault in ("truncate", "drip"):
            self._hang_up()

    def _send(self, data: bytes, request: Request) -> None:
        """Sends at the server's speed, as far as the client listens."""
        rate, sent = self.owner.bytes_per_second, 0
        while sent < len(data):
            piece = data[sent : sent + _PIECE]
            if rate is not None and self.owner.closing.wait(len(piece) / rate):
                self._hang_up()
                return
            is_last = sent + len(piece) == len(data)
            if is_last:
                self.owner.note(request)
            try:
                self.wfile.write(piece)
            except OSError:
                if not is_last:
                    self.owner.note(replace(request, bytes=sent, complete=False))
                self.close_connection = True
                return
            sent += len(piece)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()


def _range(header: str | None, size: int) -> tuple[int, int]:
    if header is None:
        return 0, size
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, size - int(last)), size
    return min(int(first), size), min(int(last) + 1 if last else size, size)


def _listing(objects: dict[str, StoredObject], prefix: str) -> bytes:
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{len(made.data)}</Size><ETag>{escape(made.etag)}</ETag>"
        f"<LastModified>{made.last_modified.strftime('%Y-%m-%dT%H:%M:%S.000Z')}</LastModified></Contents>"
        for key, made in sorted(objects.items())
        if key.startswith(prefix)
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>".encode()
