"""Calls of SyncShards about rows: assign, reinitialize, remove, scan and restore, touched rows, stats.

Where several ranks write, it is as if one process had been given their data in rank order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith import SGD, Adagrad, LocalShards, SyncShards, TableConfig, Zeros
from tests.distributed.ranks import run_ranks
from tests.table.support import as_sets, ints, whole

TABLES = [
    TableConfig("a", dim=1, optimizer=SGD(1.0), initializer=Zeros()),
    TableConfig("b", dim=2, optimizer=Adagrad(0.1)),
]


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def values(shards: SyncShards, *ids: int) -> list[float]:
    """Table "a" as every rank reads it."""
    return shards.lookup({"a": ints(*ids)}).rows["a"].flatten().tolist()


def times(shards: SyncShards, table: str = "a") -> dict[int, int]:
    """Of the rows here."""
    rows = whole(shards.local[table])
    return dict(zip(rows.ids.tolist(), rows.time.tolist(), strict=True))


def written(shards: SyncShards) -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    # Ids 0 and 1 are rank 0's twice and rank 1's once, id 2 rank 1's alone; other ranks name no table.
    rows = {0: (ints(0, 1, 0), column(1, 2, 3)), 1: (ints(1, 2), column(4, 5))}.get(rank)
    given = {} if rows is None else {"a": rows}
    shards.assign(given, time=50 + rank)
    found["assign"] = values(shards, 0, 1, 2)
    found["times of assign"] = times(shards)
    shards.assign_add(given, time=70 if rank == 0 else None)
    found["assign_add"] = values(shards, 0, 1, 2)
    found["times of assign_add"] = times(shards)

    shards.clear()
    asked = {0: ints(9, 5, 9), 1: ints(5, 6), 2: ints(6), 3: ints()}[rank]
    found["reinitialize"] = shards.reinitialize({"a": asked, "b": asked}, time=80)["a"].tolist()
    found["reinitialize again"] = shards.reinitialize({"b": ints(5, 77, 6)})["b"].tolist()
    found["unknown table"] = shards.reinitialize({"a": asked, "z": asked}, missing_ok=True)["z"].tolist()

    # Id 6 of ranks 0 and 1, which counts once; id 1000 has no row.
    gone = {0: {"a": ints(6, 9)}, 1: {"a": ints(6, 1000), "b": ints(5)}}.get(rank, {"b": ints()})
    found["remove"] = shards.remove(gone)
    found["left"] = sorted(whole(shards.local["a"]).ids.tolist())
    return found


def walked(shards: SyncShards) -> dict[str, Any]:
    """What scan, restore, clear and reserve do with this rank's part."""
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    shards.clear()
    ids = torch.arange(100)
    lookup = shards.lookup({"b": ids})
    grads = lookup.rows["b"] + rank
    shards.apply_gradients(lookup, {"b": grads}, step=3, time=90)
    chunks = list(shards.scan("b", chunk_size=7))
    assert all(0 < len(chunk.ids) <= 7 for chunk in chunks)
    found["held"] = whole(shards.local["b"])
    found["stats"] = {name: stats.rows for name, stats in shards.stats().items()}
    assert shards.memory()["b"].rows > 0
    assert {name: ids.tolist() for name, ids in shards.evict().items()} == {"a": [], "b": []}

    other = LocalShards(TABLES)
    other.apply_gradients({"b": ids}, {"b": torch.ones(100, 2)}, step=0, time=91)
    shards.clear()
    assert len(shards.local["b"]) == 0
    shards.reserve({"b": 10_000})
    found["capacity"] = shards.stats()["b"].capacity
    for chunk in other.scan("b", chunk_size=30):
        shards.restore("b", chunk)  # every rank is given all rows
    found["restored"] = whole(shards.local["b"])
    return found


