"""ServerChannel: the socket of a worker to one server, for lookups and pushes.

It starts no thread: one that waits for an answer receives whatever arrives, answers of others too. A
channel that is lost stays lost: answers that are missing are marked so, and `ServerLink` opens a new channel.

Memory of a request belongs to the server until it has answered. Without an answer the server may use it at
any later time: its segments are never used again, and a read that is sent again has its rows elsewhere.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import threading
import time as clock
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from megalith.errors import InputError
from megalith.ps.channel_messages import (
    HANDSHAKE_SECONDS,
    MAGIC,
    PROOF_SIZE,
    RANDOM_SIZE,
    ChannelAddress,
    FrameReader,
    WireFrame,
    answer_id,
    as_bytes,
    decode_error,
    drop_sent,
    frame_bytes,
    place_arrays,
    proof,
)
from megalith.ps.messages import Array, Failure, array_of
from megalith.ps.shared_memory import SMALLEST, SegmentPool, SharedSegment


class ChannelLostError(ConnectionError):
    """The connection has ended; the server may have ended too."""


class ChannelReply:
    def __init__(self, channel: ServerChannel, held: list[Array], out: Array | None) -> None:
        self.channel = channel
        self.out = out
        self.held = held
        self.done = self.lost = False
        self.result: Failure | None = None

    def end(self, result: Failure | None = None, *, lost: bool = False) -> None:
        self.result, self.lost, self.done = result, lost, True
        self.held, self.out = [], None


class ServerChannel:
    """Thread-safe."""

    def __init__(self, address: ChannelAddress, pool: SegmentPool, timeout: float) -> None:
        self._pool = pool
        self._timeout = timeout
        self.shared = bool(address.unix)
        try:
            self._socket = _connect(address)
        except (OSError, EOFError) as error:
            raise ChannelLostError(str(error)) from error
        weakref.finalize(self, self._socket.close)
        self._known: set[int] = set()  # segments that the server has
        self._number = 0
        self._replies: dict[int, ChannelReply] = {}
        self._reader = FrameReader(self._place)
        self._sending = threading.RLock()
        self._state = threading.Condition()
        self._receiving = False
        self.lost = False

    # ---- requests

    def read(self, text: dict[str, Any], ids: Array, out: Tensor) -> ChannelReply:
        target = array_of(out)
        place = self._find(target)
        text = {"call": "read", **text, "rows": None if place is None else [*place, target.size]}
        return self._request(text, {"ids": ids}, target, inline=place is None)

    def push(self, text: dict[str, Any], arrays: Mapping[str, Array]) -> ChannelReply:
        return self._request({"call": "push", **text}, arrays)

    def _request(
        self,
        text: dict[str, Any],
        arrays: Mapping[str, Array],
        out: Array | None = None,
        inline: bool = False,
    ) -> ChannelReply:
        shared = {name: self._in_segment(array) for name, array in arrays.items()}
        described, payload = place_arrays(shared, {name: self._find(each) for name, each in shared.items()})
        held = [*shared.values()] if out is None else [*shared.values(), out]
        reply = ChannelReply(self, held, out if inline else None)
        with self._sending:
            with self._state:
                self._number += 1
                id = self._number
            pieces = frame_bytes({**text, "id": id, "arrays": described}, payload)
            with self._state:
                if self.lost:
                    reply.end(lost=True)
                    return reply
                self._replies[id] = reply
            named = {entry[3] for entry in described} | {(text.get("rows") or [-1])[0]}
            try:
                self._share(named - self._known - {-1})
                self._send(deque(pieces))
            except BaseException as error:  # what was sent may be a part of a frame
                self._lose()
                if not isinstance(error, OSError):
                    raise
        return reply

    def _in_segment(self, array: Array) -> Array:
        """Return an array that is in a segment if it is large and the server shares memory."""
        if not self.shared or array.nbytes < SMALLEST or self._pool.find(array) is not None:
            return array
        copy = array_of(self._pool.new(array.nbytes)).view(array.dtype)
        copy[:] = array.reshape(-1)
        return copy

    def _find(self, array: Array) -> tuple[int, int] | None:
        found = self._pool.find(array) if self.shared else None
        return None if found is None else (found[0].number, found[1])

    def _share(self, numbers: set[int]) -> None:
        """Send the file descriptors of segments, and which ones are gone."""
        if not numbers:
            return
        segments = self._pool.segments
        gone = self._known - segments.keys()
        if gone:
            self._known -= gone
            self._send(deque(frame_bytes({"call": "forget", "numbers": sorted(gone)}, [])))
        for number in sorted(numbers):
            self._send_segment(segments[number])
            self._known.add(number)

    def _send_segment(self, segment: SharedSegment) -> None:
        (frame,) = frame_bytes({"call": "segment", "number": segment.number, "size": segment.size}, [])
        while True:
            try:
                sent = socket.send_fds(self._socket, [frame], [segment.file])
                break
            except BlockingIOError:
                self._wait_until_writable(clock.monotonic() + self._timeout)
        self._send(deque([frame[sent:]] if sent < len(frame) else []))

    def _send(self, pieces: deque[memoryview]) -> None:
        deadline = clock.monotonic() + self._timeout
        while pieces:
            try:
                drop_sent(pieces, self._socket.sendmsg(list(pieces)[:16]))
            except BlockingIOError:
                self._wait_until_writable(deadline)

    def _wait_until_writable(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(max(0.0, deadline - clock.monotonic()) * 1000):
            raise TimeoutError(f"a server did not receive within {self._timeout:g} s")

    # ---- answers

    def wait(self, reply: ChannelReply, timeout: float | None) -> bool:
        deadline = None if timeout is None else clock.monotonic() + timeout
        while True:
            mine = arrived = False
            left = None if deadline is None else max(0.0, deadline - clock.monotonic())
            try:
                with self._state:
                    if reply.done:
                        return True
                    if self._receiving:
                        self._state.wait(left)
                    else:
                        self._receiving = mine = True
                if mine:
                    arrived = self._receive(left)
            finally:
                if mine:
                    with self._state:
                        self._receiving = False
                        self._state.notify_all()
            if left == 0.0 and not arrived:
                return reply.done

    def poll(self, reply: ChannelReply) -> bool:
        """Return whether an answer has arrived or is lost, without waiting."""
        return reply.done or self.wait(reply, 0.0)

    def _receive(self, timeout: float | None) -> bool:
        """Receive until a frame is complete or nothing is left; return whether something has arrived."""
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                return False
            while True:
                count = self._socket.recv_into(self._reader.wanted())
                if not count:
                    raise EOFError
                frame = self._reader.advance(count)
                if frame is not None:
                    self._take(frame)
                    return True
        except BlockingIOError:
            return True
        except BaseException as error:  # bytes may have been received that the reader does not know
            self._lose()
            if not isinstance(error, EOFError | OSError | InputError):
                raise
            return True

    def _place(self, text: dict[str, Any], size: int) -> Array:
        reply = self._replies.get(answer_id(text))
        if reply is None or reply.out is None or reply.out.size != size:
            raise InputError(f"a server sent {size} bytes that were not requested")
        return as_bytes(reply.out)

    def _take(self, frame: WireFrame) -> None:
        with self._state:
            reply = self._replies.get(answer_id(frame.text))
            if reply is None:
                raise InputError("a server answered a request that was not made")
            error = frame.text.get("error")
            if error is None and reply.out is not None and not frame.payload.size:
                raise InputError("a server answered without the rows")
            reply.end(None if error is None else decode_error(error))
            del self._replies[answer_id(frame.text)]

    def _lose(self) -> None:
        with self._state:
            self.lost = True
            with suppress(OSError):  # closed when it is freed: another thread may be using it now
                self._socket.shutdown(socket.SHUT_RDWR)
            for reply in self._replies.values():
                for array in reply.held:  # before they are freed
                    self._pool.retire(array)
                reply.end(lost=True)
            self._replies.clear()

    def close(self) -> None:
        """Close the connection; answers that are missing are lost."""
        if not self.lost:
            self._lose()


def open_channel(
    ask: Callable[[str], ChannelAddress], node: str, pool: SegmentPool, timeout: float
) -> ServerChannel:
    """Connect to a server; over TCP if its Unix socket is not one of this host."""
    # Ray's node of a process that is connected through `ray://` is not its own.
    address = ask(node)
    try:
        return ServerChannel(address, pool, timeout)
    except ChannelLostError as error:
        refused = isinstance(error.__cause__, ConnectionRefusedError)
        if not address.unix or not refused or ask(node) != address:
            raise
    return ServerChannel(ask(""), pool, timeout)


def _connect(address: ChannelAddress) -> socket.socket:
    made = socket.socket(socket.AF_UNIX if address.unix else _family(address.host), socket.SOCK_STREAM)
    try:
        made.settimeout(HANDSHAKE_SECONDS)
        if address.unix:
            made.connect("\0" + address.unix)
        else:
            made.connect((address.host, address.port))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        own = secrets.token_bytes(RANDOM_SIZE)
        made.sendall(MAGIC + own)
        theirs, answer = _exactly(made, RANDOM_SIZE), _exactly(made, PROOF_SIZE)
        if not hmac.compare_digest(answer, proof(address.secret, b"server", own, theirs)):
            raise ConnectionError("another process listens where the server was")
        made.sendall(proof(address.secret, b"worker", own, theirs))
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _exactly(peer: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = peer.recv(size - len(found))
        if not piece:
            raise EOFError("the server closed the connection")
        found += piece
    return found
