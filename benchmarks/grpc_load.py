"""Closed-loop clients of gRPC and REST that cost little: bytes written by hand, one thread for all of them.

A client of grpcio takes as much of a core as the server that it measures. Here a request is one `send` of
bytes that are made before; a response is read until the frame that ends its stream. Nothing of a response is
decoded beyond that, except that it must hold a message. Only what such a load needs is implemented: one
stream at a time on each connection, no headers that are kept between requests.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 4, 6, 7, 8
_END_STREAM = _ACK = 1
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_LARGE = (1 << 30) - 1


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def _request(method: str, message: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the frames of a request without the numbers of its stream."""
    path = method.encode()
    headers = b"\x83\x86\x04" + bytes([len(path)]) + path + _header(b":authority", b"benchmark")
    headers += _header(b"content-type", b"application/grpc") + _header(b"te", b"trailers")
    body = b"\x00" + struct.pack(">I", len(message)) + message
    assert len(body) < 16384 * 64, "a larger message than a benchmark needs"
    data = [body[at : at + 16384] for at in range(0, len(body), 16384)]
    assert len(data) == 1, "one frame for each message"
    head = struct.pack(">I", len(headers))[1:] + bytes([_HEADERS, 4])
    return head, headers, struct.pack(">I", len(body))[1:] + bytes([_DATA, _END_STREAM]), body


class _Connection:
    """One client: sends a request when it has the response to the last one."""

    def __init__(
        self, host: str, port: int, requests: Sequence[tuple[bytes, bytes, bytes, bytes]], at: int
    ) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = struct.pack(">HIHI", 3, 100, 4, _LARGE)
        self.socket.sendall(
            _PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW, 0, 0, struct.pack(">I", _LARGE))
        )
        self._requests, self._at = requests, at
        self._stream = -1
        self._buffer = b""
        self._window = 65535
        self._messages = 0
        self.sent_at = 0.0

    def send(self) -> None:
        self._at = (self._at + 1) % len(self._requests)
        self._stream += 2
        self._messages = 0
        number = struct.pack(">I", self._stream)
        head, headers, data, body = self._requests[self._at]
        self._window -= len(body)
        assert self._window >= 0, "the server does not return its window"
        self.sent_at = time.perf_counter()
        self.socket.sendall(b"".join((head, number, headers, data, number, body)))

    def receive(self) -> bool:
        """Read what has arrived; return whether the response is complete."""
        arrived = self.socket.recv(65536)
        if not arrived:
            raise ConnectionError("the server closed a connection")
        buffer = self._buffer + arrived if self._buffer else arrived
        at, done, size = 0, False, len(buffer)
        while size - at >= 9:
            length = int.from_bytes(buffer[at : at + 3], "big")
            if size - at < 9 + length:
                break
            kind, flags = buffer[at + 3], buffer[at + 4]
            if kind == _DATA:
                self._messages += length > 5
            elif kind == _SETTINGS and not flags & _ACK:
                self.socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
            elif kind == _PING and not flags & _ACK:
                self.socket.sendall(_frame(_PING, _ACK, 0, buffer[at + 9 : at + 17]))
            elif kind == _WINDOW and buffer[at + 5 : at + 9] == b"\0\0\0\0":
                self._window += int.from_bytes(buffer[at + 9 : at + 13], "big")
            elif kind == _GOAWAY:
                raise ConnectionError("the server ended a connection")
            if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                assert self._messages, "a request failed"
                done = True
            at += 9 + length
        self._buffer = buffer[at:]
        return done


class _HttpConnection:
    """One client of REST, with one connection that is kept."""

    def __init__(self, host: str, port: int, requests: Sequence[bytes], at: int) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._requests, self._at = requests, at
        self._buffer = b""
        self.sent_at = 0.0

    def send(self) -> None:
        self._at = (self._at + 1) % len(self._requests)
        self._buffer = b""
        self.sent_at = time.perf_counter()
        self.socket.sendall(self._requests[self._at])

    def receive(self) -> bool:
        """Read what has arrived; return whether the response is complete."""
        arrived = self.socket.recv(65536)
        if not arrived:
            raise ConnectionError("the server closed a connection")
        self._buffer += arrived
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return False
        assert head.startswith(b"HTTP/1.1 200 "), "a request failed"
        return len(body) == int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])


def _http_request(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: benchmark\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def load(
    address: str, method: str, messages: Sequence[bytes], clients: int, seconds: float
) -> dict[str, float]:
    """Run closed-loop clients.

    Args:
        address: host:port.
        method: Path of the method of gRPC, or of REST, below /v2/.
        messages: Serialised requests, which the clients send in turn.
        clients: Number of connections.
        seconds: How long to measure, after three requests of each.

    Returns:
        Requests per second, p50_ms, p99_ms, and the cores that the clients used.
    """
    host, _, port = address.rpartition(":")
    opened: list[Any]
    starts = [k * len(messages) // clients for k in range(clients)]
    if method.startswith("/v2/"):
        texts = [_http_request(method, message) for message in messages]
        opened = [_HttpConnection(host, int(port), texts, at) for at in starts]
    else:
        requests = [_request(method, message) for message in messages]
        opened = [_Connection(host, int(port), requests, at) for at in starts]
    by_file = {each.socket.fileno(): each for each in opened}
    poll = select.epoll()
    for file in by_file:
        poll.register(file, select.EPOLLIN)
    latencies: list[float] = []

    def run(until: float, most: int) -> int:
        """Answer events until a time or a number of responses."""
        count = 0
        while time.perf_counter() < until and count < most:
            events = poll.poll(10.0)
            assert events, "no response in 10 seconds"
            for file, _ in events:
                client = by_file[file]
                if client.receive():
                    now = time.perf_counter()
                    latencies.append(now - client.sent_at)
                    count += 1
                    client.send()
        return count

    try:
        for client in opened:
            client.send()
        run(time.perf_counter() + 60.0, 3 * clients)
        latencies.clear()
        start, busy = time.perf_counter(), time.process_time()
        count = run(start + seconds, 1 << 62)
        took, busy = time.perf_counter() - start, time.process_time() - busy
    finally:
        poll.close()
        for client in opened:
            client.socket.close()
    p50, p99 = np.percentile(np.array(latencies), (50, 99)) * 1e3
    return {
        "requests": count,
        "per_second": count / took,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "client_cpu": busy / took,
    }
