"""Batching: queued requests are computed together, abandoned ones are not, and the queue is bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from megalith.errors import InputError, RemoteError
from megalith.serving.server import batching, model_server, repository
from megalith.serving.server.batching import Batcher
from megalith.serving.server.http import event_loop, run_on_loop
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.server_config import Batching, ServerConfig
from tests.serving.exports import INPUTS, export_version, fails, is_healthy, logits, request_of, rows, serving

LIMIT = 30.0
PREDICT = "/tensorflow.serving.PredictionService/Predict"


class Gate:
    """Computes x -> 10 * x for each batch once it is released; records the batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def __call__(self, batch: Sequence[int]) -> list[int | Exception]:
        self.entered.release()
        assert self.go.acquire(timeout=LIMIT)
        self.batches.append(list(batch))
        return [InputError(f"{x} is negative") if x < 0 else 10 * x for x in batch]


@contextmanager
def busy(
    settings: Batching | None = None, **options: Any
) -> Iterator[tuple[Any, Gate, Callable[..., Future[int]]]]:
    """A batcher that is computing 0 already, so that all else waits; `ask` submits on the event loop."""
    gate, ended = Gate(), threading.Event()
    batcher: Batcher[int, int] = Batcher(
        gate, settings or Batching(), name="test", on_end=ended.set, **options
    )

    def ask(x: int, rows: int = 1, *, timeout: float = LIMIT, **more: Any) -> Future[int]:
        waiting = batcher.queued_rows
        asked = submit(batcher, x, rows, timeout=timeout, **more)
        while batcher.queued_rows == waiting and not asked.done():
            pass
        return asked

    first = submit(batcher, 0)
    assert gate.entered.acquire(timeout=LIMIT)
    try:
        yield batcher, gate, ask
    finally:
        for _ in range(16):
            gate.go.release()
        assert first.result(LIMIT) == 0
        batcher.close()
        assert ended.wait(LIMIT)


def submit(
    batcher: Batcher[int, int], x: int, rows: int = 1, *, timeout: float = LIMIT, **more: Any
) -> Future[int]:
    work = batcher.submit(x, rows, timeout=timeout, **more)
    return asyncio.run_coroutine_threadsafe(work, event_loop())


def test_what_waits_is_computed_together() -> None:
    with busy() as (_, gate, ask):
        asked = [ask(x) for x in (1, 2, 3)]
        gate.go.release(2)
        assert [each.result(LIMIT) for each in asked] == [10, 20, 30]
        assert gate.batches == [[0], [1, 2, 3]]


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (Batching(max_rows=4), [(2, 0), (2, 0), (1, 0), (9, 0), (1, 0)]),
        (Batching(max_bytes=100), [(1, 60), (1, 40), (1, 1), (1, 200), (1, 1)]),
    ],
    ids=["rows", "bytes"],
)
def test_a_batch_has_a_largest_size_but_a_request_is_never_cut(
    settings: Batching, sizes: list[tuple[int, int]]
) -> None:
    with busy(settings) as (_, gate, ask):
        asked = [ask(k + 1, rows, cost=cost) for k, (rows, cost) in enumerate(sizes)]
        gate.go.release(5)
        assert [each.result(LIMIT) for each in asked] == [10, 20, 30, 40, 50]
        assert gate.batches == [[0], [1, 2], [3], [4], [5]]


def test_requests_that_share_a_feature_are_computed_alone() -> None:
    with busy(combines=False) as (_, gate, ask):
        asked = [ask(1), ask(2)]
        gate.go.release(3)
        assert [each.result(LIMIT) for each in asked] == [10, 20]
        assert gate.batches == [[0], [1], [2]]


def test_an_error_fails_only_its_request() -> None:
    with busy() as (_, gate, ask):
        bad, good = ask(-1), ask(1)
        gate.go.release(2)
        with pytest.raises(InputError, match="-1 is negative"):
            bad.result(LIMIT)
        assert good.result(LIMIT) == 10


@pytest.mark.parametrize(
    ("settings", "rows", "cost", "queued"),
    [(Batching(max_queue_rows=3), 2, 0, 2), (Batching(max_queue_bytes=100), 1, 60, 1)],
    ids=["rows", "bytes"],
)
def test_a_full_queue_refuses(settings: Batching, rows: int, cost: int, queued: int) -> None:
    with busy(settings) as (_, gate, ask):
        waiting = ask(1, rows, cost=cost)
        with pytest.raises(RequestError, match=f"{queued} rows are already queued") as raised:
            ask(2, rows, cost=cost).result(LIMIT)
        assert raised.value.code == Code.RESOURCE_EXHAUSTED
        gate.go.release(2)
        assert waiting.result(LIMIT) == 10


