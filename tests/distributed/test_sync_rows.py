"""Calls of SyncShards about rows: what several ranks write, scan and restore, touched rows, stats.

Where several ranks write, it is as if one process had been given their data in rank order; test_sync_equal.py
compares all writes with one process.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megalith import SGD, Adagrad, LocalShards, SyncShards, TableConfig, Zeros
from tests.distributed.ranks import PATIENT, run_ranks
from tests.table.support import as_sets, ints, whole

TABLES = [
    TableConfig("a", dim=1, optimizer=SGD(1.0), initializer=Zeros()),
    TableConfig("b", dim=2, optimizer=Adagrad(0.1)),
]
IDS = torch.arange(100)


def written(shards: SyncShards) -> None:
    rank = dist.get_rank()
    own = [i for i in (0, 1, 2) if i % 4 == rank]

    def check(values: list[float], time: int) -> None:
        assert shards.lookup({"a": ints(0, 1, 2)}).rows["a"].flatten().tolist() == values
        assert (whole(shards.local["a"]).ids.tolist(), whole(shards.local["a"]).time.tolist()) == (
            own,
            [time] * len(own),
        )

    # Ids 0 and 1 are rank 0's twice and rank 1's once, id 2 rank 1's alone; other ranks name no table.
    rows = {0: (ints(0, 1, 0), [[1.0], [2.0], [3.0]]), 1: (ints(1, 2), [[4.0], [5.0]])}.get(rank)
    given = {} if rows is None else {"a": (rows[0], torch.tensor(rows[1]))}
    shards.assign(given, time=50 + rank)
    check([3, 4, 5], 53)  # the row of the highest rank, the latest time of all ranks
    shards.assign_add(given, time=70 if rank == 0 else None)
    check([3 + 1 + 3, 4 + 2 + 4, 5 + 5], 70)  # that of the one rank that gave one

    shards.clear()
    asked = {0: ints(9, 5, 9), 1: ints(5, 6), 2: ints(6), 3: ints()}[rank]
    status = shards.reinitialize({"a": asked, "b": asked}, time=80)["a"].tolist()
    assert status == [[0, 0, 1], [1, 0], [1], []][rank]
    unknown = shards.reinitialize({"a": asked, "z": asked}, missing_ok=True)["z"]
    assert unknown.tolist() == [-1] * len(asked)
    # Id 6 of ranks 0 and 1, which counts once; id 1000 has no row.
    gone = {0: {"a": ints(6, 9)}, 1: {"a": ints(6, 1000), "b": ints(5)}}.get(rank, {"b": ints()})
    assert shards.remove(gone) == [{"a": 2}, {"a": 2, "b": 1}, {"b": 1}, {"b": 1}][rank]
    assert whole(shards.local["a"]).ids.tolist() == ([5] if rank == 1 else [])


def walked(shards: SyncShards) -> None:
    """Each rank walks, and restores of all rows, those that it owns."""
    rank, alone = dist.get_rank(), LocalShards(TABLES)

    def check() -> None:
        expected, got = whole(alone.local["b"]), whole(shards.local["b"])
        expected = expected.select(expected.ids % 4 == rank)
        assert (got.ids.tolist(), got.time.tolist()) == (expected.ids.tolist(), expected.time.tolist())
        for a, b in zip(got.columns(), expected.columns(), strict=True):
            torch.testing.assert_close(a, b)

    shards.clear()
    lookup = shards.lookup({"b": IDS})
    shards.apply_gradients(lookup, {"b": lookup.rows["b"] + rank}, step=3, time=90)
    rows = alone.lookup({"b": IDS}).rows["b"]
    alone.apply_gradients({"b": IDS}, {"b": 4 * rows + (0 + 1 + 2 + 3)}, step=3, time=90)
    check()
    assert all(0 < len(chunk.ids) <= 7 for chunk in shards.scan("b", chunk_size=7))
    assert {name: stats.rows for name, stats in shards.stats().items()} == {"a": 0, "b": 25}
    assert shards.memory()["b"].rows > 0
    assert {name: ids.tolist() for name, ids in shards.evict().items()} == {"a": [], "b": []}

    shards.clear()
    assert len(shards.local["b"]) == 0
    shards.reserve({"b": 10_000})
    assert 2_500 <= shards.stats()["b"].capacity < 10_000  # a rank's share
    for chunk in alone.scan("b", chunk_size=30):
        shards.restore("b", chunk)  # every rank is given all rows
    check()


def touched(shards: SyncShards) -> None:
    """Each rank remembers what changed of its rows."""
    own = {i for i in range(1, 6) if i % 4 == dist.get_rank()}
    shards.clear()
    shards.track("one")
    shards.track("other")
    shards.apply_gradients({"a": ints(1, 2, 3, 4)}, {"a": torch.ones(4, 1)}, step=0)
    shards.assign({"a": (ints(5), torch.ones(1, 1))} if dist.get_rank() == 0 else {})
    shards.remove({"a": ints(2)})
    assert as_sets(shards.drain_touched("one")["a"]) == (own - {2}, own & {2})
    assert as_sets(shards.drain_touched("one")["a"]) == (set(), set())
    shards.mark_touched("one", {"a": ints(1, 2, 3, 4)})  # every rank gives all back
    assert as_sets(shards.drain_touched("one")["a"]) == (own - {2, 5}, own & {2})  # without a row: removed
    assert as_sets(shards.drain_touched("other")["a"]) == (own - {2}, own & {2})
    shards.untrack("one")
    assert shards.stats()["a"].consumers == ("other",)


def on_a_rank(transport: str) -> None:
    shards = SyncShards(TABLES, transport=transport, timeout=PATIENT)
    for work in (written, walked, touched):
        work(shards)


@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_calls_about_rows(transport: str) -> None:
    run_ranks(on_a_rank, transport, world_size=4)
