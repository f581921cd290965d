"""HTTP: a server with one thread for each connection, and the base class of its handlers.

Connections, requests and waits are limited. A connection that is silent, or sends its request too slowly, is
closed, and at once if others need its place (http_connections.py). If all are being answered, a client gets a
503 without a body.
"""

from __future__ import annotations

import io
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from megalith import __version__
from megalith.serving.server.http_connections import HttpConnection, HttpConnections
from megalith.serving.server.security import Security

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

IDLE_SECONDS = 30.0
"""Seconds after which a silent connection is closed, also within a request."""
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
            self.shutdown()
            self._thread.join()
        self.server_close()
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, timeout)

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
