"""The event loop of a process's servers, HTTP connections on it with uvicorn, and bodies.

gRPC, REST and metrics share one event loop, which a daemon thread runs. uvicorn parses HTTP and limits
headers; this module adds what it leaves to a proxy: a limit of connections, and deadlines. A connection that
is silent, sends its request too slowly or does not read its response is closed, and at once if a new
connection needs its slot:

    state       meaning                                                     may be closed for a new connection
    waiting     idle, in its TLS handshake, still sending a request, or     yes, the longest waiting first
                receiving its response
    answering   its request is being answered                               no

So clients that connect and stay silent, or send slowly, cannot keep others out. If all connections are being
answered, SPARE_CONNECTIONS more are accepted, which may only ask for the server's health; beyond them a
client gets a 503 without a body.

A compressed body is a few bytes that may become any number of bytes, so by default none is accepted. If the
server accepts them, a body is decompressed up to the limit of a body that is not compressed, and not further.
Responses are compressed for clients that ask for it.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import gzip
import logging
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from megalith import __version__
from megalith.errors import RemoteError
from megalith.library import import_extra
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.security import Security

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
uvicorn: Any = import_extra("uvicorn", "REST and metrics need uvicorn", "serve")
_H11: Any = import_extra("uvicorn.protocols.http.h11_impl", "REST and metrics need uvicorn", "serve")

MAX_CONNECTIONS = 128
SPARE_CONNECTIONS = 16
IDLE_SECONDS = 30.0
"""Seconds after which a connection without a request is closed."""
REQUEST_SECONDS = 60.0
"""Seconds in which a request must arrive completely, and in which its response must be read."""
CHECK_SECONDS = 1.0
"""Seconds between two checks of these deadlines."""
BACKLOG = 128
START_SECONDS = 30.0
"""Seconds in which a port must be open."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


# ---- the event loop


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all servers of this process."""
    with _starting:  # threads that ask at the same time must get the same loop
        return _loop_of(os.getpid())


_starting = threading.Lock()


@functools.cache
def _loop_of(process: int) -> asyncio.AbstractEventLoop:  # a forked process needs its own
    loop: asyncio.AbstractEventLoop = import_extra("uvloop", "serving needs uvloop", "serve").new_event_loop()
    aio = import_extra("grpc.aio", "serving needs grpcio", "serve")

    def run() -> None:
        asyncio.set_event_loop(loop)
        # gRPC has one poller for all loops of a process. Without this reference it would end with the last
        # server, in whatever thread collects that server. It asks for the loop of the thread that calls it,
        # and a caller's thread may have none any more (after asyncio.run).
        aio.init_grpc_aio()
        loop.run_forever()

    thread = threading.Thread(target=run, name="megalith-loop", daemon=True)
    thread.start()

    def end() -> None:
        if os.getpid() == process:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(1.0)

    atexit.register(end)
    return loop


def run_on_loop(work: Coroutine[Any, Any, Result], timeout: float, what: str) -> Result:
    """Run a coroutine on the event loop and wait for it; raise RemoteError if it takes too long."""
    future = asyncio.run_coroutine_threadsafe(work, event_loop())
    try:
        return future.result(timeout)
    except TimeoutError:
        if future.done():
            raise
        future.cancel()
        raise RemoteError(f"{what} has not ended after {timeout:g} s", code="DEADLINE_EXCEEDED") from None


# ---- connections


class HttpConnection(_H11.H11Protocol):  # type: ignore[misc]
    """A connection: uvicorn's protocol, and the states above."""

    def __init__(self, server: HttpServer, client: socket.socket, config: Any, state: Any) -> None:
        super().__init__(config, state, {"connection": self})
        self.logger, self.access_log = logger, False
        self.is_spare = False
        self._server, self._client = server, client

    def connection_lost(self, error: Exception | None) -> None:
        self._server.forget(self)
        super().connection_lost(error)

    def send_400_response(self, message: str) -> None:
        """Refuse what is not HTTP."""
        self._server.on_malformed(self.client, message)
        super().send_400_response(message)

    def abort(self) -> None:
        """End the connection, whatever it is doing."""
        if self.transport is not None:
            self.transport.abort()
        else:  # in its TLS handshake, or before it
            with suppress(OSError):
                self._client.shutdown(socket.SHUT_RDWR)
            self._client.close()

    def begin_answer(self) -> bool:
        """Note that a request has arrived completely; return False if the connection was closed."""
        return self._server.begin_answer(self)

    def end_answer(self) -> None:
        """Note that the response is sent next."""
        self._server.end_answer(self)


