"""Corners that a careful reader found: numbers that round away, threads that race, tensors without memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megalith import FTRL, SGD, Adam, LocalShards, Segment, Table, TableConfig, Zeros
from megalith.errors import InputError, UnknownNameError, UsageError
from megalith.ops import Bags, OutputSlice, Pooling
from tests.table.support import native_table


def sgd(name: str = "t", dim: int = 2, lr: float = 1.0) -> TableConfig:
    return TableConfig(name, dim=dim, optimizer=SGD(lr), initializer=Zeros())


def test_a_beta_that_is_one_in_float32_raises() -> None:
    with pytest.raises(InputError, match="betas"):
        Adam(betas=(0.99999999, 0.999))


def test_a_rate_that_is_zero_in_float32_raises_in_ftrl(engine: str) -> None:
    table = Table(TableConfig("t", dim=1, optimizer=FTRL(1e-50)), engine=engine)
    with pytest.raises(InputError, match=r"table 't'.*is 0"):
        table.apply_gradients(torch.tensor([1]), torch.ones(1, 1), step=0)
    assert len(table) == 0


def test_whole_numbers_of_any_kind_can_be_asked_for(engine: str) -> None:
    table = Table(sgd(), engine=engine)
    table.assign(torch.tensor([5]), torch.ones(1, 2))
    assert 5 in table
    assert np.int64(5) in table
    assert torch.tensor(5) in table
    assert "5" not in table
    assert 5.0 not in table
    assert 2**64 + 5 not in table


def test_precision_together_with_segments_raises() -> None:
    with pytest.raises(InputError, match="not both"):
        TableConfig("t", segments=[Segment(1, optimizer=SGD())], precision="bogus")


def test_rows_of_billions_of_floats_raise() -> None:
    with pytest.raises(InputError, match=r"'t'.*floats"):
        TableConfig("t", dim=2**30, optimizer=SGD())


@pytest.mark.parametrize("n", [-1, 2.5, 2**70, True])
def test_room_is_a_number_of_rows(engine: str, n: object) -> None:
    with pytest.raises(InputError, match="table 't': reserve"):
        Table(sgd(), engine=engine).reserve(n)  # type: ignore[arg-type]


def test_weights_with_a_history_leave_none_in_the_table(engine: str) -> None:
    table = Table(sgd(), engine=engine)
    weights = torch.ones(1, requires_grad=True)
    bags = Bags(torch.tensor([0, 1]), (OutputSlice(0, 0, 0, 2),), weights=weights)
    pooling = Pooling(((1, 2),), {"t": (bags,)})
    table.update(None, torch.tensor([1]), [torch.ones(1, 2)], pooling, step=0)
    assert not table.lookup(torch.tensor([1])).requires_grad


def test_capacity_is_never_below_the_number_of_rows() -> None:
    table = Table(sgd(dim=1))
    grown = 0
    for start in range(0, 20000, 200):
        ids = torch.arange(start, start + 200)
        table.assign(ids, torch.zeros(200, 1))
        stats = table.stats()
        grown += stats.growing
        assert stats.capacity >= stats.rows == start + 200
    assert grown


def test_a_tensor_without_memory_raises() -> None:
    table = Table(sgd())
    with FakeTensorMode():
        fake = torch.empty(4, dtype=torch.int64)
        with pytest.raises((InputError, TypeError)):
            native_table(table).remove(fake)


@pytest.mark.usefixtures("restore_threads")
def test_helpers_flush_tiny_numbers_as_the_caller_does() -> None:
    ids = torch.arange(40000)
    tiny = torch.full((40000, 8), 1e-40)

    def weights_after_a_step(threads: int, flush: bool) -> torch.Tensor:
        torch.set_num_threads(threads)
        table = Table(sgd(dim=8))
        table.apply_gradients(ids, torch.zeros(40000, 8), step=0)  # starts the helpers
        torch.set_flush_denormal(flush)
        try:
            table.apply_gradients(ids, tiny, step=0)
        finally:
            torch.set_flush_denormal(False)
        return table.lookup(ids)

    for flush in (True, False):
        alone = weights_after_a_step(1, flush)
        assert torch.equal(alone.view(torch.int32), weights_after_a_step(2, flush).view(torch.int32))
        assert bool((alone == 0).all()) == flush


def test_consumers_of_many_threads_keep_their_names() -> None:
    for _ in range(50):
        table = Table(sgd())
        gate = threading.Barrier(4)

        def join(name: str, table: Table = table, gate: threading.Barrier = gate) -> None:
            gate.wait()
            table.track(name)

        threads = [threading.Thread(target=join, args=(f"c{k}",)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(table.stats().consumers) == ["c0", "c1", "c2", "c3"]


def test_draining_while_another_thread_untracks_never_reads_freed_flags() -> None:
    table = Table(sgd())
    table.assign(torch.arange(1000), torch.zeros(1000, 2))
    done = threading.Event()

    def come_and_go() -> None:
        for _ in range(300):
            table.track("x")
            table.untrack("x")
        done.set()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    while not done.is_set():
        try:
            table.drain_touched("x")
            table.mark_touched("x", torch.arange(10))
        except UnknownNameError:
            continue
    thread.join()


def test_a_consumer_needs_a_name(engine: str) -> None:
    table = Table(sgd(), engine=engine)
    for name in (None, "", 3):
        with pytest.raises(InputError, match="consumer"):
            table.track(name)  # type: ignore[arg-type]
    assert table.stats().consumers == ()


def test_removing_and_creating_again_does_not_pile_up(engine: str) -> None:
    table = Table(sgd(), engine=engine)
    table.track("slow")
    ids = torch.arange(100)
    for _ in range(60):  # 6000 removed ids, of which 100 differ
        table.assign(ids, torch.zeros(100, 2))
        table.remove(ids)
    assert table.memory().side < 20000
    updated, removed = table.drain_touched("slow")
    assert updated.numel() == 0
    assert sorted(removed.tolist()) == ids.tolist()


def test_a_lookup_notices_ids_changed_in_place() -> None:
    shards = LocalShards([sgd()])
    ids = torch.tensor([1, 2])
    lookup = shards.lookup({"t": ids})
    ids.add_(10)
    with pytest.raises(UsageError, match="table 't': its ids were changed"):
        shards.apply_gradients(lookup, {"t": torch.ones(2, 2)}, step=0)
    assert len(shards.local["t"]) == 0


def test_a_failed_call_leaves_the_lookup_usable() -> None:
    shards = LocalShards([sgd()])
    lookup = shards.lookup({"t": torch.tensor([1])})
    for wrong in ({"scale": float("nan")}, {"time": -1.0}, {"step": -1}):
        with pytest.raises(InputError):
            shards.apply_gradients(lookup, {"t": torch.ones(1, 2)}, **{"step": 0, **wrong})  # type: ignore[arg-type]
    shards.apply_gradients(lookup, {"t": torch.ones(1, 2)}, step=0)
    assert len(shards.local["t"]) == 1


def test_one_table_without_the_consumer_drains_none() -> None:
    shards = LocalShards([sgd("a"), sgd("b")])
    shards.local["a"].track("x")
    shards.assign({"a": (torch.tensor([1]), torch.zeros(1, 2))})
    with pytest.raises(UnknownNameError, match="table 'b'"):
        shards.drain_touched("x")
    assert shards.local["a"].drain_touched("x")[0].tolist() == [1]


def test_asking_whether_a_table_was_looked_up_reads_no_rows() -> None:
    shards = LocalShards([sgd("a"), sgd("b")])
    rows = shards.lookup({"a": torch.tensor([1])}).rows
    assert "a" in rows
    assert "b" not in rows
