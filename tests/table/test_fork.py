"""Tables in forked processes: data workers that look rows up, children that train their own copy."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megalith import Normal, Table, _native
from megalith.table.engines.cpu import CpuEngine
from tests.table.support import TorchSGD, as_sets, assert_same_bits, native_table, sgd_table, unchanged


class Lookups(Dataset[Tensor]):
    """Batches looked up by a data worker in the table it inherited."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        torch.set_num_threads(2)  # a worker starts with one
        return self.table.lookup(torch.arange(20_000) + 1000 * index)


@pytest.mark.usefixtures("restore_threads")
def test_forked_data_workers_look_rows_up() -> None:
    torch.set_num_threads(2)
    table = sgd_table("cpu", 8, initializer=Normal())
    ids = torch.arange(50_000)
    table.apply_gradients(ids, torch.randn(50_000, 8), step=0)  # starts the pool's workers
    data = Lookups(table)

    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)

    for index, rows in enumerate(loader):
        assert_same_bits(rows, data[index])
    assert index == 7


def in_child(work: Callable[[], None]) -> None:
    """Runs `work` in a forked child, which is killed after a minute, and expects it to end well."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"


def test_a_child_writes_although_a_thread_held_the_lock_when_it_was_forked() -> None:
    table = sgd_table("cpu", 1, optimizer=TorchSGD(1.0))
    assert isinstance(table.engine_impl, CpuEngine)
    held, done = threading.Event(), threading.Event()

    def hold(lock: AbstractContextManager[Any]) -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold, args=(table.engine_impl._writing,))
    thread.start()
    held.wait()

    def work() -> None:
        table.apply_gradients(torch.tensor([1]), torch.ones(1, 1), step=0)
        assert table.lookup(torch.tensor([1])).item() == -1.0

    try:
        in_child(work)
    finally:
        done.set()
        thread.join()
    assert len(table) == 0


@pytest.mark.usefixtures("restore_threads")
def test_a_child_does_not_use_the_threads_of_torch() -> None:
    torch.set_num_threads(2)

    def work() -> None:
        assert not _native.uses_torch_threads(2)

    in_child(work)


@pytest.mark.usefixtures("restore_threads")
def test_a_child_trains_its_own_copy() -> None:
    torch.set_num_threads(2)
    table = sgd_table("cpu", 8, initializer=Normal())
    ids, ones = torch.arange(50_000), torch.ones(50_000, 8)
    later = ids + 25_000
    table.track("a")
    table.apply_gradients(ids, ones, step=0, time=0)
    parents, fresh = table.lookup(ids), table.lookup(later[25_000:])
    expected = torch.cat([parents[25_000:], fresh]) - 1.0

    def child() -> None:
        # Two threads for the table; torch's own pool does not come back after a fork.
        before = table.lookup(ids)
        table.apply_gradients(later, ones, step=1)
        after = table.lookup(later)
        sgd_table("cpu", 8).assign(ids, ones)
        torch.set_num_threads(1)
        assert_same_bits(before, parents)
        assert_same_bits(after, expected)
        assert len(table) == 75_000
        assert table.remove(ids[:10]) == 10
        assert len(as_sets(table.drain_touched("a"))[0]) == 75_000 - 10

    with unchanged(table):
        in_child(child)
    table.apply_gradients(ids, ones, step=1)
    assert_same_bits(table.lookup(ids), parents - 1.0)


@pytest.mark.usefixtures("restore_threads")
def test_a_child_sees_whole_writes_and_open_locks() -> None:
    torch.set_num_threads(2)
    table = sgd_table("cpu", 16)
    ids = torch.arange(20_000)
    table.assign(ids, torch.zeros(ids.numel(), 16))
    stop = threading.Event()
    written = [0]

    def write() -> None:
        while not stop.is_set():
            written[0] += 1
            table.assign(ids, torch.full((ids.numel(), 16), float(written[0])))

    def child() -> None:
        torch.set_num_threads(1)  # for torch; the table's calls below use two
        rows = torch.empty(ids.numel(), 16)
        native_table(table).read(None, -1, ids, rows, 2)
        first = float(rows[0, 0])
        assert bool((rows == first).all()), "half a write"
        native_table(table).assign(ids, rows, True, 0, 2)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        for _ in range(10):
            in_child(child)
    finally:
        stop.set()
        writer.join(60)
    assert not writer.is_alive()
    assert table.lookup(ids)[:, 0].tolist() == [float(written[0])] * ids.numel()
