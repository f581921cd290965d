"""Calls of gRPC: those that never send their message take nothing from others."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from megalith.errors import RemoteError
from megalith.serving.server import grpc_calls
from megalith.serving.server.grpc_calls import MAX_CONTROLS, MAX_REFLECTIONS, REQUESTS, GrpcCall
from megalith.serving.server.http import run_on_loop
from megalith.serving.server.model_server import SPARE_REQUESTS, ModelServer
from megalith.serving.server.server_config import ServerConfig
from tests.serving.exports import INPUTS, ServerClient, is_healthy, silent, wait_until

STATUS = "/tensorflow.serving.ModelService/GetModelStatus"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MAX_CONCURRENT = 4


@pytest.fixture(scope="module")
def server(exported: Path) -> Iterator[ModelServer]:
    with ModelServer(exported, ServerConfig(max_concurrent=MAX_CONCURRENT)) as started:
        yield started


@pytest.fixture
def short_reads(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without a message end soon; only here, because other calls may be slow on a busy machine."""
    monkeypatch.setattr(server._limits, "read_seconds", 1.0)


def has_status(server: ModelServer) -> bool:
    with ServerClient(server.address) as ask:
        return bool(ask.status())


@pytest.mark.usefixtures("short_reads")
@pytest.mark.parametrize("method", REQUESTS)
def test_half_open_requests_leave_health_alone_and_end(server: ModelServer, method: str) -> None:
    places = MAX_CONCURRENT + SPARE_REQUESTS
    with silent(server, method, places + 156) as calls:
        assert is_healthy(server)
        assert has_status(server)
        codes = [call.code() for call in calls]
        assert set(codes) <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}
        assert codes.count(grpc.StatusCode.CANCELLED) >= places
    wait_until(lambda: not server._limits.requests.calls)  # a client sees the end before the server does
    with ServerClient(server.address) as ask:
        assert ask(INPUTS)["logits"].shape == (2,)


@pytest.mark.usefixtures("short_reads")
@pytest.mark.parametrize("method", [STATUS, REFLECTION])
def test_half_open_calls_of_other_methods_leave_requests_alone(server: ModelServer, method: str) -> None:
    with silent(server, method, 40) as calls, ServerClient(server.address) as ask:
        assert ask(INPUTS)["logits"].shape == (2,)
        assert is_healthy(server)
        codes = [call.code() for call in calls]
        assert set(codes) <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}
        assert codes.count(grpc.StatusCode.CANCELLED) >= MAX_REFLECTIONS


@pytest.mark.parametrize("method", [REQUESTS[0], STATUS, "/grpc.health.v1.Health/Check"])
def test_half_open_calls_give_way_to_others(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Otherwise a few of them, begun again and again, would keep everyone out."""
    limits = server._limits
    monkeypatch.setattr(limits, "read_seconds", 3600.0)
    monkeypatch.setattr(grpc_calls, "PATIENCE_SECONDS", 0.0)
    group = {REQUESTS[0]: limits.requests, STATUS: limits.control}.get(method, limits.checks)
    every = MAX_CONCURRENT + SPARE_REQUESTS if method == REQUESTS[0] else MAX_CONTROLS
    wait_until(lambda: not group.calls)
    with silent(server, method, every) as calls:
        wait_until(lambda: len(group.calls) == every)
        with ServerClient(server.address) as ask:
            for _ in range(3):
                assert ask(INPUTS)["logits"].shape == (2,)
                assert is_healthy(server)
                assert has_status(server)
        wait_until(lambda: any(call.done() for call in calls))
        ended = [call for call in calls if call.done()]
        assert 1 <= len(ended) < every  # a place that is free again takes nobody else's
        assert {call.code() for call in ended} == {grpc.StatusCode.CANCELLED}
    wait_until(lambda: not group.calls)


def test_a_call_without_a_message_is_refused(server: ModelServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        for method in (*REQUESTS, STATUS):
            with pytest.raises(grpc.RpcError) as raised:
                channel.stream_unary(method)(iter(()), timeout=20)
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_places_come_back(server: ModelServer) -> None:
    """More requests than places, several at a time: each is answered, or refused because of the others."""
    with ServerClient(server.address) as ask, ThreadPoolExecutor(2) as pool:

        def score() -> str:
            try:
                return str(ask(INPUTS)["logits"].shape[0])
            except RemoteError as error:
                return str(error.code)

        assert {future.result() for future in [pool.submit(score) for _ in range(60)]} == {"2"}


def test_a_call_that_is_ended_twice_is_cancelled_once() -> None:
    async def end_twice() -> tuple[int, str]:
        async def wait() -> None:
            call = GrpcCall(read_seconds=60.0)
            call.end("too slow")
            call.end("another call needs its slot")
            try:
                await asyncio.sleep(60)  # it is cancelled before
            except asyncio.CancelledError:
                found.append((call.task.uncancel(), call.reason))

        found: list[tuple[int, str]] = []
        await asyncio.create_task(wait())
        return found[0]

    # Cancellations that are left count as the client's, which gets no status.
    assert run_on_loop(end_twice(), 30.0, "two ends") == (0, "too slow")


_FIRST_USE = """
import threading
from megalith.serving.server.http import event_loop

barrier, found = threading.Barrier(16), []
def ask():
    barrier.wait(60)
    found.append(event_loop())
threads = [threading.Thread(target=ask) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
loops = [thread.name for thread in threading.enumerate()].count("megalith-loop")
assert (len(found), len(set(found)), loops) == (16, 1, 1), (found, loops)
"""


def test_threads_that_use_the_event_loop_first_share_it() -> None:
    subprocess.run([sys.executable, "-c", _FIRST_USE], check=True, timeout=60)
