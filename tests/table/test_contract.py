"""The contract every engine keeps: creating, reading, training, assigning and removing rows."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import SGD, Adagrad, Adam, Normal, Segment, Table, TableConfig, Uniform
from megalith.errors import InputError, UsageError
from megalith.ops import Pooling
from megalith.table import Chunk
from tests.table.support import (
    EXTREME_IDS,
    as_sets,
    assert_same_bits,
    assert_same_tables,
    ints,
    sgd_table,
    state_of,
    summed,
    unchanged,
    whole,
)


def times_of(table: Table) -> dict[int, int]:
    all_rows = whole(table)
    return dict(zip(all_rows.ids.tolist(), all_rows.time.tolist(), strict=True))


# ---- making tables


def test_an_unknown_engine_or_a_wrong_config_or_seed_raises(engine: str) -> None:
    config: Any = TableConfig("t", dim=1, optimizer=SGD())
    assert Table(config).engine == "cpu"
    with pytest.raises(InputError, match="unknown engine 'gpu'; known engines: reference, cpu, cuda"):
        Table(config, engine="gpu")
    for wrong in (None, "user", {"name": "user"}):
        with pytest.raises(InputError, match="config must be a TableConfig"):
            Table(wrong, engine=engine)  # type: ignore[arg-type]
    for seed in (1.0, "1", None, True):
        with pytest.raises(InputError, match="seed must be an integer"):
            Table(config, engine=engine, seed=seed)  # type: ignore[arg-type]


# ---- finding and reading


@pytest.mark.parametrize("missing", ["initial", "zeros"])
def test_a_new_table_is_empty_and_lookup_never_inserts(engine: str, missing: str) -> None:
    table = sgd_table(engine, initializer=Normal(), missing=missing)

    for _ in range(3):
        table.lookup(ints(*EXTREME_IDS))
        assert table.find(ints(*EXTREME_IDS)).tolist() == [-1] * len(EXTREME_IDS)

    assert len(table) == 0
    assert 0 not in table
    assert list(table.scan()) == []


def test_missing_ids_read_as_the_config_defines(engine: str) -> None:
    initial = sgd_table(engine, initializer=Normal(), missing="initial")
    zeros = sgd_table(engine, initializer=Normal(), missing="zeros")
    ids = ints(1, 2)
    first = initial.lookup(ids)
    assert bool((first != 0).all())

    assert_same_bits(zeros.lookup(ids), torch.zeros(2, 2))
    for table in (initial, zeros):
        table.apply_gradients(ints(1), torch.zeros(1, 2), step=0)

    # A row starts from the initializer in both; id 2 is still missing.
    assert_same_bits(initial.lookup(ids), first)
    assert_same_bits(zeros.lookup(ids), torch.stack([first[0], torch.zeros(2)]))


@pytest.mark.parametrize("with_epoch", [True, False])
def test_rows_found_before_a_removal_are_found_again(engine: str, with_epoch: bool) -> None:
    table = sgd_table(engine, 1)
    ids = ints(1, 2, 3)
    table.assign(ids, torch.tensor([[1.0], [2.0], [3.0]]))
    epoch = table.epoch
    rows = table.find(ids)

    table.remove(ints(1, 2))
    table.assign(ints(9), torch.tensor([[9.0]]))  # may take a row that was let go

    known = epoch if with_epoch else None
    assert table.read(rows, ids, epoch=known).tolist() == [[0.0], [0.0], [3.0]]
    table.update(rows, ids, torch.ones(3, 1), step=0, epoch=known)
    assert table.lookup(ints(1, 2, 3, 9)).tolist() == [[-1.0], [-1.0], [2.0], [9.0]]


@pytest.mark.parametrize("row", [-2, -(2**31), 1, 2**31 - 1])
def test_row_numbers_that_never_existed_do_no_harm(engine: str, row: int) -> None:
    table = sgd_table(engine, 1)
    table.assign(ints(1), torch.tensor([[5.0]]))
    rows = torch.tensor([row], dtype=torch.int32)

    assert table.read(rows, ints(1)).item() == 5.0
    table.update(rows, ints(1), torch.ones(1, 1), step=0)

    assert table.lookup(ints(1)).item() == 4.0


@pytest.mark.parametrize("change", ["remove", "restore", "clear"])
def test_the_epoch_advances_when_rows_may_move(engine: str, change: str) -> None:
    table = sgd_table(engine)
    table.assign(ints(1), torch.zeros(1, 2))
    before = table.epoch

    if change == "remove":
        table.remove(ints(1))
    elif change == "restore":
        table.restore(whole(table))
    else:
        table.clear()

    assert table.epoch > before


def test_the_epoch_stays_while_rows_stay(engine: str) -> None:
    table = sgd_table(engine)
    ids = torch.arange(300)
    table.assign(ids[:1], torch.zeros(1, 2))
    before, row = table.epoch, table.find(ids[:1])

    table.apply_gradients(ids, torch.ones(300, 2), step=0)
    table.assign_add(ids, torch.ones(300, 2))
    table.reinitialize(ids)
    table.reserve(1000)
    table.track("a")
    table.drain_touched("a")

    assert table.epoch == before
    assert table.find(ids[:1]).tolist() == row.tolist()


# ---- training


def test_gradients_are_summed_in_input_order(engine: str) -> None:
    table = sgd_table(engine, 1)
    # A 1 added while the sum is 1e8 is lost to rounding; added after the -1e8 it is not.
    grads = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])

    table.apply_gradients(ints(5, 5, 5, 5), grads, step=0)
    table.apply_gradients(ints(6, 6, 6, 6), grads[[0, 2, 1, 3]], step=0)

    assert table.lookup(ints(5, 6)).tolist() == [[-1.0], [-2.0]]


# ---- times


@pytest.mark.parametrize("time", [0, 7, 2**32 - 1, 7.9])
def test_every_write_sets_the_time(engine: str, time: float) -> None:
    table = sgd_table(engine, 1)
    one = torch.ones(1, 1)
    writes: list[Callable[[Tensor], object]] = [
        lambda ids: table.apply_gradients(ids, one, step=0, time=time),
        lambda ids: table.update(None, ids, [one], Pooling.sum("t", ints(0, 1), 1), step=0, time=time),
        lambda ids: table.assign(ids, one, time=time),
        lambda ids: table.assign_add(ids, one, time=time),
        lambda ids: table.reinitialize(ids, time=time),
    ]
    for id, write in enumerate(writes):
        table.assign(ints(id), one, time=3)
        write(ints(id))

    assert set(times_of(table).values()) == {int(time)}


def test_without_a_time_the_clock_is_asked(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1234.5)
    table = sgd_table(engine, 1)

    table.assign(ints(1), torch.ones(1, 1))

    assert times_of(table) == {1: 1234}


# ---- assigning


def test_of_duplicates_the_last_assignment_stays_and_additions_add_in_order(engine: str) -> None:
    table = sgd_table(engine, 1)

    table.assign(ints(1, 2, 1), torch.tensor([[1.0], [2.0], [3.0]]))

    assert table.lookup(ints(1, 2)).tolist() == [[3.0], [2.0]]
    assert len(table) == 2

    table = sgd_table(engine, 1, initializer=Uniform(2.0, 2.0))

    table.assign_add(ints(1, 2, 1), torch.tensor([[1e8], [1.0], [-1e8]]))

    assert table.lookup(ints(1, 2)).tolist() == [[0.0], [3.0]]


def test_new_and_reinitialized_rows_get_fresh_state(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=Adagrad(initial_accumulator_value=0.5))
    table.apply_gradients(ints(1), torch.full((1, 1), 2.0), step=0)

    table.assign(ints(1, 2), torch.zeros(2, 1))
    table.assign_add(ints(1, 3), torch.zeros(2, 1))

    assert [state_of(table, id)["0/sum"] for id in (1, 2, 3)] == [[4.5], [0.5], [0.5]]

    table = sgd_table(engine, optimizer=Adam(), initializer=Normal())
    fresh = sgd_table(engine, optimizer=Adam(), initializer=Normal())
    ids = ints(1, 2)
    table.apply_gradients(ids, torch.ones(2, 2), step=0)
    fresh.apply_gradients(ints(3), torch.ones(1, 2), step=0, time=9)

    status = table.reinitialize(ints(1, 2, 3, 3, 1), time=9)
    fresh.reinitialize(ints(3, 2, 1), time=9)

    # The second 3 was there already when its turn came.
    assert status.dtype == torch.int32
    assert status.tolist() == [1, 1, 0, 1, 1]
    assert_same_tables(whole(table), whole(fresh))


# ---- removing


def test_a_removed_id_reads_as_missing_and_starts_again(engine: str) -> None:
    table = sgd_table(engine, optimizer=Adagrad(), initializer=Normal())
    initial = table.lookup(ints(1, 2))
    table.apply_gradients(ints(1, 2), torch.ones(2, 2), step=0)

    assert table.remove(ints(1, 77, 1)) == 1
    assert table.remove(ints(1)) == 0

    assert [len(table), 1 in table, 2 in table] == [1, False, True]
    assert_same_bits(table.lookup(ints(1)), initial[:1])
    table.apply_gradients(ints(1), torch.zeros(1, 2), step=0)
    assert_same_bits(table.lookup(ints(1)), initial[:1])
    assert state_of(table, 1)["0/sum"] == [0.0, 0.0]


# ---- looking at a table


def test_stats_memory_and_repr_report_the_contents(engine: str) -> None:
    table = sgd_table(engine, 4, optimizer=Adagrad(), name="user")
    table.track("sync")
    table.assign(torch.arange(100), torch.ones(100, 4))
    stats, memory = table.stats(), table.memory()

    assert (stats.name, stats.engine, stats.rows) == ("user", engine, 100)
    assert stats.capacity >= 100
    assert stats.epoch == table.epoch
    assert stats.consumers == ("sync",)
    assert memory.rows + memory.state >= 100 * 8 * 4
    assert memory.total == sum(dataclasses.astuple(memory))
    assert all(word in repr(table) for word in ("'user'", f"engine={engine!r}", "rows=100"))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_or_pickling_a_table_raises(engine: str, duplicate: Callable[[Table], object]) -> None:
    table = sgd_table(engine, name="user")

    with pytest.raises(UsageError, match=r"'user' cannot be copied or pickled.*scan\(\) and restore"):
        duplicate(table)


# ---- legal input that looks odd: empty, strided, narrow, extreme and differentiable


DIM = 3


def ones(n: int = 1, dim: int = DIM) -> torch.Tensor:
    return torch.ones(n, dim)


def test_empty_batches_are_legal_everywhere(engine: str) -> None:
    segments = [Segment(1, optimizer=SGD(1.0)), Segment(2, optimizer=Adagrad(0.1))]
    table = Table(TableConfig("user", segments=segments), engine=engine)
    table.apply_gradients(ints(1, 2), ones(2), step=0)
    table.track("sync")
    none, nothing = ints(), ones(0)
    empty_bags = Pooling.sum("user", ints(0), DIM)
    no_ids = Pooling.sum("user", ints(0, 0, 0), DIM)

    with unchanged(table):
        assert table.find(none).shape == (0,)
        assert table.lookup(none).shape == (0, DIM)
        assert table.read(table.find(none), none).shape == (0, DIM)
        assert table.read(table.find(none), none, empty_bags)[0].shape == (0, DIM)
        assert table.read(table.find(none), none, no_ids)[0].tolist() == [[0.0] * DIM] * 2
        table.apply_gradients(none, nothing, step=0)
        table.update(table.find(none), none, nothing, step=0, epoch=table.epoch)
        table.update(None, none, [nothing], empty_bags, step=0)
        table.update(None, none, [ones(2)], no_ids, step=0)
        table.assign(none, nothing)
        table.assign_add(none, nothing)
        assert table.reinitialize(none).shape == (0,)
        table.mark_touched("sync", none)
        table.reserve(0)
    assert table.remove(none) == 0
    table.restore(Chunk(none, nothing, {"1/sum": ones(0, 2)}, none))
    assert len(table) == 2
    assert as_sets(table.drain_touched("sync")) == (set(), set())


def test_strided_tensors_are_legal(engine: str) -> None:
    strided, packed = (sgd_table(engine, 2, optimizer=Adagrad(), initializer=Normal()) for _ in range(2))
    ids = torch.arange(20)[::2]
    values = torch.arange(40.0).reshape(2, 20).T[::2]
    assert not ids.is_contiguous()
    assert not values.is_contiguous()
    assert not strided.find(ids)[::2].is_contiguous()

    for table, x, v in ((strided, ids, values), (packed, ids.contiguous(), values.contiguous())):
        table.assign(x, v, time=0)
        table.apply_gradients(x, v, step=0, time=0)
        table.assign_add(x, v, time=0)
        rows = table.find(torch.arange(20))[::2]
        table.update(rows, x, v, step=1, time=0)
        table.update(None, x, [v[:2]], Pooling.sum("t", ints(0, 5, 10), 2), step=2, time=0)
        assert_same_bits(table.read(rows, x), table.lookup(x))

    assert_same_tables(whole(strided), whole(packed))


def test_tensors_with_a_gradient_history_leave_none_in_the_table(engine: str) -> None:
    table = sgd_table(engine, 2)
    rows, weights = torch.ones(1, 2, requires_grad=True), torch.ones(1, requires_grad=True)

    table.restore(Chunk(ints(1), rows * 3, {}, ints(0)))
    table.apply_gradients(ints(1), rows * 2, step=0)
    table.assign_add(ints(1), rows)
    table.assign(ints(2), rows)
    table.update(None, ints(2), [rows], summed("t", ints(0, 1), 2, weights=weights), step=0)

    assert not table.lookup(ints(1, 2)).requires_grad
    assert table.lookup(ints(1, 2)).tolist() == [[2.0, 2.0], [0.0, 0.0]]


def test_ids_of_all_64_bits_and_int32_are_legal(engine: str) -> None:
    table = sgd_table(engine, 1)
    ids = ints(*EXTREME_IDS)
    values = torch.arange(1.0, ids.numel() + 1)[:, None]

    table.assign(ids, values)
    table.apply_gradients(ids, torch.ones_like(values), step=0)

    assert all(id in table for id in EXTREME_IDS)
    assert_same_bits(table.lookup(ids), values - 1)
    assert table.remove(ids[1:]) == ids.numel() - 1
    assert [id in table for id in EXTREME_IDS] == [True] + [False] * (ids.numel() - 1)

    narrow, wide = sgd_table(engine, initializer=Normal()), sgd_table(engine, initializer=Normal())
    ids = ints(-1, 0, 1, 2**31 - 1, -(2**31))
    grads = torch.arange(10.0).reshape(5, 2)

    assert_same_bits(narrow.lookup(ids.int()), wide.lookup(ids))
    narrow.apply_gradients(ids.int(), grads, step=0, time=0)
    wide.apply_gradients(ids, grads, step=0, time=0)

    assert -1 in narrow
    assert 2**32 - 1 not in narrow
    assert_same_tables(whole(narrow), whole(wide))
