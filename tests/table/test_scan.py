"""scan and restore: walking a table in chunks, and rebuilding it elsewhere to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalith import FTRL, Adagrad, Adam, Normal, RowWiseAdagrad, Segment, Table, TableConfig, Zeros
from megalith.table import Chunk
from tests.table.support import (
    EXTREME_IDS,
    assert_same_bits,
    assert_same_tables,
    ints,
    sgd_table,
    whole,
)

CONFIG = TableConfig(
    "t",
    segments=[
        Segment(1, optimizer=FTRL(0.5, l1=0.1), initializer=Zeros()),
        Segment(8, optimizer=Adam(0.1, bias_correction="row"), initializer=Normal()),
        Segment(3, optimizer=RowWiseAdagrad(0.1)),
        Segment(2, optimizer=Adagrad(0.1, initial_accumulator_value=0.1)),
    ],
)


def trained(engine: str, rows: int = 50, *, seed: int = 0) -> Table:
    table = Table(CONFIG, engine=engine, seed=seed)
    ids = torch.cat([ints(*EXTREME_IDS), torch.arange(100, 100 + rows)])
    for step in range(3):
        some = ids[step::2]
        grads = torch.sin(torch.arange(float(some.numel() * CONFIG.dim))).reshape(-1, CONFIG.dim)
        table.apply_gradients(some, grads, step=step, time=1000 + step)
    return table


def test_a_chunk_holds_whole_rows(engine: str) -> None:
    table = trained(engine)
    (chunk,) = table.scan()
    n = len(table)

    assert chunk.ids.dtype == chunk.time.dtype == torch.int64
    assert chunk.ids.shape == chunk.time.shape == (n,)
    assert chunk.rows.shape == (n, 14)
    assert {key: tuple(value.shape) for key, value in chunk.state.items()} == {
        "0/sum": (n, 1),
        "0/z": (n, 1),
        "1/m": (n, 8),
        "1/v": (n, 8),
        "1/count": (n, 1),
        "2/sum": (n, 1),
        "3/sum": (n, 2),
    }
    assert chunk.count is None
    assert_same_bits(chunk.rows, table.lookup(chunk.ids))


def test_a_chunk_is_a_copy(engine: str) -> None:
    table = trained(engine)
    before = whole(table)
    (chunk,) = table.scan()

    chunk.rows.fill_(9.0)
    chunk.state["1/m"].fill_(9.0)
    assert_same_tables(whole(table), before)
    kept = chunk.rows.clone()
    table.assign(chunk.ids, torch.zeros_like(chunk.rows))
    assert_same_bits(chunk.rows, kept)


def test_rows_that_stay_come_once_while_others_come_and_go(engine: str) -> None:
    table = sgd_table(engine, 1)
    stays = torch.arange(0, 400, 2)
    goes = torch.arange(1, 400, 2)
    table.assign(torch.arange(400), torch.arange(400.0)[:, None])
    seen: list[int] = []

    for number, chunk in enumerate(table.scan(16)):
        values = dict(zip(chunk.ids.tolist(), chunk.rows[:, 0].tolist(), strict=True))
        assert all(value == abs(id) for id, value in values.items())
        seen += values
        # Between chunks, rows before and after the position are removed, and new rows reuse their numbers.
        table.remove(goes[number::7])
        new = torch.arange(1000 * (number + 1), 1000 * (number + 1) + 9)
        table.assign(new, new.float()[:, None])
        if number == 3:
            table.reserve(5000)
        assert number < 200

    counts = torch.bincount(torch.tensor([id for id in seen if id < 400]), minlength=400)
    assert counts[stays].tolist() == [1] * 200
    assert int(counts[goes].max()) <= 1


def test_a_scan_survives_clear(engine: str) -> None:
    table = sgd_table(engine, 1)
    table.assign(torch.arange(100), torch.zeros(100, 1))
    chunks = table.scan(10)
    first = next(chunks)

    table.clear()

    assert first.ids.numel() == 10
    assert list(chunks) == []


@pytest.mark.parametrize("target", ["reference", "cpu"])
@pytest.mark.parametrize(("seed", "chunk_size"), [(0, 65536), (99, 7)])
def test_restore_rebuilds_a_table_anywhere(engine: str, target: str, seed: int, chunk_size: int) -> None:
    source = trained(engine)
    copy = Table(CONFIG, engine=target, seed=seed)

    for chunk in source.scan(chunk_size):
        copy.restore(replace(chunk, state=dict(reversed(chunk.state.items()))))  # its keys in any order

    assert_same_tables(whole(copy), whole(source))


def test_restore_replaces_existing_rows_and_leaves_others(engine: str) -> None:
    table = trained(engine)
    before = whole(table)
    at = before.ids.tolist().index(100)
    table.apply_gradients(torch.arange(100, 150), torch.ones(50, 14), step=9, time=9)
    after = whole(table)

    table.restore(before.part(at, at + 1))

    now = whole(table)
    others = torch.arange(len(table)) != at
    assert_same_bits(now.rows[at], before.rows[at])
    assert_same_bits(now.state["1/m"][at], before.state["1/m"][at])
    assert now.time[at] == before.time[at]
    assert_same_bits(now.rows[others], after.rows[others])


def test_of_duplicates_in_a_chunk_the_last_stays(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=Adagrad())
    rows, state = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[4.0], [5.0], [6.0]])

    table.restore(Chunk(ints(7, 8, 7), rows, {"0/sum": state}, ints(10, 11, 12)))

    now = whole(table)
    assert now.ids.tolist() == [7, 8]
    assert now.rows.tolist() == [[3.0], [2.0]]
    assert now.state["0/sum"].tolist() == [[6.0], [5.0]]
    assert now.time.tolist() == [12, 11]


def test_strided_and_odd_values_are_restored_to_the_bit(engine: str) -> None:
    table = sgd_table(engine, 2)
    odd = torch.tensor([[-0.0, float("nan")], [float("inf"), 1e-45]]).T
    assert not odd.is_contiguous()

    table.restore(Chunk(ints(1, 0, 2)[::2], odd, {}, ints(0, 0, 2**32 - 1)[::2]))

    now = whole(table)
    assert_same_bits(now.rows, odd)
    assert now.time.tolist() == [0, 2**32 - 1]
