"""ChannelServer: a server listens on sockets for the lookups and pushes of workers.

    worker is           socket                                      arrays travel
    on the same node    a Unix socket without a file (Linux)        through segments of shared memory
    on another node     TCP, on the address of the node             over the socket

The TCP socket is opened when the first worker of another node asks for it. Everything runs in the event loop
of the server; a connection that breaks the protocol is closed and logged, and the others continue. When a
connection ends, its reads are cancelled; pushes that have arrived are applied from memory that nobody changes
(see `channel_client.py`).
"""

from __future__ import annotations

import array as arrays
import asyncio
import hmac
import logging
import os
import secrets
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from megalith.errors import InputError
from megalith.ps.channel_messages import (
    HANDSHAKE_SECONDS,
    MAGIC,
    PROOF_SIZE,
    RANDOM_SIZE,
    ChannelAddress,
    FrameReader,
    PushRequest,
    ReadRequest,
    WireFrame,
    as_bytes,
    decode_request,
    drop_sent,
    error_text,
    forgotten,
    frame_bytes,
    proof,
    segment_fields,
)
from megalith.ps.messages import Array
from megalith.ps.shared_memory import map_segment

logger = logging.getLogger(__name__)

_WAITING = 64  # Number of connections that may be in their handshake
_SEGMENTS = 4096
_FILES = 8
Serve = Callable[[ReadRequest | PushRequest], Awaitable[Array | None]]