def touched(shards: SyncShards) -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    shards.clear()
    shards.track("one")
    shards.track("other")
    shards.apply_gradients({"a": ints(1, 2, 3, 4)}, {"a": torch.ones(4, 1)}, step=0)
    shards.assign({"a": (ints(5), column(1.0))} if rank == 0 else {})
    shards.remove({"a": ints(2)})
    found["drained"] = as_sets(shards.drain_touched("one")["a"])
    found["again"] = as_sets(shards.drain_touched("one")["a"])
    shards.mark_touched("one", {"a": ints(1, 2, 3, 4)})  # every rank gives all back
    found["marked"] = as_sets(shards.drain_touched("one")["a"])
    found["other"] = as_sets(shards.drain_touched("other")["a"])
    shards.untrack("one")
    found["consumers"] = shards.stats()["a"].consumers
    return found


def on_a_rank(transport: str) -> dict[str, Any]:
    shards = SyncShards(TABLES, transport=transport, timeout=60.0)
    return {"written": written(shards), "walked": walked(shards), "touched": touched(shards)}


@pytest.fixture(scope="module", params=["gloo", "auto"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(on_a_rank, request.param, world_size=4)


def test_of_several_values_that_of_the_highest_rank_stays(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        found = rank["written"]
        assert found["assign"] == [3, 4, 5]
        assert found["assign_add"] == [3 + 1 + 3, 4 + 2 + 4, 5 + 5]
        own = [i for i in (0, 1, 2) if i % 4 == number]
        assert found["times of assign"] == dict.fromkeys(own, 53)  # the latest of all ranks
        assert found["times of assign_add"] == dict.fromkeys(own, 70)  # that of the one rank that gave one


def test_reinitialize_tells_in_input_order_who_was_first(ranks: list[dict[str, Any]]) -> None:
    found = [rank["written"]["reinitialize"] for rank in ranks]
    assert found == [[0, 0, 1], [1, 0], [1], []]
    found = [rank["written"]["reinitialize again"] for rank in ranks]
    assert found == [[1, 0, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert [rank["written"]["unknown table"] for rank in ranks] == [[-1] * 3, [-1] * 2, [-1], []]


def test_remove_counts_the_rows_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    found = [rank["written"]["remove"] for rank in ranks]
    assert found == [{"a": 2}, {"a": 2, "b": 1}, {"b": 1}, {"b": 1}]
    assert [rank["written"]["left"] for rank in ranks] == [[], [5], [], []]


def test_each_rank_walks_the_rows_it_owns(ranks: list[dict[str, Any]]) -> None:
    alone = LocalShards(TABLES)
    ids = torch.arange(100)
    rows = alone.lookup({"b": ids}).rows["b"]
    alone.apply_gradients({"b": ids}, {"b": 4 * rows + (0 + 1 + 2 + 3)}, step=3, time=90)
    expected = whole(alone.local["b"])
    for number, rank in enumerate(ranks):
        found = rank["walked"]
        own = expected.select(expected.ids % 4 == number)
        assert torch.equal(found["held"].ids, own.ids)
        torch.testing.assert_close(found["held"].rows, own.rows)
        assert torch.equal(found["held"].time, own.time)
        assert found["stats"] == {"a": 0, "b": 25}


def test_each_rank_restores_of_all_rows_those_it_owns(ranks: list[dict[str, Any]]) -> None:
    alone = LocalShards(TABLES)
    alone.apply_gradients({"b": torch.arange(100)}, {"b": torch.ones(100, 2)}, step=0, time=91)
    expected = whole(alone.local["b"])
    for number, rank in enumerate(ranks):
        restored, own = rank["walked"]["restored"], expected.select(expected.ids % 4 == number)
        for a, b in zip((restored.ids, *restored.columns()), (own.ids, *own.columns()), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(restored.time, own.time)
        assert 2_500 <= rank["walked"]["capacity"] < 10_000  # a rank's share


def test_each_rank_remembers_what_changed_of_its_rows(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        found = rank["touched"]
        own = {i for i in range(1, 6) if i % 4 == number}
        assert found["drained"] == (own - {2}, own & {2})
        assert found["again"] == (set(), set())
        assert found["marked"] == (own - {2, 5}, own & {2})  # what has no row any more counts as removed
        assert found["other"] == found["drained"]
        assert found["consumers"] == ("other",)
