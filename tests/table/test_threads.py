"""Many threads: results that do not depend on their number, and writes that are atomic."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch
from torch import Tensor

from megalith import FTRL, SGD, Adagrad, Adam, Normal, RowWiseAdagrad, Segment, Table, TableConfig, _native
from megalith.errors import UnknownNameError
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.table import Chunk, Optimizer
from tests.table.support import assert_same_bits, assert_same_tables, sgd_table, whole
from tests.table.test_custom_optimizer import SignSGD

PATIENCE = 120  # seconds; only a deadlock takes so long


def run_together(*work: Callable[[], object]) -> None:
    """Runs each function in its own thread and raises what one of them raised."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]


@contextmanager
def announced(done: threading.Event) -> Iterator[None]:
    """Sets `done` at the end of a writer, also of one that fails, so that readers end."""
    try:
        yield
    finally:
        done.set()


# ---- whose threads


@pytest.mark.usefixtures("restore_threads")
def test_the_main_thread_uses_the_threads_of_torch() -> None:
    torch.set_num_threads(2)
    there = sys.platform == "linux" and "OpenMP" in torch.__config__.parallel_info()
    found = []

    run_together(lambda: found.append(_native.uses_torch_threads(2)))

    assert found == [False]  # torch would start threads for each thread that calls it
    assert _native.uses_torch_threads(2) == there
    assert not _native.uses_torch_threads(3)


# ---- the number of threads does not show

CONFIG = TableConfig(
    "t",
    segments=[
        Segment(1, optimizer=FTRL(0.5, l1=0.01)),
        Segment(8, optimizer=Adam(0.1), initializer=Normal()),
        Segment(12, optimizer=RowWiseAdagrad(0.1)),
        Segment(3, optimizer=Adagrad(0.1)),
    ],
)
OCCURRENCES = 40_000


def skewed_ids(seed: int) -> Tensor:
    """Few ids very often, many ids once."""
    uniform = torch.rand(OCCURRENCES, generator=torch.Generator().manual_seed(seed))
    return ((20_000 * uniform**4).long() - 5_000) << 20


def two_features() -> Pooling:
    """Half the occurrences summed with weights, most others averaged and added; some for the whole batch."""
    half, bags = OCCURRENCES // 2, OCCURRENCES // 20
    weights = torch.randn(OCCURRENCES, generator=torch.Generator().manual_seed(3))
    tens, nines = torch.arange(bags + 1) * 10, half + 3 + torch.arange(bags + 1) * 9
    counts, shared = torch.full((bags,), 9.0), nines[-1] + torch.tensor([0, 500])
    return Pooling(
        outputs=((bags, 24), (bags, 10)),
        bags={
            "t": (
                Bags(tens, (OutputSlice(0, 0, 0, 24), OutputSlice(1, 0, 2, 12)), weights=weights),
                Bags(nines, (OutputSlice(0, 0, 0, 24, accumulate=True),), divisor=counts),
                Bags(shared, (OutputSlice(1, 0, 0, 10, accumulate=True),), shared=True),
            )
        },
    )


def life(threads: int) -> tuple[Chunk, list[Tensor]]:
    """A few calls of every kind with a number of threads; the table and what was read."""
    torch.set_num_threads(threads)
    table = Table(CONFIG, seed=5)
    pooling = two_features()
    generator = torch.Generator().manual_seed(1)
    read: list[Tensor] = []
    for step in range(3):
        ids = skewed_ids(step)
        flat = torch.randn(OCCURRENCES, 24, generator=generator)
        grads = [torch.randn(shape, generator=generator) for shape in pooling.outputs]
        table.apply_gradients(ids, flat, step=step, time=step)
        read += table.read(table.find(ids), ids, pooling)
        table.update(table.find(ids), ids, grads, pooling, step=step, time=step, scale=0.5)
        table.remove(ids[:100])
        table.assign_add(ids[:5000], flat[:5000], time=step)
        table.reinitialize(ids[100:4000:7], time=step)
        read.append(table.lookup(skewed_ids(step + 1)))
    copy = Table(CONFIG, seed=6)
    copy.restore(whole(table))
    return whole(copy), read


@pytest.mark.usefixtures("restore_threads")
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    expected, expected_reads = life(1)
    assert expected.ids.numel() > 10_000

    for threads in (2, 4):
        actual, reads = life(threads)
        assert_same_tables(actual, expected)
        for a, e in zip(reads, expected_reads, strict=True):
            assert_same_bits(a, e)


@pytest.mark.usefixtures("restore_threads")
def test_results_do_not_depend_on_other_callers_of_the_pool() -> None:
    expected, _ = life(1)
    results: list[Chunk] = []

    run_together(*[lambda: results.append(life(2)[0]) for _ in range(3)])

    for actual in results:
        assert_same_tables(actual, expected)


# ---- a write is atomic for readers


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("threads", [1, 2])
def test_readers_never_see_half_a_write(threads: int) -> None:
    torch.set_num_threads(threads)
    table = sgd_table("cpu", 16)
    ids = torch.arange(10_000) * 977
    bag = Pooling.sum("t", torch.arange(10_001), 16)
    writes = 60
    table.assign(ids, torch.zeros(ids.numel(), 16))
    done = threading.Event()

    def write() -> None:
        with announced(done):
            for constant in range(1, writes + 1):
                if constant % 3:
                    table.assign(ids, torch.full((ids.numel(), 16), float(constant)))
                else:  # the same by another way: SGD with rate 1 from constant - 1
                    table.apply_gradients(ids, torch.full((ids.numel(), 16), -1.0), step=0)

    def read(look: Callable[[], Tensor]) -> None:
        last = 0.0
        while not done.is_set():
            rows = look()
            low, high = float(rows.min()), float(rows.max())
            assert low == high, f"a mix of {low} and {high}"
            assert low >= last, "time went backwards"
            last = low

    run_together(
        write,
        lambda: read(lambda: table.lookup(ids)),
        lambda: read(lambda: table.read(table.find(ids), ids, bag)[0]),
    )

    assert float(table.lookup(ids).min()) == writes


