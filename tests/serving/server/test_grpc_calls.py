"""Calls of gRPC: those that never send their message take nothing from others; threads run them in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from megalith.errors import InputError, RemoteError
from megalith.serving.server import grpc_calls
from megalith.serving.server.grpc_calls import MAX_CONTROLS, MAX_REFLECTIONS, REQUESTS, HandlerThreads
from megalith.serving.server.model_server import SPARE_REQUESTS, ModelServer
from megalith.serving.server.server_config import ServerConfig
from tests.serving.exports import INPUTS, ServerClient, is_healthy, request_of, silent, wait_until

STATUS = "/tensorflow.serving.ModelService/GetModelStatus"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MAX_CONCURRENT = 4
LIMIT = 60.0


@pytest.fixture(scope="module")
def server(exported: Path) -> Iterator[ModelServer]:
    with ModelServer(exported, ServerConfig(max_concurrent=MAX_CONCURRENT)) as started:
        yield started


@pytest.fixture
def short_reads(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without a message end soon; only here, because other calls may be slow on a busy machine."""
    assert server._guard is not None
    monkeypatch.setattr(server._guard._deadlines, "seconds", 1.0)


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
    assert server._guard is not None
    free = server._guard._requests.places
    wait_until(lambda: free._value == places)  # the client sees the end of a call before the server counts it
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
    guard = server._guard
    assert guard is not None
    monkeypatch.setattr(guard._deadlines, "seconds", 3600.0)
    monkeypatch.setattr(grpc_calls, "PATIENCE_SECONDS", 0.0)
    groups = {REQUESTS[0]: guard._requests, STATUS: guard._control}
    places = groups.get(method, guard._checks).places
    every = MAX_CONCURRENT + SPARE_REQUESTS if method == REQUESTS[0] else MAX_CONTROLS
    wait_until(lambda: places._value == every)
    with silent(server, method, every) as calls:
        wait_until(lambda: places._value == 0)
        with ServerClient(server.address) as ask:
            for _ in range(3):
                assert ask(INPUTS)["logits"].shape == (2,)
                assert is_healthy(server)
                assert has_status(server)
        wait_until(lambda: any(call.done() for call in calls))
        ended = [call for call in calls if call.done()]
        assert 1 <= len(ended) < every  # a place that is free again takes nobody else's
        assert {call.code() for call in ended} == {grpc.StatusCode.CANCELLED}
    wait_until(lambda: places._value == every)


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


def test_a_cancelled_call_has_its_place_until_its_thread_is_free(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise calls would be accepted that wait for a thread, with no deadline."""
    started, go = threading.Semaphore(0), threading.Event()
    (model,) = server.models

    def holds(*_: object, **__: object) -> object:
        started.release()
        go.wait(LIMIT)
        raise InputError("held")

    assert model.newest is not None
    monkeypatch.setattr(model.newest, "predict", holds)
    places = server._guard._requests.places  # type: ignore[union-attr]
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(REQUESTS[0])
        before = MAX_CONCURRENT + SPARE_REQUESTS
        wait_until(lambda: places._value == before)  # threads of the tests above may still end
        held = call.future(request_of(INPUTS).SerializeToString(), timeout=LIMIT)
        assert started.acquire(timeout=LIMIT)
        ended = threading.Event()
        held.add_done_callback(lambda _: ended.set())
        held.cancel()
        assert ended.wait(LIMIT)
        assert is_healthy(server)  # the server has read what came before it, the cancellation
        assert places._value == before - 1
        go.set()
        wait_until(lambda: places._value == before)


def blocked(gate: threading.Event) -> Callable[[], int]:
    def call() -> int:
        assert gate.wait(LIMIT)
        return threading.get_ident()

    return call


def test_the_thread_that_became_idle_last_runs_the_next_call() -> None:
    pool = HandlerThreads(4, "test")
    gates = [threading.Event() for _ in range(3)]
    futures = [pool.submit(blocked(gate)) for gate in gates]
    threads = []
    for gate, future in zip(gates, futures, strict=True):
        gate.set()
        threads.append(future.result(LIMIT))
        wait_until(lambda: len(pool._idle) >= len(threads))

    assert len(set(threads)) == 3
    for _ in range(5):
        assert pool.submit(threading.get_ident).result(LIMIT) == threads[2]
        wait_until(lambda: len(pool._idle) >= 3)
    pool.shutdown()


def test_calls_wait_in_order_while_all_threads_are_busy() -> None:
    pool, gate = HandlerThreads(2, "test"), threading.Event()
    busy = [pool.submit(blocked(gate)) for _ in range(2)]
    done: list[int] = []
    waiting = [pool.submit(done.append, k) for k in range(50)]
    assert not any(each.done() for each in waiting)
    gate.set()
    pool.shutdown()

    assert all(each.done() for each in (*busy, *waiting))
    assert sorted(done) == list(range(50))


def test_errors_and_results_reach_the_caller() -> None:
    pool = HandlerThreads(1, "test")

    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(LIMIT)
    assert pool.submit(int, "ff", base=16).result(LIMIT) == 255
    pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(int)


def test_shutdown_cancels_what_has_not_begun() -> None:
    pool, gate = HandlerThreads(1, "test"), threading.Event()
    running = pool.submit(blocked(gate))
    waiting = pool.submit(int)
    pool.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    assert not running.done()
    gate.set()
    pool.shutdown()
    assert running.done()
