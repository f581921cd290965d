"""Snapshots: they hold the rows of the moment they were taken, whatever is written later."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith import Adagrad, Adam, Segment, Table, TableConfig
from megalith.errors import InputError, UsageError
from megalith.table import Chunk
from megalith.table.engines.contract import Engine
from tests.fixed_examples import fixed_examples
from tests.table.support import EXTREME_IDS, contents, ints

CONFIG = TableConfig("t", segments=[Segment(2, optimizer=Adam(0.1)), Segment(1, optimizer=Adagrad(0.1))])


def filled(engine: str, n: int = 300) -> Table:
    table = Table(CONFIG, engine=engine)
    ids = torch.cat([torch.arange(100, 100 + n), ints(*EXTREME_IDS)])
    table.apply_gradients(ids, torch.randn(ids.numel(), 3), step=0, time=50)
    return table


def spoil(table: Table) -> None:
    ids = torch.arange(100, 250)
    table.apply_gradients(ids, torch.ones(150, 3), step=1, time=60)
    table.remove(torch.arange(120, 140))
    table.assign(torch.arange(110, 130), torch.zeros(20, 3), time=70)
    table.reinitialize(ints(200, 201, 9999), time=80)
    table.assign_add(torch.arange(-50, -10), torch.ones(40, 3), time=90)


def test_a_full_snapshot_drains_a_consumer_too() -> None:
    table = filled("cpu")
    table.track("delta")
    table.assign(ints(1), torch.ones(1, 3))
    with table.snapshot(consumer="delta") as snapshot:
        assert snapshot.rows == len(table)
        table.assign(ints(2), torch.ones(1, 3))
    assert table.drain_touched("delta")[0].tolist() == [2]


def test_writers_wait_while_there_is_no_room() -> None:
    table = filled("cpu", 5000)
    before = contents(list(table.scan()))
    snapshot = table.snapshot(buffer_bytes=1)
    writer = threading.Thread(target=spoil, args=(table,))
    writer.start()
    rows = contents(list(snapshot.chunks(64)))
    snapshot.close()
    writer.join(60)
    assert not writer.is_alive()
    assert rows == before


def test_a_writer_does_not_wait_for_a_reader_that_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "reader_seconds", 0.1)
    table = filled("cpu", 5000)
    before = contents(list(table.scan()))
    snapshot = table.snapshot(buffer_bytes=1)
    with pytest.raises(
        UsageError, match=r"table 't': no row of its open snapshot was read .*: read the snapshot"
    ):
        spoil(table)
    assert contents(list(snapshot.chunks(64))) == before
    snapshot.close()
    spoil(table)


def test_one_snapshot_at_a_time_and_none_after_close() -> None:
    for engine in ("cpu", "reference"):
        table = filled(engine, 5)
        snapshot = table.snapshot()
        with pytest.raises(InputError, match="table 't' already has an open snapshot"):
            table.snapshot()
        snapshot.close()
        snapshot.close()
        with pytest.raises(UsageError, match="closed"):
            snapshot.read(table.new_chunk(1))
    with pytest.raises(InputError, match="needs a consumer"):
        table.snapshot(touched_only=True)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["train", "assign", "remove", "reinitialize", "read"]),
        st.lists(st.integers(0, 30), min_size=1, max_size=12),
    ),
    max_size=12,
)


@fixed_examples(40)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), ACTIONS, ACTIONS)
def test_any_writes_leave_a_snapshot_alone(
    first: list[int],
    before: list[tuple[str, list[int]]],
    after: list[tuple[str, list[int]]],
) -> None:
    table = Table(CONFIG)
    table.assign(ints(*first), torch.rand(len(first), 3), time=1)
    chunks: list[Chunk] = []

    def run(actions: list[tuple[str, list[int]]]) -> None:
        for what, ids in actions:
            if what == "train":
                table.apply_gradients(ints(*ids), torch.rand(len(ids), 3), step=2, time=2)
            elif what == "assign":
                table.assign(ints(*ids), torch.rand(len(ids), 3), time=3)
            elif what == "remove":
                table.remove(ints(*ids))
            elif what == "reinitialize":
                table.reinitialize(ints(*ids), time=4)
            elif chunks:
                chunk = table.new_chunk(len(ids))
                chunks.append(chunk.part(0, snapshot.read(chunk)))

    run(before)
    expected = contents(list(table.scan()))
    snapshot = table.snapshot()
    chunks.append(table.new_chunk(0))
    run(after)
    chunks += snapshot.chunks(7)
    snapshot.close()
    assert contents(chunks) == expected
