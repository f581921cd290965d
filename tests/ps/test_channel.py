"""Lookups and pushes over sockets: real connections to tables in another thread, and their ends."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time as clock
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megalith.errors import InputError, UsageError
from megalith.ps import shared_memory
from megalith.ps.channel_client import ChannelLostError, ServerChannel, open_channel
from megalith.ps.channel_listener import ChannelServer
from megalith.ps.channel_messages import MAGIC, ChannelAddress, PushRequest, ReadRequest, frame_bytes
from megalith.ps.messages import SpaceSpec
from megalith.ps.shared_memory import SegmentPool
from megalith.ps.table_server import ServerLoop
from megalith.ps.table_space import TableSpace
from tests.ps.support import table

LIMIT = 60.0
BLOCKED = -5


class Server:
    """The tables of one server in a thread, without Ray; reads of id BLOCKED wait until `go` is set."""

    def __init__(self, dim: int = 1, *, workers: int = 1) -> None:
        wire = ("float32", "float32")
        spec = SpaceSpec([table(dim=dim)], "cpu", 0, wire, workers > 1, None, workers, LIMIT, "")
        self.space = TableSpace(spec, 0, 1)
        for worker in range(workers):
            self.space.join(worker, "s")
        self.loop = ServerLoop()
        self.channel = ChannelServer(self._serve, "here", "127.0.0.1")
        self.go = threading.Event()
        self.blocked = 0

    async def _serve(self, request: ReadRequest | PushRequest) -> Any:
        if isinstance(request, PushRequest):
            return await self.space.write(request.worker, request.session, request.number, request.write)
        self.blocked += 1
        try:
            while BLOCKED in request.ids and not self.go.is_set():
                await asyncio.sleep(0.001)
        finally:
            self.blocked -= 1
        own = request.worker, request.session, request.after
        rows = await self.space.read(*own, request.ids, request.counts, request.step, request.out)
        return rows if request.out is None else None

    def run(self, work: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return work()

        return asyncio.run(self.loop.run(call()))

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = clock.monotonic() + LIMIT
        while not self.run(condition):
            assert clock.monotonic() < deadline
            clock.sleep(0.001)

    def address(self, node: str = "here") -> ChannelAddress:
        found: ChannelAddress = self.run(lambda: self.channel.address(node))
        return found


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


@pytest.fixture(params=["here", "elsewhere"])
def node(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def connect(server: Server, node: str = "here") -> ServerChannel:
    return ServerChannel(server.address(node), SegmentPool(), LIMIT)


def ask(channel: ServerChannel, ids: list[int], dim: int = 1, **fields: Any) -> tuple[Any, torch.Tensor]:
    """Start a read; its reply, and the memory for the rows."""
    out = channel._pool.new(4 * dim * len(ids))
    text = {"name": "t", "worker": 0, "session": "s", "after": 0, "counts": [len(ids)], "step": None}
    return channel.read(text | fields, np.array(ids), out), out.view(torch.float32)


def rows(channel: ServerChannel, ids: list[int], dim: int = 1, **fields: Any) -> torch.Tensor:
    reply, out = ask(channel, ids, dim, **fields)
    assert channel.wait(reply, LIMIT)
    if reply.result is not None:
        raise reply.result.error
    return out.view(-1, dim)


def push(channel: ServerChannel, number: int, ids: list[int], grads: torch.Tensor, worker: int = 0) -> Any:
    header = {
        "counts": [len(ids)],
        "step": 0,
        "time": 1,
        "scale": 1.0,
        "clip_norm": 0.0,
        "rates": {"t": [1.0]},
    }
    text = {"name": "t", "worker": worker, "session": "s", "number": number, "header": header}
    return channel.push(text, {"ids": np.array(ids), "grads": grads.numpy().reshape(-1).view(np.uint8)})


# ---- calls


def test_rows_and_gradients_arrive_whatever_the_size_and_way(node: str) -> None:
    server = Server(dim=5)
    channel = connect(server, node)
    assert channel.shared == (node == "here")
    expected = torch.zeros(70_000, 5)
    generator = torch.Generator().manual_seed(3)
    for number, count in enumerate((1, 3, 70_000, 2_000, 1), start=1):  # 70,000: 1.4 MB of rows
        ids = torch.randperm(70_000, generator=generator)[:count]
        grads = torch.randn(count, 5, generator=generator)
        expected[ids] -= grads
        reply = push(channel, number, ids.tolist(), grads)
        assert torch.equal(rows(channel, ids.tolist(), 5, after=number), expected[ids])
        assert channel.wait(reply, LIMIT)
        assert reply.result is None
    assert bool(channel._known) == (node == "here")
    channel.close()


def test_an_error_on_the_server_is_raised_with_its_class(server: Server, node: str) -> None:
    channel = connect(server, node)
    with pytest.raises(UsageError, match="worker 7 has not joined"):
        rows(channel, [1], worker=7)
    with pytest.raises(InputError, match=r"2 ids with counts \[2, 0\] for 1 tables"):
        rows(channel, [1, 2], counts=[2, 0])
    with pytest.raises(InputError, match="a request has 2 ids, but counts of 3"):
        rows(channel, [1, 2], counts=[3])
    assert rows(channel, [1]).tolist() == [[0]]  # the connection continues
    channel.close()


def test_threads_wait_for_their_own_answers(server: Server, node: str) -> None:
    channel = connect(server, node)
    server.go.clear()
    blocked, _ = ask(channel, [BLOCKED])
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(channel.wait, blocked, LIMIT)  # it receives the answers below
        for id in range(50):
            assert rows(channel, [id]).tolist() == [[0]]
        assert not channel.poll(blocked)
        assert not channel.wait(blocked, 0.001)
        server.go.set()
        assert waiting.result(LIMIT)
    assert channel.poll(blocked)
    channel.close()


def test_memory_is_not_used_again_before_the_server_has_answered(server: Server) -> None:
    channel = connect(server)
    server.go.clear()
    reply, out = ask(channel, [BLOCKED] * 5000)
    where = out.data_ptr()
    del out
    others = [channel._pool.new(20_000) for _ in range(3)]
    assert where not in [each.data_ptr() for each in others]
    server.go.set()
    assert channel.wait(reply, LIMIT)
    later = [channel._pool.new(20_000) for _ in range(3)]
    assert where in [each.data_ptr() for each in later]
    channel.close()


def test_segments_that_are_not_kept_are_forgotten(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_KEPT", 1)
    channel, pool = connect(server), SegmentPool()
    channel._pool = pool
    for count in (100_000, 300_000, 600_000, 100_000):  # segments of other sizes
        assert rows(channel, list(range(count))).sum() == 0
    assert len(pool.segments) <= 3
    assert channel._known <= pool.segments.keys()
    channel.close()


# ---- ends


def test_a_connection_that_ends_loses_what_was_not_answered(server: Server, node: str) -> None:
    channel = connect(server, node)
    server.go.clear()
    reply, _ = ask(channel, [BLOCKED])
    channel._socket.shutdown(socket.SHUT_RDWR)
    assert channel.wait(reply, LIMIT)
    assert reply.lost
    assert channel.lost
    late, _ = ask(channel, [1])
    assert late.lost
    server.go.set()
    assert rows(connect(server, node), [1]).tolist() == [[0]]


def test_a_push_that_waits_is_applied_as_it_was_sent_though_its_channel_is_lost() -> None:
    server, ids = Server(workers=2), list(range(5000))
    channel, other = connect(server), connect(server)
    reply = push(channel, 1, ids, torch.ones(5000))
    server.wait(lambda: server.space.waiting == 1)  # for the gradients of worker 1
    channel.close()
    assert reply.lost
    pool = channel._pool
    for _ in range(8):
        pool.new(20_000).view(torch.float32).fill_(1000.0)
    kept = [pool.new(20_000).view(torch.float32).fill_(1000.0) for _ in range(8)]
    again = ServerChannel(server.address(), pool, LIMIT)
    replies = [push(again, 1, ids, torch.ones(5000)), push(other, 1, ids, torch.ones(5000), worker=1)]
    assert again.wait(replies[0], LIMIT)
    assert other.wait(replies[1], LIMIT)
    assert rows(again, ids, after=1).unique().tolist() == [-2]
    del kept
    pool.new(20_000)
    assert not any(segment.retired for segment in pool.segments.values())  # they are gone


def test_a_read_that_waits_writes_nothing_once_its_channel_is_lost(node: str) -> None:
    server = Server()
    channel = connect(server, node)
    reply, out = ask(channel, [BLOCKED] * 5000)
    out.fill_(7)
    server.wait(lambda: server.blocked == 1)
    channel.close()
    assert reply.lost
    server.wait(lambda: not server.blocked)  # it was cancelled
    server.go.set()
    assert rows(connect(server, node), [BLOCKED]).tolist() == [[0]]
    assert out.unique().tolist() == [7]
    assert channel._pool.find(out.numpy()) is None
    lost = set(channel._pool.segments)
    del out
    channel._pool.new(20_000)
    assert lost.isdisjoint(channel._pool.segments)


def test_a_worker_that_does_not_reach_the_unix_socket_uses_tcp(server: Server) -> None:
    nobody = replace(server.address(), unix="megalith-nobody")
    channel = open_channel(
        lambda node: nobody if node == "here" else server.address(node), "here", SegmentPool(), LIMIT
    )
    assert not channel.shared
    assert rows(channel, [1]).tolist() == [[0]]
    channel.close()
    ended = iter([nobody, server.address()])  # the server was started again in between
    with pytest.raises(ChannelLostError):
        open_channel(lambda node: next(ended), "here", SegmentPool(), LIMIT)


def test_a_worker_with_another_secret_is_refused(server: Server, node: str) -> None:
    address = server.address(node)
    with pytest.raises(ChannelLostError, match="another process listens"):
        ServerChannel(replace(address, secret=bytes(32)), SegmentPool(), LIMIT)
    with pytest.raises(ChannelLostError):
        ServerChannel(replace(address, unix="x" if address.unix else "", port=1), SegmentPool(), LIMIT)


def raw(server: Server) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.address("elsewhere").port), timeout=LIMIT)
    made.settimeout(LIMIT)
    return made


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(100), MAGIC + bytes(64)])
def test_a_process_without_the_secret_is_disconnected(server: Server, sent: bytes) -> None:
    with raw(server) as peer:
        peer.sendall(sent)
        if not sent:
            peer.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):  # the end of the connection is what is waited for
            while peer.recv(4096):
                pass
    assert rows(connect(server), [1]).tolist() == [[0]]


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense" * 4,
        struct.pack("<4sIQ", b"MCH1", 1 << 31, 0),
        struct.pack("<4sIQ", b"MCH1", 2, 1 << 62) + b"{}",
        struct.pack("<4sIQ", b"MCH1", 2, 0) + b"[]",
        b"".join(map(bytes, frame_bytes({"call": "evict"}, []))),
        b"".join(map(bytes, frame_bytes({"call": "segment", "number": 1, "size": 1 << 20}, []))),
    ],
)
def test_a_connection_that_sends_something_else_is_closed(server: Server, node: str, sent: bytes) -> None:
    channel, other = connect(server, node), connect(server, node)
    reply, _ = ask(channel, [BLOCKED])
    server.go.clear()
    channel._socket.setblocking(True)
    channel._socket.sendall(sent)
    channel._socket.setblocking(False)
    assert channel.wait(reply, LIMIT)
    server.go.set()
    assert rows(other, [1]).tolist() == [[0]]


@pytest.mark.parametrize(
    "answer",
    [{"id": 77}, {"id": "1"}, {"id": 1, "error": ["SystemExit", ""]}, {"id": 1}, {}],
    ids=["unknown", "text", "error", "no rows", "empty"],
)
def test_a_wrong_answer_ends_the_connection(server: Server, answer: dict[str, Any]) -> None:
    channel = connect(server, "elsewhere")
    server.go.clear()
    reply, _ = ask(channel, [BLOCKED])
    mine, theirs = socket.socketpair()
    channel._socket.close()
    channel._socket = mine
    mine.setblocking(False)
    theirs.sendmsg(frame_bytes(answer, []))
    assert channel.wait(reply, LIMIT)
    assert reply.lost
    server.go.set()
    theirs.close()
