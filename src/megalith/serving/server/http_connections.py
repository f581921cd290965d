"""HTTP connections: how many a server has, and which one is closed for a new one.

    state       meaning                                                  may be closed for a new connection
    waiting     idle, in its TLS handshake, or still sending a request   yes, the longest waiting first
    answering   its request is being answered                            no

So clients that connect and stay silent, or send slowly, cannot keep others out. If all connections are being
answered, SPARE_CONNECTIONS more are accepted, which may only ask for the server's health.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

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
