"""What is legal though it looks odd: empty, strided, narrow, extreme and differentiable input."""

from __future__ import annotations

import pytest
import torch

from megalith import SGD, Adagrad, Normal, Segment, Table, TableConfig
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.table import Chunk
from tests.table.support import (
    EXTREME_IDS,
    as_sets,
    assert_same_bits,
    assert_same_tables,
    ints,
    sgd_table,
    summed,
    unchanged,
    whole,
)

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


def test_int32_ids_are_sign_extended(engine: str) -> None:
    narrow, wide = sgd_table(engine, initializer=Normal()), sgd_table(engine, initializer=Normal())
    ids = ints(-1, 0, 1, 2**31 - 1, -(2**31))
    grads = torch.arange(10.0).reshape(5, 2)

    assert_same_bits(narrow.lookup(ids.int()), wide.lookup(ids))
    narrow.apply_gradients(ids.int(), grads, step=0, time=0)
    wide.apply_gradients(ids, grads, step=0, time=0)

    assert -1 in narrow
    assert 2**32 - 1 not in narrow
    assert_same_tables(whole(narrow), whole(wide))


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


@pytest.mark.parametrize("field", ["offsets", "weights", "divisor"])
def test_a_poolings_tensors_may_be_strided(engine: str, field: str) -> None:
    table = sgd_table(engine, 1)
    table.assign(ints(1, 2, 3), torch.tensor([[1.0], [2.0], [4.0]]))
    fields = {
        "offsets": ints(0, 1, 3),
        "weights": torch.tensor([1.0, 2.0, 3.0]),
        "divisor": torch.tensor([1.0, 2.0]),
    }
    fields[field] = torch.stack([fields[field], fields[field]], dim=1)[:, 0]
    pooling = summed("t", fields.pop("offsets"), 1, **fields)
    ids = ints(1, 2, 3)

    (out,) = table.read(table.find(ids), ids, pooling)
    table.update(None, ids, [torch.ones(2, 1)], pooling, step=0)

    assert out.tolist() == [[1.0], [8.0]]
    assert table.lookup(ids).tolist() == [[0.0], [1.0], [2.5]]


def test_an_output_may_have_no_columns(engine: str) -> None:
    table = sgd_table(engine, 1)
    table.assign(ints(1), torch.ones(1, 1))
    pooling = Pooling(((5, 0), (1, 1)), {"t": (Bags(ints(0, 1), (OutputSlice(1, 0, 0, 1),)),)})

    empty, out = table.read(table.find(ints(1)), ints(1), pooling)

    assert empty.shape == (5, 0)
    assert out.tolist() == [[1.0]]


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


def test_every_64_bit_id_is_legal(engine: str) -> None:
    table = sgd_table(engine, 1)
    ids = ints(*EXTREME_IDS)
    values = torch.arange(1.0, ids.numel() + 1)[:, None]

    table.assign(ids, values)
    table.apply_gradients(ids, torch.ones_like(values), step=0)

    assert all(id in table for id in EXTREME_IDS)
    assert_same_bits(table.lookup(ids), values - 1)
    assert table.remove(ids[1:]) == ids.numel() - 1
    assert [id in table for id in EXTREME_IDS] == [True] + [False] * (ids.numel() - 1)