class HttpServer:
    """An HTTP server of an ASGI application on the event loop; `start` and `stop` it."""

    def __init__(
        self,
        app: Callable[..., Any],
        security: Security,
        host: str,
        port: int,
        *,
        reuse_port: bool = False,
        on_malformed: Callable[[Any, str], None] = lambda peer, message: None,
    ) -> None:
        self._security, self.on_malformed = security, on_malformed
        security.ssl_context()  # raises if its files cannot be read
        self._waiting: dict[HttpConnection, float] = {}
        """Connections and their deadlines, in this order."""
        self._answering: set[HttpConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: asyncio.Task[None] | None = None
        self._listener = _listener(host.strip("[]"), port, reuse_port)
        self.port: int = self._listener.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_H11.H11Protocol,
                loop="none",
                interface="asgi3",
                lifespan="off",
                ws="none",
                proxy_headers=False,
                server_header=False,
                headers=[("server", f"megalith/{__version__}")],
                timeout_keep_alive=IDLE_SECONDS,
                log_config=None,
            )
        )

    def start(self) -> None:
        """Start to accept connections."""
        run_on_loop(self._start(), START_SECONDS, f"opening HTTP port {self.port}")

    async def _start(self) -> None:
        self._server.config.load()
        self._serving = asyncio.create_task(self._server.serve([]))  # the connections are accepted here
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._begin(self._accept())
        self._begin(self._check_deadlines())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # too many open files
                logger.error("HTTP port %d cannot accept a connection: %s", self.port, error)
                await asyncio.sleep(CHECK_SECONDS)
                continue
            connection = HttpConnection(self, client, self._server.config, self._server.server_state)
            if self._open(connection):
                self._begin(self._connect(connection, client))
                continue
            if not self._security.secure:  # TLS would need a handshake first
                with suppress(OSError):
                    client.send(_FULL)
            client.close()

    async def _connect(self, connection: HttpConnection, client: socket.socket) -> None:
        context = self._security.ssl_context()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                client,
                ssl=context,
                ssl_handshake_timeout=None if context is None else REQUEST_SECONDS,
            )
        except OSError:  # of the TLS handshake; an SSLError is an OSError
            self.forget(connection)
            client.close()

    def stop(self, timeout: float) -> None:
        """Accept no further connections, wait for responses in progress, and close all connections."""
        if self._serving is None:
            self._listener.close()
            return
        try:
            run_on_loop(self._stop(timeout), timeout + START_SECONDS, f"closing HTTP port {self.port}")
        except RemoteError as error:
            logger.error("%s; its connections end with this process", error)

    async def _stop(self, timeout: float) -> None:
        assert self._serving is not None
        for task in [*self._tasks]:
            task.cancel()
        self._listener.close()
        for connection in [*self._waiting]:
            if connection.transport is None:  # uvicorn does not know those in their TLS handshake
                connection.abort()
        self._server.config.timeout_graceful_shutdown = timeout
        self._server.should_exit = True
        try:
            await self._serving
        finally:
            left = [*self._waiting, *self._answering]
            if self._answering:
                logger.error("HTTP port %d: %d responses were not sent", self.port, len(self._answering))
            for connection in left:
                connection.abort()

    # ---- connections

    def _open(self, connection: HttpConnection) -> bool:
        """Register a new connection, and close the longest waiting one if there are too many."""
        count = len(self._waiting) + len(self._answering)
        connection.is_spare = len(self._answering) >= MAX_CONNECTIONS
        if count >= MAX_CONNECTIONS + (SPARE_CONNECTIONS if connection.is_spare else 0):
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            del self._waiting[oldest]
            oldest.abort()
        self._wait(connection)
        return True

    def begin_answer(self, connection: HttpConnection) -> bool:
        if self._waiting.pop(connection, None) is None:
            return False
        self._answering.add(connection)
        return True

    def end_answer(self, connection: HttpConnection) -> None:
        if connection in self._answering:
            self._answering.remove(connection)
            self._wait(connection)

    def forget(self, connection: HttpConnection) -> None:
        self._waiting.pop(connection, None)
        self._answering.discard(connection)

    def _wait(self, connection: HttpConnection) -> None:
        self._waiting[connection] = time.monotonic() + REQUEST_SECONDS

    async def _check_deadlines(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = time.monotonic()
            for connection, deadline in [*self._waiting.items()]:
                if deadline > now:
                    break
                del self._waiting[connection]
                connection.abort()


def _listener(host: str, port: int, reuse_port: bool) -> socket.socket:
    """Bind a port, without listening."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


# ---- bodies

GZIP = "gzip"
MIN_GZIP_BYTES = 1024
"""Smaller responses are not compressed."""
_LEVEL = 1
_GZIP_FORMAT = 16 + zlib.MAX_WBITS
_READ_BYTES, _PIECE_BYTES = 1 << 14, 1 << 18
"""Bytes that are decompressed at a time, and the most that become of them."""


def body_encoding(headers: Any, limit: int, accept_compressed: bool) -> str:
    """Return the encoding of a body; raise RequestError if it must not be read."""
    encoding: str = headers.get("content-encoding", "identity").strip().lower()
    if headers.get("transfer-encoding"):
        raise RequestError(Code.INVALID_ARGUMENT, "send the body with a Content-Length, not in chunks")
    if encoding != "identity" and not (accept_compressed and encoding == GZIP):
        raise RequestError(
            Code.INVALID_ARGUMENT,
            f"send the body unencoded: {encoding[:30]!r} is not accepted (gzip needs a server started with "
            "--accept-compressed, in Python ServerConfig(accept_compressed=True))",
        )
    if int(headers.get("content-length", "0")) > limit:  # uvicorn has checked that it is a number
        raise RequestError(Code.OUT_OF_RANGE, f"the body has more than {limit} bytes")
    return encoding


def decompress_body(body: bytes, limit: int) -> bytes:
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


def compress_body(headers: Any, body: bytes) -> tuple[bytes, dict[str, str]]:
    """Compress the body of a response if the client accepts that and it is large enough."""
    if len(body) < MIN_GZIP_BYTES or not _accepts_gzip(headers):
        return body, {}
    return gzip.compress(body, _LEVEL, mtime=0), {"Content-Encoding": GZIP, "Vary": "Accept-Encoding"}


def _accepts_gzip(headers: Any) -> bool:
    accepted: dict[str, bool] = {}
    for part in ",".join(headers.getlist("accept-encoding")).lower().split(","):
        name, _, quality = part.partition(";")
        accepted[name.strip()] = quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return accepted.get(GZIP, accepted.get("*", False))  # "*" stands for what is not named