class ChannelServer:
    """All methods run in the event loop of the server."""

    def __init__(self, serve: Serve, node: str, host: str) -> None:
        self._serve = serve
        self._node = node
        self._host = host
        self._secret = secrets.token_bytes(32)
        self._unix = ""
        self._port = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._greeting = 0

    def address(self, node: str) -> ChannelAddress:
        """Return where a worker connects to, and listen there."""
        if node == self._node and sys.platform == "linux":
            if not self._unix:
                self._unix = f"megalith-{secrets.token_hex(16)}"
                self._listen(socket.AF_UNIX, "\0" + self._unix)
            return ChannelAddress(self._unix, "", 0, self._secret)
        if not self._port:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            self._port = self._listen(family, (self._host, 0)).getsockname()[1]
        return ChannelAddress("", self._host, self._port, self._secret)

    def _listen(self, family: int, place: Any) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(place)
        listener.listen(128)
        self._start(self._accept(listener))
        return listener

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listener)
            except OSError as error:  # too many open files
                logger.warning("a server cannot accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            if self._greeting >= _WAITING:
                peer.close()
                continue
            peer.setblocking(False)
            self._start(self._greet(peer))

    async def _greet(self, peer: socket.socket) -> None:
        self._greeting += 1
        try:
            await asyncio.wait_for(self._handshake(peer), HANDSHAKE_SECONDS)
        except (InputError, EOFError, OSError) as error:
            logger.warning("a server refused a connection: %s", error)
            peer.close()
            return
        finally:
            self._greeting -= 1
        ServerConnection(peer, self._serve, self._start)

    async def _handshake(self, peer: socket.socket) -> None:
        if peer.family == socket.AF_UNIX:
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            user = int.from_bytes(credentials[4:8], sys.byteorder)
            if user != os.getuid():
                raise InputError(f"the process of user {user} is not one of this user")
        else:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        hello = await _receive(peer, len(MAGIC) + RANDOM_SIZE)
        if not hello.startswith(MAGIC):
            raise InputError("it is not a worker of this version")
        theirs, own = hello[len(MAGIC) :], secrets.token_bytes(RANDOM_SIZE)
        await asyncio.get_running_loop().sock_sendall(peer, own + proof(self._secret, b"server", theirs, own))
        answer = await _receive(peer, PROOF_SIZE)
        if not hmac.compare_digest(answer, proof(self._secret, b"worker", theirs, own)):
            raise InputError("it does not know the secret of this server")


async def _receive(peer: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = await asyncio.get_running_loop().sock_recv(peer, size - len(found))
        if not piece:
            raise EOFError("it was closed during the handshake")
        found += piece
    return found


class ServerConnection:
    """A connection of a worker, after the handshake. It lives as long as the socket is open."""

    def __init__(
        self,
        peer: socket.socket,
        serve: Serve,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._peer = peer
        self._serve = serve
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._outgoing: deque[memoryview] = deque()
        self._segments: dict[int, Array] = {}
        self._files: deque[int] = deque()
        self._shared = peer.family == socket.AF_UNIX
        self._closed = False
        self._reads: set[asyncio.Task[None]] = set()
        self._loop.add_reader(peer, self._readable)

    def _readable(self) -> None:
        try:
            frame = self._next_frame()
            if frame is not None:
                self._handle(frame)
        except BlockingIOError:
            return
        except (InputError, MemoryError) as error:
            logger.warning("a server closed a connection: %s", error)
            self._close()
        except (EOFError, OSError):
            self._close()

    def _next_frame(self) -> WireFrame | None:
        """Receive until a frame is complete, or until nothing is left, which raises BlockingIOError."""
        while True:
            count = self._receive(self._reader.wanted())
            if not count:
                raise EOFError
            frame = self._reader.advance(count)
            if frame is not None:
                return frame

    def _receive(self, view: memoryview) -> int:
        if not self._shared:
            return self._peer.recv_into(view)
        space = socket.CMSG_SPACE(_FILES * arrays.array("i").itemsize)
        count, ancillary, _, _ = self._peer.recvmsg_into([view], space)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                files = arrays.array("i")
                files.frombytes(data[: len(data) - len(data) % files.itemsize])
                self._files.extend(files)
        if len(self._files) > _FILES:
            raise InputError("it sent files that no segment needs")
        return count

    def _handle(self, frame: WireFrame) -> None:
        call = frame.text.get("call")
        if call == "segment":
            number, size = segment_fields(frame.text)
            if not self._files or number in self._segments or len(self._segments) >= _SEGMENTS:
                raise InputError(f"segment {number} has no file, or there are too many")
            self._segments[number] = map_segment(self._files.popleft(), size)
        elif call == "forget":
            for number in forgotten(frame.text):
                self._segments.pop(number, None)
        else:
            try:
                request = decode_request(frame, self._segments)
            except InputError as error:
                if "id" not in frame.text:
                    raise
                self._send(frame_bytes({"id": frame.text["id"], "error": error_text(error)}, []))
            else:
                task = self._start(self._answer(request))
                if isinstance(request, ReadRequest):
                    self._reads.add(task)
                    task.add_done_callback(self._reads.discard)

    async def _answer(self, request: ReadRequest | PushRequest) -> None:
        text: dict[str, Any] = {"id": request.id}
        payload: list[Array] = []
        try:
            rows = await self._serve(request)
            if rows is not None:
                payload = [as_bytes(rows)]
        except Exception as error:
            text["error"] = error_text(error)
            if text["error"][0] == "MegalithError":
                logger.exception("a call of a worker failed")
        if not self._closed:
            self._send(frame_bytes(text, payload))

    def _send(self, pieces: list[memoryview]) -> None:
        idle = not self._outgoing
        self._outgoing.extend(pieces)
        if idle:
            self._writable()
            if self._outgoing and not self._closed:
                self._loop.add_writer(self._peer, self._writable)

    def _writable(self) -> None:
        try:
            while self._outgoing:
                drop_sent(self._outgoing, self._peer.sendmsg(list(self._outgoing)[:16]))
        except BlockingIOError:
            return
        except OSError:
            self._close()
            return
        self._loop.remove_writer(self._peer)

    def _close(self) -> None:
        self._closed = True
        for read in self._reads:
            read.cancel()
        self._loop.remove_reader(self._peer)
        self._loop.remove_writer(self._peer)
        self._peer.close()
        self._outgoing.clear()
        self._segments.clear()
        while self._files:
            os.close(self._files.popleft())