def test_readers_see_rows_whole_while_the_table_grows_and_shrinks() -> None:
    table = sgd_table("cpu", 4, missing="zeros")
    steady = torch.arange(500)
    table.assign(steady, steady[:, None].float().expand(500, 4))
    done = threading.Event()

    def write() -> None:
        with announced(done):
            for number in range(60):
                ids = torch.arange(1000) + 1000 * (number + 1)
                table.assign(ids, ids[:, None].float().expand(1000, 4))
                if number % 2:
                    table.remove(ids[::2])

    def read() -> None:
        everything = torch.arange(61_000)
        while not done.is_set():
            rows = table.lookup(everything)
            assert bool((rows[:500, 0] == steady).all()), "a row that stayed was lost"
            expected = everything[:, None].float()
            assert bool(((rows == 0) | (rows == expected)).all()), "another id's row"

    def walk() -> None:
        while not done.is_set():
            for chunk in table.scan(512):
                assert bool((chunk.rows == chunk.ids[:, None]).all())

    run_together(write, read, walk)

    assert len(table) == 500 + 60_000 - 30 * 500


# ---- concurrent writers


@pytest.mark.parametrize("optimizer", [SGD(1.0), SignSGD(1.0)], ids=["native", "torch"])
def test_concurrent_updates_all_count(engine: str, optimizer: Optimizer) -> None:
    table = sgd_table(engine, 2, optimizer=optimizer)
    calls = 40 if engine == "cpu" else 5
    ids = torch.arange(200) * 31

    def train(number: int) -> None:
        for call in range(calls):
            mine = ids[(number + call) % 2 :]
            table.apply_gradients(mine, torch.ones(mine.numel(), 2), step=call)

    run_together(*[lambda n=n: train(n) for n in range(4)])

    # Whole numbers, so the order of the steps does not matter. Id 0 sits out every other call.
    expected = torch.full((200, 2), -4.0 * calls)
    skipped = sum((number + call) % 2 for number in range(4) for call in range(calls))
    expected[0] += skipped
    assert_same_bits(table.lookup(ids), expected)


def test_two_consumers_drain_everything_once_while_rows_change() -> None:
    table = sgd_table("cpu", 1)
    for consumer in ("a", "b"):
        table.track(consumer)
    done = threading.Event()
    drained: dict[str, list[int]] = {"a": [], "b": []}

    def write() -> None:
        with announced(done):
            for number in range(200):
                table.assign(torch.arange(50) + 50 * number, torch.ones(50, 1))

    def drain(consumer: str) -> None:
        finished = False
        while not finished:
            finished = done.is_set()
            drained[consumer] += table.drain_touched(consumer)[0].tolist()

    run_together(write, lambda: drain("a"), lambda: drain("b"))

    # Each id was written once, so each consumer hears of it exactly once.
    assert sorted(drained["a"]) == sorted(drained["b"]) == list(range(10_000))


# ---- consumers that come and go, and numbers below the normal ones


def test_consumers_of_many_threads_keep_their_names() -> None:
    names = ["c0", "c1", "c2", "c3"]
    for _ in range(50):
        table, gate = sgd_table("cpu"), threading.Barrier(len(names), timeout=PATIENCE)

        def join(name: str, table: Table = table, gate: threading.Barrier = gate) -> None:
            gate.wait()
            table.track(name)

        run_together(*[partial(join, name) for name in names])
        assert sorted(table.stats().consumers) == names


def test_draining_while_another_thread_untracks_never_reads_freed_flags() -> None:
    table = sgd_table("cpu")
    table.assign(torch.arange(1000), torch.zeros(1000, 2))
    done = threading.Event()

    def come_and_go() -> None:
        with announced(done):
            for _ in range(300):
                table.track("x")
                table.untrack("x")

    def drain() -> None:
        while not done.is_set():
            with suppress(UnknownNameError):
                table.drain_touched("x")
                table.mark_touched("x", torch.arange(10))

    run_together(come_and_go, drain)


@pytest.mark.usefixtures("restore_threads")
def test_helpers_flush_tiny_numbers_as_the_caller_does() -> None:
    ids = torch.arange(40000)
    tiny = torch.full((40000, 8), 1e-40)

    def weights_after_a_step(threads: int, flush: bool) -> Tensor:
        torch.set_num_threads(threads)
        table = sgd_table("cpu", 8)
        table.apply_gradients(ids, torch.zeros(40000, 8), step=0)  # starts the helpers
        torch.set_flush_denormal(flush)
        try:
            table.apply_gradients(ids, tiny, step=0)
        finally:
            torch.set_flush_denormal(False)
        return table.lookup(ids)

    for flush in (True, False):
        alone = weights_after_a_step(1, flush)
        assert_same_bits(alone, weights_after_a_step(2, flush))
        assert bool((alone == 0).all()) == flush
