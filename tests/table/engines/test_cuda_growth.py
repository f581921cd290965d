"""Memory of the cuda engine's tables: growth without waiting, and growth that fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from megalith import (
    SGD,
    Capacity,
    EmbeddingCollection,
    Feature,
    MinCount,
    Probability,
    Table,
    TableConfig,
    Zeros,
)
from megalith.table.engines.cuda.device_table import CALLS_AHEAD, DeviceTable
from megalith.table.engines.cuda.engine import CudaEngine
from megalith.table.engines.cuda.launch_group import CounterReport
from tests.table.engines.cuda_configs import gpu_or_soak

CONFIG = TableConfig("t", dim=2, optimizer=SGD(1.0), initializer=Zeros())
ROWS, STRIDE = 16, 64
"""Rows of a chunk and bytes of a row."""


def small_chunks(config: TableConfig = CONFIG) -> Table:
    """A table with chunks of ROWS rows."""
    table = Table(config, engine="cuda")
    table.engine_impl = CudaEngine(config, chunk_bytes=512)
    layout = memory_of(table).layout
    assert (1 << layout.shift, layout.stride) == (ROWS, STRIDE)
    return table


def memory_of(table: Table) -> DeviceTable:
    engine = table.engine_impl
    assert isinstance(engine, CudaEngine)
    return engine.table


def fail_after(monkeypatch: pytest.MonkeyPatch, allocations: int) -> None:
    """Let the allocation of a chunk fail after some."""
    zeros, left = torch.zeros, [allocations]

    def limited(*sizes: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.int64 and sizes[0] == ROWS * STRIDE // 8:
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("out of memory")
        return zeros(*sizes, **options)

    monkeypatch.setattr(torch, "zeros", limited)


@gpu_or_soak
def test_updates_of_known_ids_do_not_read_the_counters_after_rows_were_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = small_chunks()
    table.assign(torch.arange(64), torch.zeros(64, 2))
    table.remove(torch.arange(40))
    memory = memory_of(table)
    used, free, *_ = memory.read_counters()
    assert (used, free) == (64, 40)
    monkeypatch.setattr(memory, "read_counters", lambda: pytest.fail("waits for the device"))
    for step in range(2):
        table.apply_gradients(torch.tensor([50, 60]), torch.ones(2, 2), step=step)
    assert bool((table.find(torch.tensor([50, 60])) >= 0).all())


@gpu_or_soak
def test_a_table_that_cannot_grow_is_unchanged_and_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    table = small_chunks()
    table.assign(torch.arange(10), torch.ones(10, 2))
    before = memory_of(table).row_capacity
    with monkeypatch.context() as patch:
        fail_after(patch, 2)
        with pytest.raises(torch.OutOfMemoryError):
            table.apply_gradients(torch.arange(200), torch.ones(200, 2), step=0)
    assert len(table) == 10
    assert memory_of(table).row_capacity == before
    assert memory_of(table).chunk_table.numel() == before // ROWS
    table.apply_gradients(torch.arange(40), torch.ones(40, 2), step=1)
    assert torch.equal(table.lookup(torch.arange(40)).cpu()[:, 0], torch.tensor([0.0] * 10 + [-1.0] * 30))


@pytest.mark.skipif(CALLS_AHEAD == 1, reason="the interpreter allocates no memory ahead")
def test_memory_for_later_calls_is_not_needed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    table = small_chunks()
    fail_after(monkeypatch, 4)
    table.apply_gradients(torch.arange(64), torch.ones(64, 2), step=0)
    assert len(table) == 64


def test_memory_for_later_calls_is_allocated_if_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(small_chunks())
    with monkeypatch.context() as patch:
        fail_after(patch, 4)
        memory._add_chunks(500, least=60)
    assert memory.row_capacity == 64
    memory._add_chunks(100, least=60)
    assert memory.row_capacity == 112


def test_an_update_of_several_tables_without_memory_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [
        TableConfig("a", dim=4, optimizer=SGD(1.0), initializer=Zeros()),
        TableConfig("b", dim=2, optimizer=SGD(1.0), initializer=Zeros()),
    ]
    collection = EmbeddingCollection(tables, [Feature("x", "a"), Feature("y", "b")], engine="cuda")
    columns = {"x": torch.arange(3), "y": torch.arange(3)}
    out = collection(columns)
    loss = out["x"].sum() + out["y"].sum()
    memory = memory_of(collection.tables["b"])
    with monkeypatch.context() as patch:
        failing = torch.OutOfMemoryError("out of memory")

        def fail(rows: int, least: int) -> None:
            raise failing

        patch.setattr(memory, "_add_chunks", fail)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
    assert [len(collection.tables[name]) for name in ("a", "b")] == [0, 0]


@pytest.mark.parametrize("admission", [MinCount(2), Probability(0.3)], ids=str)
def test_a_report_says_the_numbers_of_the_counters(admission: Any) -> None:
    # More would leave a negative room, for which a call without ids of the table cannot make any.
    config = TableConfig(
        "t", dim=2, optimizer=SGD(1.0), admission=admission, eviction=Capacity(rows=8, score="lru")
    )
    table = Table(config, engine="cuda")
    for step in (1, 2, 3):
        ids = torch.arange(5 * step, 5 * step + 8)
        table.apply_gradients(ids, torch.ones(8, 2), step=step)
    engine, memory = table.engine_impl, memory_of(table)
    assert isinstance(engine, CudaEngine)
    memory.read_counters()

    def known() -> list[int]:
        return [memory.room, memory.most_rows, memory.most_evicted, memory.most_refused, memory.most_counted]

    exact = known()
    memory.know(0, [0, 0, 0, 0], memory.requested - 1)
    arrived: Any = SimpleNamespace(query=lambda: True)
    numbers = engine.group.scratch("created", 1, torch.int64).cpu()
    engine.group._reports.append(CounterReport(arrived, numbers, [memory.requested]))
    engine.group.make_room([0])
    assert known() == exact
    assert memory.most_refused > 0
