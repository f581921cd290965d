"""Scans, snapshots and restores of the cuda engine: rows travel in blocks. The blocks are small here."""

from __future__ import annotations

import random
import threading

import pytest
import torch

pytest.importorskip("triton")

from megalith import SGD, Adagrad, Capacity, FixedPoint, Segment, Table, TableConfig, Zeros
from megalith.shards import LocalShards
from megalith.table import Chunk
from megalith.table.engines.cuda import engine, streams
from megalith.table.engines.cuda.engine import CudaEngine
from megalith.table.engines.cuda.engine_group import CudaEngineGroup
from tests.table.engines.cuda_configs import Halving, cases, gpu_or_soak
from tests.table.support import contents, found_blocks, ints

SEGMENTS = [Segment(2, optimizer=Adagrad(0.1)), Segment(1, optimizer=SGD(0.1), precision="float16")]
TABLES = {
    "segments": TableConfig("t", segments=SEGMENTS),
    "counted": TableConfig("t", dim=3, optimizer=SGD(0.1), eviction=Capacity(rows=60, score="lfu")),
    "in torch": TableConfig("t", dim=3, optimizer=Halving(0.1)),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 rows, the smallest block."""
    monkeypatch.setattr(streams, "BLOCK_BYTES", 1)
    monkeypatch.setattr(engine, "LIVE_ROWS", 32)


def filled(config: TableConfig, n: int = 50) -> Table:
    table = Table(config, engine="cuda")
    ids = torch.arange(n) * 7 - 30
    table.assign(ids, torch.arange(n * 3, dtype=torch.float32).view(n, 3) / 100, time=50)
    table.apply_gradients(ids[:4], torch.ones(4, 3), step=1, time=51)
    table.remove(ids[5:9])
    return table


def change(table: Table, what: str, ids: list[int]) -> None:
    if what == "train":
        table.apply_gradients(ints(*ids), torch.ones(len(ids), 3), step=2, time=60)
    elif what == "assign":
        table.assign(ints(*ids), torch.ones(len(ids), 3), time=61)
    elif what == "remove":
        table.remove(ints(*ids))
    elif what == "reinitialize":
        table.reinitialize(ints(*ids), time=62)
    elif what == "restore":
        chunk = table.new_chunk(len(ids))
        for column in streams.all_columns(chunk):
            column.fill_(1)
        table.restore(Chunk(ints(*ids), chunk.rows, chunk.state, chunk.time, chunk.count, chunk.step))
    else:
        table.clear()


CHANGES = ("train", "assign", "remove", "reinitialize", "restore", "train", "assign", "clear")


@pytest.mark.parametrize("name", cases(TABLES, "segments"))
def test_a_snapshot_holds_what_was_there_whatever_is_written_later(name: str) -> None:
    chance = random.Random(3)
    table = filled(TABLES[name])
    before = contents(list(table.scan()))
    snapshot = table.snapshot()
    assert snapshot.rows == len(before) == 46
    chunks = []
    for what in CHANGES:
        chunk = table.new_chunk(chance.choice([1, 3, 7]))
        chunks.append(chunk.part(0, snapshot.read(chunk)))
        change(table, what, [chance.randrange(60) * 7 - 30 for _ in range(9)])
    chunks += snapshot.chunks(5)
    snapshot.close()
    assert contents(chunks) == before
    assert contents(list(table.scan())) == {}


def test_a_snapshot_of_touched_rows_drains_them_and_gives_them_back() -> None:
    table = filled(TABLES["segments"])
    table.track("delta")
    table.assign(ints(-1, 40), torch.ones(2, 3), time=9)
    table.remove(ints(47, 54, 8888))
    with pytest.raises(ZeroDivisionError), table.snapshot(consumer="delta", touched_only=True):
        raise ZeroDivisionError

    snapshot = table.snapshot(consumer="delta", touched_only=True)
    table.assign(ints(-1, 0), torch.zeros(2, 3), time=10)
    rows = contents(list(snapshot.chunks(1)))
    snapshot.close()

    assert {id: row[:3] for id, row in rows.items()} == {-1: [1, 1, 1], 40: [1, 1, 1]}
    assert sorted(snapshot.removed.tolist()) == [47, 54]
    updated, removed = table.drain_touched("delta")
    assert sorted(updated.tolist()) == [-1, 0]
    assert removed.tolist() == []


def test_writers_wait_while_there_is_no_room_for_saved_rows() -> None:
    table = filled(TABLES["segments"])
    before = contents(list(table.scan()))
    snapshot = table.snapshot(buffer_bytes=1)
    assert snapshot.pressure == 0.0
    change(table, "train", [-30, 250, 257])
    assert snapshot.pressure == 1.0
    writer = threading.Thread(target=change, args=(table, "assign", [264, 271]))
    writer.start()  # it waits until saved rows are read
    rows = contents(list(snapshot.chunks(4)))
    snapshot.close()
    writer.join(120)
    assert not writer.is_alive()
    assert rows == before
    assert torch.equal(table.lookup(ints(264, 271)).cpu(), torch.ones(2, 3))


@gpu_or_soak
def test_a_snapshot_that_closes_lets_writers_continue() -> None:
    table = filled(TABLES["segments"])
    snapshot = table.snapshot(buffer_bytes=1)
    change(table, "train", [250])
    writer = threading.Thread(target=change, args=(table, "assign", [264]))
    writer.start()
    snapshot.close()
    writer.join(120)
    assert not writer.is_alive()


@gpu_or_soak
def test_rows_keep_their_place_in_a_host_tier_while_a_snapshot_is_open() -> None:
    plain = TableConfig("t", dim=2, optimizer=SGD(1.0), initializer=Zeros())
    size = 16 * CudaEngine(plain).layout.stride
    table = Table(
        TableConfig("t", dim=2, optimizer=SGD(1.0), initializer=Zeros(), device_bytes=size), engine="cuda"
    )
    table.assign(torch.arange(40), torch.zeros(40, 2))
    snapshot = table.snapshot()
    for step in range(3):
        table.apply_gradients(torch.arange(30, 34), torch.ones(4, 2), step=step)
    use = table.stats().host_tier
    assert use is not None
    assert (use.misses, use.moved) == (12, 0)
    rows = torch.cat([chunk.rows for chunk in snapshot.chunks(7)])
    assert rows.shape[0] == 40
    assert not rows.any()
    snapshot.close()
    table.apply_gradients(torch.arange(30, 34), torch.ones(4, 2), step=3)
    use = table.stats().host_tier
    assert use is not None
    assert use.moved == 4


@pytest.mark.parametrize("chunk_size", cases([7, 16, 100], 16))
def test_a_scan_yields_every_row_once_and_sees_writes_between_chunks(chunk_size: int) -> None:
    table = filled(TABLES["segments"])
    seen: list[int] = []
    for number, chunk in enumerate(table.scan(chunk_size)):
        assert chunk.ids.numel() <= chunk_size
        seen += chunk.ids.tolist()
        if number == 0:
            expected = {id: row for id, row in contents(list(table.scan())).items() if id not in (306, 313)}
            table.remove(ints(306, 313))  # the last rows
            table.assign(ints(299), torch.ones(1, 3), time=51)
        if 299 in chunk.ids and number:
            assert chunk.rows[chunk.ids == 299].tolist() == [[1.0, 1.0, 1.0]]
    assert len(seen) == len(set(seen))
    assert set(seen) - {306, 313} == set(expected)
    assert (306 in seen) == (chunk_size == 100)


@pytest.mark.parametrize("name", cases(TABLES, "counted"))
def test_restored_rows_are_those_that_were_scanned(name: str) -> None:
    table, other = filled(TABLES[name]), Table(TABLES[name], engine="cuda")
    (chunk,) = table.scan()
    other.restore(chunk)
    assert contents(list(other.scan(9))) == contents([chunk])
    twice = Chunk(
        torch.cat([chunk.ids, chunk.ids[:3]]),
        *(torch.cat([column, column[3:6]]) for column in [chunk.rows]),
        {key: torch.cat([column, column[3:6]]) for key, column in chunk.state.items()},
        torch.cat([chunk.time, chunk.time[:3]]),
        *(
            None if column is None else torch.cat([column, column[:3]])
            for column in (chunk.count, chunk.step)
        ),
    )
    other.restore(twice)  # the last of equal ids wins
    got, expected = contents(list(other.scan(9))), contents([chunk])
    ids = chunk.ids.tolist()
    for target, source in zip(ids[:3], ids[3:6], strict=True):
        assert got[target][: table.config.row_floats] == expected[source][: table.config.row_floats]
    assert {id: got[id] for id in ids[3:]} == {id: expected[id] for id in ids[3:]}


@pytest.mark.parametrize(
    "tables", cases([("a", "b"), ("a", "wide"), ("a", "b", "wide"), ("a", "rounded")], ("a", "b", "wide"))
)
@pytest.mark.parametrize("peers", cases([1, 3], 3))
def test_rows_of_several_peers_are_read_by_peer_then_table(tables: tuple[str, ...], peers: int) -> None:
    configs = {
        "a": TableConfig("a", dim=3, optimizer=SGD(0.1)),
        "b": TableConfig("b", dim=3, optimizer=SGD(0.2), initializer=Zeros()),
        "wide": TableConfig("wide", dim=5, optimizer=Adagrad(0.1), precision="bfloat16"),
        "rounded": TableConfig("rounded", dim=2, optimizer=SGD(0.1), serving=FixedPoint(1.0)),
    }
    shards = LocalShards([configs[name] for name in tables], engine="cuda", seed=3)
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 7, (peers, len(tables)), generator=generator)
    counts[-1, 0], counts[:, -1] = 4, counts[:, -1] * (len(tables) < 3)
    ids, found, one_by_one = found_blocks(shards, counts)
    stale = {name: own._replace(epoch=None) for name, own in found.items()}
    assert isinstance(shards.engines, CudaEngineGroup)
    for known in (found, stale):
        ours = torch.full_like(one_by_one, torch.nan)
        shards.engines.read_blocks(ids, known, counts, ours, step=0)
        assert torch.equal(ours, one_by_one)