@pytest.mark.parametrize("size", [{"rows": 4}, {"rows": 1, "cost": 101}])
def test_an_empty_queue_refuses_what_no_queue_has_room_for(size: dict[str, int]) -> None:
    with (
        busy(Batching(max_queue_rows=3, max_queue_bytes=100)) as (batcher, _, _),
        pytest.raises(InputError, match=r"the limits are 3 rows and 100 bytes"),
    ):
        submit(batcher, 1, **size).result(LIMIT)


def test_a_batch_that_cannot_be_counted_fails_and_the_next_is_computed() -> None:
    counted: list[int] = []

    def count(rows: int) -> None:
        counted.append(rows)
        if rows == 2:
            raise OSError("no metrics")

    with busy(on_batch=count) as (_, gate, ask):
        gate.go.release(2)
        bad = ask(1, 2)
        with pytest.raises(OSError, match="no metrics"):
            bad.result(LIMIT)
        good = ask(2, 3)
        assert good.result(LIMIT) == 20
        assert counted == [1, 2, 3]


def test_a_request_that_nobody_waits_for_is_not_computed() -> None:
    with busy() as (_, gate, ask):
        late, cancelled, good = ask(1, timeout=0.0), ask(3), ask(2)
        assert cancelled.cancel()
        run_on_loop(asyncio.sleep(0), LIMIT, "the loop to see it")
        with pytest.raises(RequestError) as raised:
            late.result(LIMIT)
        assert raised.value.code == Code.DEADLINE_EXCEEDED
        gate.go.release(2)
        assert good.result(LIMIT) == 20
        assert gate.batches == [[0], [2]]


def test_a_timeout_of_the_computation_is_its_error() -> None:
    def compute(batch: Sequence[int]) -> list[int | Exception]:
        raise TimeoutError("of a part")

    batcher: Batcher[int, int] = Batcher(compute, Batching(), name="test")
    with pytest.raises(TimeoutError, match="of a part"):
        submit(batcher, 1).result(LIMIT)
    batcher.close()


def test_waiting_for_a_fuller_batch_ends_when_it_is_full() -> None:
    gate = Gate()
    batcher: Batcher[int, int] = Batcher(gate, Batching(max_rows=2, max_wait=60), name="test")
    asked = [submit(batcher, x) for x in (1, 2)]
    gate.go.release()
    assert [each.result(LIMIT) for each in asked] == [10, 20]
    assert gate.batches == [[1, 2]]
    batcher.close()


def test_closing_computes_what_is_queued_and_refuses_the_rest() -> None:
    with busy() as (batcher, gate, ask):
        asked = ask(1)
        batcher.close()
        gate.go.release(2)
        assert asked.result(LIMIT) == 10
        with pytest.raises(RequestError, match="shutting down"):
            submit(batcher, 2).result(LIMIT)


def test_a_small_request_that_is_alone_is_computed_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "INLINE_SECONDS", LIMIT - 1)  # a busy machine may take longer than that
    found: list[tuple[str, list[int]]] = []
    ended = threading.Event()

    def compute(batch: Sequence[int]) -> list[int | Exception]:
        found.append(("loop" if threading.current_thread().name == "megalith-loop" else "thread", [*batch]))
        return [InputError(f"{x} is negative") if x < 0 else 10 * x for x in batch]

    batcher: Batcher[int, int] = Batcher(compute, Batching(), name="test", inline=True, on_end=ended.set)
    monkeypatch.setattr(batcher, "_last_seconds", 0.0)

    async def together() -> list[int]:
        return await asyncio.gather(*(batcher.submit(x, timeout=LIMIT) for x in (5, 6)))

    async def leave() -> None:
        task = asyncio.create_task(batcher.submit(7, timeout=LIMIT))
        await asyncio.sleep(0)  # it is queued
        task.cancel()

    assert submit(batcher, 1).result(LIMIT) == 10
    with pytest.raises(InputError, match="-2 is negative"):
        submit(batcher, -2).result(LIMIT)
    run_on_loop(leave(), LIMIT, "leaving")
    assert submit(batcher, 3, rows=batching.INLINE_ROWS + 1).result(LIMIT) == 30
    assert submit(batcher, 4, timeout=LIMIT).result(LIMIT) == 40
    assert run_on_loop(together(), LIMIT, "two requests") == [50, 60]
    batcher.close()
    assert ended.wait(LIMIT)
    alone = [("loop", [1]), ("loop", [-2]), ("thread", [3]), ("loop", [4])]
    assert found == [*alone, ("thread", [5, 6])]


