"""CommMetrics: exact numbers of a batch made by hand, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith import SGD, SyncShards, TableConfig
from megalith.errors import InputError, UnknownNameError, UsageError
from megalith.shards import CommMetrics, CommReport
from tests.distributed.ranks import run_ranks

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


def error_of(work: Any) -> str:
    try:
        work()
    except (InputError, UnknownNameError, UsageError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def on_a_rank() -> dict[str, Any]:
    found: dict[str, Any] = {}
    shards = SyncShards(CONFIGS)
    step(shards, 0)  # nobody counts this one
    shards.clear()
    seen: list[CommReport] = []
    metrics = CommMetrics(shards, callback=seen.append)
    step(shards, 0)
    first = metrics.collect(10)
    found["first"] = {table: numbers(first, table) for table in first.tables}
    found["lookups"] = first.lookups
    found["seen"] = seen == [first]
    found["waits"] = {name: min(spread.by_rank) > 0 for name, spread in first.waits.items()}
    found["scalars"] = first.scalars()
    found["splits"] = {
        table: {exchange: splits.by_sender for exchange, splits in exchanges.items()}
        for table, exchanges in first.splits.items()
    }
    found["histograms"] = first.histograms()
    ids = first.splits["a"]["ids"]
    found["by receiver"] = (ids.of(0), ids.of(1), ids.sent, ids.received)
    step(shards, 1)
    again = metrics.collect(20)
    found["again"] = {name: numbers(again, "a")[name] for name in ("misses", "created", "ids_sent")}

    found["twice"] = error_of(lambda: CommMetrics(shards))
    metrics.close()
    found["unknown"] = error_of(lambda: CommMetrics(shards, tables=["user"]))
    some = CommMetrics(shards, tables=["b"])
    shards.assign({"b": (torch.tensor([1]), torch.zeros(1, 2))} if shards.rank == 0 else {})
    assigned = some.collect(30)
    found["assign"] = {table: numbers(assigned, table) for table in some.tables}
    found["assign splits"] = assigned.splits["b"]["rows"].by_sender
    some.close()
    some.close()  # nothing happens
    found["closed"] = error_of(lambda: shards.add_recorder("x"))  # type: ignore[arg-type]

    small = SyncShards(CONFIGS, wire={"rows": "int8", "grads": "bfloat16"})
    metrics = CommMetrics(small)
    step(small, 0)
    found["small"] = numbers(metrics.collect(1), "a")["bytes_sent"]
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_a_rank)


def test_a_batch_made_by_hand_counts_exactly(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:  # every rank knows the numbers of all
        assert found["lookups"] == 1
        assert found["first"]["a"] == {
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
        assert found["first"]["b"] == {
            "ids": (0, 2),
            "distinct": (0, 1),
            "distinct_ratio": (1.0, 0.5),
            "served": (1, 0),
            "misses": (1, 0),
            "created": (1, 0),
            "ids_sent": (0, 1),
            "ids_received": (1, 0),
            "bytes_sent": (8, 8 + 8),
            "bytes_received": (8 + 8, 8),
        }


def test_splits_name_sender_and_receiver(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["splits"]["a"] == {
            "ids": ((2, 2), (1, 1)),  # rank 0 asks rank 0 for 0 and 2, rank 1 for 1 and 3; rank 1: 4; 3
            "rows": ((2, 1), (2, 1)),  # from the owner, so the other way round
            "gradients": ((2, 2), (1, 1)),
        }
        assert found["splits"]["b"] == {
            "ids": ((0, 0), (1, 0)),
            "rows": ((0, 1), (0, 0)),
            "gradients": ((0, 0), (1, 0)),
        }
        of_0, of_1, sent, received = found["by receiver"]
        assert (of_0.by_rank, of_1.by_rank) == ((2, 2), (1, 1))
        assert (sent.by_rank, sent.max_rank, received.by_rank) == ((4, 2), 0, (3, 3))
        assert found["assign splits"] == ((0, 1), (0, 0))  # rank 0 assigns id 1


def test_histograms_hold_the_splits_and_what_each_rank_sent(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        a = {name: values for name, values in found["histograms"].items() if name.startswith("comm/a/")}
        assert a == {
            "comm/a/ids_splits": (2, 2, 1, 1),
            "comm/a/ids_dist": (4, 2),
            "comm/a/rows_splits": (2, 1, 2, 1),
            "comm/a/rows_dist": (3, 3),
            "comm/a/gradients_splits": (2, 2, 1, 1),
            "comm/a/gradients_dist": (4, 2),
        }


def test_a_report_counts_from_the_last_one(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["again"] == {"misses": (0, 0), "created": (0, 0), "ids_sent": (2, 1)}


def test_scalars_have_names_and_say_who_has_least_and_most(ranks: list[dict[str, Any]]) -> None:
    scalars = ranks[0]["scalars"]
    assert scalars["comm/lookups"] == 1
    assert scalars["comm/a/ids/rank0"] == 7
    own = {name.rpartition("/")[2]: x for name, x in scalars.items() if name.startswith("comm/b/served/")}
    assert own == {"rank0": 1, "rank1": 0, "min": 0, "min_rank": 1, "max": 1, "max_rank": 0, "skew": 2.0}
    assert scalars["comm/a/served/skew"] == 1.0
    assert {name.split("/")[1] for name in scalars if name.startswith("comm_wait/")} == {
        "sizes",
        "ids",
        "rows",
        "gradients",
    }


def test_waits_are_measured_and_the_callback_gets_the_report(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["waits"] == {"sizes": True, "ids": True, "rows": True, "gradients": True}
        assert found["seen"]


def test_some_tables_and_other_calls(ranks: list[dict[str, Any]]) -> None:
    assigned = ranks[1]["assign"]
    assert list(assigned) == ["b"]
    assert assigned["b"]["ids"] == (0, 0)  # nothing was looked up
    assert assigned["b"]["ids_sent"] == (1, 0)
    assert assigned["b"]["bytes_sent"] == (8 + 8, 0)


def test_bytes_are_those_of_the_wire(ranks: list[dict[str, Any]]) -> None:
    row, gradient = 4 + 4, 4 * 2  # a scale and a byte a number; two bytes a number
    assert ranks[0]["small"] == (2 * 8 + 1 * row + 2 * gradient, 1 * 8 + 2 * row + 1 * gradient)


def test_mistakes_are_told(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["unknown"].startswith("UnknownNameError: unknown table 'user' (known: 'a', 'b')")
        assert "close() it first" in found["twice"]
        assert found["closed"] == "InputError: recorder must be a Recorder, got str"
