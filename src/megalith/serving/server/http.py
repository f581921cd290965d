"""HTTP: a server of threads, one for each connection, and what its handlers share.

Connections, requests and waits are bounded: who says nothing, or says it too slowly, is hung up on, and who
comes when all places are taken is told so.
"""

from __future__ import annotations

import io
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any

from megalith import __version__
from megalith.serving.server.security import Security

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("megalith.serving")

MAX_CONNECTIONS = 128
IDLE_SECONDS = 30.0
"""How long a connection may say nothing, in the middle of a request too."""
REQUEST_SECONDS = 120.0
"""How long a request may take to arrive, however busily it does."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HttpServer(ThreadingMixIn, HTTPServer):
    """The server; `start` and `stop` it. handler: answers the requests of a connection."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, handler: type[Handler], security: Security, host: str, port: int) -> None:
        self._context = security.ssl_context()
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._changed = threading.Condition()
        self._busy = 0
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host.strip("[]"), port), handler)
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, name="megalith-http", daemon=True)

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Takes no more connections, and waits `timeout` seconds for answers that are being written."""
        if self._thread.ident is not None:  # `shutdown` waits for a loop that must have begun
            self.shutdown()
            self._thread.join()
        self.server_close()
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
        """Gives a connection a thread, or a bare refusal if there are too many."""
        if not self._places.acquire(blocking=False):
            try:
                if self._context is None:  # TLS would have to shake hands first
                    request.send(_FULL)
            finally:
                self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

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


class Handler(BaseHTTPRequestHandler):
    """The requests of a connection; `do_GET` and the like answer them, by `reply`."""

    protocol_version = "HTTP/1.1"
    server_version = f"megalith/{__version__}"
    sys_version = ""
    # Status line, headers and body would be packets of their own, each waiting for the one before.
    wbufsize = -1
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Reads what comes within its time."""
        super().setup()
        self.rfile.close()
        self._arriving = _Arriving(self.connection)
        self.rfile = io.BufferedReader(self._arriving)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are counted, not logged."""
        log.debug(format, *args)

    def reply(self, status: int, kind: str, body: bytes, **headers: str) -> None:
        """Sends an answer; the next request has a time of its own."""
        self._arriving.begin()
        self.connection.settimeout(IDLE_SECONDS)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


class _Arriving(io.RawIOBase):
    """What a connection sends. Reading raises TimeoutError if it is silent, or a request takes too long."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.begin()

    def begin(self) -> None:
        """Another request may come."""
        self._deadline = time.monotonic() + REQUEST_SECONDS

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Buffer) -> int:
        """As a socket's file does."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(min(left, IDLE_SECONDS))
        return self._connection.recv_into(buffer)
