"""Lookups and pushes over sockets: real connections to tables in another thread, broken bytes, and ends."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import threading
import time as clock
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith import errors
from megalith.errors import InputError, MegalithError, UnknownNameError, UsageError
from megalith.shards.servers import channel_frames, shared_segments
from megalith.shards.servers.channel_client import ChannelLostError, ServerChannel, open_channel
from megalith.shards.servers.channel_frames import MAGIC, FrameReader, WireFrame, frame_bytes
from megalith.shards.servers.channel_messages import (
    PushRequest,
    ReadRequest,
    decode_error,
    decode_request,
    error_text,
    forgotten,
    place_arrays,
    segment_fields,
)
from megalith.shards.servers.channel_server import ChannelAddress, ChannelServer
from megalith.shards.servers.server_loop import ServerLoop
from megalith.shards.servers.server_messages import SpaceSpec
from megalith.shards.servers.shared_segments import SegmentPool, map_segment
from megalith.shards.servers.table_space import TableSpace
from tests.shards.servers.support import table

LIMIT = 60.0
BLOCKED = -5
NOTHING = np.empty(0, np.uint8)


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
    monkeypatch.setattr(shared_segments, "_KEPT", 1)
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
    assert rows(again, ids).unique().tolist() == [-2]
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


# ---- bytes from outside


def feed(data: bytes, sizes: Iterator[int] | None = None) -> list[WireFrame]:
    reader, found, at = FrameReader(), [], 0
    while at < len(data):
        wanted = reader.wanted()
        assert len(wanted) > 0
        count = min(len(wanted), len(data) - at, next(sizes) if sizes else 1 << 30)
        wanted[:count] = data[at : at + count]
        at += count
        frame = reader.advance(count)
        if frame is not None:
            found.append(frame)
    return found


def some_frames() -> list[tuple[dict[str, Any], bytes]]:
    return [({"a": 1}, b""), ({}, b"xyz"), ({"call": "read", "deep": [[1], {"b": None}]}, bytes(1000))]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_frames_are_the_same_whatever_the_pieces_in_which_they_arrive(sizes: list[int]) -> None:
    pieces = [frame_bytes(text, [np.frombuffer(more, np.uint8)]) for text, more in some_frames()]
    data = b"".join(bytes(piece) for each in pieces for piece in each)
    found = feed(data, iter(sizes * len(data)))
    assert [(frame.text, frame.payload.tobytes()) for frame in found] == some_frames()


@given(st.data())
def test_broken_frames_raise_and_nothing_else(data: st.DataObject) -> None:
    pieces = [frame_bytes(text, [np.frombuffer(more, np.uint8)]) for text, more in some_frames()]
    sent = bytearray(b"".join(bytes(piece) for each in pieces for piece in each))
    for _ in range(data.draw(st.integers(1, 6))):
        sent[data.draw(st.integers(0, 120))] = data.draw(st.integers(0, 255))
    with suppress(InputError):
        feed(bytes(sent[: data.draw(st.integers(0, len(sent)))]))


def requests() -> list[tuple[dict[str, Any], np.ndarray[Any, Any]]]:
    """Valid requests: a read from a segment, a read and a push with everything in the payload."""
    ids = np.arange(4)
    described, pieces = place_arrays({"ids": ids}, {"ids": None})
    read = {"call": "read", "id": 1, "name": "t", "worker": 0, "session": "s", "after": 0, "counts": [4]}
    read |= {"step": None, "arrays": described, "rows": None}
    inside = read | {"arrays": [["ids", "int64", 4, 3, 64]], "rows": [3, 128, 16], "step": 5}
    header = {
        "counts": [1, 3],
        "step": 0,
        "time": None,
        "scale": 1.0,
        "clip_norm": None,
        "rates": {"t": [1.0]},
    }
    arrays = {"ids": ids, "grads": np.zeros(16, np.uint8), "seen": np.ones(4, np.int64)}
    several, more = place_arrays(arrays, dict.fromkeys(arrays))
    push = {"call": "push", "id": 2, "name": "t", "worker": 0, "session": "s", "number": 1}
    push |= {"header": header, "arrays": several}
    return [(inside, NOTHING), (read, np.concatenate(pieces)), (push, np.concatenate(more))]


SEGMENTS = {3: np.zeros(256, np.uint8)}


def test_requests_are_what_was_sent() -> None:
    inside, read, sent = (decode_request(WireFrame(text, payload), SEGMENTS) for text, payload in requests())
    assert isinstance(inside, ReadRequest)
    assert isinstance(read, ReadRequest)
    assert isinstance(sent, PushRequest)
    assert (inside.ids.tolist(), inside.step) == ([0] * 4, 5)
    assert inside.out is not None
    assert inside.out.size == 16
    assert (read.ids.tolist(), read.counts, read.out) == ([0, 1, 2, 3], [4], None)
    assert sent.write.arrays["seen"].tolist() == [1] * 4
    assert sent.write.header["counts"] == [1, 3]


VALUES = st.sampled_from(
    [None, True, -1, 0, 1, 2**62, 2**70, 1.5, "", "ids", "int64", "float64", [], {}, [1], ["ids"], [[]]]
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from _paths(child, (*path, key))


@given(st.data())
def test_wrong_requests_raise_and_nothing_else(data: st.DataObject) -> None:
    text, payload = data.draw(st.sampled_from(range(3)).map(lambda number: requests()[number]))
    text = json.loads(json.dumps(text))
    for _ in range(data.draw(st.integers(1, 2))):
        *path, last = data.draw(st.sampled_from(list(_paths(text))))
        place: Any = text
        for key in path:
            place = place[key]
        if data.draw(st.booleans()):
            place[last] = data.draw(VALUES)
        else:
            del place[last]
        if not list(_paths(text)):
            break
    cut = data.draw(st.integers(0, payload.size))
    try:
        found = decode_request(WireFrame(text, payload[:cut]), SEGMENTS)
    except InputError:
        return
    arrays = {"ids": found.ids} if isinstance(found, ReadRequest) else found.write.arrays
    counts = found.counts if isinstance(found, ReadRequest) else found.write.header["counts"]
    assert sum(counts) == arrays["ids"].size  # what was accepted is consistent
    for array in arrays.values():
        array.sum()  # and in memory that exists


@pytest.mark.parametrize("text", [{}, {"number": -1, "size": 5}, {"number": 0, "size": 0}, {"number": 0.5}])
def test_wrong_segments_are_refused(text: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        segment_fields(text)
    with pytest.raises(InputError):
        forgotten({"numbers": [text]})
    with pytest.raises(InputError):
        forgotten(text)


def test_files_that_are_no_segments_are_refused(tmp_path: Any) -> None:
    pool = SegmentPool()
    kept = pool.new(300_000)
    (segment,) = pool.segments.values()
    assert map_segment(os.dup(segment.file), segment.size).size == segment.size == 512 << 10
    with pytest.raises(InputError, match="announced"):
        map_segment(os.dup(segment.file), segment.size - 1)
    (tmp_path / "x").write_bytes(bytes(4096))
    with pytest.raises(InputError):  # it could be truncated while it is mapped
        map_segment(os.open(tmp_path / "x", os.O_RDWR), 4096)
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(InputError):
        map_segment(unsealed, 4096)
    with pytest.raises(OSError):  # noqa: PT011 - EPERM: it is sealed
        os.ftruncate(segment.file, 1)
    assert pool.find(kept.numpy()[5:]) == (segment, 5)


def test_a_message_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_frames, "MAX_PAYLOAD", 100)
    with pytest.raises(InputError, match="use smaller batches"):
        frame_bytes({}, [np.zeros(101, np.uint8)])


def test_numbers_that_are_not_finite_are_not_sent() -> None:
    with pytest.raises(InputError, match="infinite or NaN"):
        frame_bytes({"scale": float("inf")}, [])


def test_a_pool_that_is_freed_closes_its_files() -> None:
    pool = SegmentPool()
    kept = pool.new(20_000)
    (file,) = [segment.file for segment in pool.segments.values()]
    del pool
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    assert kept.fill_(1).sum() == 20_000  # the memory stays


def test_errors_keep_their_class_and_message() -> None:
    for name in dir(errors):
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, MegalithError):
            found = decode_error(error_text(kind("what and where"))).error
            assert (type(found), str(found)) == (kind, "what and where")
    assert isinstance(decode_error(error_text(PermissionError(13, "denied"))).error, OSError)
    assert str(decode_error(error_text(UnknownNameError("'x'"))).error) == "'x'"
    unknown = decode_error(error_text(ZeroDivisionError("oh"))).error
    assert (type(unknown), str(unknown)) == (MegalithError, "on a server: ZeroDivisionError: oh")
    for wrong in (None, [], ["OSError"], ["KeyError", "x"], ["InputError", 5], "x"):
        with pytest.raises(InputError):
            decode_error(wrong)
