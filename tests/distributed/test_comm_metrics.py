"""CommMetrics: exact numbers of a batch made by hand, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith import SGD, SyncShards, TableConfig
from megalith.shards import CommMetrics, CommReport
from tests.distributed.ranks import error_of, run_ranks

# Under roundrobin rank 0 owns even ids, rank 1 odd ones. Rank 0 looks up 7 ids of `a`, 4 of them distinct
# (0 and 2 are its own); rank 1 looks up 2 (3 is its own). Table `b` is asked for by rank 1 alone.
IDS = (
    {"a": torch.tensor([0, 1, 1, 2, 3, 3, 3]), "b": torch.empty(0, dtype=torch.int64)},
    {"a": torch.tensor([3, 4]), "b": torch.tensor([6, 6])},
)
CONFIGS = [TableConfig("a", dim=4, optimizer=SGD(1.0)), TableConfig("b", dim=2, optimizer=SGD(1.0))]


def step(shards: SyncShards, number: int) -> None:
    lookup = shards.lookup(IDS[shards.rank])
    shards.apply_gradients(
        lookup, {name: torch.ones_like(rows) for name, rows in lookup.rows.items()}, step=number
    )


def numbers(report: CommReport, table: str) -> dict[str, tuple[float, ...]]:
    return {name: spread.by_rank for name, spread in report.tables[table].items()}


def on_a_rank() -> dict[str, Any]:
    found: dict[str, Any] = {}
    shards = SyncShards(CONFIGS)
    step(shards, 0)  # nobody counts this one
    shards.clear()
    seen: list[CommReport] = []
    metrics = CommMetrics(shards, callback=seen.append)
    step(shards, 0)
    first = found["first"] = metrics.collect(10)
    assert seen == [first]
    step(shards, 1)
    again = numbers(metrics.collect(20), "a")
    assert (again["misses"], again["created"], again["ids_sent"]) == ((0, 0), (0, 0), (2, 1))

    assert "close() it first" in error_of(CommMetrics, shards)
    metrics.close()
    unknown = error_of(CommMetrics, shards, tables=["user"])
    assert unknown.startswith("UnknownNameError: unknown table 'user' (known: 'a', 'b')")
    some = CommMetrics(shards, tables=["b"])
    shards.assign({"b": (torch.tensor([1]), torch.zeros(1, 2))} if shards.rank == 0 else {})
    assigned = some.collect(30)
    assert list(assigned.tables) == ["b"]
    got = numbers(assigned, "b")  # nothing was looked up
    assert (got["ids"], got["ids_sent"], got["bytes_sent"]) == ((0, 0), (1, 0), (8 + 8, 0))
    assert assigned.splits["b"]["rows"].by_sender == ((0, 1), (0, 0))  # rank 0 assigns id 1
    some.close()
    some.close()  # nothing happens
    assert error_of(shards.add_recorder, "x") == "InputError: recorder must be a Recorder, got str"

    small = SyncShards(CONFIGS, wire={"rows": "int8", "grads": "bfloat16"})
    metrics = CommMetrics(small)
    step(small, 0)
    row, gradient = 4 + 4, 4 * 2  # a scale and a byte a number; two bytes a number
    sent = (2 * 8 + 1 * row + 2 * gradient, 1 * 8 + 2 * row + 1 * gradient)
    assert numbers(metrics.collect(1), "a")["bytes_sent"] == sent
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def reports() -> list[CommReport]:
    """What each rank counted of one batch; it also checks later reports, other calls and wrong use."""
    return [found["first"] for found in run_ranks(on_a_rank)]


A = {
    "ids": (7, 2),
    "distinct": (4, 2),
    "distinct_ratio": (4 / 7, 1.0),
    "served": (3, 3),  # 0, 2 and 4; 1, 3 and once more 3
    "misses": (3, 3),
    "created": (3, 2),
    "ids_sent": (2, 1),  # 1 and 3; 4
    "ids_received": (1, 2),
    # An id of 8 bytes there, a row of 16 back, a gradient of 16 there.
    "bytes_sent": (2 * (8 + 16) + 1 * 16, 1 * (8 + 16) + 2 * 16),
    "bytes_received": (1 * (8 + 16) + 2 * 16, 2 * (8 + 16) + 1 * 16),
}
B = {"ids": (0, 2), "distinct": (0, 1), "distinct_ratio": (1.0, 0.5), "served": (1, 0), "misses": (1, 0)}
B |= {"created": (1, 0), "ids_sent": (0, 1), "ids_received": (1, 0)}
B |= {"bytes_sent": (8, 8 + 8), "bytes_received": (8 + 8, 8)}


def test_a_batch_made_by_hand_counts_exactly(reports: list[CommReport]) -> None:
    for report in reports:  # every rank knows the numbers of all
        assert report.lookups == 1
        assert (numbers(report, "a"), numbers(report, "b")) == (A, B)
        waits = {name: min(spread.by_rank) > 0 for name, spread in report.waits.items()}
        assert waits == dict.fromkeys(("sizes", "ids", "rows", "gradients"), True)


def test_splits_name_sender_and_receiver(reports: list[CommReport]) -> None:
    splits = {
        # Rank 0 asks rank 0 for 0 and 2, rank 1 for 1 and 3; rank 1: 4; 3. Rows come from the owner.
        "a": {"ids": ((2, 2), (1, 1)), "rows": ((2, 1), (2, 1)), "gradients": ((2, 2), (1, 1))},
        "b": {"ids": ((0, 0), (1, 0)), "rows": ((0, 1), (0, 0)), "gradients": ((0, 0), (1, 0))},
    }
    for report in reports:
        for table, expected in splits.items():
            assert {name: each.by_sender for name, each in report.splits[table].items()} == expected
        ids = report.splits["a"]["ids"]
        assert (ids.of(0).by_rank, ids.of(1).by_rank) == ((2, 2), (1, 1))
        assert (ids.sent.by_rank, ids.sent.max_rank, ids.received.by_rank) == ((4, 2), 0, (3, 3))
        drawn = {n.removeprefix("comm/a/"): x for n, x in report.histograms().items() if "/a/" in n}
        assert drawn == {
            **{"ids_splits": (2, 2, 1, 1), "rows_splits": (2, 1, 2, 1), "gradients_splits": (2, 2, 1, 1)},
            **{"ids_dist": (4, 2), "rows_dist": (3, 3), "gradients_dist": (4, 2)},
        }


def test_scalars_have_names_and_say_who_has_least_and_most(reports: list[CommReport]) -> None:
    scalars = reports[0].scalars()
    assert scalars["comm/lookups"] == 1
    assert scalars["comm/a/ids/rank0"] == 7
    own = {name.rpartition("/")[2]: x for name, x in scalars.items() if name.startswith("comm/b/served/")}
    assert own == {"rank0": 1, "rank1": 0, "min": 0, "min_rank": 1, "max": 1, "max_rank": 0, "skew": 2.0}
    assert scalars["comm/a/served/skew"] == 1.0
    waits = {name.split("/")[1] for name in scalars if name.startswith("comm_wait/")}
    assert waits == {"sizes", "ids", "rows", "gradients"}
