"""Rows that are written while a policy decides stay; readers and snapshots see one moment of admission."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalith import SGD, Capacity, MinCount, Ones, Segment, Table, TableConfig, Zeros
from megalith.table import Chunk, Eviction, Optimizer
from tests.table.support import TorchSGD, ints, whole


class Everything(Eviction):
    """Finds all rows expired, after it has called a function: another thread may write at this moment."""

    name = "everything"

    def __init__(self) -> None:
        self.meanwhile: Callable[[], object] = lambda: None

    def expired(self, chunk: Chunk, now: int) -> Tensor:
        self.meanwhile()
        return torch.ones_like(chunk.ids, dtype=torch.bool)


def recreate(table: Table) -> None:
    table.remove(ints(2))
    table.assign(ints(2), torch.zeros(1, 2), time=7)


WRITES: dict[str, Callable[[Table], object]] = {
    "update": lambda table: table.apply_gradients(ints(2), torch.zeros(1, 2), step=0, time=7),
    "assign": lambda table: table.assign(ints(2), table.lookup(ints(2)), time=7),
    "assign_add": lambda table: table.assign_add(ints(2), torch.zeros(1, 2), time=7),
    "reinitialize": lambda table: table.reinitialize(ints(2), time=7),
    "restore": lambda table: table.restore(whole(table).select(ints(1))),
    "remove and assign": recreate,
}


@pytest.mark.parametrize("optimizer", [SGD(1.0), TorchSGD(1.0)], ids=["native", "torch"])
@pytest.mark.parametrize("name", list(WRITES))
def test_a_row_written_after_the_scan_stays_even_in_the_same_second(
    engine: str, name: str, optimizer: Optimizer
) -> None:
    policy = Everything()
    table = Table(
        TableConfig("t", dim=2, optimizer=optimizer, initializer=Zeros(), eviction=policy), engine=engine
    )
    table.apply_gradients(ints(1, 2, 3), torch.zeros(3, 2), step=0, time=7)
    policy.meanwhile = lambda: WRITES[name](table)

    assert sorted(table.evict(7).tolist()) == [1, 3]
    assert table.stats().counters.evicted == 2

    policy.meanwhile = lambda: None
    assert table.evict(7).tolist() == [2]


def test_a_row_that_moved_after_the_scan_stays() -> None:
    policy = Everything()
    table = Table(TableConfig("t", dim=1, optimizer=SGD(1.0), eviction=policy), engine="cpu")
    table.assign(torch.arange(9000), torch.zeros(9000, 1), time=7)

    def shrink() -> None:
        table.remove(torch.arange(8990))
        while not table.engine_impl.compact(10_000):
            pass

    policy.meanwhile = shrink
    assert table.evict_part(7, rows=9000).numel() == 0
    policy.meanwhile = lambda: None
    assert sorted(table.evict(7).tolist()) == list(range(8990, 9000))


def test_a_row_written_while_a_score_function_runs_stays(engine: str) -> None:
    def oldest_id(chunk: Chunk) -> Tensor:
        if table.lookup(ints(1)).sum() == 0:
            table.assign(ints(1), torch.ones(1, 2), time=7)
        return chunk.ids.double()

    config = TableConfig(
        "t", dim=2, optimizer=SGD(1.0), initializer=Zeros(), eviction=Capacity(20, score=oldest_id)
    )
    table = Table(config, engine=engine)
    table.assign(torch.arange(1, 21), torch.zeros(20, 2), time=7)

    table.assign(ints(50), torch.zeros(1, 2), time=7)

    assert table.drain_evicted().tolist() == [2]  # a tenth of the table would be ids 1 and 2
    assert 1 in table


def test_a_reader_never_sees_a_new_row_before_its_first_step() -> None:
    config = TableConfig(
        "t",
        segments=[Segment(4, optimizer=TorchSGD(1.0), initializer=Ones())],
        admission=MinCount(1),
        eviction=Capacity(64),
        missing="zeros",
    )
    table = Table(config)
    ids, seen, done = torch.arange(32), set(), threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.update(table.lookup(ids).unique().tolist())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(300):
            table.apply_gradients(ids, torch.full((32, 4), -2.0), step=step, time=step)
            table.remove(ids)
    finally:
        done.set()
        reader.join()

    assert seen <= {0.0, 3.0}  # without a row, and 1 + 2; a new row before its step would be 1


def test_a_snapshot_holds_the_counts_of_its_moment(engine: str) -> None:
    table = Table(TableConfig("t", dim=1, optimizer=SGD(1.0), admission=MinCount(2)), engine=engine)
    table.apply_gradients(ints(1, 2, 3, 3), torch.ones(4, 1), step=0)

    with table.snapshot(pending=True) as snapshot:
        table.apply_gradients(ints(1, 2, 4), torch.ones(3, 1), step=1)
        rows = [i for chunk in snapshot.chunks(10) for i in chunk.ids.tolist()]

    assert rows == [3]
    assert [x.tolist() for x in snapshot.pending] == [[1, 2], [1, 1]]
    with table.snapshot() as snapshot:
        assert [x.numel() for x in snapshot.pending] == [0, 0]


def test_room_that_a_score_function_makes_is_not_taken_by_another_thread(engine: str) -> None:
    threads: list[threading.Thread] = []

    def score(chunk: Chunk) -> Tensor:
        if not threads:
            threads.append(threading.Thread(target=write, args=(torch.arange(200, 210),)))
            threads[0].start()
            threads[0].join(0.05)  # it waits for this write
        return chunk.ids.double()

    def write(ids: Tensor) -> None:
        table.apply_gradients(ids, torch.ones(ids.numel(), 2), step=0, time=1)

    table = Table(
        TableConfig("t", dim=2, optimizer=SGD(1.0), eviction=Capacity(20, score=score)), engine=engine
    )
    write(torch.arange(20))

    write(torch.arange(100, 110))
    threads[0].join()

    assert sorted(whole(table).ids.tolist()) == [*range(100, 110), *range(200, 210)]
