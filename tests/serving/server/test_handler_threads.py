"""Calls run in the thread that became idle last, in order while all are busy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from megalith.serving.server.grpc_calls import HandlerThreads

SECONDS = 60.0


def blocked(gate: threading.Event) -> Callable[[], int]:
    def call() -> int:
        assert gate.wait(SECONDS)
        return threading.get_ident()

    return call


def test_the_thread_that_became_idle_last_runs_the_next_call() -> None:
    pool = HandlerThreads(4, "test")
    gates = [threading.Event() for _ in range(3)]
    futures = [pool.submit(blocked(gate)) for gate in gates]
    threads = []
    for gate, future in zip(gates, futures, strict=True):
        gate.set()
        threads.append(future.result(SECONDS))
        wait_for_idle(pool, len(threads))

    assert len(set(threads)) == 3
    for _ in range(5):
        assert pool.submit(threading.get_ident).result(SECONDS) == threads[2]
        wait_for_idle(pool, 3)
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
        pool.submit(divmod, 1, 0).result(SECONDS)
    assert pool.submit(int, "ff", base=16).result(SECONDS) == 255
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


def test_many_callers_lose_no_call() -> None:
    pool = HandlerThreads(3, "test")
    results: list[int] = []

    def caller(first: int) -> None:
        results.extend(pool.submit(lambda k: k, first + k).result(SECONDS) for k in range(200))

    callers = [threading.Thread(target=caller, args=(1000 * k,)) for k in range(6)]
    for each in callers:
        each.start()
    for each in callers:
        each.join(SECONDS)
    pool.shutdown()

    assert sorted(results) == [1000 * c + k for c in range(6) for k in range(200)]


def wait_for_idle(pool: HandlerThreads, count: int) -> None:
    """Wait until some threads are idle: a result is there shortly before its thread is idle again."""
    for _ in range(int(SECONDS * 1000)):
        if len(pool._idle) >= count:
            return
        threading.Event().wait(0.001)
    raise AssertionError("the threads did not become idle")
