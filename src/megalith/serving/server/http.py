"""HTTP: a server with one thread for each connection, the base class of its handlers, and bodies.

Connections, requests and waits are limited. A connection that is silent, or sends its request too slowly, is
closed, and at once if a new connection needs its slot:

    state       meaning                                                  may be closed for a new connection
    waiting     idle, in its TLS handshake, or still sending a request   yes, the longest waiting first
    answering   its request is being answered                            no

So clients that connect and stay silent, or send slowly, cannot keep others out. If all connections are being
answered, SPARE_CONNECTIONS more are accepted, which may only ask for the server's health; beyond them a
client gets a 503 without a body.

A compressed body is a few bytes that may become any number of bytes, so by default none is accepted. If the
server accepts them, a body is decompressed up to the limit of a body that is not compressed, and not further.
Responses are compressed for clients that ask for it.
"""

from __future__ import annotations

import gzip
import io
import logging
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from megalith import __version__
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.security import Security

if TYPE_CHECKING:
    from typing_extensions import Buffer


MAX_CONNECTIONS = 128
SPARE_CONNECTIONS = 16


class HttpConnection:
    """A connection of an HTTP server."""

    def __init__(self, client: socket.socket, is_spare: bool) -> None:
        self.client = client
        self.is_spare = is_spare


class HttpConnections:
    """The connections of a server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[HttpConnection, None] = {}  # in the order of their last response
        self._answering: set[HttpConnection] = set()

    def open(self, client: socket.socket) -> HttpConnection | None:
        """Register a new connection, and close the longest waiting one if there are too many."""
        with self._lock:
            count = len(self._waiting) + len(self._answering)
            is_spare = len(self._answering) >= MAX_CONNECTIONS
            if count >= MAX_CONNECTIONS + (SPARE_CONNECTIONS if is_spare else 0):
                oldest = next(iter(self._waiting), None)
                if oldest is None:
                    return None
                del self._waiting[oldest]
                with suppress(OSError):
                    # Ends the wait of its thread. An SSLSocket's own method would change its state too.
                    socket.socket.shutdown(oldest.client, socket.SHUT_RDWR)
            opened = HttpConnection(client, is_spare)
            self._waiting[opened] = None
            return opened

    def begin_answer(self, connection: HttpConnection) -> bool:
        """Note that a request has arrived completely."""
        with self._lock:
            if connection not in self._waiting:
                return False
            del self._waiting[connection]
            self._answering.add(connection)
            return True

    def end_answer(self, connection: HttpConnection) -> None:
        """Note that a response was sent."""
        with self._lock:
            if connection in self._answering:
                self._answering.remove(connection)
                self._waiting[connection] = None

    def close(self, connection: HttpConnection) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._waiting.pop(connection, None)
            self._answering.discard(connection)


GZIP = "gzip"
MIN_GZIP_BYTES = 1024
"""Smaller responses are not compressed."""
_LEVEL = 1
_GZIP_FORMAT = 16 + zlib.MAX_WBITS
_READ_BYTES, _PIECE_BYTES = 1 << 14, 1 << 18
"""Bytes that are decompressed at a time, and the most that become of them."""


def read_body(
    headers: Message, read: Callable[[int], bytes], limit: int, *, accept_compressed: bool
) -> bytes:
    """Read the body of a request."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if headers.get("transfer-encoding"):
        raise RequestError(Code.INVALID_ARGUMENT, "send the body with a Content-Length, not in chunks")
    if encoding != "identity" and not (accept_compressed and encoding == GZIP):
        raise RequestError(
            Code.INVALID_ARGUMENT,
            f"send the body unencoded: {encoding[:30]!r} is not accepted (gzip needs a server started with "
            "--accept-compressed, in Python ServerConfig(accept_compressed=True))",
        )
    lengths = headers.get_all("content-length", ["0"])
    given = lengths[0]
    if len(lengths) > 1 or not given.isascii() or not given.isdecimal() or len(given) > 18:
        raise RequestError(Code.INVALID_ARGUMENT, "Content-Length must be one decimal number")
    if int(given) > limit:
        raise RequestError(Code.OUT_OF_RANGE, f"the body has more than {limit} bytes")
    body = read(int(given))
    if len(body) != int(given):
        raise RequestError(Code.INVALID_ARGUMENT, "the body is shorter than its Content-Length")
    return body if encoding == "identity" or not body else _decompress(body, limit)


def _decompress(body: bytes, limit: int) -> bytes:
    """Decompress a body; its size is found first, so that one that becomes too large takes no memory."""
    try:
        size = _decompressed_size(body, limit)
        return zlib.decompress(body, _GZIP_FORMAT, bufsize=max(1, size))
    except zlib.error:
        raise RequestError(Code.INVALID_ARGUMENT, "the body is not valid gzip") from None


def _decompressed_size(body: bytes, limit: int) -> int:
    stream = zlib.decompressobj(_GZIP_FORMAT)
    size = end = 0
    while not stream.eof:
        data = stream.unconsumed_tail
        if not data:
            data, end = body[end : end + _READ_BYTES], end + _READ_BYTES
        piece = stream.decompress(data, _PIECE_BYTES)
        size += len(piece)
        if size > limit:
            raise RequestError(Code.OUT_OF_RANGE, f"the body has more than {limit} bytes once decompressed")
        if not piece and end >= len(body) and not stream.unconsumed_tail:
            break
    if not stream.eof or stream.unused_data or end < len(body):
        raise RequestError(Code.INVALID_ARGUMENT, "the body is not one complete gzip stream")
    return size