def test_a_request_while_another_is_computed_does_not_block_the_event_loop() -> None:
    with busy(inline=True) as (_, gate, ask):
        asked = ask(1)
        gate.go.release(2)
        assert asked.result(LIMIT) == 10
        assert gate.batches == [[0], [1]]


# ---- the server


def test_concurrent_requests_get_their_own_scores(tmp_path: Path) -> None:
    model = export_version(tmp_path)
    with serving(tmp_path, batching=Batching(max_rows=64, workers=2)) as (server, ask):

        def one(seed: int) -> None:
            features, dense = rows(1 + seed % 5, seed)
            if seed % 3 == 0:  # some lack a feature, so that plain and other requests meet in a batch
                del features["tags"]
            outputs = ask({**features, "dense": dense})
            features.setdefault("tags", torch.full((len(dense), 1), -1))
            torch.testing.assert_close(outputs["logits"], logits(model, features, dense))

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(one, range(200)))
        text = server.metrics.text().decode()
        assert (
            'megalith_request_seconds_count{code="OK",model="movies",signature="serving_default"} 200.0'
            in text
        )


def test_a_request_of_many_rows_is_computed_in_pieces(tmp_path: Path) -> None:
    model = export_version(tmp_path)
    with serving(tmp_path, batching=Batching(max_rows=4)) as (server, ask):
        features, dense = rows(10)
        expected = logits(model, features, dense)
        torch.testing.assert_close(ask({**features, "dense": dense})["logits"], expected)
        assert 'megalith_batch_rows_bucket{le="4.0",model="movies"} 3.0' in server.metrics.text().decode()


def test_a_few_bytes_do_not_make_many_rows(tmp_path: Path) -> None:
    export_version(tmp_path)
    with serving(tmp_path) as (_, ask):
        request = request_of(INPUTS)
        for proto in request.inputs.values():
            proto.ClearField("tensor_content")
            proto.tensor_shape.dim[0].size = 400_000
        assert request.ByteSize() < 200
        with fails("INVALID_ARGUMENT", r"400000 rows .* send it in parts"):
            ask.send(request)


@contextmanager
def served_by(directory: Path, predict: Callable[[Any, int, Any], Any]) -> Iterator[tuple[Any, Any]]:
    """A version whose computation is replaced, and the computation that it had."""
    export_version(directory)
    with ModelServer(directory) as server:
        version: Any = server.models[0].newest
        compute, version._predict_plain = version._predict_plain, predict
        yield version, compute


def test_whatever_one_request_breaks_the_others_are_answered(tmp_path: Path) -> None:
    def predict(batch: Any, size: int, dense: Any) -> Any:
        if (dense == 7.0).any():
            raise MemoryError("too much")
        return compute(batch, size, dense)

    with served_by(tmp_path, predict) as (version, compute):
        features, dense = rows(1)
        good, bad = (version.reader.read({**features, "dense": each}) for each in (dense, dense * 0 + 7))
        before, failed, after = version._compute([good, bad, good])
        assert isinstance(failed, MemoryError)
        assert not isinstance(before, Exception)
        assert not isinstance(after, Exception)


def test_a_part_that_does_not_answer_is_not_asked_again_for_each_request(tmp_path: Path) -> None:
    calls: list[int] = []

    def predict(batch: Any, size: int, dense: Any) -> Any:
        calls.append(size)
        raise RemoteError("movies:ps_0 does not answer", code="UNAVAILABLE")

    with served_by(tmp_path, predict) as (version, _):
        features, dense = rows(1)
        one = version.reader.read({**features, "dense": dense})
        results = version._compute([one, one])
        assert [type(result) for result in results] == [RemoteError, RemoteError]
        assert calls == [2]