def compress_body(headers: Message, body: bytes) -> tuple[bytes, dict[str, str]]:
    """Compress the body of a response if the client accepts that and it is large enough."""
    if len(body) < MIN_GZIP_BYTES or not _accepts_gzip(headers):
        return body, {}
    return gzip.compress(body, _LEVEL, mtime=0), {"Content-Encoding": GZIP, "Vary": "Accept-Encoding"}


def _accepts_gzip(headers: Message) -> bool:
    accepted: dict[str, bool] = {}
    for part in ",".join(headers.get_all("accept-encoding", [])).lower().split(","):
        name, _, quality = part.partition(";")
        accepted[name.strip()] = quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return accepted.get(GZIP, accepted.get("*", False))  # "*" stands for what is not named


logger = logging.getLogger(__name__)

IDLE_SECONDS = 30.0
"""Seconds after which a silent connection is closed, also within a request."""
STOP_SECONDS = 5.0
"""Seconds in which the loop of a server that stops must end."""
REQUEST_SECONDS = 120.0
"""Seconds in which a request must arrive completely."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HttpServer(ThreadingMixIn, HTTPServer):
    """An HTTP server; `start` and `stop` it."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, handler: type[Handler], security: Security, host: str, port: int, *, reuse_port: bool = False
    ) -> None:
        self._security = security
        self.allow_reuse_port = reuse_port
        security.ssl_context()  # raises if its files cannot be read
        self.connections = HttpConnections()
        self._own = threading.local()
        self._changed = threading.Condition()
        self._busy = 0
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host.strip("[]"), port), handler)
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, name="megalith-http", daemon=True)

    def start(self) -> None:
        """Start to accept connections."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Accept no further connections, and wait for responses in progress."""
        if self._thread.ident is not None:  # `shutdown` would wait forever for a loop that never started
            threading.Thread(target=self.shutdown, daemon=True).start()
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive():
                logger.error("HTTP port %d still accepts connections after %g s", self.port, STOP_SECONDS)
        self.server_close()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._busy, timeout):
                logger.error("HTTP port %d: %d responses end with this process", self.port, self._busy)

    @property
    def connection(self) -> HttpConnection:
        """The connection that this thread serves."""
        opened: HttpConnection = self._own.connection
        return opened

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Mark a request, which has arrived completely, as in progress."""
        if not self.connections.begin_answer(self.connection):
            raise ConnectionAbortedError("closed for another connection")
        with self._changed:
            self._busy += 1
        try:
            yield
        finally:
            self.connections.end_answer(self.connection)
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or send a 503 without a body if there is no room for it."""
        opened = self.connections.open(request)
        if opened is None:
            try:
                if not self._security.secure:  # TLS would need a handshake first
                    request.send(_FULL)
            finally:
                self.shutdown_request(request)
            return
        try:
            super().process_request(cast(Any, opened), client_address)  # passed to process_request_thread
        except BaseException:
            self.connections.close(opened)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection; the TLS handshake happens here, so that a slow client delays no other."""
        opened: HttpConnection = request
        client = opened.client
        try:
            client.settimeout(IDLE_SECONDS)
            context = self._security.ssl_context()
            if context is not None:
                try:
                    client = opened.client = context.wrap_socket(
                        client, server_side=True, do_handshake_on_connect=False
                    )
                    client.do_handshake()
                except (OSError, ssl.SSLError):
                    self.shutdown_request(client)
                    return
            self._own.connection = opened
            super().process_request_thread(client, client_address)
        finally:
            self.connections.close(opened)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a broken connection, for debugging only."""
        logger.debug("a connection broke", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """Handles the requests of a connection; subclasses define `do_GET` and others, which call `reply`."""

    protocol_version = "HTTP/1.1"
    server_version = f"megalith/{__version__}"
    sys_version = ""
    # Unbuffered, the status line, headers and body would be separate packets that wait for each other.
    wbufsize = -1
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Replace the reader by one with deadlines."""
        super().setup()
        self.rfile.close()
        self._reader = _DeadlineReader(self.connection)
        self.rfile = io.BufferedReader(self._reader)

    def handle_expect_100(self) -> bool:
        """Answer `Expect: 100-continue`, which clients such as curl await before a large body."""
        answered = super().handle_expect_100()
        self.wfile.flush()
        return answered

    def log_message(self, format: str, *args: Any) -> None:
        """Log for debugging only: requests are counted instead."""
        logger.debug(format, *args)

    def reply(
        self, status: int, kind: str, body: bytes, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Send a response, and start the deadline of the next request."""
        self._reader.begin()
        self.connection.settimeout(IDLE_SECONDS)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()


class _DeadlineReader(io.RawIOBase):
    """Reads from a connection; raises TimeoutError if it is silent, or if a request takes too long."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.begin()

    def begin(self) -> None:
        """Start the deadline of the next request."""
        self._deadline = time.monotonic() + REQUEST_SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        """Read into a buffer, as the file of a socket does."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(min(left, IDLE_SECONDS))
        return self._connection.recv_into(buffer)