class Held:
    """A server whose model computes only when released, and what it has computed."""

    def __init__(self, server: ModelServer) -> None:
        version: Any = server.models[0].newest
        self.server = server
        self.go, self.entered = threading.Event(), threading.Event()
        self.rows = 0
        compute = version._predict_plain

        def predict(batch: Any, size: int, dense: Any) -> Any:
            self.entered.set()
            assert self.go.wait(LIMIT)
            self.rows += size
            return compute(batch, size, dense)

        version._predict_plain = predict


@contextmanager
def held(directory: Path, **options: Any) -> Iterator[Held]:
    export_version(directory)
    with ModelServer(directory, ServerConfig(**options)) as server:
        made = Held(server)
        try:
            yield made
        finally:
            made.go.set()


def data(count: int = 1) -> bytes:
    features, dense = rows(count)
    message: bytes = request_of({**features, "dense": dense}).SerializeToString()
    return message


def test_deadlines_and_cancelled_calls_are_not_computed(tmp_path: Path) -> None:
    with held(tmp_path) as hold, grpc.insecure_channel(hold.server.address) as channel:
        call = channel.unary_unary(PREDICT)
        first = call.future(data(1), timeout=LIMIT)
        assert hold.entered.wait(LIMIT)
        late = call.future(data(10), timeout=0.2)
        assert late.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        gone = call.future(data(100), timeout=LIMIT)
        while not hold.server.models[0].newest.queued_rows >= 100:
            pass
        gone.cancel()
        last = call.future(data(1000), timeout=LIMIT)
        while not hold.server.models[0].newest.queued_rows >= 1000:
            pass
        hold.go.set()
        assert first.result(LIMIT)
        assert last.result(LIMIT)
        assert hold.rows == 1001


def test_a_full_server_refuses_and_still_reports_health(tmp_path: Path) -> None:
    with held(tmp_path, max_concurrent=1) as hold, grpc.insecure_channel(hold.server.address) as channel:
        call = channel.unary_unary(PREDICT)
        first = call.future(data(), timeout=LIMIT)
        assert hold.entered.wait(LIMIT)
        assert call.future(data(), timeout=LIMIT).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert is_healthy(hold.server)
        hold.go.set()
        assert first.result(LIMIT)


def test_stopping_answers_what_was_accepted_and_refuses_the_rest(tmp_path: Path) -> None:
    with held(tmp_path) as hold, grpc.insecure_channel(hold.server.address) as channel:
        call = channel.unary_unary(PREDICT)
        first = call.future(data(), timeout=LIMIT)
        assert hold.entered.wait(LIMIT)
        stopping = threading.Thread(target=hold.server.stop)
        stopping.start()
        while not hold.server._dispatcher.closing:
            pass
        assert call.future(data(), timeout=LIMIT).code() == grpc.StatusCode.UNAVAILABLE
        hold.go.set()
        assert first.result(LIMIT)
        stopping.join(LIMIT)
        assert not stopping.is_alive()


def test_stopping_does_not_wait_without_end_for_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_server, "LAST_SECONDS", 0.02)
    monkeypatch.setattr(model_server, "CANCEL_SECONDS", 0.02)

    async def never(seconds: float) -> None:
        await asyncio.Event().wait()

    with held(tmp_path) as hold:
        hold.server._servers.append(SimpleNamespace(stop=never))
        hold.server.stop()
    assert "the stop of gRPC has not ended after 0.04 s; its calls end with this process" in caplog.text


def test_stopping_has_a_deadline(tmp_path: Path) -> None:
    with held(tmp_path, drain_seconds=0.1) as hold, grpc.insecure_channel(hold.server.address) as channel:
        first = channel.unary_unary(PREDICT).future(data(), timeout=LIMIT)
        assert hold.entered.wait(LIMIT)
        stopping = threading.Thread(target=hold.server.stop)
        stopping.start()
        stopping.join(LIMIT)
        assert not stopping.is_alive()
        assert first.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


def test_a_computation_that_never_ends_does_not_block_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller has given up, so that the version is unused and is closed while a thread computes it."""
    monkeypatch.setattr(repository, "CLOSE_SECONDS", 0.1)
    with held(tmp_path, drain_seconds=0.2) as hold:
        with grpc.insecure_channel(hold.server.address) as channel:
            late = channel.unary_unary(PREDICT).future(data(), timeout=1.0)
            assert hold.entered.wait(LIMIT)
            assert late.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        stopping = threading.Thread(target=hold.server.stop)
        stopping.start()
        stopping.join(LIMIT)
        assert not stopping.is_alive()
        assert "movies version 1: its last requests have not ended in 0." in caplog.text
